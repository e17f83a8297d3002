"""How fast allreduces are, compared with MPI or NCCL alone.

The ranks (hvdenv/standalone/ranks/bench.py) and the yardstick (hvdenv/standalone/ranks/yardstick.c)
measure; this module starts them and judges whether they gave figures.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv import RANK_PROGRAMS
from hvdenv.base.schema import Problem, decode
from hvdenv.reports.page import size as bytes_shown
from hvdenv.reports.report import Measurement
from hvdenv.sites.launchers import MpiVersion
from hvdenv.standalone.ranks.events import BENCH_SIZES, Timed
from hvdenv.verification.rank_judgement import Judgement, judge_exercise, judge_run
from hvdenv.verification.rank_run import RankRun
from hvdenv.verification.rank_start import Pair, start_program, start_ranks
from hvdenv.verification.setup import Effort, HostMpi, Setup

EXERCISE = "bench"
# The network without Horovod, between the memories of hosts and between GPUs.
YARDSTICKS = MPI_ALONE, NCCL_ALONE = "MPI alone", "NCCL alone"
# The share of the time for the ranks; the rest is for the yardstick.
_RANKS = 0.7
_FIGURES = re.compile(r"@hvdenv-yardstick (\{[^{}]*\})")


class Yardstick(NamedTuple):
    """The figures of MPI or NCCL alone, by size, or why there are none.

    Attributes:
        evidence: output of programs.
        name: one of YARDSTICKS.
    """

    points: tuple[Timed, ...]
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
    """

    subject: str
    run: RankRun
    yardstick: Yardstick = _NONE

    @property
    def allreduces(self) -> list[Timed]:
        return [each for rank in self.run.ranks for each in rank.all(Timed)]


def measure(setup: Setup, timeout: float, effort: Effort, mpi: HostMpi, pair: Pair) -> Benchmark:
    """Timed allreduces on all ranks, then the yardstick."""
    timed = setup._replace(exercises=(f"{EXERCISE}={effort.seconds:g}",))
    run = start_ranks(timed, timeout * _RANKS, mpi, *pair)
    found = Benchmark(pair.subject, run)
    yardstick = _yardstick_beside(setup, timeout * (1 - _RANKS), effort, mpi[0], found)
    return found._replace(yardstick=yardstick)


def _yardstick_beside(
    setup: Setup, timeout: float, effort: Effort, mpi: MpiVersion, benchmark: Benchmark
) -> Yardstick:
    """The yardstick for the largest message of a run, on GPUs if the run was on GPUs."""
    measured = benchmark.allreduces
    if not measured:
        return Yardstick((), "the ranks gave no figures in time")
    largest = measured[-1].size
    if not measured[0].device:
        return measure_yardstick(setup, timeout, effort, mpi, largest)
    if gpus := gpu_libraries(benchmark.run):
        found = measure_yardstick(setup, timeout, effort, mpi, largest, gpus)
    else:
        found = Yardstick((), "the ranks loaded no libnccl and libcudart that a program could open")
    return found._replace(name=NCCL_ALONE)


def gpu_libraries(run: RankRun) -> tuple[str, str] | None:
    """The NCCL or RCCL and the runtime with which the ranks used their GPUs; None without."""
    loaded = run.ranks[0].path.libraries

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


def parse_yardstick(text: str) -> tuple[Timed, ...]:
    """The figures in the output of yardstick.c; lines that launchers have mixed are ignored."""
    found = []
    for match in _FIGURES.finditer(text):
        with suppress(ValueError, Problem):
            found.append(decode(Timed, json.loads(match[1])))
    return tuple(found)


def measurements(benchmarks: Sequence[Benchmark]) -> Iterator[Measurement]:
    """All figures of a report: by framework and controller, then those of the yardsticks."""
    for each in benchmarks:
        yield from _figures(each.subject, each.allreduces)
    for yardstick in _fastest(benchmarks):
        yield from _figures(yardstick.name, yardstick.points)


def _figures(subject: str, points: Sequence[Timed]) -> Iterator[Measurement]:
    for point in points:
        about = (subject, point.size, point.ranks)
        yield Measurement("allreduce latency", _rounded(point.median * 1e6), "us", *about)
        if point.ranks > 1:
            yield Measurement("allreduce bandwidth", _rounded(point.bandwidth), "GB/s", *about)


def _fastest(benchmarks: Sequence[Benchmark]) -> Iterator[Yardstick]:
    """Each yardstick, where it was fastest."""
    for name in YARDSTICKS:
        if found := [each.yardstick for each in benchmarks if each.yardstick.name == name]:
            yield max(found, key=lambda each: each.speed)


def _rounded(value: float) -> float:
    """Four digits: the measurement is not more precise."""
    return float(f"{value:.4g}")


def judge_speed(benchmark: Benchmark) -> Judgement:
    """Whether the ranks of one framework and controller measured, and what."""
    run, points, yardstick = benchmark.run, benchmark.allreduces, benchmark.yardstick
    whole = judge_run(run)
    if broken := whole if whole.status == "fail" else judge_exercise(run, EXERCISE):
        return broken
    evidence = [*_listed(points, yardstick)]
    if points and points[-1].size < BENCH_SIZES[-1]:
        largest = bytes_shown(points[-1].size)
        evidence.append(f"nothing above {largest} was measured: --bench-time was too short")
    return Judgement("pass", "; ".join(_extremes(points, yardstick)), "\n".join(evidence))


def judge_yardsticks(benchmarks: Sequence[Benchmark]) -> Iterator[tuple[str, Judgement]]:
    for points, problem, evidence, name in _fastest(benchmarks):
        if points:
            said, shown = "; ".join(_extremes(points)), "\n".join(_listed(points))
            yield name, Judgement("pass", said, shown)
        else:
            yield name, Judgement("skip", f"there is no yardstick: {problem}", evidence)


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _extremes(points: Sequence[Timed], yardstick: Yardstick = _NONE) -> Iterator[str]:
    """The highest bandwidth and the lowest latency, which are at the ends."""
    if not points:
        yield "no allreduce was measured"
        return
    last, share = points[-1], _share(points[-1], yardstick)
    beside = f", {share:.0f} % of {yardstick.name}" if share else ""
    fast = f"{_shown(last.bandwidth)} GB/s" if last.ranks > 1 else _latency(last)
    yield f"{bytes_shown(last.size)}: {fast}{beside}"
    if points[1:]:
        yield f"{bytes_shown(points[0].size)}: {_latency(points[0])}"


def _latency(point: Timed) -> str:
    return f"{_shown(point.median * 1e6)} us"


def _share(point: Timed, yardstick: Yardstick) -> float:
    """Horovod's share of the yardstick's speed in percent; 0 if unknown."""
    beside = (each.median for each in yardstick.points if each.size == point.size)
    return 100 * next(beside, 0.0) / point.median


def _listed(points: Sequence[Timed], yardstick: Yardstick = _NONE) -> Iterator[str]:
    yield f"{'size':>8} {'median us':>10} {'minimum':>10} {'quartiles':>19} {'GB/s':>8}" + (
        f" {'of ' + yardstick.name:>15}" if yardstick.points else ""
    )
    for point in points:
        least, low, middle, high, _ = (f"{1e6 * each:.1f}" for each in point.seconds)
        line = f"{bytes_shown(point.size):>8} {middle:>10} {least:>10} {low:>9} {high:>9}"
        share = _share(point, yardstick)
        yield f"{line} {point.bandwidth:8.3f}" + (f" {share:13.0f} %" if share else "")
