"""Why events of a log happened: conditions of causes, rules of `check`, and families of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from hvdenv.knowledge.events import Event, Reading
from hvdenv.knowledge.failures import Cause, Failures, Family, Kind
from hvdenv.knowledge.rules import Observables, judge

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


class Explanation(NamedTuple):
    """What an event means.

    Attributes:
        derived: a cause only because of the family of a name; it steps back behind another cause.
        vague: how little is known: 0 for a text of one cause, 1 for a cause, 2 for a type.
    """

    id: str
    says: str
    remedies: tuple[str, ...]
    kind: Kind
    general: int = 0
    derived: bool = False
    vague: int = 1
    of_others: bool = False
    rules: tuple[str, ...] = ()
    source: str = ""


class Explainer:
    """Explains the events of a log by what is known."""

    def __init__(self, failures: Failures, log: Reading) -> None:
        self.failures = failures
        self.log = log

    def explain(self, event: Event) -> Explanation | None:
        """What an event means in this log: the first cause that fits, or what its type says."""
        if event.cause:
            return self._of_cause(event.cause, event) if self.holds(event.cause, event) else None
        for cause in self.failures.causes:
            if event.type.name in cause.event and self.holds(cause, event):
                return self._of_cause(cause, event)
        return self._of_rule(event) or self._of_family(event) or self._of_type(event)

    def holds(self, cause: Cause, event: Event) -> bool:
        """Whether a cause explains an event."""
        slots = event.hit.slots
        return (
            all(self._fits(each, slots.get(slot, ""), slots) for slot, each in cause.when.items())
            and all(map(self._has_context, cause.context))
            and (not cause.needs or not self.log.texts.isdisjoint(cause.needs))
            and self.log.texts.isdisjoint(cause.unless)
        )

    def _fits(
        self, conditions: str | tuple[str, ...], value: str, slots: Mapping[str, str]
    ) -> bool:
        """Whether a slot has one of several values, and none of those with ``!``."""
        each_one = (conditions,) if isinstance(conditions, str) else conditions
        denied = [each[1:] for each in each_one if each.startswith("!") and each[1:2] != "="]
        wanted = [each for each in each_one if not each.startswith("!") or each[1:2] == "="]
        if any(self._is(each, value, slots) for each in denied):
            return False
        return not wanted or any(self._is(each, value, slots) for each in wanted)

    def _is(self, condition: str, value: str, slots: Mapping[str, str]) -> bool:
        if condition.startswith("!= "):
            return value != _SLOT.sub(lambda at: slots.get(at[1], ""), condition[3:])
        if condition.startswith("@"):
            family = next(each for each in self.failures.families if each.id == condition[1:])
            return any(
                family.has(each, value)
                for each in ("headers", "libraries", "packages", "symbols", "modules")
            )
        return fnmatchcase(value.lower(), condition.lower())

    def _has_context(self, name: str) -> bool:
        return (name.removeprefix("!") in self.log.contexts) is not name.startswith("!")

    def _of_cause(self, cause: Cause, event: Event) -> Explanation:
        family = self._family(event)
        own = cause.remedies or self._remedies_of(family, event) or event.type.remedies
        remedies = (*self._inside(cause.inside), *own)
        return Explanation(
            id=cause.id,
            says=self._filled(cause.says, event),
            remedies=_all_filled(remedies, event.hit.slots),
            kind=cause.kind,
            vague=0 if event.cause else 1,
            general=cause.general,
            of_others=cause.of_others,
            rules=cause.rules,
            source=cause.source,
        )

    def _inside(self, remedies: Mapping[str, str | tuple[str, ...]]) -> list[str]:
        """The remedies of the contexts that the log has."""
        told = [each for name, each in remedies.items() if self._has_context(name)]
        return [one for each in told for one in ((each,) if isinstance(each, str) else each)]

    def _of_rule(self, event: Event) -> Explanation | None:
        """A rule of `check` that what the log names breaks."""
        wanted = event.type.rules
        broken = judge(self._observables(event)) if wanted else ()
        for rule in broken:
            if any(fnmatchcase(rule.id, each) for each in wanted):
                return Explanation(
                    id=event.type.name,
                    says=f"{self._filled(event.type.says, event)}: {rule.message}",
                    remedies=(rule.remedy,),
                    kind="cause",
                    rules=(rule.id,),
                    source=f"{rule.certainty}: {rule.source}",
                )
        return None

    def _observables(self, event: Event) -> Observables:
        """What rules may ask: the versions that the log names, and the one that a package was asked in."""
        seen = {"torch_provider": "pip", "tensorflow_provider": "pip", "horovod_provider": "source"}
        versions = {**self.log.facts, **_asked(event.hit.slots.get("package", ""))}
        return seen | {
            name: value
            for name, value in versions.items()
            if name == "machine" or _is_version(value)
        }

    def _of_family(self, event: Event) -> Explanation | None:
        family = self._family(event)
        remedies = self._remedies_of(family, event)
        if not family or not remedies:
            return None
        said = event.type.known.replace("{family}", family.about)
        return Explanation(
            id=f"{event.type.name}-{family.id}",
            says=self._filled(said, event),
            remedies=remedies,
            kind="cause",
            derived=True,
        )

    def _family(self, event: Event) -> Family | None:
        member, name = event.type.member, event.hit.slots.get("name", "")
        return self.failures.family_of(member, name) if member and name else None

    def _remedies_of(self, family: Family | None, event: Event) -> tuple[str, ...]:
        member = event.type.member
        if not family or not member:
            return ()
        return _all_filled(family.remedies(member, self.log.contexts), event.hit.slots)

    def _filled(self, text: str, event: Event) -> str:
        return _filled(text, {**event.hit.slots, "where": self.log.where})

    def _of_type(self, event: Event) -> Explanation:
        kind = event.type
        return Explanation(
            id=kind.name,
            says=self._filled(kind.says, event),
            vague=2,
            remedies=_all_filled((*self._inside(kind.inside), *kind.remedies), event.hit.slots),
            kind=kind.kind,
            general=kind.general,
            of_others=kind.of_others,
            derived=kind.kind == "cause" and (kind.steps_back or bool(kind.member)),
        )


def _filled(text: str, slots: Mapping[str, str]) -> str:
    """A text with slots filled in; one that the log does not fill leaves no gap."""
    filled = _SLOT.sub(lambda at: slots.get(at[1], "") or _GAP, text)
    return _GAPS.sub("", filled).strip()


def _all_filled(texts: Iterable[str], slots: Mapping[str, str]) -> tuple[str, ...]:
    """Remedies with slots filled in, without those that a slot of the log does not fit into."""
    return tuple(
        _filled(each, slots)
        for each in texts
        if all(slots.get(name) for name in _SLOT.findall(each)) and _can_be_pasted(each, slots)
    )


def _can_be_pasted(remedy: str, slots: Mapping[str, str]) -> bool:
    """Whether the commands of a remedy only do what they say with what the log fills into them.

    Anybody may have written the log, and a name in it may be `$(...)`.
    """
    return all(
        _fits_into(command, slot.start(), slots.get(slot[1], ""))
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


def _asked(requirement: str) -> dict[str, str]:
    """A package and its version, where a requirement names one."""
    try:
        asked = Requirement(requirement)
    except InvalidRequirement:
        return {}
    pins = [each.version for each in asked.specifier if each.operator == "=="]
    return {asked.name: pins[0]} if pins else {}


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
