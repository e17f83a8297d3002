"""The HTML page: whole, and with nothing in it that a program put there as markup; its drawings."""

from __future__ import annotations

import importlib
import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdenv.base.schema import encode
from hvdenv.reports import page
from hvdenv.reports.page import is_drawn, plots
from hvdenv.reports.render import HEADINGS, clean
from hvdenv.reports.report import Finding, Measurement, RankRecord, Report, Row
from tests.pure.conftest import CASES

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


def bandwidth(value: float, subject: str, size: int = 1024, ranks: int = 2) -> Measurement:
    return Measurement("allreduce bandwidth", value, "GB/s", subject, size, ranks)


def speed(value: float, ranks: int) -> Measurement:
    return Measurement("training speed", value, "samples/s", "torch over MPI", ranks=ranks)


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
    drawings = [attributes for tag, attributes in read.tags if tag == "svg"]
    assert all("aria-hidden" in each or each["role"] == "img" for each in drawings)
    (told,) = [each["aria-label"] for each in drawings if "bandwidth" in each.get("aria-label", "")]
    assert "torch over MPI: 5.60 GB/s at 256 MiB, 92% of MPI alone" in told


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
        known = measurement.subject if is_drawn(measurement) else measurement.name
        assert known in text
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


PLOTS = json.loads((CASES / "reports" / "plots.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", PLOTS, ids=lambda case: case["about"])
def test_what_plots_say(case: dict[str, Any]) -> None:
    (plot,) = plots([Measurement(*each) for each in case["measured"]])
    levels, marks = [each.label for each in plot.levels], [each.mark for each in plot.lines]
    said = {**encode(plot), "levels": levels, "marks": marks}
    wanted = {key: value for key, value in case.items() if key not in ("about", "measured")}
    assert {key: said[key] for key in wanted} == wanted


def test_scaling_has_its_ideal() -> None:
    (plot,) = plots([speed(100.0, 1), speed(150.0, 2), speed(300.0, 4)])
    assert plot.summary == (
        "torch over MPI: 300 samples/s on 4 ranks, scaling efficiency 75% against 1 rank",
    )
    line, ideal = plot.lines
    assert ideal.label == "torch over MPI, ideal"
    assert plot.header == ("ranks", "torch over MPI")
    labels = ["1 rank: 100 samples/s", "2 ranks: 200 samples/s", "4 ranks: 400 samples/s"]
    assert [dot.label for dot in ideal.dots] == labels
    # Twice the ranks, twice the speed: a straight line.
    (x0, y0, _), (x1, y1, _), (x2, y2, _) = ideal.dots
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.2)
    assert line.dots[0][:2] == ideal.dots[0][:2] and line.dots[2].y > ideal.dots[2].y


def test_what_cannot_be_drawn_is_listed() -> None:
    unfit = (
        bandwidth(0.0, "torch over MPI"),
        bandwidth(1.0, "torch over Gloo", 0),
        Measurement("training speed", 5.0, "samples/s", "mxnet over MPI"),
    )
    assert list(plots(unfit)) == []
    text = "\n".join(Read(page.render(report_of("a", "b", "c")._replace(measurements=unfit))).texts)
    assert "Other measurements" in text
    for each in unfit:
        assert each.subject in text


@settings(max_examples=40)
@given(
    st.lists(
        st.builds(
            Measurement,
            st.sampled_from(["allreduce bandwidth", "training speed", "other"]),
            st.floats(-1e17, 1e17),
            st.just("GB/s"),
            st.sampled_from(["torch over MPI", "MPI alone"]),
            st.none() | st.integers(-(2**59), 2**59),
            st.none() | st.integers(-2, 2**59),
        ),
        max_size=12,
    )
)
@example([bandwidth(1.0, "torch over MPI", size) for size in (2**59 - 1, 2**59)])
def test_any_figures_can_be_shown(measurements: list[Measurement]) -> None:
    report = report_of("a", "b", "c")._replace(measurements=tuple(measurements))
    read = Read(page.render(report))
    assert (read.wrong, read.unclosed) == ([], [])
    drawings = {tag for tag, _ in read.tags} >= {"circle"}
    assert drawings == any(is_drawn(each) for each in measurements)
    assert not any("nan" in each or "inf" in each for each in read.all("cx") + read.all("d"))


SVG = "{http://www.w3.org/2000/svg}"
# A digit is as wide, and a line of text as high.
WIDTH, HEIGHT = 8, 14


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("curves")


@pytest.mark.parametrize("power", [0, 0.5, 1, 1.2])
@pytest.mark.parametrize("name", ["build", "verify", "doctor", "solve", "isolate"])
def test_labels_of_axes_do_not_overlap(curves: ModuleType, name: str, power: float) -> None:
    curve = curves.CURVES[name]
    seconds = {
        size: curves.Taken(0.001 * size**power, 20.0 + size ** (power / 2)) for size in curve.sizes
    }
    more = {size: each._replace(seconds=4 * each.seconds) for size, each in seconds.items()}
    found = {"one": seconds, "two <&>": more}
    drawing = ElementTree.fromstring(curves.picture(curve, found))
    _, _, width, height = map(int, drawing.attrib["viewBox"].split())
    boxes = [box(each) for each in drawing.iter(f"{SVG}text")]
    assert "two <&>" in [each.text for each in drawing.iter(f"{SVG}text")]
    for number, (left, top, right, bottom) in enumerate(boxes):
        assert min(left, top) >= 0 and right <= width and bottom <= height
        for other in boxes[:number]:
            beside = right <= other[0] or other[2] <= left
            assert beside or bottom <= other[1] or other[3] <= top
    for each in drawing.iter(f"{SVG}line"):
        assert 0 <= float(each.attrib["x2"]) <= width and 0 <= float(each.attrib["y2"]) <= height


def box(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """The edges of a text: left, top, right, bottom."""
    x, y, length = float(text.attrib["x"]), float(text.attrib["y"]), len(text.text or "") * WIDTH
    share = {"end": 1.0, "middle": 0.5}.get(text.attrib.get("text-anchor", ""), 0.0)
    return x - share * length, y - HEIGHT, x + (1 - share) * length, y


def test_a_row_for_each_line(curves: ModuleType) -> None:
    found = {"solve and lock": {10_000: curves.Taken(1.0, 50.0), 50_000: curves.Taken(4.0, 80.2)}}
    (row,) = curves.rows(curves.CURVES["solve"], found)
    assert row == (
        "| Solve and lock a conda recipe: solve and lock | records: 10,000 · 50,000 | 1.00 · 4.00"
        " | 50.0 · 80.2 | 4.00 times the seconds for 5.00 times the size |"
    )
