"""Reads a page: each of its commands into values of a recipe, or into the reason why not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple, get_args

from hvdenv.drafting import directives, launching, modulelines, packagefiles, packages
from hvdenv.drafting.directives import Field
from hvdenv.drafting.page import Page
from hvdenv.drafting.pages import Block, blocks
from hvdenv.drafting.shell import UNKNOWN, Statement, read_script
from hvdenv.drafting.values import (
    COMMAND,
    INFERRED,
    SCRIPT,
    Found,
    Key,
    Left,
    Origin,
    Read,
    Value,
    at,
    leave,
)
from hvdenv.drafting.variables import variable
from hvdenv.model.cluster import LauncherName

# Pages with more are no pages.
MOST_COMMANDS = MOST_VALUES = 3000
MOST_LINES = 50_000
EVERY_LINE = (1, sys.maxsize)
# The table of lines that are about another way to an environment, and what ways differ in.
OTHER_WAY = "another way"
_OF_WAYS = frozenset({"python", "conda", "frameworks", "packages", "build_tools", "horovod"})
_CREATES = frozenset({at("python.provider")})
_INSTALLS = frozenset({"horovod", "frameworks"})

Reader = Callable[[Statement, Page], Iterator[Read | Field]]


class Program(NamedTuple):
    """A program of pages.

    Attributes:
        table: of the recipe that it is about.
        read: what a command of it means.
    """

    table: str
    read: Reader


def _export(statement: Statement, _: Page) -> Iterator[Read]:
    if not statement.variables:
        yield leave("the page sets its value elsewhere", understood=True)


def _means(told: str) -> Reader:
    return lambda _, __: iter([leave(told, understood=True)])


_EXPORTS = ("export", "declare", "local", "typeset")
_LAUNCHERS = (
    *(each for each in get_args(LauncherName) if not each.startswith("horovodrun-")),
    *["mpiexec.hydra", "orterun", "horovodrun", "ibrun", "prun", "lrun", "mpirun_rsh", "torchrun"],
)
_INTERACTIVE = "idev qrsh qlogin srun_gpu interact sdev si"
_NO_EFFECT = (
    "cd mkdir ls ll cp mv rm cat echo vi vim nano emacs less more tail head chmod pwd which whereis wget"
    " curl tar unzip ssh scp rsync squeue scancel sinfo scontrol sacct qstat qdel bjobs watch nvidia-smi"
    " rocm-smi date hostname printenv sleep wait touch deactivate exit clear htop top grep sed awk find"
    " tree tee sort uniq wc cut xargs df du quota id groups whoami uname lscpu nproc jupyter tensorboard"
    " pytest test true printf set shopt ulimit umask unset showq sacctmgr bpeek bkill clush tmux screen"
    " python3-config kill let"
)
PROGRAMS: dict[str, Program] = {
    **dict.fromkeys(_NO_EFFECT.split(), Program("", _means("it changes nothing that a recipe describes"))),
    **dict.fromkeys(_INTERACTIVE.split(), Program("", _means("for an interactive job: hvdenv shell"))),
    **dict.fromkeys(_LAUNCHERS, Program("launch", launching.launch)),
    "srun": Program("launch", launching.srun),
    **dict.fromkeys(launching.REQUESTS, Program("job", launching.request)),
    **dict.fromkeys(("module", "ml"), Program("modules", modulelines.module)),
    **dict.fromkeys(("source", "."), Program("modules", modulelines.source)),
    **dict.fromkeys(("conda", "mamba", "micromamba"), Program("conda", packages.conda)),
    "pip": Program("packages", packages.pip),
    "python": Program("packages", packages.python),
    "virtualenv": Program("packages", packages.virtualenv),
    "uv": Program("packages", packages.uv),
    "git": Program("", packages.git),
    **dict.fromkeys(("singularity", "apptainer"), Program("container", launching.container)),
    **dict.fromkeys(_EXPORTS, Program("environment.run", _export)),
}  # fmt: skip
# Tables whose values contain no variables, but for these keys.
_PLAIN = frozenset({"environment", "container", "job", "network", "launch"})
_FOLDERS = frozenset({"output", "error", "binds"})
_VERSIONED = re.compile(r"(?:.*/)?(python|pip)[\d.]*")
_NAMED = re.compile(r"\$([A-Za-z_]\w*)")


def _program(statement: Statement) -> Program | None:
    name = (statement.words or ("",))[0]
    found = _VERSIONED.fullmatch(name)
    return PROGRAMS.get(found[1] if found else name)


def known(name: str) -> bool:
    return name != "." and (name in PROGRAMS or bool(_VERSIONED.fullmatch(name)))


def read_page(text: str, source: str, lines: tuple[int, int] = EVERY_LINE) -> Found:
    """Every command of a page.

    Args:
        source: its name, for the origins of values.
        lines: the first and last line to read commands from. The page is parsed as a whole: a
            range may begin or end within a block of code.
    """
    every = text.split("\n")
    reader = _Reader(source)
    for block in blocks("\n".join(every[:MOST_LINES]), source):
        first, last = lines[0] - block.line, lines[1] - block.line
        kept = tuple(text if first <= at <= last else "" for at, text in enumerate(block.lines))
        if any(kept):
            reader.read_block(block._replace(lines=kept))
        if reader.has_too_many:
            break
    return reader.found(more_lines=len(every) > MOST_LINES)


class _Job(NamedTuple):
    """What the directives or options of a job mean.

    Attributes:
        read: with the lines that they come from.
        launches: whether the script that they are in starts ranks; None outside of scripts.
    """

    read: tuple[tuple[Statement, Read], ...]
    launches: bool | None


class _Part(NamedTuple):
    """Consecutive lines of the page.

    Attributes:
        does: the tables, and the key, that it has values for.
    """

    first: int
    last: int
    section: int
    does: frozenset[str | Key] = frozenset()

    def joined(self, other: _Part) -> _Part:
        return self._replace(last=other.last, does=self.does | other.does)


class _Reader:
    """Reads the blocks of one page, in order.

    Attributes:
        lines: every line that may be a command, by its number.
        parts: the sections of the page.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.page = Page()
        self.variables: dict[str, str] = {}
        self.jobs: list[_Job] = []
        self.values: list[Value] = []
        self.left: list[Left] = []
        self.lines: dict[int, Left] = {}
        self.parts: list[_Part] = []
        self.commands = self.read = 0

    @property
    def has_too_many(self) -> str:
        """The limit that stopped reading, or ""."""
        if self.commands > MOST_COMMANDS:
            return f"{MOST_COMMANDS} commands"
        return f"{MOST_VALUES} values" if self.read > MOST_VALUES else ""

    def found(self, *, more_lines: bool) -> Found:
        self._keep_jobs()
        values = self._without_other_ways()
        loads = modulelines.drafted(self.page.loads, builds_horovod=self.page.builds_horovod)
        if most := self.has_too_many or (f"{MOST_LINES} lines" if more_lines else ""):
            told = f"it has more than {most}, and the rest was not read"
            self.left.append(Left(Origin(self.source), told))
        values = directives.with_scheduler([*loads, *values])
        return Found(tuple(values), tuple(self.left), tuple(self.lines.values()), self.commands)

    def read_block(self, block: Block) -> None:
        script = read_script(block, self.source, known, MOST_COMMANDS - self.commands + 1)
        self.lines |= {each.origin.line: each for each in script.lines}
        before = len(self.values)
        if block.kind in packagefiles.READERS:
            read = packagefiles.READERS[block.kind](block, self.source, self.page)
            self._read_all(read)
        else:
            self._read_script(script.statements)
        self._note_parts(block, [each for each in self.values[before:] if each.weight != INFERRED])
        for inner in script.inner:
            self.read_block(inner._replace(section=block.section))

    def _note_parts(self, block: Block, new: list[Value]) -> None:
        """What the block adds to its section. Another environment begins another part."""
        creations = {each.origin.line for each in new if each.key in _CREATES}
        starts = sorted({block.line, *creations})
        ends = [*(start - 1 for start in starts[1:]), block.line + len(block.lines) - 1]
        for first, last in zip(starts, ends, strict=True):
            keys = {each.key for each in new if first <= each.origin.line <= last}
            does = frozenset(key[0] for key in keys) | (_CREATES & keys)
            part = _Part(first, last, block.section, does)
            before = self.parts[-1] if self.parts else part._replace(section=-1)
            if before.section == part.section and not before.does & part.does >= _CREATES:
                part = self.parts.pop().joined(part)
            self.parts.append(part)

    def _read_script(self, statements: tuple[Statement, ...]) -> None:
        batch = any(each.batch for each in statements)
        other = directives.unsupported(statements)
        before = len(self.values)
        if batch:  # it starts from nothing
            self.page.loads.purge()
        resolved = map(self._resolved, _without_python(statements))
        fields = self._read_all((each, self._read(each, other)) for each in resolved)
        new = self.values[before:]
        launches = any(each.key == at("launch.launcher") for each in new)
        for job in _jobs(fields):
            meant = directives.values_of(job, self._scheduler_of(job[0].statement))
            self.jobs.append(_Job(tuple(meant), launches if batch else None))
        if batch:
            self.page.loads.purge()

    def _read_all(self, read: Iterable[tuple[Statement, Iterator[Read | Field]]]) -> list[Field]:
        """Keep what commands mean; the options of batch systems mean something together."""
        fields = list[Field]()
        for statement, reads in read:
            if self.has_too_many:
                break
            self.commands += 1
            for each in islice(reads, MOST_VALUES + 1):
                self.read += 1
                if isinstance(each, Field):
                    fields.append(each)
                elif isinstance(each, Value) and each.key == modulelines.LOAD and _is_stated(each):
                    self.page.loads.add(_stated(statement, each))
                else:
                    self._keep(statement, each)
        return fields

    def _without_other_ways(self) -> list[Value]:
        """The values of the first way to an environment. The lines of the others are left.

        What creates another environment after the first one is complete, or a section that builds
        Horovod for another framework, begins another way. Jobs belong to all of them.
        """
        ways = [_Part(0, 0, 0)]
        for part in self.parts:
            both = ways[-1].does & part.does
            complete = _INSTALLS & ways[-1].does
            if (both >= _CREATES and complete) or both >= _INSTALLS:
                ways.append(part)
            else:
                ways[-1] = ways[-1].joined(part)
        values = list[Value]()
        for each in self.values:
            way = next((w for w in ways[1:] if w.first <= each.origin.line <= w.last), None)
            if way and each.key[0] in _OF_WAYS:
                told = f"another way: `--lines {way.first}-{way.last}` drafts it"
                self.left.append(Left(each.origin, told, table=OTHER_WAY))
            else:
                values.append(each)
        return values

    def _keep_jobs(self) -> None:
        """Values of the jobs; those of a script that starts ranks have precedence."""
        other = leave("the page starts ranks in another script", understood=True)
        another = any(each.launches for each in self.jobs)
        for job in self.jobs:
            for statement, read in job.read:
                launched = _table_of(statement) == "launch" and not statement.batch
                outdone = another and (job.launches is False or launched)
                self._keep(statement, other if outdone else read)

    def _scheduler_of(self, statement: Statement) -> str:
        if statement.directive:
            return directives.scheduler_of(statement.origin.text)
        return launching.REQUESTS.get(statement.words[0]) or self.page.scheduler

    def _keep(self, statement: Statement, read: Read) -> None:
        if isinstance(read, Value) and not _is_stated(read):
            read = leave(f"the page does not state {'.'.join(read.key)}")
        if isinstance(read, Value):
            self.values.append(_stated(statement, read))
            return
        table = _table_of(statement)
        placed = not read.understood or table == "job"
        left = read._replace(origin=statement.origin, table=table if placed else "")
        if left not in self.left[-5:]:
            self.left.append(left)

    def _resolved(self, statement: Statement) -> Statement:
        """With the texts of variables that the page has set before."""

        def fill(text: str) -> str:
            return _NAMED.sub(lambda found: self.variables.get(found[1], found[0]), text)

        variables = tuple((name, fill(value)) for name, value in statement.variables)
        if not statement.words or statement.words[0] in _EXPORTS:
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
            if scheduler := directives.scheduler_of(statement.origin.text):
                self.page.scheduler = scheduler
                yield Value(at("scheduler"), scheduler)
                yield from directives.fields_of_directive(statement)
        else:
            yield from _variables(statement)
            program = _program(statement)
            if program:
                yield from program.read(statement, self.page)
            elif statement.words and statement.words[0].strip("."):
                yield leave(f"hvdenv does not know {statement.words[0]}")


