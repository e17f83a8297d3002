"""What ranks report (hvdenv/probes/rank.py writes it), and what that says about a run."""

from __future__ import annotations

import base64
import json
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdenv.masking import mask, plain
from hvdenv.report import Status

_EVENT = re.compile(r"@hvdenv (?P<token>\w+) (?P<crc>[0-9a-f]{8}) (?P<payload>[A-Za-z0-9+/]+)")
_RANK_VARIABLES = (
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
)
_SHOWN = 8  # ranks that evidence and messages name one by one


class Rank(NamedTuple):
    """One rank's events; None for one that did not come."""

    host: str
    pid: int
    started: dict[str, Any]
    result: dict[str, Any] | None = None
    overdue: dict[str, Any] | None = None
    exited: dict[str, Any] | None = None

    @property
    def number(self) -> int | None:
        """Its number, as it says itself or else as the launcher said."""
        if self.result:
            return int(self.result["rank"])
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
    def ending(self) -> str:
        """What is wrong with how it ended; empty if nothing is."""
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
        return "" if self.result else "ended without a result"

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

    @property
    def operations(self) -> frozenset[str]:
        """What Horovod named as reducing CPU tensors, on all ranks that said so."""
        said = (rank.result["said"].get("cpu", "") for rank in self.ranks if rank.result)
        return frozenset({"GLOO": "Gloo"}.get(name, name) for name in said if name)


class Judgement(NamedTuple):
    """What a run proves, or what is wrong with it."""

    status: Status
    message: str
    evidence: str = ""
    remedy: str = ""


def parse_events(text: str, token: str) -> list[dict[str, Any]]:
    """The whole events of a token in a launcher's output; whatever else is there is ignored."""
    events = []
    for line in text.splitlines():
        found = _EVENT.search(line)
        if found and found["token"] == token:
            payload = found["payload"].encode("ascii")
            if int(found["crc"], 16) == zlib.crc32(payload):
                events.append(json.loads(base64.b64decode(payload + b"=" * (-len(payload) % 4))))
    return events


def collect(events: Sequence[dict[str, Any]]) -> tuple[Rank, ...]:
    """The ranks that events came from, in the order of their numbers."""
    seen: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for event in events:
        key = (str(event["host"]), int(event["pid"]))
        seen.setdefault(key, {})[event["event"]] = event
    ranks = [
        Rank(
            host,
            pid,
            kinds.get("started", {}),
            kinds.get("result"),
            kinds.get("overdue"),
            kinds.get("exited"),
        )
        for (host, pid), kinds in seen.items()
    ]
    return tuple(sorted(ranks, key=lambda rank: (rank.number or 0, rank.host, rank.pid)))


def judge(run: RankRun) -> Judgement:
    """The first thing that is wrong with a run, in the order in which it explains the rest."""
    tests = (
        _nothing_started,
        _singletons,
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
        f"{run.size} ranks on {_listed(hosts)} agree on {first['tests']} reductions,"
        f" with {run.controller} as the controller ({run.launcher})",
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
        parts += [f"    {line}" for line in run.tail.splitlines()]
    return "\n".join(parts)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _nothing_started(run: RankRun) -> Judgement | None:
    if run.ranks:
        return None
    how = f"did not end within {run.timeout:.0f} s" if run.timed_out else f"exit {run.returncode}"
    return Judgement(
        "fail",
        f"{run.launcher} started none of {run.size} ranks ({how})",
        _evidence(run),
        "read the launcher's own words in the evidence; run the command above by hand",
    )


def _singletons(run: RankRun) -> Judgement | None:
    results = [rank.result for rank in run.ranks if rank.result]
    if run.size == 1 or len(results) < 2 or any(result["size"] != 1 for result in results):
        return None
    return Judgement(
        "fail",
        f"{len(results)} processes were started, but each says that it is alone (size 1)",
        _evidence(run, lines=[f"{r.name}: {r.started.get('variables', {})}" for r in run.ranks]),
        "the launcher and the MPI that Horovod was built with do not know each other: start with"
        " the mpirun of that MPI (see `started by`), or with srun under the PMI that it has"
        " (`srun --mpi=list`); then build Horovod again with the MPI that you start with",
    )


def _broken_ranks(run: RankRun) -> Judgement | None:
    broken = [rank for rank in run.ranks if rank.ending]
    if not broken:
        return None
    # Once one rank fails, launchers end the others, or these notice and give up.
    order = ("was ended by SIG", "hangs", "ended ", "was lost", "was ended by its launcher")
    first = min(next(i for i, o in enumerate(order) if r.ending.startswith(o)) for r in broken)
    cause = [rank for rank in broken if rank.ending.startswith(order[first])]
    others = [rank for rank in broken if rank not in cause]
    message = f"{_listed([rank.name for rank in cause])}: {cause[0].ending}"
    if cause[0].ending == "hangs":
        message = f"{_listed([r.name for r in cause])}: no end within {run.timeout:.0f} s"
        reported = [rank.name for rank in run.ranks if rank.result]
        message += f"; results came from {_listed(reported) or 'no rank'}"
    elif len({rank.ending for rank in cause}) > 1:
        message = "; ".join(f"{rank.name} {rank.ending}" for rank in cause[:_SHOWN])
    return Judgement(
        "fail",
        message,
        _evidence(run, cause + others),
        "the last lines of each rank are in the evidence: start with the first one named",
    )


def _numbering(run: RankRun) -> Judgement | None:
    results = [rank.result for rank in run.ranks if rank.result]
    problems = []
    if len(results) != run.size:
        problems.append(f"{len(results)} of {run.size} ranks reported")
    if wrong := sorted({result["size"] for result in results} - {run.size}):
        problems.append(f"Horovod's size is {_listed([str(n) for n in wrong])}, not {run.size}")
    numbers = Counter(result["rank"] for result in results)
    if not problems and numbers != Counter(range(run.size)):
        problems.append(f"the ranks are {sorted(numbers.elements())}, not 0 to {run.size - 1}")
    for host in sorted({rank.host for rank in run.ranks}) if not problems else ():
        there = [rank.result for rank in run.ranks if rank.result and rank.host == host]
        if Counter(result["local_rank"] for result in there) != Counter(range(len(there))):
            got = sorted(result["local_rank"] for result in there)
            problems.append(f"the local ranks on {host} are {got}, not 0 to {len(there) - 1}")
        if {result["local_size"] for result in there} != {len(there)}:
            problems.append(f"the local size on {host} is not {len(there)}")
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
        f"allreduce gives wrong values on {_listed([rank.name for rank in wrong])}:"
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
    if not run.returncode:
        return None
    how = "did not end" if run.timed_out else f"ended with exit code {run.returncode}"
    return Judgement(
        "fail",
        f"all ranks are right, but {run.launcher} {how}",
        _evidence(run),
        "a batch job would count as failed: read the launcher's own words in the evidence",
    )


def _controller_not_named(run: RankRun) -> Judgement | None:
    if all(_controller(rank.result or {}) for rank in run.ranks):
        return None
    return Judgement(
        "unproven",
        f"the results are right, but Horovod does not say whether it used {run.controller}",
        _evidence(run),
        "a newer Horovod names its controller when HOROVOD_LOG_LEVEL is debug",
    )
