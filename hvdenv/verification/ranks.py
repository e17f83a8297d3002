"""What ranks reported (hvdenv/standalone/ranks/rank.py), and what it says about a run."""

from __future__ import annotations

import re
import shlex
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from hvdenv.knowledge.diagnosis import Found, explain
from hvdenv.masking import clean
from hvdenv.reports.report import Status
from hvdenv.sites.hosts import short
from hvdenv.standalone.ranks.events import (
    DataPath,
    Exited,
    ExtensionFacts,
    Joined,
    Operation,
    Overdue,
    ProgramEnd,
    RankEvent,
    Result,
    Stage,
    Started,
)
from hvdenv.verification.received import Received, read

_RANK_VARIABLES = (
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
)
# An event has fewer, of several ranks at a time.
_EVENT_LINES, _NEWS = 32, 200
_SHOWN = 8  # ranks that evidence and messages name one by one
_LINES = 15  # of the launcher in the evidence

# Stages that are no exercise: a rank that ends there fails the allreduces.
_COMMON = ("", "start", "allreduce", "shutdown")
# Output of Horovod, Gloo and MPI in a rank when another one is gone.
_GAVE_UP = re.compile(
    r"Horovod has been shut down|Connection (?:reset|closed) by peer|Broken pipe"
    r"|Read timeout|Socket closed|Timed out waiting"
)
# The last line of a traceback, without the exception's module.
_EXCEPTION = re.compile(r"^(?:\w+\.)*(?P<text>\w*(?:Error|Exception|Interrupt|Exit)\b.*)")
_EXCEPTION_LENGTH = 300
# A rank is slow if it takes this many times the others' seconds, and this many seconds longer.
_SLOW_FACTOR, _SLOW_SECONDS = 5.0, 0.25
# The ranks for which Horovod waits, as rank.py keeps them: ``missing ranks: 1: [a] 2: [a]``.
_MISSING = re.compile(r"\b(\d+): \[")
# faulthandler's stacks: one block for each thread, the innermost frame first.
_THREAD = re.compile(r"^(?:Current t|T)hread 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]*)", line \d+ in ', re.MULTILINE)
# Files whose functions wait for the other ranks, most of them within Horovod's library.
_WAITING = re.compile(
    r"/horovod/\w+/(?:mpi_ops|basics|process_sets)\.py$|/tensorflow/python/|^<string>$"
    r"|/ranks/context\.py$"
)
# Endings in the order in which they explain each other: once one rank fails, launchers and
# schedulers end the others, or the others notice, or wait. No other rank makes a rank crash.
_ENDINGS = tuple(
    map(
        re.compile,
        (
            r"was ended by (?!its launcher|SIGKILL|SIGTERM)", r"was ended by SIG", r"is stopped",
            r"(?:ended|exited) ", r"disappeared", r"hangs", r"was ended by its launcher",
        ),
    )
)  # fmt: skip

E = TypeVar("E", bound=RankEvent)


class Rank(NamedTuple):
    """One rank and its events."""

    host: str
    pid: int
    events: tuple[RankEvent, ...] = ()

    def all(self, kind: type[E]) -> list[E]:
        """Its events of one type."""
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[E]) -> E | None:
        """Its last event of one type."""
        return next(iter(self.all(kind)[::-1]), None)

    @property
    def result(self) -> Result | None:
        return self.last(Result)

    @property
    def exited(self) -> Exited | None:
        return self.last(Exited)

    @property
    def overdue(self) -> Overdue | None:
        return self.last(Overdue)

    @property
    def extension(self) -> ExtensionFacts | None:
        return self.last(ExtensionFacts)

    @property
    def path(self) -> DataPath | None:
        """How its data went (hvdenv/verification/datapath.py)."""
        return self.last(DataPath)

    @property
    def variables(self) -> dict[str, str]:
        """What its launcher states about it."""
        return (self.last(Started) or Started()).variables

    @property
    def number(self) -> int | None:
        """Its number as Horovod states it, or else its launcher."""
        if joined := self.result or self.last(Joined):
            return joined.rank
        numbers = (self.variables.get(name, "") for name in _RANK_VARIABLES)
        return next((int(number) for number in numbers if number.isdigit()), None)

    @property
    def name(self) -> str:
        """How messages call it."""
        number = "unknown" if self.number is None else str(self.number)
        return f"rank {number} on {self.host}"

    @property
    def _latest(self) -> Exited | Overdue | Stage:
        return self.exited or self.overdue or self.last(Stage) or Stage("")

    @property
    def stage(self) -> str:
        """The exercise, or other stage, that it reached."""
        return self._latest.stage

    @property
    def detail(self) -> str:
        """What it tried last within its stage."""
        return self._latest.detail

    @property
    def doing(self) -> str:
        """What it tried last: ``operations (alltoall int8)``."""
        detail = self._latest.detail
        return f"{self.stage} ({detail})" if detail else self.stage

    @property
    def ending(self) -> str:
        """What is wrong with how it ended; empty if nothing is."""
        exited, overdue = self.exited, self.overdue
        if overdue and overdue.stopped:
            return "is stopped (by SIGSTOP or a debugger)"
        if exited is None:
            return "hangs" if overdue else "disappeared without reporting an exit"
        if overdue or exited.ended_by == "deadline":
            return "hangs"
        if exited.ended_by:
            return "was ended by its launcher"
        if exited.signal:
            return f"was ended by {exited.signal}"
        if exited.code:
            return f"exited with code {exited.code}"
        if not (self.result or self.last(ProgramEnd)):
            return "exited without a result"
        return "" if exited.stage == "shutdown" else "exited too early"

    @property
    def exception(self) -> str:
        """The exception that ended it; empty if none did."""
        found = [match for line in self.tail.splitlines() if (match := _EXCEPTION.match(line))]
        return found[-1]["text"][:_EXCEPTION_LENGTH] if found else ""

    @property
    def gave_up(self) -> bool:
        """Whether it ended because another rank was gone."""
        failed = self.ending.startswith(("exited with", "was ended by SIGABRT"))
        return failed and bool(_GAVE_UP.search(self.tail))

    @property
    def working_in(self) -> str:
        """The file of its innermost Python frame when it was late; empty if no stack shows it."""
        # On a busy host the stacks may come after the report that the rank is overdue.
        tails = (event.tail for event in (self.overdue, self.exited) if event)
        for stack in (stack for tail in tails for stack in _THREAD.split(tail)[1:]):
            if "rank_work.py" in stack and (frame := _FRAME.search(stack)):
                return frame["file"]
        return ""

    @property
    def tail(self) -> str:
        """The last lines of its output; its stacks, if it was late."""
        tails = (event.tail for event in (self.overdue, self.exited) if event)
        return clean(next(filter(None, tails), ""))


