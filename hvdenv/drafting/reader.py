"""Reads a page: each of its commands into values of a recipe, or into the reason why not.

A page may describe several ways to an environment, such as "with conda" and "with pip". The draft follows
the first.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from hvdenv.drafting import commands, jobs, packages
from hvdenv.drafting.commands import find_program, is_known, table_of
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
_OF_JOBS = frozenset({"scheduler", "job", "partitions", "launch"})
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
        reader.facts.append(Left(Origin(source), f"it has {told}, and the rest was not read"))
    return reader.found(len(every))


class Script(NamedTuple):
    """A job script of a page, or commands that describe a job.

    Attributes:
        lines: the first and last one.
        batch: whether it has directives.
        launches: whether it starts ranks.
        job: what its directives and the ranks that it starts say about a job.
    """

    lines: Lines
    batch: bool
    launches: bool
    job: list[Fact]


class _Reader:
    """Reads the blocks of one page, in order.

    Attributes:
        lines: every line that may be a command, by its number.
        blocks: the first line and the section of each.
        room: how many more commands and values to read.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.variables: dict[str, str] = {}
        self.facts: list[Fact] = []
        self.scripts: list[Script] = []
        self.lines: dict[int, Left] = {}
        self.blocks: list[tuple[int, Section]] = []
        self.commands, self.room = 0, MOST_READ

    def found(self, last: int) -> Found:
        """What was read; ``last`` is the last line of the page."""
        facts = _of_first(self.facts, self.scripts, self.blocks, last)
        facts = commands.with_modules(chain.from_iterable(_indexes(facts)))
        return Found(tuple(facts), tuple(self.lines.values()), self.commands)

    def read_block(self, block: Block) -> None:
        """A script with directives starts from nothing, and describes a job."""
        script = read_script(block, self.source, is_known, self.room)
        self.lines |= {each.origin.line: each for each in script.lines}
        self.blocks.append((block.line, block.section))
        nqsv = jobs.is_nqsv(script.statements)
        read = list[Fact]()
        for statement in map(self._resolved, script.statements):
            if self.room > 0:
                self.commands += 1
                facts = [*islice(_meaning(statement, nqsv=nqsv), self.room)]
                self.room -= 1 + len(facts)
                read += (_placed(each, statement) for each in facts)
        batch = any(each.batch for each in script.statements)
        start = [commands.START] if batch else []
        self.facts += [*start, *(each for each in read if each.key[0] != OPTION), *start]
        options = [each for each in read if isinstance(each, Value) and each.key[0] == OPTION]
        if batch or options:
            scheduler = next((each.key[1] for each in options if each.key[1]), "")
            launches = any(each.key == _LAUNCHER for each in read)
            job = list(jobs.job_values(options, scheduler)) if scheduler or not batch else []
            lines = block.line, block.line + len(block.lines) - 1
            self.scripts.append(Script(lines, batch, launches, job))
        for inner in script.inner:
            self.read_block(inner._replace(section=block.section))

    def _resolved(self, statement: Statement) -> Statement:
        """With the texts of variables that the page has set before."""

        def fill(text: str) -> str:
            return _NAMED.sub(lambda found: self.variables.get(found[1], found[0]), text)

        variables = tuple((name, fill(value)) for name, value in statement.variables)
        if table_of(statement) == "environment.run":
            plain = ((name, value) for name, value in variables if UNKNOWN not in value)
            self.variables |= {name: value for name, value in plain if len(value) < 500}
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
        if program := find_program(statement.program):
            yield from program.read(statement)
        elif statement.program.strip("."):
            yield leave(f"hvdenv does not know {statement.program}")


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
    role = table if fact.key[0] == OPTION else fact.role
    return fact._replace(origin=statement.origin, weight=weight, role=role)


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
            keys = (("frameworks", name, each.key[-1]) for name in names)
            yield (each._replace(key=key) for key in keys)
        else:
            yield [packages.other_index(str(each.value))._replace(origin=each.origin)]


class Part(NamedTuple):
    """Consecutive lines of a page, and the values that they have for keys."""

    first: int
    section: Section
    does: dict[Key, set[str]]

    def conflicts(self, other: Part) -> bool:
        """Whether both create an environment or build Horovod, and not the same again."""
        creates, builds = (key in self.does and key in other.does for key in (_CREATES, BUILD))
        mine, its = (
            {key: values for key, values in each.does.items() if key[0] == "horovod"}
            for each in (self, other)
        )
        return creates or (builds and mine != its)


