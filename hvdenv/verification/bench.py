"""How fast allreduces and training steps are, compared with MPI or NCCL alone and with references.

The ranks (hvdenv/standalone/ranks/bench.py, speed.py) and the yardstick
(hvdenv/standalone/ranks/yardstick.c) measure; this module judges their figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

from hvdenv.launch.launchers import Launch
from hvdenv.launch.placement import filled
from hvdenv.model.cluster import (
    BANDWIDTH,
    LATENCY,
    MPI_ALONE,
    SIZES,
    SPEED,
    UNITS,
    YARDSTICKS,
    Reference,
)  # fmt: skip
from hvdenv.reports.report import Measurement
from hvdenv.sites.batch import counted
from hvdenv.standalone.ranks.events import Bench, BenchEnd, RankEvent, Speed
from hvdenv.verification import ranks
from hvdenv.verification.ranks import Judgement, RankRun

E = TypeVar("E", bound=RankEvent)

EXERCISES = ("bench", "speed")
_YARDSTICK = re.compile(r"@hvdenv-yardstick (\{[^{}]*\})")
_NAMES = {size: name for name, size in SIZES.items()}
_REMEDY = "measure again while these hosts are idle; if the result stays, see the evidence"


class Effort(NamedTuple):
    """For how many seconds each program of ``verify --bench`` measures, and a folder that all hosts see."""

    seconds: float
    folder: str


class Point(NamedTuple):
    """One size of message, or of one training step.

    Attributes:
        amount: bytes of the message, or samples of the step on all ranks.
        seconds: of one allreduce or step: minimum, quartiles and maximum.
    """

    amount: int
    ranks: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return self.seconds[2]

    @property
    def bandwidth(self) -> float:
        """The bus bandwidth in GB/s as nccl-tests define it; 0 for one rank.

        Every rank must send and receive 2 (n - 1) / n of the message, whatever the algorithm,
        so the figure can be compared with the hardware's.
        """
        return 2 * (self.ranks - 1) / self.ranks * self.amount / self.median / 1e9


class Yardstick(NamedTuple):
    """The figures of MPI or NCCL alone, by size, or why there are none.

    Attributes:
        evidence: output of programs.
        name: one of YARDSTICKS.
    """

    points: tuple[Point, ...]
    problem: str = ""
    evidence: str = ""
    name: str = MPI_ALONE


_NONE = Yardstick(())


class Benchmark(NamedTuple):
    """One framework over one controller, and the yardstick, measured right after it."""

    run: RankRun
    yardstick: Yardstick


def fewer(ranks: int) -> list[int]:
    return [2**power for power in range(ranks.bit_length()) if 2**power < ranks]


def with_fewer(launch: Launch, ranks: int) -> Launch:
    hosts = filled(launch.hosts, ranks)
    return launch._replace(
        ranks=ranks,
        hosts=hosts,
        hostfile="",
        ranks_per_node=min(launch.ranks_per_node, ranks),
        placed=bool(hosts),
    )


def parse_yardstick(text: str) -> tuple[Point, ...]:
    found = []
    for line in text.splitlines():
        if match := _YARDSTICK.search(line):
            table = json.loads(match[1])
            found.append(Point(table["size"], table["ranks"], tuple(table["seconds"])))
    return tuple(found)


def allreduces(run: RankRun) -> tuple[Point, ...]:
    return tuple(Point(each.size, run.size, tuple(each.seconds)) for each in _events(run, Bench))


def steps(run: RankRun) -> Point | None:
    for each in _events(run, Speed):
        return Point(each.samples, run.size, tuple(each.seconds))
    return None


def libraries_of_gpus(run: RankRun) -> tuple[str, str] | None:
    """The NCCL or RCCL and the runtime with which the ranks used their GPUs; None without."""
    path = run.ranks[0].path
    loaded = path.libraries if path else {}

    def first(*names: str) -> str:
        return next((loaded[name][0] for name in sorted(loaded) if name.startswith(names)), "")

    found = first("libnccl", "librccl"), first("libcudart", "libamdhip64")
    return found if all(found) else None


def _events(run: RankRun, kind: type[E]) -> Iterator[E]:
    for rank in run.ranks:
        yield from rank.all(kind)


def measurements(
    benchmarks: Mapping[tuple[str, str], Benchmark | None],
    smaller: Mapping[tuple[str, str], Sequence[RankRun] | None],
) -> Iterator[Measurement]:
    """All figures of a report, by framework and controller, and the yardstick's medians."""
    done = {key: benchmark for key, benchmark in benchmarks.items() if benchmark}
    for key, benchmark in done.items():
        subject = " over ".join(key)
        yield from _of_allreduces(allreduces(benchmark.run), subject)
        yield from _of_steps([*(smaller.get(key) or ()), benchmark.run], subject)
    for name, points in _together([each.yardstick for each in done.values()]).items():
        yield from _of_allreduces(points, name)