class RankRun(NamedTuple):
    """One start of N ranks.

    Attributes:
        launcher: its name.
        controller: ``MPI`` or ``Gloo``: what Horovod should use.
        argv: how the ranks were started.
        size: how many ranks were requested.
        ranks: those that reported.
        returncode: the launcher's.
        timed_out: whether the launcher had to be ended.
        tail: last lines of the launcher's own output.
        launched_by: path and version of the program that starts ranks.
        timeout: seconds that the ranks had.
        hosts: where they should be; empty if the launcher was to choose.
        exercises: names of what they were to do after the allreduces, in this order.
    """

    launcher: str
    controller: str
    argv: tuple[str, ...]
    size: int
    ranks: tuple[Rank, ...]
    returncode: int = 0
    timed_out: bool = False
    tail: str = ""
    launched_by: str = ""
    timeout: float = 0.0
    hosts: tuple[str, ...] = ()
    exercises: tuple[str, ...] = ()

    @property
    def extension(self) -> ExtensionFacts | None:
        """What the first rank that reported it found its Horovod to be."""
        return next((rank.extension for rank in self.ranks if rank.extension), None)

    @property
    def results(self) -> list[Result]:
        """Those of all ranks that have one."""
        return [rank.result for rank in self.ranks if rank.result]

    @property
    def operations(self) -> frozenset[str]:
        """What Horovod logged as reducing CPU tensors, on any rank."""
        names = {result.logged.get("cpu", "") for result in self.results} - {""}
        return frozenset({"GLOO": "Gloo"}.get(name, name) for name in names)


