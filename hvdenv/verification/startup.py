"""How long ranks take from their launch to the end of ``hvd.init()``, and for what.

The ranks measure themselves (hvdenv/standalone/ranks/startup.py). They start on all nodes first,
when as little as possible is cached there, and then again on 1, 2, 4 ... and all nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdenv.reports.report import IMPORTS, INIT, STARTUP, Measurement, StartupRecord
from hvdenv.sites.batch import counted
from hvdenv.standalone.ranks.events import Startup
from hvdenv.verification import ranks
from hvdenv.verification.bench import fewer, with_fewer
from hvdenv.verification.collection import Setup
from hvdenv.verification.ranks import Judgement, Rank, RankRun

EXERCISE = "startup"
FIRST, ESTIMATE = "first start-up", "start-up estimate"
# Clocks of two hosts that differ by less than this agree.
_CLOCK_SECONDS = 0.05
# An estimate is for this many times the nodes, and needs imports that grow by these with them.
_AHEAD, _GROWTH, _GROWTH_SECONDS = 8, 1.2, 1.0
_SHOWN = 8
_NOT_COUNTED = (
    "counted in the interpreter; not counted: files that the dynamic loader and C code open, and"
    " what Python reads before its program"
)


class Start(NamedTuple):
    """One start of ranks.

    Attributes:
        run: its ranks, of which each reports a Startup unless it failed.
        launched: when verify called the launcher, by the clock of its host.
        seconds: until the launcher had ended.
        again: whether all nodes had started ranks just before.
    """

    run: RankRun
    launched: float
    seconds: float
    again: bool = False

    @property
    def nodes(self) -> int:
        return len({rank.host for rank in self.run.ranks})

    @property
    def whole(self) -> bool:
        """Whether all ranks were initialised."""
        return len(self.measured) == self.run.size and not any(r.ending for r in self.run.ranks)

    @property
    def measured(self) -> list[tuple[Rank, Startup]]:
        each = ((rank, rank.last(Startup)) for rank in self.run.ranks)
        return [(rank, startup) for rank, startup in each if startup]

    def launcher(self, startup: Startup) -> float | None:
        """Seconds until the rank's process started; None if the clocks of the hosts differ."""
        seconds = startup.started - self.launched
        # The rank was initialised before the launcher ended.
        most = self.seconds - startup.interpreter - _imports(startup) - startup.init
        return max(seconds, 0.0) if -_CLOCK_SECONDS <= seconds <= most else None

    def total(self, startup: Startup) -> float:
        own = startup.interpreter + _imports(startup) + startup.init
        return (self.launcher(startup) or 0.0) + own

    @property
    def slowest(self) -> tuple[Rank, Startup]:
        return max(self.measured, key=lambda each: self.total(each[1]))


def _imports(startup: Startup) -> float:
    return startup.framework + startup.horovod


def launches(setup: Setup) -> Iterator[Setup]:
    """The same environment with ranks on 1, 2, 4 ... and all nodes."""
    hosts = setup.launch.hosts
    for count in fewer(len(hosts)):
        slots = sum(host.slots for host in hosts[:count])
        yield setup._replace(launch=with_fewer(setup.launch, slots))
    yield setup


def measurements(framework: str, starts: Sequence[Start]) -> Iterator[Measurement]:
    for start in filter(lambda each: each.whole, starts):
        _, slowest = start.slowest
        subject, size = f"{framework} over {start.run.controller}", start.run.size
        parts = {STARTUP: start.total(slowest), IMPORTS: _imports(slowest), INIT: slowest.init}
        for name, seconds in parts.items() if start.again else ((FIRST, parts[STARTUP]),):
            yield Measurement(name, round(seconds, 3), "s", subject, ranks=size)
    if estimated := estimate(starts):
        yield Measurement(
            ESTIMATE, round(estimated.seconds, 1), "s", subject, ranks=estimated.ranks
        )


