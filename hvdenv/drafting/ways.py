"""The ways to an environment that a page describes, such as "with conda" and "with pip"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hvdenv.drafting.pages import BOLD, Section
from hvdenv.drafting.values import BUILD, Fact, Key, Left, Value, Weight, at

_CREATES = at("python.provider")
# What ways differ in, and what describes a job.
_TABLES = frozenset({"python", "conda", "frameworks", "packages", "build_tools", "horovod"})
_OF_JOBS = frozenset({"scheduler", "job", "launch"})
# The table of lines that are about another way to an environment.
OTHER_WAY = "another way"
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

    @property
    def creates(self) -> bool:
        return _CREATES in self.does

    @property
    def builds(self) -> bool:
        return BUILD in self.does or at("horovod.version") in self.does

    @property
    def installs(self) -> bool:
        return self.builds or any(key[0] == "frameworks" for key in self.does)

    @property
    def gpu(self) -> dict[Key, set[str]]:
        return {key: values for key, values in self.does.items() if key[:2] == ("horovod", "gpu")}

    def states_no_more_than(self, other: Part) -> bool:
        return all(values <= other.does.get(key, set()) for key, values in self.does.items())


class Other(NamedTuple):
    """Another way than the one that the draft follows.

    Attributes:
        lines: the first and last one.
        instead: those of the way that the draft follows.
    """

    lines: Lines
    instead: Lines

    def has(self, fact: Fact) -> bool:
        return self.lines[0] <= fact.origin.line <= self.lines[1]


def of_first(
    facts: Sequence[Fact], sections: Iterable[tuple[int, Section]], last: int
) -> list[Fact]:
    """The facts of the first way to an environment; those of others are left.

    If its lines describe no job, those of others do.

    Args:
        sections: the lines at which sections of the page begin.
        last: the last line of the page.
    """
    values = [each for each in facts if isinstance(each, Value)]
    others = _find_others(_parts(values, sections), last)
    of_jobs = [each for each in values if each.key[0] in _OF_JOBS]
    jobs = {each.origin.line for each in of_jobs}
    has_job = any(not any(other.has(each) for other in others) for each in of_jobs)
    told = {
        each: f"another way: `--lines {_lines_of(each, others, last, jobs)}` drafts it"
        for each in others
    }
    found, left = list[Fact](), list[Left]()
    for fact in facts:
        other = next((each for each in others if each.has(fact)), None)
        job = isinstance(fact, Value) and fact.key[0] in _OF_JOBS
        if other is None or isinstance(fact, Left) or (job and not has_job):
            found.append(fact)
        elif fact.key != BUILD:
            left.append(Left(fact.origin, told[other], table=OTHER_WAY))
    return [*found, *sorted(left, key=lambda each: each.origin.line)]


def _parts(values: Iterable[Value], sections: Iterable[tuple[int, Section]]) -> list[Part]:
    """A part begins with a section, and where another environment is created."""
    parts = [Part(line, section, {}, []) for line, section in sections]
    for each in values:
        if each.weight > Weight.INFERRED and each.key[0] in _TABLES:
            above = (part for part in parts if part.first <= each.origin.line)
            part = max(above, key=lambda part: part.first)
            if each.key == _CREATES and part.creates:
                part = Part(each.origin.line, part.section, {}, [])
                parts.append(part)
            part.does.setdefault(each.key, set()).add(str(each.value))
            part.lines.append(each.origin.line)
    return sorted(parts, key=lambda part: part.first)


def _find_others(parts: Sequence[Part], last: int) -> list[Other]:
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
    """Whether both create an environment or build Horovod, and not the same again."""
    if not other.creates and one.gpu == other.gpu and other.states_no_more_than(one):
        return False  # such as after a failure
    return (one.creates and other.creates) or (one.builds and other.builds)


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


def _lines_of(other: Other, others: Sequence[Other], last: int, jobs: set[int]) -> str:
    """The lines that draft another way, with what the page says for all of them: ``1-7,20-31``.

    If no lines of a job are among them, those of the way that the draft follows are.
    """
    gone = [each.lines for each in others if each is not other] + [other.instead]
    kept = [n for n in range(1, last + 1) if not any(a <= n <= b for a, b in gone)]
    if jobs.isdisjoint(kept):
        first, end = other.instead
        kept = sorted([*kept, *(n for n in jobs if first <= n <= end)])
    return ",".join(f"{first}-{end}" for first, end in _ranges(kept))


def _ranges(numbers: Sequence[int]) -> Iterator[Lines]:
    start = numbers[0] if numbers else 0
    for number, following in zip(numbers, [*numbers[1:], 0], strict=True):
        if following != number + 1:
            yield start, number
            start = following