# Gloo resolves its own host's name and does not expect to find nothing.
_NAMELESS = Found(
    "host-without-address",
    "the host's own name has no address, and Gloo then ends with a segmentation fault",
    ("add the host's name to /etc/hosts or DNS, or start ranks with mpirun",),
)
# MPI and Gloo keep what they share in files, and print nothing useful when there is no space.
_FULL = Found(
    "folder-full",
    "no space is left in {0}",
    ("free some space, or set TMPDIR to another folder; `df -h` and `df -i` show what is left",),
)


class Judgement(NamedTuple):
    """What a run proves, or what is wrong with it."""

    status: Status
    message: str
    evidence: str = ""
    remedy: str = ""


def collect(messages: Sequence[Received]) -> tuple[Rank, ...]:
    """The ranks that events came from, in the order of their numbers."""
    events: dict[tuple[str, int], list[RankEvent]] = {}
    for message in messages:
        events.setdefault((message.host, message.pid), []).append(message.event)
    ranks = [Rank(host, pid, tuple(each)) for (host, pid), each in events.items()]
    return tuple(sorted(ranks, key=lambda rank: (rank.number or 0, rank.host, rank.pid)))


def listener(token: str, tell: Callable[[str, str], None]) -> Callable[[str], None]:
    """A function for each line of a launcher, which tells once what ranks do and what is wrong."""
    recent: deque[str] = deque(maxlen=_EVENT_LINES)
    told: set[tuple[str, str]] = set()

    def take(line: str) -> None:
        if token in line:
            recent.append(line)
            for message in read("\n".join(recent), token):
                news = _news(message.event)
                if news and news not in told and len(told) < _NEWS:
                    told.add(news)
                    tell(*news)

    return take


def _news(event: RankEvent) -> tuple[str, str] | None:
    if isinstance(event, Stage):
        return "stage", event.stage
    if isinstance(event, Operation) and event.wrong:
        return "failed", f"wrong values in {event.operation}"
    return None


def judge(run: RankRun) -> Judgement:
    """The first thing that is wrong with a run, in the order in which it explains the rest.

    What ranks that had all results do later, in an exercise, is judge_exercise()'s.
    """
    tests = (
        _nothing_started,
        _singletons,
        _environments,
        _broken_ranks,
        _numbering,
        _wrong_results,
        _other_controller,
        _launcher_failed,
        _controller_not_named,
    )
    for test in tests:
        if found := test(run):
            return found
    hosts = sorted({rank.host for rank in run.ranks})
    count = run.results[0].tests
    slowest = slow(run)
    but = f"; but {slowest[0].name} {slowest[1]}" if slowest else ""
    return Judgement(
        "pass",
        f"{run.size} ranks on {listed(hosts)} agree on {count} reductions,"
        f" with {run.controller} as the controller ({run.launcher}){but}",
    )


def causes_by_rank(run: RankRun) -> list[str]:
    """Why each rank failed, in the order of the run's ranks; empty for those that did not."""
    first, _ = _first_broken(run)
    failed = judge(run)
    found = []
    for rank in run.ranks:
        cause = _own_cause(rank)
        if rank.ending and first and rank not in first:
            cause = f"{rank.ending}, after {listed([each.name for each in first])} failed"
        elif not cause and failed.status == "fail" and not first and not _wrong_results(run):
            cause = failed.message
        found.append(cause)
    return found


def _own_cause(rank: Rank) -> str:
    result = rank.result
    if rank.ending:
        text = f" ({rank.exception})" if rank.exception else ""
        doing = f", in {rank.doing}" if rank.doing not in _COMMON else ""
        return f"{rank.ending}{text}{doing}"
    if result and result.failed:
        return f"{result.failed} of {result.tests} reductions are wrong"
    wrong = [each.operation for each in rank.all(Operation) if each.wrong]
    return f"wrong values in {listed(wrong)}" if wrong else ""


