"""What ranks reported (hvdenv/standalone/ranks/rank.py), as data."""

import base64
import json
import re
import typing
import zlib
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from hvdenv.base.masking import clean
from hvdenv.base.schema import Problem, decode, mapped
from hvdenv.standalone.ranks.events import (
    LAUNCHER_VARIABLES,
    DataPath,
    Exited,
    ExtensionFacts,
    Joined,
    Overdue,
    ProgramEnd,
    RankEvent,
    Result,
    Stage,
    Started,
)

_LINE = re.compile(
    r"@hvdenv (?P<token>\w+) (?P<crc>[0-9a-f]{8}) (?P<rest>(?P<source>[0-9A-F]+)"
    r"\.(?P<event>\d{1,9})\.(?P<part>\d{1,9})\.(?P<parts>\d{1,9})\.(?P<payload>[A-Za-z0-9+/]+))"
)
_KINDS: dict[str, type[RankEvent]] = {kind.__name__: kind for kind in typing.get_args(RankEvent)}


class Received(NamedTuple):
    """An event, and the process that reported it."""

    host: str
    pid: int
    event: RankEvent


def read_events(text: str, token: str) -> list[Received]:
    """The complete events of a token in a launcher's output, those of a process in their order.

    Everything else is ignored, also an event that does not fit its type: the other events of
    its rank show what is missing.
    """
    parts: dict[tuple[str, str], dict[int, str]] = {}
    whole: dict[tuple[str, str], str] = {}
    for found in _LINE.finditer(text):
        if found["token"] != token or int(found["crc"], 16) != zlib.crc32(found["rest"].encode()):
            continue
        key = found["source"], found["event"]
        parts.setdefault(key, {})[int(found["part"])] = found["payload"]
        if len(parts[key]) == int(found["parts"]):
            whole[key] = "".join(parts[key][number] for number in sorted(parts[key]))
    in_order = sorted(whole, key=lambda key: int(key[1]))  # some may have arrived at the end
    return [each for each in (_received(whole[key]) for key in in_order) if each]


def _received(payload: str) -> Received | None:
    try:
        return event_of(json.loads(base64.b64decode(payload + "=" * (-len(payload) % 4))))
    except (Problem, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def event_of(table: dict[str, object]) -> Received:
    """The event of a JSON object. Its texts, which a rank wrote, are cleaned here.

    Raises:
        Problem: a field does not fit its type.
        LookupError: there is no such type, or no host or process.
    """
    host, pid = decode(str, table.pop("host")), decode(int, table.pop("pid"))
    kind = _KINDS[str(table.pop("event"))]
    return Received(host, pid, mapped(decode(kind, table, lenient=True), clean))


# Output of Horovod, Gloo and MPI in a rank when another one is gone.
_GAVE_UP = re.compile(
    r"Horovod has been shut down|Connection (?:reset|closed) by peer|Broken pipe"
    r"|Read timeout|Socket closed|Timed out waiting"
)
# The last line of a traceback, without the exception's module.
_EXCEPTION = re.compile(r"^(?:\w+\.)*(?P<text>\w*(?:Error|Exception|Interrupt|Exit)\b.*)")
_EXCEPTION_LENGTH = 300
# faulthandler's stacks: one block for each thread, the innermost frame first.
_THREAD = re.compile(r"^(?:Current t|T)hread 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]*)", line \d+ in ', re.MULTILINE)

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
    def joined(self) -> Joined | None:
        return self.last(Joined)

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
    def path(self) -> DataPath:
        """How its data went (hvdenv/verification/datapath.py); nothing if it did not report it."""
        return self.last(DataPath) or DataPath()

    @property
    def variables(self) -> dict[str, str]:
        """What its launcher states about it."""
        return (self.last(Started) or Started()).variables

    @property
    def number(self) -> int | None:
        """Its number as Horovod states it, or else its launcher."""
        if self.joined:
            return self.joined.rank
        names = (name for name in LAUNCHER_VARIABLES if not name.endswith(("SIZE", "NTASKS")))
        numbers = (self.variables.get(name, "") for name in names)
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
        return next(filter(None, tails), "")


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
    def joined(self) -> list[Joined]:
        """The numbers of all ranks that have a result."""
        return [rank.joined for rank in self.ranks if rank.result and rank.joined]

    @property
    def operations(self) -> frozenset[str]:
        """What Horovod logged as reducing CPU tensors, on any rank."""
        names = {name for rank in self.ranks for name in rank.path.logged.get("cpu", [])[-1:]}
        return frozenset({"GLOO": "Gloo"}.get(name, name) for name in names)

    def reported(self, kind: type[E], key: str) -> dict[str, list[tuple[str, E]]]:
        """The events of one type with the names of their ranks, by one of their fields."""
        found: dict[str, list[tuple[str, E]]] = {}
        for rank in self.ranks:
            for event in rank.all(kind):
                found.setdefault(getattr(event, key), []).append((rank.name, event))
        return found


def collect(messages: Sequence[Received]) -> tuple[Rank, ...]:
    """The ranks that events came from, in the order of their numbers."""
    events: dict[tuple[str, int], list[RankEvent]] = {}
    for message in messages:
        events.setdefault((message.host, message.pid), []).append(message.event)
    ranks = [Rank(host, pid, tuple(each)) for (host, pid), each in events.items()]
    return tuple(sorted(ranks, key=lambda rank: (rank.number or 0, rank.host, rank.pid)))