def _of_allreduces(points: Sequence[Point], subject: str) -> Iterator[Measurement]:
    for point in points:
        about = (subject, point.amount, point.ranks)
        yield Measurement(LATENCY, _rounded(point.median * 1e6), UNITS[LATENCY], *about)
        if point.ranks > 1:
            yield Measurement(BANDWIDTH, _rounded(point.bandwidth), UNITS[BANDWIDTH], *about)


def _of_steps(runs: Sequence[RankRun], subject: str) -> Iterator[Measurement]:
    for point in filter(None, map(steps, runs)):
        speed = _rounded(point.amount / point.median)
        yield Measurement(SPEED, speed, UNITS[SPEED], subject, None, point.ranks)


def _together(yardsticks: Sequence[Yardstick]) -> dict[str, list[Point]]:
    """By name, the medians of all runs of a yardstick."""
    found: dict[str, dict[int, list[Point]]] = {}
    for each in sorted(yardsticks, key=lambda each: YARDSTICKS.index(each.name)):
        sizes = found.setdefault(each.name, {})
        for point in each.points:
            sizes.setdefault(point.amount, []).append(point)
    return {name: [*map(_median, sizes.values())] for name, sizes in found.items()}


def _median(points: Sequence[Point]) -> Point:
    seconds = zip(*(point.seconds for point in points), strict=True)
    return points[0]._replace(seconds=tuple(map(median, seconds)))


def _rounded(value: float) -> float:
    """Four digits: the measurement is not more precise."""
    return float(f"{value:.4g}")


def judge(
    subject: str, benchmark: Benchmark, smaller: Sequence[RankRun], references: Sequence[Reference]
) -> Judgement:
    """Judge the figures of one framework and controller.

    Args:
        subject: such as ``torch over MPI``.
        smaller: training steps with fewer ranks.
        references: of the recipe.
    """
    whole, yardstick = benchmark
    for run in (whole, *smaller):
        if broken := _broken(run):
            message = f"with {counted(run.size, 'rank')}: {broken.message}"
            return broken._replace(message=message)
    points, runs = allreduces(whole), [*smaller, whole]
    figures = [*_of_allreduces(points, subject), *_of_steps(runs, subject)]
    message = "; ".join([*_sentences(points, yardstick), *_scaling(runs)])
    evidence = "\n".join([*_listed(points, yardstick), *_ends(whole)])
    return _judged(subject, figures, whole, references, message, evidence)


def judge_yardsticks(
    benchmarks: Sequence[Benchmark], references: Sequence[Reference]
) -> Iterator[tuple[str, Judgement]]:
    for name, points in _together([each.yardstick for each in benchmarks]).items():
        first = next(each for each in benchmarks if each.yardstick.name == name)
        if points:
            message, evidence = "; ".join(_sentences(points)), "\n".join(_listed(points))
            figures = list(_of_allreduces(points, name))
            yield name, _judged(name, figures, first.run, references, message, evidence)
        else:
            why = f"there is no yardstick: {first.yardstick.problem}"
            yield name, Judgement("skip", why, first.yardstick.evidence)


def _broken(run: RankRun) -> Judgement | None:
    whole = ranks.judge(run)
    if whole.status == "fail":
        return whole
    return next(
        (found for name in run.exercises if (found := ranks.judge_exercise(run, name))), None
    )


