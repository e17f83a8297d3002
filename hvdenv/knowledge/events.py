"""Read a log: the events that it shows, and what else it says of where it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import BinaryIO, NamedTuple

from hvdenv.knowledge.failures import Cause, EventType, Failures, Named, all_failures
from hvdenv.knowledge.logs import Hit, Matcher, Query, Search, matcher
from hvdenv.knowledge.wordings import wording

ERRORS, FRAMES = 5, 30
# In a backtrace by UCX or Open MPI, the library and the function that crashed are below the frames
# of the signal handler.
_CRASHED = tuple(
    f"{handler}({{}}\\n{{}}{{library}}.so{{}}({{function}}"
    for handler in ("libc.so.6", "libpthread.so.0", "libucs.so.0")
)
_HANDLERS = ("libc", "libpthread", "libucs", "ld-linux")


class Event(NamedTuple):
    """An event of a log, or a text that only one cause has: then `cause` is that."""

    type: EventType
    hit: Hit
    cause: Cause | None = None


class Reading(NamedTuple):
    """What was read from a log.

    Attributes:
        events: in the order of lines.
        contexts: names of those that it shows.
        mentions: versions and paths by what they are called, and `facts` by what rules call them.
        texts: wordings of `needs` and `unless` that it contains.
        errors: the first lines that look like an error; `hints` the first that may say why.
        crashed: line number of the first crash, or one that is behind the log; `where` it crashed.
    """

    events: tuple[Event, ...]
    contexts: frozenset[str]
    mentions: dict[str, str]
    facts: dict[str, str]
    texts: frozenset[str]
    errors: tuple[Hit, ...]
    hints: tuple[Hit, ...]
    crashed: int
    where: str
    lines: int
    gave_up: bool


class _Catalog(NamedTuple):
    """All queries for a log, and what they are for, in their order."""

    queries: tuple[Query, ...]
    events: tuple[tuple[EventType, Cause | None], ...]
    texts: tuple[str, ...]
    failures: Failures

    @property
    def everything(self) -> range:
        return range(len(self.queries))


@cache
def _matcher() -> Matcher:
    known = _catalog()
    return matcher(known.queries, known.everything)


@cache
def _catalog() -> _Catalog:
    known = all_failures()
    typed = [(each, None, known.wordings.get(each.name, ())) for each in known.events.values()]
    own = [(_type_of(each), each, each.texts) for each in known.causes if each.texts]
    texts = tuple(dict.fromkeys(text for each in known.causes for text in each.needs + each.unless))
    other = known.texts
    return _Catalog(
        queries=(
            *(_query(wordings, kind.most) for kind, _, wordings in (*typed, *own)),
            *(_query((text,)) for text in texts),
            *(_query(each.wordings) for each in (*other.mention, *other.context)),
            _query(other.errors, ERRORS),
            _query(other.hints, ERRORS),
            _query(other.crashes),
            _query(_CRASHED, FRAMES),
        ),
        events=tuple((kind, cause) for kind, cause, _ in (*typed, *own)),
        texts=texts,
        failures=known,
    )


def _type_of(cause: Cause) -> EventType:
    """The type of the event that only one cause has."""
    return EventType(cause.id, cause.says, kind=cause.kind)


def _query(texts: Iterable[str], most: int = 1) -> Query:
    return Query(tuple(map(wording, texts)), most)


def read_log(log: BinaryIO, *, own: bool = False) -> Reading:
    """Read a log of any size.

    Args:
        own: whether hvdenv ran what it is the log of.
    """
    known = _catalog()
    search = Search(known.queries, _matcher())
    search.read(log)
    hits = iter([search.hits(number) for number in known.everything])
    events = [Event(kind, hit, cause) for kind, cause in known.events for hit in next(hits)]
    texts = frozenset(text for text in known.texts if next(hits))
    named = [(each, next(hits)) for each in known.failures.texts.mention]
    mentions = {each.name: _value(each, found[0]) for each, found in named if found}
    contexts = {each.name for each in known.failures.texts.context if next(hits)}
    errors, hints, crashes, frames = hits
    return Reading(
        events=tuple(sorted(events, key=lambda each: each.hit.place.number)),
        contexts=frozenset(contexts | ({"own"} if own else set())),
        mentions=mentions,
        facts={each.fact: mentions[each.name] for each, found in named if found and each.fact},
        texts=texts,
        errors=tuple(errors),
        hints=tuple(hints),
        crashed=min((hit.place.number for hit in crashes), default=search.lines + 1),
        where=_crash_site(frames),
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
