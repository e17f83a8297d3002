"""The pictures that benchmarks/curves.py draws."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

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
    found = {
        line: {
            size: curves.Taken(factor * size**power, 20.0 + size ** (power / 2))
            for size in curve.sizes
        }
        for line, factor in (("one", 0.001), ("two <&>", 0.004))
    }
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