def _judged(
    subject: str,
    figures: Sequence[Measurement],
    run: RankRun,
    references: Sequence[Reference],
    message: str,
    evidence: str,
) -> Judgement:
    """Compare with the references for this subject, number of ranks and number of hosts."""
    nodes = len({rank.host for rank in run.ranks})
    wrong, missing = [], []
    for reference in references:
        if reference.subject != subject or reference.nodes not in (None, nodes):
            continue
        counts = [*fewer(run.size), run.size] if reference.measure == SPEED else [run.size]
        if reference.ranks not in (None, *counts):
            continue
        wanted = (reference.measure, SIZES.get(reference.size or ""), reference.ranks or run.size)
        found = next((f.value for f in figures if (f.name, f.size, f.ranks) == wanted), None)
        if found is None:
            missing.append(_what(reference))
        elif problem := outside(found, reference):
            wrong.append(f"{_what(reference)} {problem}")
    if wrong:
        return Judgement("fail", "; ".join(wrong), f"{message}\n{evidence}", _REMEDY)
    if missing:
        why = "there is a reference, but no figure, for "
        remedy = "allow more time with --time; the evidence shows where it ended"
        return Judgement("unproven", why + "; ".join(missing), f"{message}\n{evidence}", remedy)
    return Judgement("pass", message, evidence)


def outside(value: float, reference: Reference) -> str:
    """How a value misses its reference; empty if it does not."""
    unit = reference.unit
    for bound, word, misses in (
        (reference.lower, "less", float.__lt__), (reference.upper, "more", float.__gt__)
    ):  # fmt: skip
        limit = None if bound is None else reference.value * (1 + bound)
        if limit is not None and misses(float(value), limit):
            found, allowed = ranks.apart(value, limit, 4)
            return (
                f"is {found} {unit}, {word} than {allowed}"
                f" ({reference.value:g} {unit} {100 * (bound or 0):+.0f} %)"
            )
    return ""


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _what(reference: Reference) -> str:
    size = f" at {_named(SIZES[reference.size])}" if reference.size else ""
    return reference.measure + size + (f" with {reference.ranks} ranks" if reference.ranks else "")


def _named(size: int) -> str:
    return re.sub(r"(?<=\d)(?=[KM])", " ", _NAMES[size])


def _sentences(points: Sequence[Point], yardstick: Yardstick = _NONE) -> Iterator[str]:
    """The highest bandwidth and the lowest latency, which are at the ends."""
    if not points:
        yield "no allreduce was measured"
        return
    for point in dict.fromkeys((points[-1], points[0])):
        last, share = point is points[-1], _share(point, yardstick)
        fast = f"{_shown(point.bandwidth)} GB/s" if last and point.ranks > 1 else ""
        text = f"{_named(point.amount)}: {fast or f'{_shown(point.median * 1e6)} us'}"
        yield f"{text}, {share:.0f} % of {yardstick.name}" if share and last else text


def _share(point: Point, yardstick: Yardstick) -> float:
    """Horovod's share of the yardstick's speed in percent; 0 if unknown."""
    beside = (each.median for each in yardstick.points if each.amount == point.amount)
    return 100 * next(beside, 0.0) / point.median


def _scaling(runs: Sequence[RankRun]) -> Iterator[str]:
    """How much faster all ranks train than one."""
    speeds = {point.ranks: point.amount / point.median for point in filter(None, map(steps, runs))}
    most = max(speeds, default=1)
    if 1 in speeds and most > 1:
        times = speeds[most] / speeds[1]
        yield f"{most} ranks train {times:.2g} times as fast as 1 ({100 * times / most:.0f} %)"
    elif most in speeds:
        yield f"{_shown(speeds[most])} samples/s"


def _listed(points: Sequence[Point], yardstick: Yardstick = _NONE) -> Iterator[str]:
    yield f"{'size':>8} {'median us':>10} {'minimum':>10} {'quartiles':>19} {'GB/s':>8}" + (
        f" {'of ' + yardstick.name:>15}" if yardstick.points else ""
    )
    for point in points:
        least, low, middle, high, _ = (f"{1e6 * each:.1f}" for each in point.seconds)
        line = f"{_named(point.amount):>8} {middle:>10} {least:>10} {low:>9} {high:>9}"
        share = _share(point, yardstick)
        yield f"{line} {point.bandwidth:8.3f}" + (f" {share:13.0f} %" if share else "")


def _ends(run: RankRun) -> Iterator[str]:
    whys = {
        "time": "--bench-time was too short",
        "memory": "the ranks of one host need more memory than is free",
    }
    for end in _events(run, BenchEnd):
        yield f"{_named(end.size)} and more were not measured: {whys[end.why]}"
