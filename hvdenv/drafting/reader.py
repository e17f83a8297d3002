"""Reads a page: each of its commands into values of a recipe, or into the reason why not."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from hvdenv.drafting import jobs, modules, packages, ways
from hvdenv.drafting.options import variable
from hvdenv.drafting.pages import Block, Section, blocks
from hvdenv.drafting.programs import find_program, is_known, table_of
from hvdenv.drafting.shell import Page, Statement, read_script
from hvdenv.drafting.values import (
    LOAD,
    OPTION,
    UNKNOWN,
    Fact,
    Found,
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
        facts = ways.of_first([*self.facts, *held], self.sections, last)
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