def _stated(statement: Statement, value: Value) -> Value:
    stated = SCRIPT if statement.batch else COMMAND
    weight = INFERRED if value.weight == INFERRED else stated
    return value._replace(origin=statement.origin, weight=weight)


def _is_stated(value: Value) -> bool:
    """Whether a value is complete. Where none is a folder, it contains no variable."""
    text, key = str(value.value), value.key
    variable = key == modulelines.LOAD or (key[0] in _PLAIN and key[-1] not in _FOLDERS)
    return not (UNKNOWN in text or "$PWD" in text or (variable and "$" in text))


def _table_of(statement: Statement) -> str:
    """The table of the recipe that a command is about."""
    if statement.directive:
        return "job"
    program = _program(statement)
    return program.table if program else "" if statement.words else "environment.run"


def _variables(statement: Statement) -> Iterator[Read]:
    """Variables alone, or those in front of Horovod's build or its ranks."""
    table = _table_of(statement)
    if statement.variables and table not in ("environment.run", "packages", "launch"):
        yield leave("its variables are for this command only")
        return
    for name, value in statement.variables:
        yield from variable(name, value, exported=bool(statement.words))


def _without_python(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Without what is typed into an interactive Python."""
    inside = False
    for statement in statements:
        starts = len(statement.words) == 1 and _program(statement) == PROGRAMS["python"]
        inside = starts or (inside and not known((statement.words or ("",))[0]))
        if not inside or starts:
            yield statement


def _jobs(fields: Iterable[Field]) -> Iterable[list[Field]]:
    """A script is one job: its directives, and the ranks that it starts. So is each command line."""
    jobs = dict[int, list[Field]]()
    for each in fields:
        launched = each.field in directives.OF_LAUNCHER
        of_script = each.statement.directive or (launched and each.statement.batch)
        line = 0 if of_script else each.statement.origin.line
        jobs.setdefault(line, []).append(each)
    return jobs.values()