def slow(run: RankRun) -> tuple[Rank, str] | None:
    """The rank that took much longer than the others for the same work, and this in words."""
    seconds = [result.busy for result in run.results]
    if len(seconds) < 2 or not all(seconds):
        return None
    *others, longest = sorted(seconds)
    usual = statistics.median(others)
    slowest = [rank for rank in run.ranks if rank.result][seconds.index(longest)]
    if longest < max(_SLOW_FACTOR * usual, usual + _SLOW_SECONDS):
        return None
    return slowest, (
        f"took {longest / usual:.0f} times as long as the others for its own work"
        f" ({longest:.2g} s instead of {usual:.2g} s), and every rank waits for the slowest:"
        f" compare the cores, CPU clock and limits of {slowest.host} with those of other hosts"
    )


def _evidence(run: RankRun, ranks: Sequence[Rank] = (), lines: Sequence[str] = ()) -> str:
    parts = [f"command: {shlex.join(run.argv)}"]
    if run.launched_by:
        parts.append(f"started by: {run.launched_by}")
    parts += lines
    for rank in ranks[:_SHOWN]:
        parts.append(f"{rank.name} (process {rank.pid}) {rank.ending}:")
        parts += [f"    {line}" for line in rank.tail.splitlines() or ["(no output)"]]
    if len(ranks) > _SHOWN:
        parts.append(f"and {len(ranks) - _SHOWN} more ranks")
    if run.tail:
        parts += [f"last lines of the launcher (exit {run.returncode}):"]
        parts += [f"    {line}" for line in run.tail.splitlines()[-_LINES:]]
    return "\n".join(parts)


def _explained(run: RankRun, judgement: Judgement, ranks: Sequence[Rank] = ()) -> Judgement:
    """With the cause and its remedy, where output of ranks or of the launcher shows it.

    Args:
        run: that failed.
        judgement: what is wrong with it.
        ranks: those that failed first.
    """
    text = "\n".join((*(rank.tail for rank in ranks[:_SHOWN]), run.tail))
    # What was seen on a host says more than a text about it, or about where a rank stopped.
    found = _full(ranks) or explain(text, kills=not ranks or any(map(_may_be_killed, ranks)))
    if found and found.kill and ranks and not _is_of(found, ranks):
        found = explain(text, kills=False)
    if (found is None or found.kind != "cause") and any(
        rank.exited and rank.exited.nameless for rank in ranks
    ):
        found = _NAMELESS
    if not found:
        return judgement
    evidence = judgement.evidence
    if found.line and found.line not in evidence:
        evidence = f"{evidence}\nearlier output of the launcher:\n    {found.line.strip()}"
    message = f"{judgement.message}: {found.cause}"
    return judgement._replace(message=message, evidence=evidence, remedy=found.remedy)


def _may_be_killed(rank: Rank) -> bool:
    """Whether a kill that the launcher reports may be this rank's, and not the launcher's own."""
    return rank.ending in ("was ended by SIGKILL", "disappeared without reporting an exit")


def _is_of(found: Found, ranks: Sequence[Rank]) -> bool:
    """Whether what a launcher reports is about one of these ranks, unless it names none."""
    return not found.rank.isdigit() or int(found.rank) in {rank.number for rank in ranks}


def _full(ranks: Sequence[Rank]) -> Found | None:
    """The cause, where ranks found folders without space on their hosts."""
    ended = [(rank.host, rank.exited) for rank in ranks if rank.exited]
    full = [f"{folder} on {host}" for host, exited in ended for folder in exited.full]
    if not full:
        return None
    return _FULL._replace(cause=_FULL.cause.format(listed(list(dict.fromkeys(full)))))


