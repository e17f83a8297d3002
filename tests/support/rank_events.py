"""Events of ranks, and runs of them, as verify gets them from a launcher's output."""

from __future__ import annotations

from typing import Any

from hvdenv.standalone.ranks.events import (
    EventWriter,
    Exited,
    ExtensionFacts,
    Joined,
    Overdue,
    RankEvent,
    Result,
    Started,
    to_table,
)
from hvdenv.verification.rank_run import RankRun, Received, collect


def event(rank: int, what: RankEvent, host: str = "n1", pid: int = 0) -> Received:
    return Received(host, pid or 100 + rank, what)


def lines(message: Received, writer: EventWriter) -> list[str]:
    """As the process that reports an event writes it, but once."""
    table = to_table(message.event)
    return list(writer.lines({**table, "host": message.host, "pid": message.pid}))


def started(rank: int, host: str = "n1") -> Received:
    return event(rank, Started({"OMPI_COMM_WORLD_RANK": str(rank)}), host)


def reduced(
    rank: int, size: int = 2, *, host: str = "n1", pid: int = 0, **changed: Any
) -> list[Received]:
    """A rank's numbers, on one host, and the result of its allreduces."""
    numbers = {"rank": rank, "size": size, "local_rank": rank, "local_size": size}
    numbers.update((name, changed.pop(name)) for name in Joined._fields if name in changed)
    values: dict[str, Any] = {"tests": 30, "wrong": 0, "enabled": ["MPI"], **changed}
    return [event(rank, each, host, pid) for each in (Joined(**numbers), Result(**values))]


def exited(rank: int, *, host: str = "n1", **changed: Any) -> Received:
    usual = Exited(stage="shutdown", detail="", code=0, signal="", ended_by="", seconds=4.0)
    return event(rank, usual._replace(**changed), host)


def overdue(rank: int, tail: str, **changed: Any) -> Received:
    return event(rank, Overdue("allreduce", "", tail, 59.0)._replace(**changed))


def extension(rank: int, **changed: Any) -> Received:
    facts = ExtensionFacts("torch", "/env/bin/python", size=100, built_with="2.1.0", gpus=rank)
    known = facts._replace(installed="2.1.0", version="0.28.1")
    return event(rank, known._replace(**changed))


def good(size: int = 2, *more: RankEvent, **changed: Any) -> list[Received]:
    """Ranks of one host that are right, each with these events as well."""
    events = []
    for rank in range(size):
        events += [started(rank), *reduced(rank, size, **changed)]
        events += [event(rank, each) for each in more] + [exited(rank)]
    return events


def run(*events: Received, size: int = 2, **changed: Any) -> RankRun:
    run = RankRun(
        launcher="mpirun",
        controller="MPI",
        argv=("mpirun", "x"),
        size=size,
        ranks=collect(events),
        timeout=60.0,
    )
    return run._replace(**changed)
