"""Reads a page: each of its commands into values of a recipe, or into the reason why not."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from hvdenv.drafting import jobs, modulelines, packagefiles, ways
from hvdenv.drafting.jobs import Field
from hvdenv.drafting.page import Page
from hvdenv.drafting.pages import Block, blocks
from hvdenv.drafting.programs import EXPORTS, find_program, is_known, recipe_table
from hvdenv.drafting.shell import UNKNOWN, Statement, read_script
from hvdenv.drafting.values import (
    COMMAND,
    INFERRED,
    SCRIPT,
    Found,
    Left,
    Origin,
    Read,
    Value,
    at,
    leave,
)
from hvdenv.drafting.variables import variable
from hvdenv.drafting.ways import Part

# Pages with more are no pages: of lines, and of commands and their values.
MOST_LINES, MOST_READ = 50_000, 3000
EVERY_LINE = (1, sys.maxsize)
Ranges = Sequence[tuple[int, int]]
# The table of lines that are about another way to an environment.
OTHER_WAY = "another way"
# Tables whose values contain no variables, but for these keys.
_PLAIN = frozenset({"environment", "container", "job", "network", "launch"})
_OF_JOBS = frozenset({"scheduler", "job", "launch"})
_FOLDERS = frozenset({"output", "error", "binds"})
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
        if any(kept):
            reader.read_block(block._replace(lines=kept))
        if reader.read >= MOST_READ:
            break
    if reader.read >= MOST_READ or len(every) > MOST_LINES:
        told = f"more than {MOST_LINES:,} lines, or {MOST_READ:,} commands and values"
        reader.left.append(Left(Origin(source), f"it has {told}, and the rest was not read"))
    return reader.found(len(every))


class _Reader:
    """Reads the blocks of one page, in order.

    Attributes:
        held: what describes a job, unless another script starts the ranks.
        lines: every line that may be a command, by its number.
        parts: the sections of the page, and within one the environments that it creates.
        read: how many commands and values were read.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.page = Page()
        self.variables: dict[str, str] = {}
        self.values: list[Value] = []
        self.left: list[Left] = []
        self.held: list[tuple[Statement, Read]] = []
        self.has_launched = False
        self.lines: dict[int, Left] = {}
        self.parts: list[Part] = []
        self.commands = self.read = 0

    def found(self, last: int) -> Found:
        """What was read; ``last`` is the last line of the page."""
        other = leave("the page starts ranks in another script", understood=True)
        for statement, read in self.held:
            self._keep(statement, other if self.has_launched else read)
        others = ways.find_others(self.parts, last)
        jobs_of = (each.origin.lines for each in self.values if each.key[0] in _OF_JOBS)
        of_jobs = {line for lines in jobs_of for _, line in lines}
        hints = {each: ways.lines_of(each, others, last, of_jobs) for each in others}

        elsewhere = list[Left]()

        def of_draft(value: Value) -> bool:
            for each in others:
                if each.has(value):
                    told = f"another way: `--lines {hints[each]}` drafts it"
                    elsewhere.append(Left(value.origin, told, table=OTHER_WAY))
                    return False
            return True

        self.page.modules = [[*filter(of_draft, each)] for each in self.page.modules]
        values = [*filter(of_draft, self.values)]
        self.left += sorted(elsewhere, key=lambda left: left.origin.line)
        values = jobs.with_scheduler([*modulelines.drafted(self.page), *values])
        return Found(tuple(values), tuple(self.left), tuple(self.lines.values()), self.commands)

    def read_block(self, block: Block) -> None:
        script = read_script(block, self.source, is_known, MOST_READ - self.read)
        self.lines |= {each.origin.line: each for each in script.lines}
        if not self.parts or self.parts[-1].section != block.section:
            self.parts.append(Part(block.line, block.section, {}, []))
        if block.kind in packagefiles.READERS:
            self._read_all(packagefiles.READERS[block.kind](block, self.source, self.page))
        else:
            self._read_script(script.statements)
        for inner in script.inner:
            self.read_block(inner._replace(section=block.section))

    def _read_script(self, statements: tuple[Statement, ...]) -> None:
        batch = any(each.batch for each in statements)
        other = jobs.unsupported(statements)
        before = len(self.values)
        if batch:  # it starts from nothing
            self.page.start_modules()
        resolved = map(self._resolved, _without_python(statements))
        fields = self._read_all((each, self._read(each, other)) for each in resolved)
        launches = any(each.key == at("launch.launcher") for each in self.values[before:])
        for job in _jobs(fields):
            for statement, read in jobs.job_values(job, self.page):
                if launches if batch else recipe_table(statement) != "launch":
                    self._keep(statement, read)
                else:
                    self.held.append((statement, read))
        if batch:
            self.has_launched |= launches
            self.page.start_modules()

    def _read_all(self, read: Iterable[tuple[Statement, Iterator[Read | Field]]]) -> list[Field]:
        """Keep what commands mean; the options of batch systems mean something together."""
        fields = list[Field]()
        for statement, reads in read:
            if self.read >= MOST_READ:
                break
            self.commands += 1
            self.read += 1
            builds = self.page.builds_horovod
            for each in islice(reads, MOST_READ - self.read):
                self.read += 1
                if isinstance(each, Field):
                    fields.append(each)
                else:
                    self._keep(statement, each)
            if self.page.builds_horovod > builds:
                self.parts[-1].note_build(statement.origin.line)
        return fields

    def _keep(self, statement: Statement, read: Read) -> None:
        if isinstance(read, Value) and not _is_stated(read):
            computed = re.search(r"[$`]", statement.origin.text)
            told = "only a shell knows" if computed else "the page does not state"
            read = leave(f"{told} {'.'.join(read.key)}")
        if isinstance(read, Value):
            stated = SCRIPT if statement.batch else COMMAND
            weight = stated if read.weight == COMMAND else read.weight
            value = read._replace(origin=statement.origin, weight=weight)
            if value.key == modulelines.LOAD:
                self.page.add_module(value)
            else:
                self.values.append(value)
                self._note_part(value)
            return
        table = recipe_table(statement)
        placed = not read.understood or table == "job"
        origin = read.origin if read.origin.line else statement.origin
        left = read._replace(origin=origin, table=table if placed else "")
        if left not in self.left[-5:]:
            self.left.append(left)

    def _note_part(self, value: Value) -> None:
        """Another environment begins another part."""
        creates = value.key == at("python.provider") and value.weight > INFERRED
        if creates and self.parts[-1].creates:
            self.parts.append(Part(value.origin.line, self.parts[-1].section, {}, []))
        self.parts[-1].note(value)

    def _resolved(self, statement: Statement) -> Statement:
        """With the texts of variables that the page has set before."""

        def fill(text: str) -> str:
            return _NAMED.sub(lambda found: self.variables.get(found[1], found[0]), text)

        variables = tuple((name, fill(value)) for name, value in statement.variables)
        if not statement.words or statement.program in EXPORTS:
            plain = ((name, value) for name, value in variables if UNKNOWN not in value)
            self.variables |= {name: value for name, value in plain if len(value) < 500}
        # A shell splits the text of a variable that is a word of its own.
        words = (
            filled.split() if word.startswith("$") and " " in filled else [filled]
            for word, filled in ((word, fill(word)) for word in statement.words)
        )
        return statement._replace(words=tuple(chain.from_iterable(words)), variables=variables)

    def _read(self, statement: Statement, unsupported: str) -> Iterator[Read | Field]:
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


