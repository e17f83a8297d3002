"""The HTML page: whole, and with nothing in it that a program put there as markup."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.reports import page
from hvdenv.reports.render import HEADINGS, clean
from hvdenv.reports.report import Finding, Measurement, RankRecord, Report, Row

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
def read(everything: Report) -> Read:
    return Read(page.render(everything))


def test_the_page_is_well_formed(read: Read) -> None:
    assert (read.wrong, read.unclosed) == ([], [])
    identities = read.all("id")
    assert len(identities) == len(set(identities))
    named = {word for name in ("aria-labelledby", "headers") for word in read.all(name)}
    assert named <= set(identities)


def test_the_page_needs_nothing_else(read: Read) -> None:
    tags = {tag for tag, _ in read.tags}
    assert not tags & {"script", "iframe", "object", "embed", "img", "base", "form"}
    assert not [name for _, attributes in read.tags for name in attributes if name[:2] == "on"]
    assert read.all("src") == []
    links = read.all("href")
    assert {link for link in links if link[0] != "#"} == {"data:,"}
    assert {link[1:] for link in links if link[0] == "#"} <= set(read.all("id"))
    styles = "".join(read.texts)
    assert "@import" not in styles and "url(" not in styles
    assert any("default-src 'none'" in content for content in read.all("content"))


def test_who_does_not_see_it_is_told(read: Read) -> None:
    tags = [tag for tag, _ in read.tags]
    levels = [int(tag[1]) for tag in tags if tag in {"h1", "h2", "h3", "h4", "h5", "h6"}]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    assert tags.count("caption") == tags.count("table")


def test_all_is_in_it(read: Read, everything: Report) -> None:
    text = "\n".join(read.texts)
    for finding in everything.findings:
        for part in finding[1:6]:
            assert clean(part).strip() in text
    for row in everything.table:
        assert row.name in text
    for name, value in everything.environment.items():
        assert name in text and value in text
    for rank in everything.ranks:
        assert {rank.run, rank.host, str(rank.pid), rank.data_path} <= {*read.texts}
        assert rank.cause in text
    for measurement in everything.measurements:
        assert measurement.name in text and measurement.subject in text
    assert "memory of verify" in text and "84.3 MiB" in text
    assert "everything expected" not in text
    assert "something expected is missing or does not work" in text
    assert "https://***@pypi.example.org/simple" in text


def test_statuses_come_with_the_worst_first(read: Read) -> None:
    statuses = [each for each in read.all("id") if each in HEADINGS]
    assert statuses == ["fail", "error", "unproven", "skip", "pass"]


def test_a_report_of_nothing() -> None:
    read = Read(page.render(Report("", "/env", "n1", "", 0.0, ())))
    assert (read.wrong, read.unclosed) == ([], [])
    assert "unproven: /env on n1" in read.texts
    assert not {"table", "figure"} & {tag for tag, _ in read.tags}


SHAPE = Read(page.render(report_of("one", "two", "three"))).shape


@settings(max_examples=40)
@given(HOSTILE, HOSTILE, HOSTILE)
def test_any_text_is_text(one: str, two: str, three: str) -> None:
    read = Read(page.render(report_of(one, two, three)))
    assert read.shape == SHAPE
    "".join(read.texts).encode()
    # The first newline in <pre> is the template's own.
    assert "\n" + clean(one) in read.texts
