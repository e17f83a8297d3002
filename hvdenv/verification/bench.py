"""How fast allreduces and training steps are, compared with MPI or NCCL alone and with references.

The ranks (hvdenv/standalone/ranks/bench.py, speed.py) and the yardstick
(hvdenv/standalone/ranks/yardstick.c) measure; this module starts them and judges their figures.
"""

import json
import math
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv import RANK_PROGRAMS
from hvdenv.base.schema import Problem, decode
from hvdenv.model.cluster import (
    BANDWIDTH,
    LATENCY,
    MPI_ALONE,
    NCCL_ALONE,
    SIZES,
    SPEED,
    UNITS,
    YARDSTICKS,
    Reference,
)
from hvdenv.reports.page import size as bytes_shown
from hvdenv.reports.report import Measurement
from hvdenv.sites.batch import counted
from hvdenv.sites.launchers import Launch, MpiVersion
from hvdenv.sites.placement import filled
from hvdenv.standalone.ranks.events import BenchEnd, Timed
from hvdenv.verification.rank_judgement import Judgement, apart, judge_exercise, judge_run
from hvdenv.verification.rank_run import RankRun
from hvdenv.verification.rank_start import Pair, start_program, start_ranks
from hvdenv.verification.setup import Effort, HostMpi, Setup

EXERCISES = ("bench", "speed")
# The shares of the time for all ranks; the rest is for the yardstick, and then for fewer ranks.
_ALL_RANKS, _YARDSTICK = 0.35, 0.15
_FIGURES = re.compile(r"@hvdenv-yardstick (\{[^{}]*\})")
_REMEDY = "measure again while these hosts are idle; if the result stays, see the evidence"
_ENDS = {
    "time": "--bench-time was too short",
    "memory": "the ranks of one host need more memory than is free",
}


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
    def measured(self) -> bool:
        """Whether it is what a clock can show: all five times, each of them above 0 and finite."""
        counts, seconds = (self.amount, self.ranks), self.seconds
        return len(seconds) == 5 and all(0 < each < math.inf for each in (*counts, *seconds))

    @property
    def median(self) -> float:
        return self.seconds[2]

    @property
    def rate(self) -> float:
        return self.amount / self.median

    @property
    def bandwidth(self) -> float:
        """The bus bandwidth in GB/s as nccl-tests define it; 0 for one rank.

        Every rank must send and receive 2 (n - 1) / n of the message, whatever the algorithm,
        so the figure can be compared with the hardware's.
        """
        return 2 * (self.ranks - 1) / self.ranks * self.rate / 1e9


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

    @property
    def speed(self) -> float:
        """Bytes per second with the largest messages; 0 without figures."""
        return self.points[-1].rate if self.points else 0.0


_NONE = Yardstick(())


class Benchmark(NamedTuple):
    """One framework over one controller, and the yardstick, measured right after it.

    Attributes:
        subject: such as ``torch over MPI``.
        run: of all ranks.
        fewer: training steps on 1, 2, 4 ... ranks, fewer than all.
    """

    subject: str
    run: RankRun
    yardstick: Yardstick = _NONE
    fewer: tuple[RankRun, ...] = ()

    @property
    def steps(self) -> list[Point]:
        """One training step, by the number of ranks."""
        found = []
        for run in (*self.fewer, self.run):
            found += [each for each in _points(run, "step") if each.measured][:1]
        return found

    @property
    def allreduces(self) -> list[Point]:
        return [each for each in _points(self.run, "allreduce") if each.measured]

    @property
    def figures(self) -> list[Measurement]:
        found = _figures(self.subject, self.allreduces)
        for point in self.steps:
            speed = _rounded(point.rate)
            found.append(Measurement(SPEED, speed, UNITS[SPEED], self.subject, None, point.ranks))
        return found


def _timed(run: RankRun) -> list[tuple[str, Timed]]:
    """What ranks report, with the name of the rank that does."""
    return [(rank.name, each) for rank in run.ranks for each in rank.all(Timed)]


def _point(run: RankRun, timed: Timed) -> Point:
    return Point(timed.amount, run.size, tuple(timed.seconds))


