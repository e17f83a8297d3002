"""Reads a page: each of its commands into values of a recipe, or into the reason why not.

A page may describe several ways to an environment, such as "with conda" and "with pip". The draft follows
the first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from hvdenv.drafting import commands, jobs, packages
from hvdenv.drafting.commands import table_of
from hvdenv.drafting.options import variable
from hvdenv.drafting.pages import Block, Section, blocks
from hvdenv.drafting.shell import Statement, read_script
from hvdenv.drafting.values import (
    BUILD,
    LOAD,
    OPTION,
    UNKNOWN,
    Fact,
    Found,
    Key,
    Left,
    Origin,
    Value,
    Weight,
    at,
    leave,
)

# Pages with more are no pages: of lines, and of commands and their values.
MOST_LINES, MOST_READ = 50_000, 3000
EVERY_LINE = (1, sys.maxsize)
Lines = tuple[int, int]
# Tables whose values contain no variables, but for these keys.
_PLAIN = frozenset({"environment", "container", "job", "network", "launch"})
_FOLDERS = frozenset({"output", "error", "binds"})
_LAUNCHER, _CREATES = at("launch.launcher"), at("python.provider")
# What ways differ in, and what describes a job.
_TABLES = frozenset({"python", "conda", "frameworks", "packages", "build_tools", "horovod"})
_OF_SCRIPTS = frozenset({OPTION, "scheduler", "job", "partitions"})
# The table of lines that are about another way to an environment.
OTHER_WAY = "another way"
_NAMED = re.compile(r"\$([A-Za-z_]\w*)")


def read_page(text: str, source: str, lines: Sequence[Lines] = (EVERY_LINE,)) -> Found:
    """Every command of a page.

    Args:
        source: its name, for the origins of values.
        lines: ranges of lines to read commands from. The page is parsed as a whole: a range may
            begin or end within a block of code.
    """
    every = text.split("\n")
    reader = _Reader(source)
    for block in blocks("\n".join(every[:MOST_LINES]), source):
        kept = tuple(
            text if any(first <= number <= last for first, last in lines) else ""
            for number, text in enumerate(block.lines, block.line)
        )
        if any(kept) and reader.room > 0:
            reader.read_block(block._replace(lines=kept))
    if reader.room <= 0 or len(every) > MOST_LINES:
        told = f"more than {MOST_LINES:,} lines, or {MOST_READ:,} commands and values"
        rest = Left(Origin(source), f"it has {told}, and the rest was not read")
        reader.parts.append(Part(0, 0, (), [rest], []))
    facts = _of_first(reader.parts, len(every))
    facts = commands.with_modules(chain.from_iterable(_indexes(facts)))
    return Found(tuple(facts), tuple(reader.lines.values()))


class Part(NamedTuple):
    """Consecutive lines of a page: a block of code, a text, or a part of one with an environment of its own.

    Attributes:
        block: the first line of its block. Each block is one script.
        first: its own first line.
        facts: what its commands mean, in order, but for those about a job.
        job: what the block says about a job; of its first part.
        batch: whether it has directives.
    """

    block: int
    first: int
    section: Section
    facts: list[Fact]
    job: list[Fact]
    batch: bool = False

    @property
    def does(self) -> dict[Key, set[str]]:
        """What other ways do in another way, or not at all."""
        stated: dict[Key, set[str]] = {}
        for each in self.facts:
            if isinstance(each, Value) and each.weight > Weight.INFERRED and each.key[0] in _TABLES:
                stated.setdefault(each.key, set()).add(str(each.value))
        return stated

    def conflicts(self, other: Part) -> bool:
        """Whether both create an environment or build Horovod, and not the same again."""
        mine, its = self.does, other.does
        keys = (key for key in {*mine, *its} if key[0] == "horovod")
        builds = BUILD in mine and BUILD in its and any(mine.get(k) != its.get(k) for k in keys)
        return builds or (_CREATES in mine and _CREATES in its)


class _Reader:
    """Reads the blocks of one page, in order.

    Attributes:
        lines: every line that may be a command, by its number.
        room: how many more commands and values to read.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.variables: dict[str, str] = {}
        self.parts: list[Part] = []
        self.lines: dict[int, Left] = {}
        self.room = MOST_READ

    def read_block(self, block: Block) -> None:
        """A script with directives starts from nothing, and describes a job."""
        script = read_script(block, self.source, self.room)
        self.lines |= {each.origin.line: each for each in script.lines}
        nqsv = jobs.is_nqsv(script.statements)
        batch = any(each.batch for each in script.statements)
        start, of_job = [commands.START] if batch else [], list[Fact]()
        whole = part = Part(block.line, block.line, block.section, [*start], [], batch)
        self.parts.append(part)
        for statement in map(self._resolved, script.statements):
            if self.room <= 0:
                break
            means = islice(_meaning(statement, nqsv=nqsv), self.room)
            facts = [_placed(each, statement) for each in means]
            self.room -= 1 + len(facts)
            if any(self._begins(each, part) for each in facts):
                part = whole._replace(first=statement.origin.line, facts=[], job=[])
                self.parts.append(part)
            of_job += (each for each in facts if each.key[0] in _OF_SCRIPTS)
            part.facts.extend(each for each in facts if each.key[0] not in _OF_SCRIPTS)
        part.facts.extend(start)
        if not batch or any(each.key == at("scheduler") for each in of_job):
            whole.job.extend(jobs.job_facts(of_job))
        for inner in script.inner:
            self.read_block(inner._replace(section=block.section))

    def _begins(self, fact: Fact, part: Part) -> bool:
        """Whether a part begins: where another environment is created, and with a build for both."""
        if isinstance(fact, Left) or fact.weight <= Weight.INFERRED:
            return False
        if fact.key == BUILD and part.first != part.block:
            return not any(BUILD in each.does for each in self.parts[-2:])
        return fact.key == _CREATES and _CREATES in part.does

    def _resolved(self, statement: Statement) -> Statement:
        """With the texts of variables that the page has set before."""

        def fill(text: str) -> str:
            return _NAMED.sub(lambda found: self.variables.get(found[1], found[0]), text)

        variables = tuple((name, fill(value)) for name, value in statement.variables)
        if table_of(statement) == "environment.run":
            for name, value in variables:
                if statement.branch and self.variables.get(name, value) != value:
                    self.variables[name] = f"${name}"  # which one is not known
                elif UNKNOWN not in value and len(value) < 500:
                    self.variables[name] = value
        # A shell splits the text of a variable that is a word of its own.
        words = (
            filled.split() if word.startswith("$") and " " in filled else [filled]
            for word, filled in ((word, fill(word)) for word in statement.words)
        )
        return statement._replace(words=tuple(chain.from_iterable(words)), variables=variables)