def listed(names: Sequence[str]) -> str:
    """Names for a message: of many, the first few and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def apart(one: float, other: float, digits: int) -> tuple[str, str]:
    """Two numbers with at least so many digits, and enough to differ if they do."""
    for count in range(digits, 18):
        texts = f"{one:.{count}g}", f"{other:.{count}g}"
        if texts[0] != texts[1]:
            break
    return texts


def _nothing_started(run: RankRun) -> Judgement | None:
    if run.ranks:
        return None
    how = (
        f"did not finish within {run.timeout:.0f} s" if run.timed_out else f"exit {run.returncode}"
    )
    judgement = Judgement(
        "fail",
        f"{run.launcher} started none of {run.size} ranks ({how})",
        _evidence(run),
        "read the launcher's output in the evidence, and run its command by hand",
    )
    return _explained(run, judgement)


def _singletons(run: RankRun) -> Judgement | None:
    alone = _alone(run.results)
    if run.size == 1 or len(run.results) < 2 or not alone:
        return None
    lines = [f"{rank.name}: {rank.variables}" for rank in run.ranks]
    mpi = next((rank.path.mpi for rank in run.ranks if rank.path), "")
    if mpi:
        lines.append(f"MPI of the ranks: {mpi}")
    return Judgement(
        "fail",
        f"{len(run.results)} processes were started, but {alone}",
        _evidence(run, lines=lines),
        _alone_under_srun(run, mpi) if run.launcher == "srun" else
        "the launcher does not belong to the MPI that Horovod was built with: start ranks with the"
        " mpirun of that MPI (compare `started by`), or rebuild Horovod with the launcher's MPI",
    )  # fmt: skip


def _alone(results: Sequence[Result]) -> str:
    """What shows that each rank reduces alone, whatever its size; empty if nothing does."""
    if all(result.size == 1 for result in results):
        return "each reports that it is alone (size 1)"
    if all(result.failed and result.own == result.failed for result in results):
        return (
            "each gets its own input back: each is alone, although it reports size"
            f" {results[0].size}"
        )
    return ""


def _alone_under_srun(run: RankRun, mpi: str) -> str:
    """What to do where srun and the MPI use different interfaces."""
    option = next((word for word in run.argv if word.startswith("--mpi=")), "no --mpi")
    wanted = "pmi2" if "MPICH" in mpi or "Intel" in mpi or "MVAPICH" in mpi else "pmix"
    return (
        f"srun was started with {option}, but this MPI needs --mpi={wanted}: set launch.srun_mpi"
        f' in the recipe to "{wanted}" if `srun --mpi=list` shows it, or use mpirun'
    )


def _environments(run: RankRun) -> Judgement | None:
    """Whether the ranks of all hosts have the same framework and the same Horovod."""
    have = {rank.name: _stack(rank.extension) for rank in run.ranks if rank.extension}
    if len(set(have.values())) < 2:
        return None
    usual = Counter(have.values()).most_common(1)[0][0]
    name, other = next((name, stack) for name, stack in have.items() if stack != usual)
    pairs = [(mine, theirs) for mine, theirs in zip(other, usual, strict=True) if mine != theirs]
    mine, theirs = (", ".join(pair[side] for pair in pairs) for side in (0, 1))
    return Judgement(
        "fail",
        f"{name} has a different environment from the other ranks: {mine} instead of {theirs}",
        _evidence(run, lines=[f"{rank}: {', '.join(stack)}" for rank, stack in have.items()]),
        "every host must have the same environment: in a shared folder, or as a copy of the same"
        " build; look for PYTHONPATH and modules that only one host has",
    )


def _stack(facts: ExtensionFacts) -> tuple[str, ...]:
    """What all ranks of a run must have in common, in words."""
    return (
        f"{facts.framework} {facts.installed}",
        f"Horovod {facts.version}",
        f"built with {facts.framework} {facts.built_with}",
        f"an extension of {facts.size} bytes",
        f"Python files {facts.sources}",
    )


def _broken_ranks(run: RankRun) -> Judgement | None:
    if _broken_exercise(run):
        return None
    return _brokenness(run)


def _broken_exercise(run: RankRun) -> str:
    """The exercise in which ranks failed after all had finished their allreduces."""
    cause, _ = _first_broken(run)
    if not cause or any(rank.result is None for rank in run.ranks):
        return ""
    return "" if cause[0].stage in _COMMON else cause[0].stage


def judge_exercise(run: RankRun, name: str) -> Judgement | None:
    """What kept ranks from finishing an exercise; None if all finished it.

    Their results are judged by the exercise's own check.
    """
    broken = _broken_exercise(run)
    if broken == name:
        return _brokenness(run)
    if judge(run).status == "fail":
        return Judgement("skip", "the ranks did not reach it: see allreduce")
    if broken and run.exercises.index(name) > run.exercises.index(broken):
        return Judgement("skip", f"the ranks did not reach it: see {broken}")
    return None


def breakdown(run: RankRun) -> tuple[list[Rank], Judgement]:
    """The ranks that failed first, and how."""
    cause, _ = _first_broken(run)
    how = _nothing_started(run) or _brokenness(run) or _launcher_failed(run)
    return cause, how or Judgement("error", "the ranks ended without a reason", _evidence(run))


def _brokenness(run: RankRun) -> Judgement | None:
    """How ranks failed; None if none did."""
    cause, others = _first_broken(run)
    if not cause:
        return None
    message = f"{listed([rank.name for rank in cause])}: {cause[0].ending}"
    if cause[0].ending == "hangs":
        message = f"{listed([r.name for r in cause])}: did not finish within {run.timeout:.0f} s"
        if waited := [rank.name for rank in others if rank.ending == "hangs"]:
            message += f"; {listed(waited)} waited for this"
        done = [rank.name for rank in run.ranks if rank.result]
        message += f"; results came from {listed(done) or 'no rank'}{_awaited(run)}"
    elif len({rank.ending for rank in cause}) > 1:
        message = "; ".join(f"{rank.name} {rank.ending}" for rank in cause[:_SHOWN])
    if cause[0].exception and cause[0].ending.startswith("exited with"):
        message += f" ({cause[0].exception})"
    if cause[0].doing not in _COMMON:
        message += f", in {cause[0].doing}"
    judgement = Judgement(
        "fail",
        message,
        _evidence(run, cause + others),
        "read the last lines of each rank in the evidence, starting with the first rank named",
    )
    return _explained(run, judgement, cause)


def _awaited(run: RankRun) -> str:
    """The ranks that were never started, and those that Horovod reports as missing."""
    text = ""
    if len(run.ranks) < run.size:
        silent = _hosts_without_ranks(run)
        where = f", none on {listed(silent)}" if silent else ""
        text = f"; only {len(run.ranks)} of {run.size} ranks were started{where}"
    stalled = next((one.stalled for rank in run.ranks if (one := rank.overdue) and one.stalled), "")
    return f"{text}; Horovod reports: {clean(stalled)}" if stalled else text


def _first_broken(run: RankRun) -> tuple[list[Rank], list[Rank]]:
    """The ranks that failed first, and the others that failed after them."""
    broken = [rank for rank in run.ranks if rank.ending]
    suspects = [rank for rank in broken if not rank.gave_up] or broken
    if not suspects:
        return [], []
    first = min(map(_order, suspects))
    cause = [rank for rank in suspects if _order(rank) == first]
    if cause[0].ending == "hangs":
        cause = _awaited_ranks(cause)
    return cause, [rank for rank in broken if rank not in cause]


def _awaited_ranks(hanging: Sequence[Rank]) -> list[Rank]:
    """Those of the hanging ranks for which the others wait; all of them if that is unknown."""
    return _missing(hanging) or _outside(hanging) or list(hanging)


def _missing(hanging: Sequence[Rank]) -> list[Rank]:
    """Those that Horovod reports as missing, unless these are all."""
    stalled = " ".join(rank.overdue.stalled for rank in hanging if rank.overdue)
    numbers = set(map(int, _MISSING.findall(stalled)))
    found = [rank for rank in hanging if rank.number in numbers]
    return found if len(found) < len(hanging) else []


def _outside(hanging: Sequence[Rank]) -> list[Rank]:
    """Those that were not waiting within Horovod while others were."""
    shown = [rank for rank in hanging if rank.working_in]
    found = [rank for rank in shown if not _WAITING.search(rank.working_in)]
    return found if len(found) < len(shown) else []


def _order(rank: Rank) -> int:
    """Where a rank's ending stands among those that explain each other."""
    return next(number for number, ending in enumerate(_ENDINGS) if ending.match(rank.ending))


