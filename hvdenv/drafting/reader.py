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

from hvdenv.drafting import jobs, modules, packages
from hvdenv.drafting.options import variable
from hvdenv.drafting.pages import BOLD, Block, Section, blocks
from hvdenv.drafting.programs import find_program, is_known, table_of
from hvdenv.drafting.shell import Page, Statement, read_script
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
Ranges = Sequence[tuple[int, int]]
# Tables whose values contain no variables, but for these keys.
_PLAIN = frozenset({"environment", "container", "job", "network", "launch"})
_FOLDERS = frozenset({"output", "error", "binds"})
_OTHER_SCRIPT = "the page starts ranks in another script"
_LAUNCHER = at("launch.launcher")
_CREATES = at("python.provider")
# What ways differ in, and what describes a job.
_TABLES = frozenset({"python", "conda", "frameworks", "packages", "build_tools", "horovod"})
_OF_JOBS = frozenset({"scheduler", "job", "launch"})
# The table of lines that are about another way to an environment.
OTHER_WAY = "another way"
Lines = tuple[int, int]
_NAMED = re.compile(r"\$([A-Za-z_]\w*)")


def read_page(text: str, source: str, lines: Ranges = (EVERY_LINE,)) -> Found:
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


class _Reader:
    """Reads the blocks of one page, in order.

    Attributes:
        held: what describes a job, and what to leave instead if another script starts the ranks.
        lines: every line that may be a command, by its number.
        sections: the lines at which sections of the page begin.
        room: how many more commands and values to read.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.page = Page()
        self.variables: dict[str, str] = {}
        self.facts: list[Fact] = []
        self.held: list[tuple[Fact, Left]] = []
        self.has_launched = False
        self.lines: dict[int, Left] = {}
        self.sections: list[tuple[int, Section]] = []
        self.commands, self.room = 0, MOST_READ

    def found(self, last: int) -> Found:
        """What was read; ``last`` is the last line of the page."""
        held = [instead if self.has_launched else fact for fact, instead in self.held]
        facts = _of_first([*self.facts, *held], self.sections, last)
        facts = jobs.with_scheduler(modules.with_modules(facts))
        return Found(tuple(facts), tuple(self.lines.values()), self.commands)

    def read_block(self, block: Block) -> None:
        script = read_script(block, self.source, is_known, self.room)
        self.lines |= {each.origin.line: each for each in script.lines}
        if not self.sections or self.sections[-1][1] != block.section:
            self.sections.append((block.line, block.section))
        if reader := packages.READERS.get(block.kind):
            self._read(reader(block, self.source, self.page))
        else:
            self._read_script(script.statements)
        for inner in script.inner:
            self.read_block(inner._replace(section=block.section))

    def _read_script(self, statements: Sequence[Statement]) -> None:
        """A script with directives starts from nothing, and describes a job if it starts ranks."""
        batch = any(each.batch for each in statements)
        other = jobs.unsupported(statements)
        start, before = [modules.START] if batch else [], len(self.facts)
        resolved = map(self._resolved, _without_python(statements))
        self._read((each, self._meaning(each, other)) for each in resolved)
        read = self.facts[before:]
        options = [each for each in read if isinstance(each, Value) and each.key[0] == OPTION]
        self.facts[before:] = [*start, *(each for each in read if each.key[0] != OPTION)]
        launches = any(each.key == _LAUNCHER for each in read)
        of_launches = {each.origin for each in options if each.role == "launch"}
        for job in _jobs(options):
            scheduler = next((each.key[1] for each in job if each.key[1]), self.page.scheduler)
            for fact in jobs.job_values(job, scheduler):
                of_launch = fact.origin in of_launches
                instead = Left(fact.origin, _OTHER_SCRIPT, True, "" if of_launch else "job")
                if not launches if batch else of_launch:
                    self.held.append((fact, instead))
                else:
                    self.facts.append(fact)
        self.has_launched |= batch and launches
        self.facts += start

    def _read(self, read: Iterable[tuple[Statement, Iterator[Fact]]]) -> None:
        """Keep what commands mean."""
        for statement, facts in read:
            if self.room <= 0:
                return
            self.commands += 1
            self.room -= 1
            for fact in islice(facts, self.room):
                self.room -= 1
                self.facts.append(_placed(fact, statement))

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

    def _meaning(self, statement: Statement, unsupported: str) -> Iterator[Fact]:
        if statement.directive and unsupported:
            yield leave(
                f"hvdenv does not support {unsupported}: see docs/how-to/add-a-scheduler.md"
            )
        elif statement.directive:
            yield from jobs.directive(statement, self.page)
        else:
            yield from _variables(statement)
            program = find_program(statement.program)
            if program:
                yield from program.read(statement, self.page)
            elif statement.program.strip("."):
                yield leave(f"hvdenv does not know {statement.program}")


def _placed(fact: Fact, statement: Statement) -> Fact:
    """With the place that it comes from; without what is not a complete value."""
    table = table_of(statement)
    if isinstance(fact, Value) and not _is_stated(fact):
        computed = re.search(r"[$`]", statement.origin.text)
        told = "only a shell knows" if computed else "the page does not state"
        fact = leave(f"{told} {'.'.join(fact.key)}")
    if isinstance(fact, Left):
        placed = not fact.understood or table == "job"
        return fact._replace(origin=statement.origin, table=table if placed else "")
    stated = Weight.SCRIPT if statement.batch else Weight.COMMAND
    weight = {Weight.COMMAND: stated, Weight.INTERACTIVE: Weight.COMMAND}.get(
        fact.weight, fact.weight
    )
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


def _without_python(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Without what is typed into an interactive Python."""
    inside = False
    for statement in statements:
        starts = len(statement.words) == 1 and statement.program.startswith("python")
        inside = starts or (inside and not is_known(statement.program))
        if not inside or starts:
            yield statement


def _jobs(options: Sequence[Value]) -> Iterable[list[Value]]:
    """A script is one job: its directives, and the ranks that it starts. So is each request.

    The ranks of a block that requests one allocation are in it.
    """
    of_script = {each.origin.line for each in options if each.origin.text.startswith("#")}
    launched = [each for each in options if each.key[-1] in jobs.LAUNCHED]
    requests = {each.origin.line for each in options if each not in launched} - of_script
    found = dict[int, list[Value]]()
    for each in options:
        line = each.origin.line
        if line in of_script or (each in launched and each.weight == Weight.SCRIPT):
            line = 0
        elif each in launched and len(requests) == 1:
            line = min(requests)
        # Without a job, it is the number of ranks of an example.
        elif each.key[-1] == "ranks":
            continue
        found.setdefault(line, []).append(each)
    return found.values()


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
        return BUILD in self.does

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


def _of_first(
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
