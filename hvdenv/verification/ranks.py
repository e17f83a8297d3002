"""What ranks report (hvdenv/standalone/ranks/rank.py writes it), and what that says about a run."""

from __future__ import annotations

import base64
import json
import re
import shlex
import statistics
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdenv.knowledge.diagnosis import Found, explain
from hvdenv.masking import mask, plain
from hvdenv.reports.report import Status
from hvdenv.sites.hosts import short

_EVENT = re.compile(
    r"@hvdenv (?P<token>\w+) (?P<crc>[0-9a-f]{8}) (?P<said>(?P<source>[0-9A-F]+)"
    r"\.(?P<event>\d+)\.(?P<part>\d+)\.(?P<parts>\d+)\.(?P<payload>[A-Za-z0-9+/]+))"
)
_RANK_VARIABLES = (
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
)
_SHOWN = 8  # ranks that evidence and messages name one by one
_LINES = 15  # of the launcher in the evidence

# Events of which there is one; whatever else a rank reports is of an exercise.
_ONCE = ("started", "extension", "joined", "result", "overdue", "exited")
# Stages that are no exercise: what ends there is judged with the allreduces.
_COMMON = ("", "start", "allreduce", "shutdown")
# What ranks say when another one is gone, of Horovod, Gloo and MPI.
_GAVE_UP = re.compile(
    r"Horovod has been shut down|Connection (?:reset|closed) by peer|Broken pipe"
    r"|Read timeout|Socket closed|Timed out waiting"
)
# The last line of a traceback, without the exception's module.
_EXCEPTION = re.compile(r"^(?:\w+\.)*(?P<said>\w*(?:Error|Exception|Interrupt|Exit)\b.*)")
_SAID = 300
# A rank is slow from so many times the others' seconds, and so many seconds more, on.
_SLOW_FACTOR, _SLOW_SECONDS = 5.0, 0.25
# Which ranks Horovod says it waits for, as rank.py keeps it: ``missing ranks: 1: [a] 2: [a]``.
_MISSING = re.compile(r"\b(\d+): \[")
# faulthandler's stacks: one block for each thread, the innermost frame first.
_THREAD = re.compile(r"^(?:Current t|T)hread 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]*)", line \d+ in ', re.MULTILINE)
# Files whose functions call into Horovod's library, and there wait for the other ranks.
_WAITING = re.compile(
    r"/horovod/\w+/(?:mpi_ops|basics|process_sets)\.py$|/tensorflow/python/|^<string>$"
)
# In which order endings explain each other: once one rank fails, launchers and schedulers end
# the others, or these notice, or wait for it. Nobody lets a rank crash.
_ENDINGS = tuple(
    map(
        re.compile,
        (
            r"was ended by (?!its launcher|SIGKILL|SIGTERM)", r"was ended by SIG", r"is stopped",
            r"ended ", r"was lost", r"hangs", r"was ended by its launcher",
        ),
    )
)  # fmt: skip


class Rank(NamedTuple):
    """One rank's events; None for one that did not come.

    Attributes:
        reports: what exercises reported, by the name of the event.
    """

    host: str
    pid: int
    started: dict[str, Any]
    result: dict[str, Any] | None = None
    overdue: dict[str, Any] | None = None
    exited: dict[str, Any] | None = None
    extension: dict[str, Any] | None = None
    joined: dict[str, Any] | None = None
    reports: Mapping[str, tuple[dict[str, Any], ...]] = {}

    @property
    def number(self) -> int | None:
        """Its number, as it says itself or else as the launcher said."""
        if said := self.result or self.joined:
            return int(said["rank"])
        variables = self.started.get("variables", {})
        for name in _RANK_VARIABLES:
            if str(variables.get(name, "")).isdigit():
                return int(variables[name])
        return None

    @property
    def name(self) -> str:
        """How messages call it."""
        number = "unknown" if self.number is None else str(self.number)
        return f"rank {number} on {self.host}"

    @property
    def stage(self) -> str:
        """The exercise, or other stage, that it came to."""
        for event in (self.exited, self.overdue, *reversed(self.reports.get("stage", ()))):
            if event and event.get("stage"):
                return str(event["stage"])
        return ""

    @property
    def doing(self) -> str:
        """What it tried last, as far as it could be told: ``operations (alltoall int8)``."""
        last = self.exited or self.overdue or {}
        detail = last.get("detail") if last.get("stage") == self.stage else ""
        return f"{self.stage} ({detail})" if detail else self.stage

    @property
    def ending(self) -> str:
        """What is wrong with how it ended; empty if nothing is."""
        if self.overdue and self.overdue.get("stopped"):
            return "is stopped (by SIGSTOP, or by a debugger)"
        if self.exited is None:
            return "hangs" if self.overdue else "was lost without a word"
        if self.overdue or self.exited["ended_by"] == "deadline":
            return "hangs"
        if self.exited["ended_by"]:
            return "was ended by its launcher"
        if self.exited["signal"]:
            return f"was ended by {self.exited['signal']}"
        if self.exited["code"]:
            return f"ended with exit code {self.exited['code']}"
        if not self.result:
            return "ended without a result"
        return "" if self.exited.get("stage", "shutdown") == "shutdown" else "ended before its end"

    @property
    def path(self) -> dict[str, Any]:
        """By which path its data went (hvdenv/verification/datapath.py); empty if it did not come to that."""
        return dict(next(iter(self.reports.get("path", ())), {}))

    @property
    def full(self) -> tuple[str, ...]:
        """Folders of temporary files in which no space was left when it ended."""
        return tuple((self.exited or {}).get("full", ()))

    @property
    def nameless(self) -> bool:
        """Whether its host's own name means no address there."""
        return bool(self.exited and self.exited.get("nameless"))

    @property
    def said(self) -> str:
        """The exception that ended it; empty if none did."""
        found = [match for line in self.tail.splitlines() if (match := _EXCEPTION.match(line))]
        return found[-1]["said"][:_SAID] if found else ""

    @property
    def gave_up(self) -> bool:
        """Whether it ended because another rank was gone."""
        failed = self.ending.startswith(("ended with", "was ended by SIGABRT"))
        return failed and bool(_GAVE_UP.search(self.tail))

    @property
    def working_in(self) -> str:
        """The file of its innermost Python frame when it was late; empty if no stack shows it."""
        # On a busy host the stacks may come after the report that the rank is overdue.
        tails = (str(event.get("tail", "")) for event in (self.overdue, self.exited) if event)
        for stack in (stack for tail in tails for stack in _THREAD.split(tail)[1:]):
            if "rank_work.py" in stack and (frame := _FRAME.search(stack)):
                return frame["file"]
        return ""

    @property
    def tail(self) -> str:
        """The last lines of its output; its stacks, if it was late."""
        for event in (self.overdue, self.exited):
            if event and event.get("tail"):
                return mask(plain(str(event["tail"])))
        return ""


class RankRun(NamedTuple):
    """One start of N ranks.

    Attributes:
        launcher: its name.
        controller: ``MPI`` or ``Gloo``: what Horovod should use.
        argv: how it was started.
        size: how many ranks were asked for.
        ranks: those that reported.
        returncode: the launcher's.
        timed_out: whether the launcher had to be ended.
        tail: last lines of the launcher's own output.
        launched_by: path and version of the program that starts ranks.
        timeout: seconds that the ranks had.
        hosts: where they should be; empty if that was left to the launcher.
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
    def extension(self) -> dict[str, Any]:
        """What the first rank that said so found its Horovod to be; or empty."""
        said = (rank.extension["facts"] for rank in self.ranks if rank.extension)
        return next(said, {})

    @property
    def operations(self) -> frozenset[str]:
        """What Horovod named as reducing CPU tensors, on all ranks that said so."""
        said = (rank.result["said"].get("cpu", "") for rank in self.ranks if rank.result)
        return frozenset({"GLOO": "Gloo"}.get(name, name) for name in said if name)


# Gloo looks its own host's name up and does not expect to find nothing.
_NAMELESS = Found(
    "host-without-address",
    "the host's own name means no address there, and Gloo ends with a segmentation fault",
    "enter it in /etc/hosts or the name service, or start ranks by mpirun",
)


# MPI and Gloo keep what they share in files, and say nothing of use when there is no room.
_FULL = Found(
    "folder-full",
    "no space is left in {0}",
    "free some, or name another folder with TMPDIR; `df -h` and `df -i` show what is left",
)


class Judgement(NamedTuple):
    """What a run proves, or what is wrong with it."""

    status: Status
    message: str
    evidence: str = ""
    remedy: str = ""


def parse_events(text: str, token: str) -> list[dict[str, Any]]:
    """The whole events of a token in a launcher's output; whatever else is there is ignored."""
    events: dict[tuple[str, str], dict[int, str]] = {}
    whole = {}
    for found in _EVENT.finditer(text):
        if found["token"] == token and int(found["crc"], 16) == zlib.crc32(found["said"].encode()):
            event = found["source"], found["event"]
            parts = events.setdefault(event, {})
            parts[int(found["part"])] = found["payload"]
            if len(parts) == int(found["parts"]):
                whole[event] = "".join(parts[number] for number in sorted(parts))
    return [json.loads(base64.b64decode(each + "=" * (-len(each) % 4))) for each in whole.values()]


def collect(events: Sequence[dict[str, Any]]) -> tuple[Rank, ...]:
    """The ranks that events came from, in the order of their numbers."""
    seen: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for event in events:
        seen.setdefault((str(event["host"]), int(event["pid"])), []).append(event)
    ranks = [_rank(host, pid, events) for (host, pid), events in seen.items()]
    return tuple(sorted(ranks, key=lambda rank: (rank.number or 0, rank.host, rank.pid)))


def _rank(host: str, pid: int, events: Sequence[dict[str, Any]]) -> Rank:
    once = {event["event"]: event for event in events if event["event"] in _ONCE}
    reports: dict[str, tuple[dict[str, Any], ...]] = {}
    for event in events:
        if event["event"] not in _ONCE:
            reports[event["event"]] = (*reports.get(event["event"], ()), event)
    return Rank(host, pid, once.pop("started", {}), **once, reports=reports)


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
    first = run.ranks[0].result or {}
    return Judgement(
        "pass",
        f"{run.size} ranks on {listed(hosts)} agree on {first['tests']} reductions,"
        f" with {run.controller} as the controller ({run.launcher}){_slow(run)}",
    )


def _slow(run: RankRun) -> str:
    """The rank that took much longer than the others for the same work, in words; or nothing."""
    took = [float((rank.result or {}).get("busy") or 0) for rank in run.ranks]
    if len(took) < 2 or not all(took):
        return ""
    *others, longest = sorted(took)
    usual, slowest = statistics.median(others), run.ranks[took.index(longest)]
    if longest < max(_SLOW_FACTOR * usual, usual + _SLOW_SECONDS):
        return ""
    return (
        f"; but {slowest.name} took {longest / usual:.0f} times as long as the others for its"
        f" own part of that ({longest:.2g} s, not {usual:.2g} s), and every rank waits for the"
        f" slowest: look at what else runs on {slowest.host}, and at its cores and their clock"
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
    found = _full(ranks) or explain(text, "run", kills=not ranks or any(map(_may_be_killed, ranks)))
    if found and found.kill and ranks and not _is_of(found, ranks):
        found = explain(text, "run", kills=False)
    if (found is None or found.kind != "cause") and any(rank.nameless for rank in ranks):
        found = _NAMELESS
    if not found:
        return judgement
    evidence = judgement.evidence
    if found.line and found.line not in evidence:
        evidence = f"{evidence}\nearlier, the launcher said:\n    {found.line.strip()}"
    message = f"{judgement.message}: {found.cause}"
    return judgement._replace(message=message, evidence=evidence, remedy=found.remedy)


def _may_be_killed(rank: Rank) -> bool:
    """Whether a launcher that reports kills may mean this rank, and not one that it ended itself."""
    return rank.ending in ("was ended by SIGKILL", "was lost without a word")


def _is_of(found: Found, ranks: Sequence[Rank]) -> bool:
    """Whether what a launcher reports is about one of these ranks, as far as it names one."""
    return not found.rank.isdigit() or int(found.rank) in {rank.number for rank in ranks}


def _full(ranks: Sequence[Rank]) -> Found | None:
    """The cause, where ranks have seen folders without space on their hosts."""
    full = [f"{folder} on {rank.host}" for rank in ranks for folder in rank.full]
    if not full:
        return None
    return _FULL._replace(cause=_FULL.cause.format(listed(list(dict.fromkeys(full)))))


def listed(names: Sequence[str]) -> str:
    """Names for a message: of many, the first few and how many there are more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _nothing_started(run: RankRun) -> Judgement | None:
    if run.ranks:
        return None
    how = f"did not end within {run.timeout:.0f} s" if run.timed_out else f"exit {run.returncode}"
    judgement = Judgement(
        "fail",
        f"{run.launcher} started none of {run.size} ranks ({how})",
        _evidence(run),
        "read the launcher's own words in the evidence; run the command above by hand",
    )
    return _explained(run, judgement)


def _singletons(run: RankRun) -> Judgement | None:
    results = [rank.result for rank in run.ranks if rank.result]
    said = _alone(results)
    if run.size == 1 or len(results) < 2 or not said:
        return None
    lines = [f"{r.name}: {r.started.get('variables', {})}" for r in run.ranks]
    mpi = next((r.path["mpi"] for r in run.ranks if r.path), "")
    if mpi:
        lines.append(f"MPI of the ranks: {mpi}")
    return Judgement(
        "fail",
        f"{len(results)} processes were started, but {said}",
        _evidence(run, lines=lines),
        _alone_under_srun(run, mpi) if run.launcher == "srun" else
        "the launcher and the MPI that Horovod was built with do not know each other: start with"
        " the mpirun of that MPI (see `started by`), or build Horovod again with the MPI that you"
        " start with",
    )  # fmt: skip


def _alone(results: Sequence[dict[str, Any]]) -> str:
    """How ranks show that each reduces with nobody, whatever size they say; empty if they do not."""
    if all(result["size"] == 1 for result in results):
        return "each says that it is alone (size 1)"
    if all(result["failed"] and result.get("own") == result["failed"] for result in results):
        size = results[0]["size"]
        return (
            f"each gets back what it put in: each is alone, though it says that the size is {size}"
        )
    return ""


def _alone_under_srun(run: RankRun, mpi: str) -> str:
    """What to do where srun and the MPI do not understand each other."""
    asked = next((word for word in run.argv if word.startswith("--mpi=")), "no --mpi")
    wanted = "pmi2" if "MPICH" in mpi or "Intel" in mpi or "MVAPICH" in mpi else "pmix"
    return (
        f"srun was started with {asked}, and this MPI wants --mpi={wanted}: set launch.srun_mpi in"
        f' the recipe to "{wanted}" if `srun --mpi=list` has it, else start with mpirun'
    )


def _environments(run: RankRun) -> Judgement | None:
    """Whether the ranks of all hosts have the same framework and the same Horovod."""
    have = {rank.name: _stack(rank) for rank in run.ranks if rank.extension}
    if len(set(have.values())) < 2:
        return None
    usual = Counter(have.values()).most_common(1)[0][0]
    name, other = next((name, stack) for name, stack in have.items() if stack != usual)
    pairs = [(mine, theirs) for mine, theirs in zip(other, usual, strict=True) if mine != theirs]
    mine, theirs = (", ".join(pair[side] for pair in pairs) for side in (0, 1))
    return Judgement(
        "fail",
        f"{name} has another environment than the other ranks: {mine} instead of {theirs}",
        _evidence(run, lines=[f"{rank}: {', '.join(stack)}" for rank, stack in have.items()]),
        "the environment has to be the same on every host: a folder that all of them share, or a"
        " copy of the same build; look for PYTHONPATH and modules that only one host has",
    )


def _stack(rank: Rank) -> tuple[str, ...]:
    """What the ranks of one run have to have in common, in words."""
    facts = (rank.extension or {}).get("facts", {})
    name = facts.get("framework", "")
    return (
        f"{name} {facts.get('installed')}",
        f"Horovod {facts.get('version')}",
        f"built with {name} {facts.get('built_with')}",
        f"an extension of {facts.get('size')} bytes",
        f"Python files {facts.get('sources')}",
    )


def _broken_ranks(run: RankRun) -> Judgement | None:
    if _broken_exercise(run):
        return None
    return _brokenness(run)


def _broken_exercise(run: RankRun) -> str:
    """The exercise that the ranks did not get through, all their allreduces being there."""
    cause, _ = _first_broken(run)
    if not cause or any(rank.result is None for rank in run.ranks):
        return ""
    return "" if cause[0].stage in _COMMON else cause[0].stage


def judge_exercise(run: RankRun, name: str) -> Judgement | None:
    """What is wrong with how an exercise went by; None if all ranks went through it.

    What they found in it is judged by the check that it is for.
    """
    broken = _broken_exercise(run)
    if broken == name:
        return _brokenness(run)
    if judge(run).status == "fail":
        return Judgement("skip", "the ranks did not come to it: see allreduce")
    if broken and run.exercises.index(name) > run.exercises.index(broken):
        return Judgement("skip", f"the ranks did not come to it: see {broken}")
    return None


def _brokenness(run: RankRun) -> Judgement | None:
    """How the ranks ended that did not end well; None if all did."""
    cause, others = _first_broken(run)
    if not cause:
        return None
    message = f"{listed([rank.name for rank in cause])}: {cause[0].ending}"
    if cause[0].ending == "hangs":
        message = f"{listed([r.name for r in cause])}: no end within {run.timeout:.0f} s"
        if waited := [rank.name for rank in others if rank.ending == "hangs"]:
            message += f"; {listed(waited)} waited for that"
        reported = [rank.name for rank in run.ranks if rank.result]
        message += f"; results came from {listed(reported) or 'no rank'}{_awaited(run)}"
    elif len({rank.ending for rank in cause}) > 1:
        message = "; ".join(f"{rank.name} {rank.ending}" for rank in cause[:_SHOWN])
    if cause[0].said and cause[0].ending.startswith("ended with"):
        message += f" ({cause[0].said})"
    if cause[0].doing not in _COMMON:
        message += f", in {cause[0].doing}"
    judgement = Judgement(
        "fail",
        message,
        _evidence(run, cause + others),
        "the last lines of each rank are in the evidence: start with the first one named",
    )
    return _explained(run, judgement, cause)


def _awaited(run: RankRun) -> str:
    """What ranks did not hear of: other ranks, and by Horovod's own words tensors of these."""
    text = ""
    if len(run.ranks) < run.size:
        hosts = {short(rank.host) for rank in run.ranks}
        silent = [name for name in run.hosts if short(name) not in hosts]
        where = f", none on {listed(silent)}" if silent else ""
        text = f"; only {len(run.ranks)} of {run.size} ranks were started{where}"
    told = [str(rank.overdue.get("stalled") or "") for rank in run.ranks if rank.overdue]
    stalled = next(filter(None, told), "")
    return f"{text}; Horovod says: {mask(plain(stalled))}" if stalled else text


def _first_broken(run: RankRun) -> tuple[list[Rank], list[Rank]]:
    """The ranks that broke by themselves, and the others that did not end well after them."""
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
    """Those of the hanging ranks that the others wait for; all of them if that cannot be told."""
    return _missing(hanging) or _outside(hanging) or list(hanging)


def _missing(hanging: Sequence[Rank]) -> list[Rank]:
    """Those that Horovod misses, unless these are all."""
    stalled = " ".join(str((rank.overdue or {}).get("stalled", "")) for rank in hanging)
    numbers = set(map(int, _MISSING.findall(stalled)))
    found = [rank for rank in hanging if rank.number in numbers]
    return found if len(found) < len(hanging) else []


def _outside(hanging: Sequence[Rank]) -> list[Rank]:
    """Those that were not waiting within Horovod, where others were."""
    shown = [rank for rank in hanging if rank.working_in]
    found = [rank for rank in shown if not _WAITING.search(rank.working_in)]
    return found if len(found) < len(shown) else []


def _order(rank: Rank) -> int:
    """Where a rank's ending stands among those that explain each other."""
    return next(number for number, ending in enumerate(_ENDINGS) if ending.match(rank.ending))


def _numbering(run: RankRun) -> Judgement | None:
    results = [rank.result for rank in run.ranks if rank.result]
    problems = []
    if len(results) != run.size:
        problems.append(f"{len(results)} of {run.size} ranks reported")
    if wrong := sorted({result["size"] for result in results} - {run.size}):
        problems.append(f"Horovod's size is {listed([str(n) for n in wrong])}, not {run.size}")
    numbers = Counter(result["rank"] for result in results)
    if not problems and numbers != Counter(range(run.size)):
        problems.append(f"the ranks are {sorted(numbers.elements())}, not 0 to {run.size - 1}")
    there, wanted = {short(rank.host) for rank in run.ranks}, {short(host) for host in run.hosts}
    if wanted and there != wanted and not problems:
        problems.append(f"the ranks are on {listed(sorted(there))}, not {listed(sorted(wanted))}")
    for host in sorted({rank.host for rank in run.ranks}) if not problems else ():
        local = [rank.result for rank in run.ranks if rank.result and rank.host == host]
        if Counter(result["local_rank"] for result in local) != Counter(range(len(local))):
            got = sorted(result["local_rank"] for result in local)
            problems.append(f"the local ranks on {host} are {got}, not 0 to {len(local) - 1}")
        if {result["local_size"] for result in local} != {len(local)}:
            problems.append(f"the local size on {host} is not {len(local)}")
    if not problems:
        return None
    lines = [f"{r.name}: {_numbers(r.result)}" for r in run.ranks if r.result]
    return Judgement(
        "fail",
        "; ".join(problems),
        _evidence(run, lines=lines),
        "see which launcher and which MPI were used (evidence); ranks of two jobs or of two MPIs"
        " must not be mixed",
    )


def _numbers(result: dict[str, Any]) -> str:
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    return ", ".join(f"{name} {result.get(name)}" for name in names)


def _wrong_results(run: RankRun) -> Judgement | None:
    wrong = [rank for rank in run.ranks if rank.result and rank.result["failed"]]
    if not wrong:
        return None
    lines = []
    for rank in wrong[:_SHOWN]:
        for test in (rank.result or {})["wrong"]:
            lines.append(f"{rank.name}: " + ", ".join(f"{k} {v}" for k, v in test.items()))
    first = wrong[0].result or {}
    return Judgement(
        "fail",
        f"allreduce gives wrong values on {listed([rank.name for rank in wrong])}:"
        f" {first['failed']} of {first['tests']} reductions",
        _evidence(run, lines=lines),
        "do not train with this environment; build it again for this machine, and if it stays,"
        " try the other controller and report it with this evidence",
    )


def _other_controller(run: RankRun) -> Judgement | None:
    for rank in run.ranks:
        used = _controller(rank.result or {})
        if used and used.upper() != run.controller.upper():
            return Judgement(
                "fail",
                f"{rank.name} used {used} as its controller, not {run.controller}",
                _evidence(run),
                "look for HOROVOD_CONTROLLER in the environment and in site configuration",
            )
    return None


def _controller(result: dict[str, Any]) -> str:
    """What Horovod names in its debug output, or else the only one that is enabled."""
    if named := result["said"].get("controller", ""):
        return str(named)
    on = [name for name in ("MPI", "Gloo") if result.get(f"{name.lower()}_enabled")]
    return on[0] if len(on) == 1 else ""


def _launcher_failed(run: RankRun) -> Judgement | None:
    if not run.returncode or _broken_exercise(run):
        return None
    how = "did not end" if run.timed_out else f"ended with exit code {run.returncode}"
    judgement = Judgement(
        "fail",
        f"all ranks are right, but {run.launcher} {how}",
        _evidence(run),
        "a batch job would count as failed: read the launcher's own words in the evidence",
    )
    return _explained(run, judgement)


def _controller_not_named(run: RankRun) -> Judgement | None:
    if all(_controller(rank.result or {}) for rank in run.ranks):
        return None
    return Judgement(
        "unproven",
        f"the results are right, but Horovod does not say whether it used {run.controller}",
        _evidence(run),
        "a newer Horovod names its controller when HOROVOD_LOG_LEVEL is debug",
    )