def _numbering(run: RankRun) -> Judgement | None:
    problems = list(_miscounts(run)) or list(_misplaced(run))
    if not problems:
        return None
    return Judgement(
        "fail",
        "; ".join(problems),
        _evidence(run, lines=[f"{r.name}: {_numbers(r.result)}" for r in run.ranks if r.result]),
        "compare the launcher and the MPI in the evidence; ranks of two jobs or of two MPIs must"
        " not be mixed" + _how_to_compare_names(run),
    )


def _how_to_compare_names(run: RankRun) -> str:
    """What to run where a requested host may only be known to itself by another name."""
    silent = _hosts_without_ranks(run)
    return f"; or a host has another name for itself: ssh {silent[0]} hostname" if silent else ""


def _hosts_without_ranks(run: RankRun) -> list[str]:
    """The requested hosts whose name no rank reported."""
    reported = {short(rank.host) for rank in run.ranks}
    return [host for host in run.hosts if short(host) not in reported]


def _miscounts(run: RankRun) -> Iterator[str]:
    """Ranks that are missing, or counted or numbered wrong."""
    if len(run.results) != run.size:
        yield f"{len(run.results)} of {run.size} ranks reported"
    if wrong := sorted({result.size for result in run.results} - {run.size}):
        yield f"Horovod's size is {listed([str(n) for n in wrong])}, not {run.size}"
    numbers = sorted(result.rank for result in run.results)
    if len(numbers) == run.size and not wrong and numbers != list(range(run.size)):
        yield f"the ranks are {numbers}, not 0 to {run.size - 1}"