def _points(run: RankRun, what: str) -> list[Point]:
    return [_point(run, each) for _, each in _timed(run) if each.what == what]


def measure(setup: Setup, timeout: float, effort: Effort, mpi: HostMpi, pair: Pair) -> Benchmark:
    """Timed allreduces and training steps on all ranks, then the yardstick, then fewer ranks."""
    end = time.monotonic() + timeout
    timed = setup._replace(exercises=tuple(f"{name}={effort.seconds:g}" for name in EXERCISES))
    run = start_ranks(timed, timeout * _ALL_RANKS, mpi, *pair)
    yardstick = _yardstick_beside(setup, timeout * _YARDSTICK, effort, mpi[0], run)
    counts, fewer = smaller_counts(setup.launch.ranks), []
    timed = setup._replace(exercises=(f"speed={effort.seconds:g}",))
    for done, count in enumerate(counts):
        share = max((end - time.monotonic()) / (len(counts) - done), 1.0)
        launch = with_fewer(setup.launch, count)
        fewer.append(start_ranks(timed._replace(launch=launch), share, mpi, *pair))
    return Benchmark(pair.subject, run, yardstick, tuple(fewer))


def smaller_counts(ranks: int) -> list[int]:
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


def _yardstick_beside(
    setup: Setup, timeout: float, effort: Effort, mpi: MpiVersion, run: RankRun
) -> Yardstick:
    """The yardstick for the largest message of a run, on GPUs if the run was on GPUs."""
    measured = [each for _, each in _timed(run) if each.what == "allreduce"]
    if not measured:
        return Yardstick((), "the ranks gave no figures in time")
    largest = measured[-1].amount
    if not measured[0].device:
        return measure_yardstick(setup, timeout, effort, mpi, largest)
    if gpus := gpu_libraries(run):
        found = measure_yardstick(setup, timeout, effort, mpi, largest, gpus)
    else:
        found = Yardstick((), "the ranks loaded no libnccl and libcudart that a program could open")
    return found._replace(name=NCCL_ALONE)


def gpu_libraries(run: RankRun) -> tuple[str, str] | None:
    """The NCCL or RCCL and the runtime with which the ranks used their GPUs; None without."""
    path = run.ranks[0].path
    loaded = path.libraries if path else {}

    def first(*names: str) -> str:
        return next((loaded[name][0] for name in sorted(loaded) if name.startswith(names)), "")

    found = first("libnccl", "librccl"), first("libcudart", "libamdhip64")
    return found if all(found) else None


def measure_yardstick(
    setup: Setup,
    timeout: float,
    effort: Effort,
    mpi: MpiVersion,
    largest: int,
    gpus: Sequence[str] = (),
) -> Yardstick:
    """The speed of MPI alone on the same ranks, by a program compiled with its own compiler.

    With libraries of GPUs, the speed of NCCL alone: MPI only starts and connects the ranks.
    """
    name, mpirun, compiler = setup.launcher("MPI"), setup.which("mpirun"), setup.which("mpicc")
    if mpirun and (beside := Path(mpirun).with_name("mpicc")).exists():
        compiler = str(beside)  # not another MPI's
    if not setup.can_start("MPI", (mpi, mpirun)):
        return Yardstick((), "no launcher here starts programs with MPI")
    if not compiler:
        return Yardstick((), "there is no mpicc in the environment or on PATH")
    try:
        Path(effort.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="yardstick-", dir=effort.folder) as folder:
            program = f"{folder}/yardstick"
            argv = (compiler, "-O2", "-o", program, str(RANK_PROGRAMS / "yardstick.c"), "-ldl")
            built = setup.run(argv, timeout)
            if built.returncode:
                return Yardstick((), f"{compiler} does not compile", built.tail(20))
            words = (program, f"{effort.seconds:g}", str(largest), str(int(timeout) + 1))
            launch = setup.launch._replace(program=(*words, *gpus), mpi=mpi)
            outcome = start_program(setup, name, launch, timeout)
    except OSError as error:
        return Yardstick((), f"it cannot be compiled in {effort.folder}: {error.strerror}")
    points = parse_yardstick(outcome.output)
    if not points or points[0].ranks != launch.ranks:
        size = f"{points[0].ranks} ranks" if points else "no figures"
        problem = f"{name} ran what {compiler} compiled: {size} (exit {outcome.returncode})"
        return Yardstick((), problem, outcome.tail(20))
    return Yardstick(points)


