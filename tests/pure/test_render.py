"""The report for people, as JUnit XML within the schema of Jenkins, and as an HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import get_args
from xml.etree import ElementTree

import junitparser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.reports import junit, page
from hvdenv.reports.render import clean, render
from hvdenv.reports.report import Finding, Measurement, RankRecord, Report, Row, Status

ROWS = (
    Row("Frameworks", "TensorFlow", True, True, True),
    Row("Frameworks", "PyTorch", None, True, False),
    Row("Tensor Operations", "NCCL", True, False, False),
)
PASS = Finding("extension", "torch", "pass", "torch 2.1", "path: /env/x.so")
FAIL = Finding(
    "allreduce",
    "torch over MPI",
    "fail",
    "rank 1 on n1: \x1b[31mwas ended by SIGKILL",
    "index https://me:pass@host/\n\x1b]0;title\x07last words",
    "look at\x07 it",
)


def report(*findings: Finding, ranks: tuple[RankRecord, ...] = ()) -> Report:
    return Report(
        "local", "/env", "n1", "2026-11-21T13:00:00", 12.34, findings, table=ROWS, ranks=ranks
    )


def test_whole_report() -> None:
    assert "verdict: \x1b[31mfail\x1b[0m" in render(report(PASS, FAIL), colour=True)
    assert render(report(PASS, FAIL)) == (
        "Available Frameworks:         expected  built  proven\n"
        "    TensorFlow                  [X]      [X]    [X]\n"
        "    PyTorch                      -       [X]    [ ]\n"
        "\n"
        "Available Tensor Operations:  expected  built  proven\n"
        "    NCCL                        [X]      [ ]    [ ]\n"
        "\n"
        "fail: allreduce: torch over MPI: rank 1 on n1: was ended by SIGKILL\n"
        "    index https://***@host/\n"
        "    last words\n"
        "  what to do: look at it\n"
        "\n"
        "Failed (1):\n"
        "    allreduce: torch over MPI: rank 1 on n1: was ended by SIGKILL\n"
        "\n"
        "verdict: fail: something expected is missing or does not work\n"
        "    1 pass, 1 fail; 12.3 s; /env\n"
    )


def test_ranks_that_failed_are_listed() -> None:
    rank = RankRecord(1, "n1", 0, 7, "cpu", "torch", "MPI", "fail", "was ended by \x1bSIGKILL")
    right = rank._replace(rank=0, status="pass", cause="")
    text = render(report(FAIL, ranks=(right, rank)))
    assert (
        "Ranks that failed or differ (1 of 2):\n"
        "    torch over MPI: rank 1 on n1 (process 7): fail: was ended by SIGKILL\n\n"
    ) in text
    several = [rank._replace(rank=number, pid=number) for number in range(20)]
    text = render(report(FAIL, ranks=tuple(several)), width=1000)
    assert "(20 of 20):\n    torch over MPI: rank 0 on n1 (process 0), rank 1 on n1 (p" in text
    assert "rank 15 on n1 (process 15) and 4 more: fail: was ended by SIGKILL\n" in text
    assert "Ranks" not in render(report(PASS, ranks=(right,)))


def test_what_passed_is_not_listed_and_what_was_skipped_only_with_evidence() -> None:
    silent = Finding("allreduce", "torch over Gloo", "skip", "built without Gloo")
    seen = Finding("allreduce", "mxnet over Gloo", "skip", "not requested: crash", "stack")
    text = render(report(PASS, silent, seen))
    assert "built without Gloo" not in text
    assert "skip: allreduce: mxnet over Gloo: not requested: crash\n    stack\n" in text
    assert "verdict: pass: everything" in text
    said = Finding("variables", "your shell", "pass", "ranks get LD_PRELOAD", "LD_PRELOAD=x.so")
    listed = "Variables:\n    your shell: ranks get LD_PRELOAD\n\nverdict: pass"
    assert listed in render(report(PASS, said))


WRONG = [
    Finding("collectives", f"{name}, torch over MPI", "fail", f"wrong {name}")._replace(
        evidence=f"cases of {name}", remedy="rebuild it"
    )
    for name in ("allgather", "alltoall", "broadcast")
]


def test_findings_of_one_cause_are_together_and_one_line_for_each_is_above_the_verdict() -> None:
    other = FAIL._replace(message="ranks died", evidence="", remedy="look at dmesg")
    unproven = FAIL._replace(status="unproven", remedy="rebuild it")
    text = render(report(unproven, WRONG[0], other, *WRONG[1:]))
    assert text.count("what to do: rebuild it") == 2  # a failure, and what is unproven
    assert "cases of allgather" in text and "cases of alltoall" not in text
    assert "  and 2 more of this cause" in text
    *_, failed, verdict = text.split("\n\n")
    assert failed.splitlines() == [
        "Failed (4):",
        "    collectives: allgather, torch over MPI: wrong allgather",
        "    allreduce: torch over MPI: ranks died",
        "    collectives: alltoall, torch over MPI: wrong alltoall",
        "    collectives: broadcast, torch over MPI: wrong broadcast",
    ]
    assert verdict.startswith("verdict: fail")
    document = report(*WRONG).to_json()
    assert [each["evidence"] for each in document["findings"]] == [each.evidence for each in WRONG]  # type: ignore[attr-defined]


TEXTS = st.lists(
    st.sampled_from(["x" * 300, "-" * 90, "`a b`", "\t", "\n", " ", "word", "é"]),
    max_size=8,
).map("".join)


@given(TEXTS, TEXTS, st.integers(60, 200))
def test_no_line_is_wider_than_the_terminal(one: str, two: str, width: int) -> None:
    rank = RankRecord(1, one, 0, 7, two, two, one, "fail", f"{one} {two}")
    findings = [
        Finding(check, one, status, two, f"{two}\n    {one}", one)
        for status in get_args(Status)
        for check in ("allreduce", "bench", "variables")
    ]
    whole = report(*findings, ranks=(rank,))._replace(prefix=f"/{two}")
    for line in render(whole, width=width).splitlines():
        assert len(line) <= width, line


def test_long_evidence_is_cut_at_its_beginning() -> None:
    long = FAIL._replace(evidence="\n".join(f"line {number}" for number in range(100)))
    text = render(report(long))
    assert "    (--json has 40 lines before these)\n    line 40\n" in text
    assert "line 39\n" not in text
    assert "line 99\n" in text


JUNIT_FAIL = Finding(
    "allreduce", "torch over MPI", "fail", "rank 1 died", "last words", "look there"
)
JUNIT_TEXTS = st.text(
    st.characters(codec=None) | st.sampled_from("<>&\"']]>\x00\x1b\r\n\ud800\uffff")
)

# Of junit-10.xsd of Jenkins' xUnit plugin: attributes (! if required) and children.
SCHEMA = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name!", "tests!", "failures!", "errors!", "time", "skipped", "timestamp", "hostname"},
        {"properties", "testcase"},
    ),
    "properties": (set(), {"property"}),
    "property": ({"name!", "value!"}, set()),
    "testcase": (
        {"name!", "time", "classname"},
        {"skipped", "error", "failure", "system-out"},
    ),
    "skipped": ({"type", "message"}, set()),
    "error": ({"type", "message"}, set()),
    "failure": ({"type", "message"}, set()),
    "system-out": (set(), set()),
}
TIME = re.compile(r"(([0-9]{0,3},)*[0-9]{3}|[0-9]{0,3})*(\.[0-9]*)?")


def junit_report(*findings: Finding, measurements: tuple[Measurement, ...] = ()) -> Report:
    return Report("local", "/env", "n1", "2026-11-21T13:00:00+0100", 12.34, findings, measurements)


def against_schema(element: ElementTree.Element) -> Iterator[str]:
    """What junit-10.xsd would say against a document."""
    attributes, children = SCHEMA[element.tag]
    if unknown := set(element.attrib) - {name.rstrip("!") for name in attributes}:
        yield f"{element.tag} has {unknown}"
    if missing := {name[:-1] for name in attributes if name[-1] == "!"} - set(element.attrib):
        yield f"{element.tag} lacks {missing}"
    if not TIME.fullmatch(element.get("time", "0")):
        yield f"{element.tag} took {element.get('time')}"
    if children and (element.text or "").strip():
        yield f"{element.tag} has a text"
    for child in element:
        if child.tag not in children:
            yield f"{child.tag} in {element.tag}"
        else:
            yield from against_schema(child)


def read(report: Report) -> junitparser.JUnitXml:
    read: junitparser.JUnitXml = junitparser.JUnitXml.fromstring(junit.render(report).encode())
    return read


def test_the_schema_of_jenkins(everything: Report) -> None:
    assert list(against_schema(ElementTree.fromstring(junit.render(everything)))) == []


def test_a_program_counts_the_same(everything: Report) -> None:
    document = read(everything)
    assert (document.tests, document.failures, document.errors) == (12, 1, 1)
    assert document.time == 61.3
    suites = "check-build files extension allreduce operation data-path launcher"
    assert [suite.name for suite in document] == suites.split()
    assert sum(suite.skipped for suite in document) == 3
    for suite in document:
        counts = suite.tests, suite.failures, suite.errors, suite.skipped
        suite.update_statistics()  # type: ignore[no-untyped-call]
        assert counts == (suite.tests, suite.failures, suite.errors, suite.skipped)
        assert suite.hostname == "gpu32.cluster.example.org"
        assert suite.timestamp == "2026-11-21T13:00:00+01:00"
        properties = {each.name: each.value for each in suite.properties()}  # type: ignore[no-untyped-call]
        known = {"verdict": "fail", "recipe": "neuron+nccl", "MPI": "Open MPI 5.0.11"}
        assert properties.items() >= known.items()


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        ("fail", junitparser.Failure, ""),
        ("error", junitparser.Error, ""),
        ("skip", junitparser.Skipped, ""),
        ("unproven", junitparser.Skipped, "unproven: "),
    ],
)
def test_what_did_not_pass(status: Status, kind: type, said: str) -> None:
    ((case,),) = read(junit_report(JUNIT_FAIL._replace(status=status)))
    assert (case.classname, case.name) == ("hvdenv.allreduce", "torch over MPI")
    (result,) = case.result
    assert type(result) is kind
    assert (result.type, result.message) == (status, f"{said}rank 1 died")
    assert result.text == "rank 1 died\n\nlast words\n\nwhat to do: look there"


def test_what_passed_and_hides_no_other() -> None:
    (suite,) = read(junit_report(JUNIT_FAIL._replace(status="pass", remedy=""), JUNIT_FAIL))
    assert [case.name for case in suite] == ["torch over MPI", "torch over MPI (2)"]
    assert [case.is_passed for case in suite] == [True, False]
    assert next(iter(suite)).system_out == "rank 1 died\n\nlast words"


@given(JUNIT_TEXTS, JUNIT_TEXTS, JUNIT_TEXTS)
def test_any_text_is_text(one: str, two: str, three: str) -> None:
    findings = [JUNIT_FAIL._replace(subject=one, message=two, evidence=three)]
    findings += [Finding(two, three, status, one) for status in ("pass", "unproven", "error")]
    whole = Report(one, two, three, one, 1.0, tuple(findings), environment={two: three})
    document = ElementTree.fromstring(junit.render(whole).encode())
    assert list(against_schema(document)) == []
    failure = document.find(".//failure")
    assert failure is not None
    assert failure.get("message") == clean(two)
    assert clean(three).rstrip("\n") in (failure.text or "")


# ---------------------------------------------------------------- the HTML page

MARKUP = """<script> </pre> </style> <!-- ]]> {{ {% "/onload=" ' & &lt;""".split()
MARKUP += ["\x1b[31m", "\ud800"]
HOSTILE = (
    st.lists(st.sampled_from(MARKUP) | st.text(st.characters(codec=None), max_size=3), min_size=1)
    .map("".join)
    .filter(clean)
)
VOID = {"meta", "link"}


class Read(HTMLParser):
    """Tags with their attributes, all texts, and the tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.unclosed: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.unclosed.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.unclosed or self.unclosed.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def shape(self) -> list[tuple[str, list[str]]]:
        """The page without anything that is said in it."""
        return [(tag, sorted(attributes)) for tag, attributes in self.tags]

    def all(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [attributes[name] for _, attributes in self.tags if name in attributes]


def report_of(*texts: str) -> Report:
    """A report that says texts wherever it can."""
    one, two, three = texts
    findings = [
        Finding(one, two, status, three, one, two)
        for status in ("pass", "fail", "error", "unproven", "skip")
    ]
    measurements = (
        *(Measurement("allreduce bandwidth", n, two, three, 1024 * n, 2) for n in (1, 2)),
        Measurement(two, 1.0, "s"),
        Measurement(three, 1.0, one, two),
    )
    table = (Row(one, two, True, True, False),)
    rank = RankRecord(None, one, None, 1, two, three, one, "fail", two, data_path=three)
    known = (one, two, three, one, 1.0, tuple(findings), measurements, table, (rank,))
    return Report(*known, environment={two: three})


@pytest.fixture(scope="module")
def shown(everything: Report) -> Read:
    return Read(page.render(everything))


def test_the_page_is_well_formed(shown: Read) -> None:
    assert (shown.wrong, shown.unclosed) == ([], [])
    identities = shown.all("id")
    assert len(identities) == len(set(identities))
    named = {word for name in ("aria-labelledby", "headers") for word in shown.all(name)}
    assert named <= set(identities)


def test_the_page_needs_nothing_else(shown: Read) -> None:
    tags = {tag for tag, _ in shown.tags}
    assert not tags & {"script", "iframe", "object", "embed", "img", "base", "form"}
    assert not [name for _, attributes in shown.tags for name in attributes if name[:2] == "on"]
    assert shown.all("src") == []
    links = shown.all("href")
    assert {link for link in links if link[0] != "#"} == {"data:,"}
    assert {link[1:] for link in links if link[0] == "#"} <= set(shown.all("id"))
    styles = "".join(shown.texts)
    assert "@import" not in styles and "url(" not in styles
    assert any("default-src 'none'" in content for content in shown.all("content"))


def test_all_is_in_it(shown: Read, everything: Report) -> None:
    text = "\n".join(shown.texts)
    for finding in everything.findings:
        for part in finding[1:6]:
            assert clean(part).strip() in text
    for row in everything.table:
        assert row.name in text
    for name, value in everything.environment.items():
        assert name in text and value in text
    for rank in everything.ranks:
        assert {rank.run, rank.host, str(rank.pid), rank.data_path} <= {*shown.texts}
        assert rank.cause in text
    for measurement in everything.measurements:
        assert measurement.name in text and measurement.subject in text
    assert "memory of verify" in text and "84.3 MiB" in text
    assert "everything expected" not in text
    assert "something expected is missing or does not work" in text
    assert "https://***@pypi.example.org/simple" in text


def test_a_report_of_nothing() -> None:
    shown = Read(page.render(Report("", "/env", "n1", "", 0.0, ())))
    assert (shown.wrong, shown.unclosed) == ([], [])
    assert "unproven: /env on n1" in shown.texts
    assert not {"table", "figure"} & {tag for tag, _ in shown.tags}


SHAPE = Read(page.render(report_of("one", "two", "three"))).shape


@settings(max_examples=40)
@given(HOSTILE, HOSTILE, HOSTILE)
def test_any_text_is_text_of_a_page(one: str, two: str, three: str) -> None:
    shown = Read(page.render(report_of(one, two, three)))
    assert shown.shape == SHAPE
    "".join(shown.texts).encode()
    # The first newline in <pre> is the template's own.
    assert "\n" + clean(one) in shown.texts
