"""JUnit XML: within the schema of Jenkins, and as a program reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from xml.etree import ElementTree

import junitparser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.reports import junit
from hvdenv.reports.render import clean
from hvdenv.reports.report import Finding, Measurement, Report, Status

FAIL = Finding("allreduce", "torch over MPI", "fail", "rank 1 died", "last words", "look there")
TEXTS = st.text(st.characters(codec=None) | st.sampled_from("<>&\"']]>\x00\x1b\r\n\ud800\uffff"))

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


def report(*findings: Finding, measurements: tuple[Measurement, ...] = ()) -> Report:
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
    assert (document.tests, document.failures, document.errors) == (16, 3, 1)
    assert document.time == 61.3
    assert [suite.name for suite in document] == [
        "check-build",
        "files",
        "extension",
        "allreduce",
        "operation",
        "data-path",
        "launcher",
        "ranks",
    ]
    assert sum(suite.skipped for suite in document) == 3
    for suite in document:
        counts = suite.tests, suite.failures, suite.errors, suite.skipped
        suite.update_statistics()  # type: ignore[no-untyped-call]
        assert counts == (suite.tests, suite.failures, suite.errors, suite.skipped)
        assert suite.hostname == "gpu32.cluster.example.org"
        assert suite.timestamp == "2026-11-21T13:00:00+01:00"
        properties = {each.name: each.value for each in suite.properties()}  # type: ignore[no-untyped-call]
        assert properties["verdict"] == "fail"
        assert properties["recipe"] == "neuron+nccl"
        assert properties["MPI"] == "Open MPI 5.0.11"


def test_times_that_are_no_numbers_are_left_out(everything: Report) -> None:
    ranks = [each._replace(seconds=math.nan) for each in everything.ranks]
    measured = [each._replace(value=math.inf) for each in everything.measurements]
    odd = everything._replace(ranks=tuple(ranks), measurements=tuple(measured))
    text = junit.render(odd)
    assert list(against_schema(ElementTree.fromstring(text))) == []
    assert 'time="nan"' not in text and 'time="inf"' not in text


def test_each_rank_is_a_case(everything: Report) -> None:
    *_, suite = read(everything)
    failed, *_ = suite
    assert failed.name == "torch over MPI: rank 0 on gpu32, local rank 0"
    assert failed.time == 12.5
    assert failed.system_out.endswith("device cuda:0, data path pml ucx, rc_mlx5/mlx5_0:1")
    (result,) = failed.result
    assert result.message == "was ended by its launcher, after rank 1 on gpu33 failed"
    assert [case.is_passed for case in suite] == [False, False, True, True]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("fail", junitparser.Failure),
        ("error", junitparser.Error),
        ("skip", junitparser.Skipped),
        ("unproven", junitparser.Skipped),
    ],
)
def test_what_did_not_pass(status: Status, kind: type) -> None:
    (suite,) = read(report(FAIL._replace(status=status)))
    (case,) = suite
    assert (case.classname, case.name) == ("hvdenv.allreduce", "torch over MPI")
    (result,) = case.result
    assert type(result) is kind
    message = {"unproven": "unproven: rank 1 died"}.get(status, "rank 1 died")
    assert (result.type, result.message) == (status, message)
    assert result.text == "rank 1 died\n\nlast words\n\nwhat to do: look there"


def test_what_passed() -> None:
    (suite,) = read(report(FAIL._replace(status="pass", remedy="")))
    (case,) = suite
    assert case.is_passed
    assert case.system_out == "rank 1 died\n\nlast words"


def test_no_case_hides_another() -> None:
    (suite,) = read(report(FAIL._replace(status="pass"), FAIL))
    assert [case.name for case in suite] == ["torch over MPI", "torch over MPI (2)"]


def test_times() -> None:
    good = (("extension", "torch"), ("operation", "MPI in torch"))
    findings = (FAIL, FAIL, *(Finding(*each, "pass", "good") for each in good))
    values = (
        ("torch over MPI", 2.5, "s"),
        ("extension of torch", 0.25, "s"),
        ("MPI in torch", 7.0, "GB/s"),
    )
    measurements = tuple(Measurement(*each) for each in values)
    allreduce, extension, operation = read(report(*findings, measurements=measurements))
    # What took the time once is counted once.
    assert [case.time for case in allreduce] == [2.5, None]
    assert (allreduce.time, extension.time, operation.time) == (2.5, 0.25, 0.0)


@given(TEXTS, TEXTS, TEXTS)
def test_any_text_is_text(one: str, two: str, three: str) -> None:
    findings = [FAIL._replace(subject=one, message=two, evidence=three)]
    findings += [Finding(two, three, status, one) for status in ("pass", "unproven", "error")]
    whole = Report(one, two, three, one, 1.0, tuple(findings), environment={two: three})
    document = ElementTree.fromstring(junit.render(whole).encode())
    assert list(against_schema(document)) == []
    failure = document.find(".//failure")
    assert failure is not None
    assert failure.get("message") == clean(two)
    assert clean(three).rstrip("\n") in (failure.text or "")