def parse_yardstick(text: str) -> tuple[Point, ...]:
    found = []
    for match in _FIGURES.finditer(text):
        with suppress(ValueError, LookupError, Problem):
            table = json.loads(match[1])
            point = Point(table["size"], table["ranks"], table["seconds"])
            found.append(decode(Point, point._asdict()))
    return tuple(each for each in found if each.measured)


def measurements(benchmarks: Sequence[Benchmark]) -> Iterator[Measurement]:
    """All figures of a report: by framework and controller, then those of the yardsticks."""
    for each in benchmarks:
        yield from each.figures
    for one in _fastest(benchmarks):
        yield from _figures(one.yardstick.name, one.yardstick.points)


def _figures(subject: str, points: Sequence[Point]) -> list[Measurement]:
    found = []
    for point in points:
        about = (subject, point.amount, point.ranks)
        found.append(Measurement(LATENCY, _rounded(point.median * 1e6), UNITS[LATENCY], *about))
        if point.ranks > 1:
            bandwidth = _rounded(point.bandwidth)
            found.append(Measurement(BANDWIDTH, bandwidth, UNITS[BANDWIDTH], *about))
    return found


def _fastest(benchmarks: Sequence[Benchmark]) -> Iterator[Benchmark]:
    """For each yardstick, the benchmark beside which it was fastest."""
    for name in YARDSTICKS:
        if found := [each for each in benchmarks if each.yardstick.name == name]:
            yield max(found, key=lambda each: each.yardstick.speed)


def _rounded(value: float) -> float:
    """Four digits: the measurement is not more precise."""
    return float(f"{value:.4g}")


def judge_speed(benchmark: Benchmark, references: Sequence[Reference]) -> Judgement:
    """Judge the figures of one framework and controller, against the recipe's references."""
    for run in (benchmark.run, *benchmark.fewer):
        if broken := _breakdown(run):
            return broken._replace(message=f"with {counted(run.size, 'rank')}: {broken.message}")
    points, yardstick = benchmark.allreduces, benchmark.yardstick
    ends = [each for rank in benchmark.run.ranks for each in rank.all(BenchEnd)]
    evidence = [*_listed(points, yardstick)]
    evidence += [
        f"{bytes_shown(e.size)} and more were not measured: {_ENDS.get(e.why, e.why)}" for e in ends
    ]
    figures = Judgement(
        "pass",
        "; ".join([*_extremes(points, yardstick), *_scaling(benchmark.steps)]),
        "\n".join(evidence),
    )
    return _compared(benchmark.subject, benchmark.figures, figures, benchmark.run, references)


def judge_yardsticks(
    benchmarks: Sequence[Benchmark], references: Sequence[Reference]
) -> Iterator[tuple[str, Judgement]]:
    for one in _fastest(benchmarks):
        points, problem, evidence, name = one.yardstick
        if points:
            passed = Judgement("pass", "; ".join(_extremes(points)), "\n".join(_listed(points)))
            yield name, _compared(name, _figures(name, points), passed, one.run, references)
        else:
            yield name, Judgement("skip", f"there is no yardstick: {problem}", evidence)


def _breakdown(run: RankRun) -> Judgement | None:
    whole = judge_run(run)
    if whole.status == "fail":
        return whole
    broken = (judge_exercise(run, name) for name in run.exercises)
    return next(filter(None, (*broken, _unmeasured(run))), None)


def _unmeasured(run: RankRun) -> Judgement | None:
    wrong = [(name, each) for name, each in _timed(run) if not _point(run, each).measured]
    if not wrong:
        return None
    lines = [f"{name}: seconds {each.seconds} for {each.amount}" for name, each in wrong]
    return Judgement(
        "fail",
        f"{wrong[0][0]} reported times that no clock can show",
        "\n".join(lines),
        "check the clock of this host, and measure again",
    )