def _misplaced(run: RankRun) -> Iterator[str]:
    """Ranks on other hosts than requested, or with wrong local numbers."""
    used, wanted = {short(rank.host) for rank in run.ranks}, {short(host) for host in run.hosts}
    if wanted and used != wanted:
        yield f"the ranks are on {listed(sorted(used))}, not {listed(sorted(wanted))}"
        return
    for host in sorted({rank.host for rank in run.ranks}):
        local = [rank.result for rank in run.ranks if rank.result and rank.host == host]
        numbers = sorted(result.local_rank for result in local)
        if numbers != list(range(len(local))):
            yield f"the local ranks on {host} are {numbers}, not 0 to {len(local) - 1}"
        if {result.local_size for result in local} != {len(local)}:
            yield f"the local size on {host} is not {len(local)}"


def _numbers(result: Result) -> str:
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    return ", ".join(f"{name} {getattr(result, name)}" for name in names)


def _wrong_results(run: RankRun) -> Judgement | None:
    wrong = [(rank.name, rank.result) for rank in run.ranks if rank.result and rank.result.failed]
    if not wrong:
        return None
    lines = [f"{name}: {each}" for name, result in wrong[:_SHOWN] for each in result.wrong]
    first = wrong[0][1]
    return Judgement(
        "fail",
        f"allreduce gives wrong values on {listed([name for name, _ in wrong])}:"
        f" {first.failed} of {first.tests} reductions",
        _evidence(run, lines=lines),
        "do not train with this environment: rebuild it for this machine; if the values stay wrong,"
        " try the other controller and report this evidence to Horovod",
    )


def _other_controller(run: RankRun) -> Judgement | None:
    for rank in run.ranks:
        used = _controller(rank.result)
        if used and used.upper() != run.controller.upper():
            return Judgement(
                "fail",
                f"{rank.name} used {used} as its controller, not {run.controller}",
                _evidence(run),
                "look for HOROVOD_CONTROLLER in your environment and in the site's configuration",
            )
    return None


def _controller(result: Result | None) -> str:
    """The controller in Horovod's debug output, or else the only one that is enabled."""
    if not result or "controller" in result.logged:
        return result.logged["controller"] if result else ""
    enabled = {"MPI": result.mpi_enabled, "Gloo": result.gloo_enabled}
    names = [name for name, on in enabled.items() if on]
    return names[0] if len(names) == 1 else ""


def _launcher_failed(run: RankRun) -> Judgement | None:
    if not run.returncode or _broken_exercise(run):
        return None
    how = "did not exit" if run.timed_out else f"exited with code {run.returncode}"
    judgement = Judgement(
        "fail",
        f"all ranks computed the right values, but {run.launcher} {how}",
        _evidence(run),
        "a batch job would count as failed: read the launcher's output in the evidence",
    )
    return _explained(run, judgement)


def _controller_not_named(run: RankRun) -> Judgement | None:
    if all(_controller(rank.result) for rank in run.ranks):
        return None
    return Judgement(
        "unproven",
        f"the values are right, but Horovod does not report whether it used {run.controller}",
        _evidence(run),
        "use a newer Horovod, which logs its controller if HOROVOD_LOG_LEVEL is debug",
    )
