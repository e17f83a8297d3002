"""The events that a log shows, and why they happened: causes, families of names."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import BinaryIO, NamedTuple, get_args

from hvdenv.knowledge.failures import Failures, Family, Meaning, Member, Named, all_failures
from hvdenv.knowledge.logs import Finder, Hit, Query, Search, make_finder
from hvdenv.knowledge.rules import each_of

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
        mentions: versions and paths by what they are called.
        errors: the first lines that look like an error; `hints` the first that may say why.
        crashed: line number of the first crash, or one that is behind the log; `where` it crashed.
    """

    events: tuple[Event, ...]
    shows: frozenset[str]
    mentions: dict[str, str]
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
    lines = search.found("line")
    return Reading(
        events=tuple(sorted(found, key=lambda each: each.hit.place.number)),
        shows=frozenset(search.found("shows")) | ({"own"} if own else set()),
        mentions={
            each.name: _value(each, values[each.name][0])
            for each in known.texts.mention
            if each.name in values
        },
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
    return ", ".join(re.findall(named.parts, value)) if named.parts else value


def _crash_site(frames: Iterable[Hit]) -> str:
    """Where a backtrace says that a process crashed."""
    for hit in frames:
        library = hit.slots["library"].rpartition("/")[2]
        if not library.startswith(_HANDLERS):
            function = hit.slots["function"].partition("+")[0]
            return f" in {library}.so" + (f" ({function})" if function else "")
    return ""


# What texts.toml calls those that a log names; `{interfaces}` of a remedy.
_INTERFACES = "network interfaces of NCCL"
_SLOT = re.compile(r"\{(\w+)\}")
_COMMAND = re.compile(r"`([^`]*)`")
# What is a name and no more where it stands in a command: no option, no address, nothing that the
# shell understands; between single quotes, what is no quote.
_PROGRAM = re.compile(r"[\w.+][\w.+-]*")
_PLAIN = re.compile(r"(?!-)[\w@%+=:,./~\[\]-]*")
_QUOTED = re.compile(r"(?!-)[\w@%+=:,./~\[\]<>!*() -]*")
# Where a slot was not filled: with the parentheses, or the space and the colon, around it.
_GAP = "\0"
_GAPS = re.compile(r" ?\(\0(?: ?\0){0,5}\)|: \0$| \0(?=[ ,;:.)]|$)|\0 ?")


class Explainer:
    """Explains the events of a log by what is known."""

    def __init__(self, failures: Failures, log: Reading) -> None:
        self.failures = failures
        self.log = log

    def explain(self, event: Event) -> Meaning | None:
        """What an event means in this log, with all slots filled in."""
        family, remedies = self._family(event)
        meaning = self._cause(event, remedies)
        if not meaning and not event.meaning.source:
            stated = event.meaning
            meaning = _of_family(stated, family, remedies) if family and remedies else stated
        if not meaning:
            return None
        interfaces = self.log.mentions.get(_INTERFACES, "those that it finds first")
        slots = {"interfaces": interfaces, **event.hit.slots, "where": self.log.where}
        inside = [each_of(told) for name, told in meaning.inside.items() if name in self.log.shows]
        remedies = (*(each for told in inside for each in told), *meaning.remedies)
        return meaning._replace(
            says=fill(meaning.says, slots),
            remedies=tuple(fill(each, slots) for each in remedies if _fits(each, slots)),
        )

    def _cause(self, event: Event, of_family: tuple[str, ...]) -> Meaning | None:
        """The first cause that fits; of a text of one cause, that one."""
        stated = event.meaning
        known = (stated,) if stated.source else self.failures.causes
        for cause in known:
            if (cause is stated or stated.id in cause.event) and self._holds(cause, event):
                return cause._replace(remedies=cause.remedies or of_family or stated.remedies)
        return None

    def _holds(self, cause: Meaning, event: Event) -> bool:
        slots = event.hit.slots
        return (
            all(self._agrees(each, slots.get(slot, ""), slots) for slot, each in cause.when.items())
            and (not cause.needs or not self.log.shows.isdisjoint(cause.needs))
            and self.log.shows.isdisjoint(cause.unless)
        )

    def _agrees(
        self, conditions: str | tuple[str, ...], value: str, slots: Mapping[str, str]
    ) -> bool:
        """Whether a slot has one of several values, and none of those with ``!``."""
        denied = [each for each in each_of(conditions) if re.match("!(?!=)", each)]
        wanted = [each for each in each_of(conditions) if each not in denied]
        return not any(self._is(each[1:], value, slots) for each in denied) and (
            not wanted or any(self._is(each, value, slots) for each in wanted)
        )

    def _is(self, condition: str, value: str, slots: Mapping[str, str]) -> bool:
        if condition.startswith("!= "):
            return value != _SLOT.sub(lambda at: slots.get(at[1], ""), condition[3:])
        if condition.startswith("@"):
            family = next(each for each in self.failures.families if each.id == condition[1:])
            return any(family.has(each, value) for each in get_args(Member))
        return fnmatchcase(value.lower(), condition.lower())

    def _family(self, event: Event) -> tuple[Family | None, tuple[str, ...]]:
        """The family of the name that an event has, and how to make the name available."""
        member, name = event.meaning.member, event.hit.slots.get("name", "")
        for family in self.failures.families if member and name else ():
            if member and family.has(member, name):
                return family, family.remedies(member, self.log.shows)
        return None, ()


def _of_family(stated: Meaning, family: Family, remedies: tuple[str, ...]) -> Meaning:
    says = stated.known.replace("{family}", family.about)
    return Meaning(f"{stated.id}-{family.id}", says, remedies, steps_back=True)


def fill(text: str, slots: Mapping[str, str]) -> str:
    """A text with slots filled in; one that the log does not fill leaves no gap."""
    filled = _SLOT.sub(lambda at: slots.get(at[1], "") or _GAP, text)
    return _GAPS.sub("", filled).strip()


def _fits(remedy: str, slots: Mapping[str, str]) -> bool:
    """Whether the log fills all slots of a remedy, and its commands only do what they say with that.

    Anybody may have written the log, and a name in it may be `$(...)`.
    """
    return all(slots.get(name) for name in _SLOT.findall(remedy)) and all(
        _fits_into(command, slot.start(), slots[slot[1]])
        for command in _COMMAND.findall(remedy)
        for slot in _SLOT.finditer(command)
    )


def _fits_into(command: str, at: int, value: str) -> bool:
    """Whether a value is only a name at a place of a command; an address is one for curl."""
    if at == 0:
        return bool(_PROGRAM.fullmatch(value))
    if "://" in value and not command.startswith("curl "):
        return False
    in_quotes = command[:at].count("'") % 2 == 1 and " -c " not in command
    return bool((_QUOTED if in_quotes else _PLAIN).fullmatch(value))