def _meaning(statement: Statement, *, nqsv: bool) -> Iterator[Fact]:
    if statement.directive and nqsv:
        yield leave("hvdenv has no scheduler for NQSV: see docs/how-to/add-a-scheduler.md")
    elif statement.directive:
        yield from jobs.directive(statement)
    else:
        yield from _variables(statement)
        yield from commands.meaning(statement)


def _placed(fact: Fact, statement: Statement) -> Fact:
    """With the place that it comes from; without what is not a complete value."""
    table = table_of(statement)
    if isinstance(fact, Value) and not _is_stated(fact):
        fact = leave(f"the page does not state {'.'.join(fact.key)}")
    if isinstance(fact, Left):
        placed = not fact.understood or table == "job"
        return fact._replace(origin=statement.origin, table=table if placed else "")
    stated = Weight.SCRIPT if statement.batch else Weight.COMMAND
    weight = stated if fact.weight == Weight.COMMAND else fact.weight
    return fact._replace(origin=statement.origin, weight=weight)


def _is_stated(value: Value) -> bool:
    """Whether a value is complete. Where none is a directory, it contains no variable."""
    text, key = str(value.value), value.key
    variable = key == LOAD or (key[0] in _PLAIN and key[-1] not in _FOLDERS)
    unknown = UNKNOWN in text or "$PWD" in text or (variable and "$" in text)
    return key[0] == OPTION or not unknown


def _variables(statement: Statement) -> Iterator[Fact]:
    """Variables alone, or those in front of Horovod's build or its ranks."""
    tables = ("environment.run", "packages", "launch")
    if statement.variables and table_of(statement) not in tables:
        yield leave("its variables are for this command only")
        return
    for name, value in statement.variables:
        yield from variable(name, value, exported=bool(statement.words))