def _of_first(
    facts: Sequence[Fact],
    scripts: Sequence[Script],
    blocks: Iterable[tuple[int, Section]],
    last: int,
) -> list[Fact]:
    """The facts of the first way to an environment, and of one job; the others are left.

    The job is that of the first script that starts ranks, of the first way if it has one. Without a script,
    it is that of all commands.
    """
    others = _find_others(_parts(facts, blocks), last)

    def way(line: int) -> Lines | None:
        return next((lines for lines in others if lines[0] <= line <= lines[1]), None)

    def rank(script: Script) -> tuple[bool, bool, bool]:
        return not script.batch, bool(way(script.lines[0])), script.batch and not script.launches

    ranked = sorted(scripts, key=rank)
    chosen = [each for each in ranked if not each.batch and rank(each) == rank(ranked[0])]
    chosen = chosen or ranked[:1]
    found, left = list[Fact](), list[Left]()
    for script in chosen:
        found += script.job
    first, end = ranked[0].lines if ranked else (0, 0)
    told = "another script of the page describes the job"
    for more in ranked[len(chosen) :]:
        found += (Left(each.origin, told, True, "job" * more.batch) for each in more.job)
    hints = {lines: _hint(lines, [others[lines], *others], last) for lines in others}
    for fact in facts:
        lines = way(fact.origin.line)
        of_job = fact.key[0] in _OF_JOBS and first <= fact.origin.line <= end
        if lines is None or isinstance(fact, Left) or of_job or fact.key == BUILD:
            found.append(fact)
        else:
            left.append(Left(fact.origin, hints[lines], table=OTHER_WAY))
    return [*found, *sorted(left, key=lambda each: each.origin.line)]


def _parts(facts: Iterable[Fact], blocks: Iterable[tuple[int, Section]]) -> list[Part]:
    """A part begins with a block, where another environment is created, and with a build for both."""
    parts = [Part(line, section, {}) for line, section in blocks]
    starts = {each.first for each in parts}
    for each in facts:
        if isinstance(each, Left) or each.weight <= Weight.INFERRED or each.key[0] not in _TABLES:
            continue
        place = bisect_right(parts, each.origin.line, key=lambda part: part.first)
        part = parts[place - 1]
        again = each.key == _CREATES and _CREATES in part.does
        common = each.key == BUILD and part.first not in starts and BUILD not in part.does
        if again or (common and BUILD not in parts[place - 2].does):
            part = Part(each.origin.line, part.section, {})
            parts.insert(place, part)
        part.does.setdefault(each.key, set()).add(str(each.value))
    return parts


def _find_others(parts: Sequence[Part], last: int) -> dict[Lines, Lines]:
    """The lines of each way that the draft does not follow, and of the one that it follows instead."""
    kept, others, end = list[Part](), dict[Lines, Lines](), 0
    for part in parts:
        if part.first > end and {_CREATES, BUILD} & part.does.keys():
            if rival := next((each for each in kept if each.conflicts(part)), None):
                lines = _reach(part, rival, parts, last)
                others[lines] = _reach(rival, part, parts, last)
                end = lines[1]
            else:
                kept.append(part)
    return others


def _reach(part: Part, rival: Part, parts: Sequence[Part], last: int) -> Lines:
    """The lines of a way: those of its section, with all below its title, or only of its part."""
    depths = range(1, len(part.section) + 1)
    common = sum(part.section[:depth] == rival.section[:depth] for depth in depths)
    root = part.section[: common + 1]
    first = end = parts.index(part)
    if len(root) > common:
        while first and parts[first - 1].section[: common + 1] == root:
            first -= 1
        while end + 1 < len(parts) and parts[end + 1].section[: common + 1] == root:
            end += 1
    after = parts[end + 1].first if end + 1 < len(parts) else last + 1
    return parts[first].first, after - 1


def _hint(way: Lines, gone: Iterable[Lines], last: int) -> str:
    """Names the lines that draft another way, with what the page says for all: ``1-7,20-31``."""
    ranges, start = list[str](), 1
    for first, end in [*sorted({*gone} - {way}), (last + 1, last + 1)]:
        if first > start:
            ranges.append(f"{start}-{first - 1}")
        start = max(start, end + 1)
    return f"lines {way[0]}-{way[1]} are another way: `--lines {','.join(ranges)}` drafts it"
