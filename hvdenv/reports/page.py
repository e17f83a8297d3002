"""A report as one self-contained HTML page, without scripts.

Every text passes clean() and is then escaped, in one place (`_environment`): output of programs
never becomes markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdenv.reports.render import HEADINGS, clean, verdict_of
from hvdenv.reports.report import Finding, Measurement, Report, Status, causes

if TYPE_CHECKING:
    from jinja2 import Environment

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
# The template draws into as much; a digit of its text is as wide.
WIDTH, HEIGHT = 500, 330
_TOP, _RIGHT, _BOTTOM, _DIGIT = 10, 28, 56, 9
_LABELS = 6
# The style sheet has as many.
_COLOURS = 6
# Above this factor between the least and the greatest, decades are marks enough.
_WIDE = 300
# What has a place on a logarithmic axis.
_LEAST, _GREATEST = 1e-9, 1e18


class Kind(NamedTuple):
    """A measurement that is drawn.

    Attributes:
        over: what the horizontal axis shows: ``size`` or ``ranks``.
        axis: what to write there.
        telling: which point the summary is about: the one with the most, or the least.
    """

    name: str
    over: str
    axis: str
    telling: Callable[[Iterable[float]], float]


KINDS = (
    Kind("allreduce bandwidth", "size", "message size", max),
    Kind("allreduce latency", "size", "message size", min),
    Kind("training speed", "ranks", "ranks", max),
)


class Dot(NamedTuple):
    x: float
    y: float
    label: str


class PlotLine(NamedTuple):
    """One line of a plot.

    Attributes:
        mark: CSS class of its colour and dashes.
        points: by what the horizontal axis shows.
        yardstick: label of the line to compare it with; empty if there is none.
        dots: its points in the drawing.
    """

    label: str
    mark: str
    points: Mapping[float, float]
    yardstick: str = ""
    dots: tuple[Dot, ...] = ()


class Plot(NamedTuple):
    """A plot, and the same in words and figures for those who do not see it.

    Attributes:
        axis: what the horizontal axis shows.
        columns, levels: marks of the horizontal and of the vertical axis, with their labels.
        summary: what each line comes to.
        header, rows: of the table of all figures.
    """

    title: str
    axis: str
    columns: tuple[Dot, ...]
    levels: tuple[Dot, ...]
    lines: tuple[PlotLine, ...]
    summary: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Scale(NamedTuple):
    """A logarithmic axis: the values at its ends, and where these lie."""

    least: float
    greatest: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.least) / math.log(self.greatest / self.least)
        return round(self.start + share * (self.end - self.start), 1)


def is_drawn(measurement: Measurement) -> bool:
    return _kind(measurement) is not None


def _kind(measurement: Measurement) -> Kind | None:
    for kind in KINDS:
        values = (getattr(measurement, kind.over), measurement.value)
        if measurement.name == kind.name and values[0] is not None:
            return kind if all(_LEAST < each < _GREATEST for each in values) else None
    return None


def plots(measurements: Sequence[Measurement]) -> Iterator[Plot]:
    for kind in KINDS:
        if found := [each for each in measurements if _kind(each) == kind]:
            yield _plot(kind, found)


def _plot(kind: Kind, found: Sequence[Measurement]) -> Plot:
    lines, unit = _lines(kind, found), found[0].unit
    title = f"{kind.name.capitalize()} in {unit}"
    if kind.over != "ranks" and found[0].ranks and len({each.ranks for each in found}) == 1:
        title += f" on {_ranks(found[0].ranks)}"
    places = sorted({place for line in lines for place in line.points})
    drawn = [*lines, *_ideals(kind, lines)]
    values = marks([value for line in drawn for value in line.points.values()])
    labels = [f"{value:,.9f}".rstrip("0").rstrip(".") for value in values]
    left = 12 + _DIGIT * max(len(label) for label in labels)
    across = Scale(*_widened(places), left, WIDTH - _RIGHT)
    up = Scale(*_widened(values), HEIGHT - _BOTTOM, _TOP)
    return Plot(
        title=title,
        axis=kind.axis,
        columns=tuple(
            Dot(across.at(each), up.start, _place(kind, each))
            for each in places[:: math.ceil(len(places) / _LABELS)]  # there is room for so many
        ),
        levels=tuple(
            Dot(left, up.at(each), label) for each, label in zip(values, labels, strict=True)
        ),
        lines=tuple(_drawn(kind, unit, line, across, up) for line in drawn),
        summary=tuple(_summary(kind, unit, lines)),
        header=(kind.axis, *(line.label for line in lines)),
        rows=tuple(
            (_place(kind, place), *(figure(line.points.get(place)) for line in lines))
            for place in places
        ),
    )


def _drawn(kind: Kind, unit: str, line: PlotLine, across: Scale, up: Scale) -> PlotLine:
    dots = (
        Dot(across.at(place), up.at(value), f"{_told(kind, place)}: {figure(value)} {unit}")
        for place, value in line.points.items()
    )
    return line._replace(dots=tuple(dots))


def _lines(kind: Kind, found: Sequence[Measurement]) -> list[PlotLine]:
    """One line for each subject, and for each number of ranks if that is not an axis."""
    several = kind.over != "ranks" and len({each.ranks for each in found}) > 1
    points: dict[tuple[str, int | None], dict[float, float]] = {}
    for each in found:
        key = (each.subject, each.ranks if several else None)
        points.setdefault(key, {})[getattr(each, kind.over)] = each.value
    lines, counts = [], {"line": 0, "yardstick": 0}
    measured = {subject for subject, _ in points if subject.endswith(" alone")}
    for (subject, ranks), at in points.items():
        sort = "yardstick" if subject in measured else "line"
        of_controller = f"{subject.rpartition(' over ')[2]} alone"
        yardstick = (*measured, ranks) if len(measured) == 1 else (of_controller, ranks)
        mark = f"{sort}-{counts[sort] % _COLOURS}"
        beside = _label(*yardstick) if yardstick in points and sort == "line" else ""
        lines.append(PlotLine(_label(subject, ranks), mark, dict(sorted(at.items())), beside))
        counts[sort] += 1
    return lines


def _label(subject: str, ranks: int | None) -> str:
    name = subject or "this host"
    return f"{name}, {_ranks(ranks)}" if ranks else name


def _ideals(kind: Kind, lines: Sequence[PlotLine]) -> list[PlotLine]:
    """What each line would be if every rank added as much as the first."""
    ideals = []
    for line in lines if kind.over == "ranks" else ():
        first, speed = next(iter(line.points.items()))
        points = {place: speed * place / first for place in line.points}
        ideals.append(PlotLine(f"{line.label}, ideal", f"{line.mark} ideal", points))
    return ideals


def _summary(kind: Kind, unit: str, lines: Sequence[PlotLine]) -> Iterator[str]:
    """What each line comes to at its telling point, and against what it is compared with."""
    by_label = {line.label: line for line in lines}
    for line in lines:
        yardstick = by_label.get(line.yardstick)
        shared = set(line.points) & set(yardstick.points) if yardstick else set()
        place = kind.telling(line.points)
        first, speed = next(iter(line.points.items()))
        compared = ""
        if kind.over == "ranks" and place != first:
            efficiency = line.points[place] / (speed * place / first)
            compared = f", scaling efficiency {efficiency:.0%} against {_ranks(first)}"
        elif yardstick and shared and kind.over != "ranks":
            there = kind.telling(shared)
            share = line.points[there] / yardstick.points[there]
            times = f"{share:.0%} of" if share < 2 else f"{share:.1f} times"
            compared = f", {times} {yardstick.label}"
            compared += f" at {size(there)}" if there != place else ""
        where = f"{'on' if kind.over == 'ranks' else 'at'} {_told(kind, place)}"
        yield f"{line.label}: {figure(line.points[place])} {unit} {where}{compared}"


def marks(values: Sequence[float]) -> list[float]:
    """Round numbers around the values: decades, and between them where these are few."""
    least, greatest = min(values), max(values)
    steps = (1,) if greatest / least > _WIDE else (1, 2, 5)
    # One decade more than there has to be at either end: log10() rounds.
    decades = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(greatest)) + 2)
    found = [step * 10.0**decade for decade in decades for step in steps]
    first = max(place for place, mark in enumerate(found) if mark <= least)
    last = min(place for place, mark in enumerate(found) if mark >= greatest)
    return found[first : last + 1]


def _widened(places: Sequence[float]) -> tuple[float, float]:
    """A little more than from the first to the last, also if these are one, or nearly."""
    first, last = places[0], places[-1]
    factor = (last / first) ** 0.03 if last > 1.001 * first else 2
    return first / factor, last * factor


def _place(kind: Kind, place: float) -> str:
    return size(place) if kind.over == "size" else f"{place:g}"


def _told(kind: Kind, place: float) -> str:
    return _ranks(place) if kind.over == "ranks" else size(place)


def size(count: float) -> str:
    """A number of bytes as people say it."""
    unit, name = next((each for each in _SIZES if count >= each[0]), _SIZES[-1])
    return f"{count / unit:.4g} {name}"


def _ranks(count: float) -> str:
    return "1 rank" if count == 1 else f"{count:g} ranks"


def figure(value: float | None) -> str:
    """A number with three digits that count, and never with an exponent."""
    if value is None or not math.isfinite(value):
        return ""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(digits, 0)}f}"


_TEMPLATE = "page.html.jinja"
_TOTAL = "verify"


def render(report: Report) -> str:
    timings = [each for each in report.measurements if each.unit == "s" and not each.subject]
    parts = [each for each in timings if each.name != _TOTAL]
    return (
        _environment()
        .get_template(_TEMPLATE)
        .render(
            report=report,
            said=verdict_of(report),
            sections=[
                (name, list(rows)) for name, rows in groupby(report.table, key=lambda r: r.section)
            ],
            groups=list(_groups(report.findings)),
            plots=list(plots(report.measurements)),
            plot_size=(WIDTH, HEIGHT),
            bars=sorted(parts, key=lambda each: -each.value),
            longest=max((each.value for each in timings), default=0) or 1,
            others=[
                each for each in report.measurements if each not in timings and not is_drawn(each)
            ],
        )
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "size": size}
    return environment


def _shown(value: Any) -> Any:
    """Markup of this module as it is, and other texts without secrets."""
    return value if hasattr(value, "__html__") else clean(str(value))


def _groups(findings: Sequence[Finding]) -> Iterator[tuple[Status, str, int, list[list[Finding]]]]:
    """For each status, the heading, the number of findings, and these by their cause."""
    for status, heading in HEADINGS.items():
        if found := [each for each in findings if each.status == status]:
            yield status, heading, len(found), causes(found)