def _compared(
    subject: str,
    figures: Sequence[Measurement],
    passed: Judgement,
    run: RankRun,
    references: Sequence[Reference],
) -> Judgement:
    """The judgement on figures after a comparison with the references for this subject, number
    of ranks and number of hosts."""
    values = {(each.name, each.size, each.ranks): each.value for each in figures}
    wrong, missing = [], []
    for each in references:
        if each.subject != subject or not _applies(each, run):
            continue
        found = values.get((each.measure, SIZES.get(each.size or ""), each.ranks or run.size))
        if found is None:
            missing.append(_measured(each))
        elif problem := missed(found, each):
            wrong.append(f"{_measured(each)} {problem}")
    evidence = f"{passed.message}\n{passed.evidence}"
    if wrong:
        return Judgement("fail", "; ".join(wrong), evidence, _REMEDY)
    if missing:
        why = "there is a reference, but no figure, for "
        remedy = "allow more time with --bench-time; the evidence shows where it ended"
        return Judgement("unproven", why + "; ".join(missing), evidence, remedy)
    return passed


def _applies(reference: Reference, run: RankRun) -> bool:
    """Whether a reference is for as many hosts and ranks."""
    counts = [run.size, *(smaller_counts(run.size) if reference.measure == SPEED else ())]
    nodes = len({rank.host for rank in run.ranks})
    return reference.nodes in (None, nodes) and reference.ranks in (None, *counts)


def missed(value: float, reference: Reference) -> str:
    """How a value misses its reference; empty if it does not."""
    unit = reference.unit
    for bound, word, sign in ((reference.lower, "less", 1), (reference.upper, "more", -1)):
        limit = None if bound is None else reference.value * (1 + bound)
        if limit is not None and not sign * value >= sign * limit:  # NaN is no figure
            found, allowed = apart(value, limit, 4)
            return (
                f"is {found} {unit}, {word} than {allowed}"
                f" ({reference.value:g} {unit} {100 * (bound or 0):+.0f} %)"
            )
    return ""


def _measured(reference: Reference) -> str:
    size = f" at {bytes_shown(SIZES[reference.size])}" if reference.size else ""
    return reference.measure + size + (f" with {reference.ranks} ranks" if reference.ranks else "")


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _extremes(points: Sequence[Point], yardstick: Yardstick = _NONE) -> Iterator[str]:
    """The highest bandwidth and the lowest latency, which are at the ends."""
    if not points:
        yield "no allreduce was measured"
        return
    for point in dict.fromkeys((points[-1], points[0])):
        last, share = point is points[-1], _share(point, yardstick)
        fast = f"{_shown(point.bandwidth)} GB/s" if last and point.ranks > 1 else ""
        text = f"{bytes_shown(point.amount)}: {fast or f'{_shown(point.median * 1e6)} us'}"
        yield f"{text}, {share:.0f} % of {yardstick.name}" if share and last else text


def _share(point: Point, yardstick: Yardstick) -> float:
    """Horovod's share of the yardstick's speed in percent; 0 if unknown."""
    beside = (each.median for each in yardstick.points if each.amount == point.amount)
    return 100 * next(beside, 0.0) / point.median


def _scaling(steps: Sequence[Point]) -> Iterator[str]:
    """How much faster all ranks train than one."""
    if not steps:
        return
    first, last = steps[0], steps[-1]
    if first.ranks == 1 and last.ranks > 1:
        times = last.rate / first.rate
        share = 100 * times / last.ranks
        yield f"{last.ranks} ranks train {times:.2g} times as fast as 1 ({share:.0f} %)"
    else:
        yield f"{_shown(last.rate)} samples/s"


def _listed(points: Sequence[Point], yardstick: Yardstick = _NONE) -> Iterator[str]:
    yield f"{'size':>8} {'median us':>10} {'minimum':>10} {'quartiles':>19} {'GB/s':>8}" + (
        f" {'of ' + yardstick.name:>15}" if yardstick.points else ""
    )
    for point in points:
        least, low, middle, high, _ = (f"{1e6 * each:.1f}" for each in point.seconds)
        line = f"{bytes_shown(point.amount):>8} {middle:>10} {least:>10} {low:>9} {high:>9}"
        share = _share(point, yardstick)
        yield f"{line} {point.bandwidth:8.3f}" + (f" {share:13.0f} %" if share else "")
