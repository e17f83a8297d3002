"""Read a log: the events that it shows, and what else it says of where it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import BinaryIO, NamedTuple

from hvdenv.knowledge.failures import Meaning, Named, all_failures
from hvdenv.knowledge.logs import Finder, Hit, Query, Search, make_finder

ERRORS, FRAMES = 5, 30
# Libraries of signal handlers.
_HANDLERS = ("libc", "libpthread", "libucs", "ld-linux")


class Event(NamedTuple):
    """A line that prints an event of a type, or a text that only one cause has."""

    meaning: Meaning
    hit: Hit


class Reading(NamedTuple):
    """What was read from a log.

    Attributes:
        events: in the order of lines; on one line, texts of one cause come first.
        shows: names of contexts, and wordings of `needs` and `unless`.
        mentions: versions and paths by what they are called, and `facts` by what rules call them.
        errors: the first lines that look like an error; `hints` the first that may say why.
        crashed: line number of the first crash, or one that is behind the log; `where` it crashed.
    """

    events: tuple[Event, ...]
    shows: frozenset[str]
    mentions: dict[str, str]
    facts: dict[str, str]
    errors: list[Hit]
    hints: list[Hit]
    crashed: int
    where: str
    lines: int
    gave_up: bool


@cache
def _queries() -> tuple[Query, ...]:
    known = all_failures()
    texts = known.texts
    conditions = dict.fromkeys(text for each in known.causes for text in each.needs + each.unless)
    return (
        *(Query("event", each.id, each.texts, each.most) for each in known.events),
        *(Query("cause", each.id, each.texts, each.most) for each in known.causes),
        *(Query("shows", text, (text,)) for text in conditions),
        *(Query("shows", each.name, each.wordings) for each in texts.context),
        *(Query("mention", each.name, each.wordings) for each in texts.mention),
        Query("line", "errors", texts.errors, ERRORS),
        Query("line", "hints", texts.hints, ERRORS),
        Query("line", "crashes", texts.crashes),
        Query("line", "frames", texts.frames, FRAMES),
    )


@cache
def _finder() -> Finder:
    return make_finder(_queries(), range(len(_queries())))


def read_log(log: BinaryIO, *, own: bool = False) -> Reading:
    """Read a log of any size.

    Args:
        own: whether hvdenv ran what it is the log of.
    """
    known = all_failures()
    search = Search(_queries(), _finder())
    search.read(log)
    causes, events = search.found("cause"), search.found("event")
    found = [Event(each, hit) for each in known.causes for hit in causes.get(each.id, ())]
    found += [Event(each, hit) for each in known.events for hit in events.get(each.id, ())]
    values = search.found("mention")
    named = {
        each: _value(each, values[each.name][0])
        for each in known.texts.mention
        if each.name in values
    }
    lines = search.found("line")
    return Reading(
        events=tuple(sorted(found, key=lambda each: each.hit.place.number)),
        shows=frozenset(search.found("shows")) | ({"own"} if own else set()),
        mentions={each.name: value for each, value in named.items()},
        facts={each.fact: value for each, value in named.items() if each.fact},
        errors=lines.get("errors", []),
        hints=lines.get("hints", []),
        crashed=min(
            (hit.place.number for hit in lines.get("crashes", ())), default=search.lines + 1
        ),
        where=_crash_site(lines.get("frames", ())),
        lines=search.lines,
        gave_up=search.gave_up,
    )


def _value(named: Named, hit: Hit) -> str:
    value = hit.slots.get("value", "")
    return "/" + value.partition("/")[2] if named.is_path else value


def _crash_site(frames: Iterable[Hit]) -> str:
    """Where a backtrace says that a process crashed."""
    for hit in frames:
        library = hit.slots["library"].rpartition("/")[2]
        if not library.startswith(_HANDLERS):
            function = hit.slots["function"].partition("+")[0]
            return f" in {library}.so" + (f" ({function})" if function else "")
    return ""