def _is_stated(value: Value) -> bool:
    """Whether a value is complete. Where none is a directory, it contains no variable."""
    text, key = str(value.value), value.key
    variable = key == modulelines.LOAD or (key[0] in _PLAIN and key[-1] not in _FOLDERS)
    return not (UNKNOWN in text or "$PWD" in text or (variable and "$" in text))


def _variables(statement: Statement) -> Iterator[Read]:
    """Variables alone, or those in front of Horovod's build or its ranks."""
    table = recipe_table(statement)
    if statement.variables and table not in ("environment.run", "packages", "launch"):
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


def _jobs(fields: Sequence[Field]) -> Iterable[list[Field]]:
    """A script is one job: its directives, and the ranks that it starts. So is each request.

    The ranks of a block that requests one allocation are in it.
    """
    launched = [each for each in fields if each.field in jobs.LAUNCHER_FIELDS]
    others = [each for each in fields if each not in launched]
    requests = {each.statement.origin.line for each in others if not each.statement.directive}
    found = dict[int, list[Field]]()
    for each in fields:
        line = each.statement.origin.line
        if each.statement.directive or (each in launched and each.statement.batch):
            line = 0
        elif each in launched and len(requests) == 1:
            line = min(requests)
        # Without a job, it is the number of ranks of an example.
        elif each.field == "ranks":
            continue
        found.setdefault(line, []).append(each)
    return found.values()