def records(framework: str, starts: Sequence[Start]) -> Iterator[StartupRecord]:
    for start in starts:
        for rank, startup in start.measured:
            values = startup._asdict()
            del values["started"]
            values["slowest"] = {each.module: each.seconds for each in startup.slowest}
            yield StartupRecord(
                run=f"{framework} over {start.run.controller}",
                nodes=start.nodes,
                ranks=start.run.size,
                again=start.again,
                rank=rank.number,
                host=rank.host,
                launcher=start.launcher(startup),
                total=round(start.total(startup), 4),
                **values,
            )


class Estimate(NamedTuple):
    """What start-up would take, and the metadata operations a second served to all nodes together."""

    nodes: int
    ranks: int
    seconds: float
    rate: float


def estimate(starts: Sequence[Start]) -> Estimate | None:
    """Start-up on more nodes, if imports became slower with the nodes that were measured.

    The operations of the additional ranks, divided by the additional seconds, are the rate at
    which the file systems serve them. More ranks are taken to be served at the same rate.
    """
    again = [start for start in starts if start.again and start.whole]
    if len(again) < 2:
        return None
    few, many = again[0], again[-1]
    before, after = (_imports(each.slowest[1]) for each in (few, many))
    if after < before * _GROWTH + _GROWTH_SECONDS:
        return None
    operations = sum(_operations(startup) for _, startup in many.measured)
    more = operations - sum(_operations(startup) for _, startup in few.measured)
    rate = more / (after - before)
    seconds = many.total(many.slowest[1]) + (_AHEAD - 1) * operations / rate
    return Estimate(many.nodes * _AHEAD, many.run.size * _AHEAD, seconds, rate)


def _operations(startup: Startup) -> int:
    return (startup.opens or 0) + startup.lookups


def judge(starts: Sequence[Start]) -> Judgement:
    """What the starts took; they fail only if ranks do."""
    for start in starts:
        if not start.whole:
            return ranks.breakdown(start.run)[1]
    first, last = starts[0], starts[-1]
    rank, slowest = first.slowest
    message = (
        f"{first.total(slowest):.2f} s from launch to the end of hvd.init() on"
        f" {counted(first.nodes, 'node')}, {last.total(last.slowest[1]):.2f} s when repeated;"
        f" the slowest, {rank.name}: {', '.join(_split(first, slowest))};"
        f" {_files(slowest)}"
    )
    return Judgement("pass", message, "\n".join(_evidence(starts)))


def _split(start: Start, startup: Startup) -> Iterator[str]:
    launcher = start.launcher(startup)
    yield "launcher unknown (clocks differ)" if launcher is None else f"launcher {launcher:.2f} s"
    for part in ("interpreter", "framework", "horovod", "init"):
        yield f"{part} {getattr(startup, part):.2f} s"


def _files(startup: Startup) -> str:
    opens = "opens not counted" if startup.opens is None else f"{startup.opens:,} files opened"
    return f"{opens}, {startup.lookups:,} other look-ups, {startup.failed:,} of which failed"


def _evidence(starts: Sequence[Start]) -> Iterator[str]:
    for start in starts:
        yield (
            f"{'again' if start.again else 'first'}, {counted(start.run.size, 'rank')} on"
            f" {counted(start.nodes, 'node')}, slowest first:"
        )
        order = sorted(start.measured, key=lambda each: -start.total(each[1]))
        for rank, startup in order[:_SHOWN]:
            split = ", ".join(_split(start, startup))
            yield f"    {rank.name}: {start.total(startup):.2f} s: {split}"
    rank, slowest = starts[0].slowest
    yield f"files of {rank.name}: {_files(slowest)}, {slowest.inside:,} in the environment"
    yield f"    {_NOT_COUNTED}"
    yield f"slowest of {slowest.modules:,} modules, without those that they import:"
    yield from (f"    {each.seconds:8.3f} s  {each.module}" for each in slowest.slowest)
    if found := estimate(starts):
        yield (
            f"estimate for {found.nodes} nodes: {found.seconds:.0f} s, if they are served at the"
            f" rate of this measurement, {found.rate:,.0f} metadata operations a second"
        )
