"""Finds the ways to an environment that a page describes, such as "with conda" and "with pip"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdenv.drafting.pages import BOLD, Section
from hvdenv.drafting.values import INFERRED, Key, Value, at

_CREATES, _BUILDS = at("python.provider"), at("horovod.version")
# What ways differ in.
_TABLES = frozenset({"python", "conda", "frameworks", "packages", "build_tools", "horovod"})
Lines = tuple[int, int]


class Part(NamedTuple):
    """Consecutive lines of a page.

    Attributes:
        does: the keys that it has values for, and the values.
        lines: of its commands that create an environment or install into it.
    """

    first: int
    section: Section
    does: dict[Key, set[str]]
    lines: list[int]

    def note(self, value: Value) -> None:
        if value.weight > INFERRED and value.key[0] in _TABLES:
            self.does.setdefault(value.key, set()).add(str(value.value))
            self.lines.append(value.origin.line)

    def note_build(self, line: int) -> None:
        self.does.setdefault(_BUILDS, set())
        self.lines.append(line)

    @property
    def creates(self) -> bool:
        return _CREATES in self.does

    @property
    def frameworks(self) -> set[str]:
        return {key[1] for key in self.does if key[0] == "frameworks"}

    @property
    def gpu(self) -> dict[Key, set[str]]:
        return {key: values for key, values in self.does.items() if key[:2] == ("horovod", "gpu")}

    def states_no_more_than(self, other: Part) -> bool:
        return all(values <= other.does.get(key, set()) for key, values in self.does.items())

    @property
    def installs(self) -> bool:
        return bool(self.frameworks) or _BUILDS in self.does


class Other(NamedTuple):
    """Another way than the one that the draft follows.

    Attributes:
        lines: the first and last one.
        instead: those of the way that the draft follows.
    """

    lines: Lines
    instead: Lines

    def has(self, value: Value) -> bool:
        return self.lines[0] <= value.origin.line <= self.lines[1]


def find_others(parts: Sequence[Part], last: int) -> list[Other]:
    """The ways that the draft does not follow: it follows the first one that installs something."""
    kept, others = list[Part](), list[Other]()
    for part in parts:
        if any(first <= part.first <= end for (first, end), _ in others):
            continue
        rival = next((each for each in kept if _conflict(each, part)), None)
        if rival is None:
            kept.append(part)
            continue
        depths = range(1, len(part.section) + 1)
        common = sum(rival.section[:depth] == part.section[:depth] for depth in depths)
        before, after = (_reach(each, common, parts, last) for each in (rival, part))
        inside = [each for each in parts if after[0] <= max(each.first, *each.lines, 0) <= after[1]]
        if not any(each.installs for each in kept) and any(each.installs for each in inside):
            kept = [*(each for each in kept if not before[0] <= each.first <= before[1]), part]
            before, after = after, before
        others.append(Other(after, before))
    return others


def _conflict(one: Part, other: Part) -> bool:
    """Whether both create an environment, build Horovod, or install a framework in two ways."""
    if not other.creates and one.gpu == other.gpu and other.states_no_more_than(one):
        return False  # to build it again, such as after a failure
    if (one.creates and other.creates) or (_BUILDS in one.does and _BUILDS in other.does):
        return True
    for name in one.frameworks & other.frameworks:
        versions, providers = (
            [each.does.get(("frameworks", name, key), set()) for each in (one, other)]
            for key in ("version", "provider")
        )
        if providers[0] != providers[1] or (all(versions) and not versions[0] & versions[1]):
            return True
    return False


def _reach(part: Part, common: int, parts: Sequence[Part], last: int) -> Lines:
    """The lines of a way: those of its section, or of its commands.

    A title in bold does not say how far it reaches.
    """
    root = part.section[: common + 1]
    headed = len(root) > common
    inside = [each for each in parts if each.section[: common + 1] == root] if headed else [part]
    after = [each.first for each in parts if each.first > inside[-1].first]
    end = min(after, default=last + 1) - 1
    if not headed or root[common][0] == BOLD:
        end = min(end, max(line for each in inside for line in each.lines))
    return inside[0].first if headed else min(part.lines), end


def lines_of(other: Other, others: Sequence[Other], last: int, of_jobs: set[int]) -> str:
    """The lines that draft another way, with what the page says for all of them: ``1-7,20-31``.

    If no lines of a job are among them, those of the way that the draft follows are.
    """
    gone = [each.lines for each in others if each is not other] + [other.instead]
    kept = [n for n in range(1, last + 1) if not any(a <= n <= b for a, b in gone)]
    if of_jobs.isdisjoint(kept):
        first, end = other.instead
        kept = sorted([*kept, *(n for n in of_jobs if first <= n <= end)])
    return ",".join(f"{first}-{end}" for first, end in _ranges(kept))


def _ranges(numbers: Sequence[int]) -> Iterator[Lines]:
    start = numbers[0] if numbers else 0
    for number, following in zip(numbers, [*numbers[1:], 0], strict=True):
        if following != number + 1:
            yield start, number
            start = following