def _indexes(facts: Sequence[Fact]) -> Iterator[Iterable[Fact]]:
    """An index that its command names for every framework, with the frameworks of the page."""
    of_frameworks = (each.key[1] for each in facts if each.key[0] == "frameworks")
    names = dict.fromkeys(name for name in of_frameworks if name != packages.EVERY)
    for each in facts:
        if isinstance(each, Left) or each.key[:2] != ("frameworks", packages.EVERY):
            yield [each]
        elif names:
            of_torch = "pytorch.org" in str(each.value) and "torch" in names
            named = ["torch"] if of_torch else names
            keys = (("frameworks", name, each.key[-1]) for name in named)
            yield (each._replace(key=key) for key in keys)
        else:
            yield [packages.other_index(str(each.value))._replace(origin=each.origin)]


def _of_first(parts: Sequence[Part], last: int) -> list[Fact]:
    """The facts of the first way to an environment, and of one job; the others are left.

    The job is that of the first script that starts ranks, of the first way if it has one. Without a script,
    it is that of all commands.
    """
    ways = _find_others(parts, last)
    launching = {part.block for part in parts if any(each.key == _LAUNCHER for each in part.facts)}

    def rank(place: int) -> tuple[bool, bool, bool]:
        part = parts[place]
        return not part.batch, place in ways, part.batch and part.block not in launching

    ranked = sorted((place for place, part in enumerate(parts) if part.job), key=rank)
    chosen = [each for each in ranked if not parts[each].batch and rank(each) == rank(ranked[0])]
    chosen = chosen or ranked[:1]
    found, left = [each for place in chosen for each in parts[place].job], list[Fact]()
    told = "another script of the page describes the job"
    for place, part in enumerate(parts):
        if place not in chosen:
            left += (Left(each.origin, told, True, "job" * part.batch) for each in part.job)
        of_job = any(part.block == parts[each].block for each in chosen[:1])
        for each in part.facts:
            launches = of_job and each.key[0] == "launch"
            shared = isinstance(each, Left) or each.key in (BUILD, commands.START.key)
            if shared or launches or place not in ways:
                found.append(each)
            else:
                left.append(Left(each.origin, ways[place], table=OTHER_WAY))
    return [*found, *left]


def _find_others(parts: Sequence[Part], last: int) -> dict[int, str]:
    """The parts of ways that the draft does not follow, and which lines draft each."""
    kept, others = list[int](), dict[range, range]()
    for place, part in enumerate(parts):
        if (
            any(place in each for each in [*others][-1:])
            or not {_CREATES, BUILD} & part.does.keys()
        ):
            continue
        rival = next((each for each in kept if parts[each].conflicts(part)), None)
        if rival is None:
            kept.append(place)
        else:
            others[_reach(place, rival, parts)] = _reach(rival, place, parts)
    starts = [*(part.first for part in parts), last + 1]
    lines = {
        each: (starts[each.start], starts[each.stop] - 1) for each in (*others, *others.values())
    }
    return {
        place: hint
        for way, instead in others.items()
        for hint in [_hint(lines[way], [lines[each] for each in (instead, *others)], last)]
        for place in way
    }


def _reach(place: int, rival: int, parts: Sequence[Part]) -> range:
    """The parts of a way: those of its section, with all below its title, or only itself."""
    section, other = parts[place].section, parts[rival].section
    common = sum(section[:depth] == other[:depth] for depth in range(1, len(section) + 1))
    first, end = place, place + 1
    if len(section) > common:
        root = section[: common + 1]
        while first and parts[first - 1].section[: common + 1] == root:
            first -= 1
        while end < len(parts) and parts[end].section[: common + 1] == root:
            end += 1
    return range(first, end)


def _hint(way: Lines, gone: Iterable[Lines], last: int) -> str:
    """Names the lines that draft another way, with what the page says for all: ``1-7,20-31``."""
    ranges, start = list[str](), 1
    for first, end in [*sorted({*gone} - {way}), (last + 1, last + 1)]:
        if first > start:
            ranges.append(f"{start}-{first - 1}")
        start = max(start, end + 1)
    return f"lines {way[0]}-{way[1]} are another way: `--lines {','.join(ranges)}` drafts it"
