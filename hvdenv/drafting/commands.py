"""Reads a page: each of its commands into values of a recipe, or into the reason why not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, get_args

from hvdenv.drafting import directives, launching, modulelines, packagefiles, packages
from hvdenv.drafting.pages import Block, blocks
from hvdenv.drafting.shell import PLACEHOLDER, UNKNOWN, Rest, Statement, read_script
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
_OTHERS = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "horovodrun", "aprun",
                     "ibrun", "prun", "lrun", "mpirun_rsh", "torchrun"})  # fmt: skip
LAUNCHERS = _OTHERS | {
    each for each in get_args(LauncherName) if not each.startswith("horovodrun-")
}
_REQUESTS = {"salloc": "slurm", "sbatch": "slurm", "sinteractive": "slurm", "srun": "slurm",
             "bsub": "lsf"}  # fmt: skip
_CONDA = frozenset({"conda", "mamba", "micromamba"})
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_NAMED = re.compile(r"\$([A-Za-z_]\w*)")
_PIP = re.compile(r"(?:.*/)?pip[\d.]*")
_INTERACTIVE = frozenset({"idev", "qrsh", "qlogin", "srun_gpu", "interact", "sdev", "si"})
# Programs that change no environment that a recipe describes.
_PROGRAMS = (
    "cd mkdir ls ll cp mv rm cat echo vi vim nano emacs less more tail head chmod pwd which whereis wget"
    " curl tar unzip ssh scp rsync squeue scancel sinfo scontrol sacct qstat qdel bjobs watch nvidia-smi"
    " rocm-smi date hostname printenv sleep wait touch deactivate exit clear htop top grep sed awk find"
    " tree tee sort uniq wc cut xargs df du quota id groups whoami uname lscpu nproc jupyter tensorboard pytest test true printf"
    " set shopt ulimit umask unset squeue showq sacctmgr bpeek bkill quota clush tmux screen python3-config kill rsync let"
)
_NO_EFFECT = frozenset(_PROGRAMS.split())
_PROFILES = re.compile(
    r"(?:~|\$HOME)/\.\w+|.*/(?:etc/profile\.d/conda\.sh|bin/activate|\.bashrc|activate)|activate"
)
# The table of lines that are about another way to an environment, and what ways differ in.
OTHER_WAY = "another way"
_CREATES = frozenset({at("python.provider")})
_OF_WAYS = frozenset({"python", "conda", "frameworks", "packages", "build_tools", "horovod"})


def _of_environment(name: str) -> bool:
    """Whether the variables in front of a program are for Horovod's build or its ranks."""
    programs = LAUNCHERS | {"export", "declare", "local", "typeset", "uv"}
    return name in programs or bool(_PYTHON.fullmatch(name) or _PIP.fullmatch(name))


def known(name: str) -> bool:
    return (
        name in LAUNCHERS | _CONDA | _NO_EFFECT | _INTERACTIVE | _REQUESTS.keys()
        or (name in _HANDLERS and name != ".")
        or bool(_PYTHON.fullmatch(name) or _PIP.fullmatch(name))
    )


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
    """A section of the page.

    Attributes:
        does: the tables, and the key, that it has values for.
    """

    first: int
    last: int
    does: frozenset[str | Key] = frozenset()

    def joined(self, other: _Part) -> _Part:
        return _Part(self.first, other.last, self.does | other.does)


class _Reader:
    """Reads the blocks of one page, in order.

    Attributes:
        scheduler: of the directives read so far, or implied by a program; empty if unknown.
        lines: every line that may be a command, by its number.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.scheduler = ""
        self.page = packages.Page()
        self.loads = modulelines.Loads()
        self.variables: dict[str, str] = {}
        self.jobs: list[_Job] = []
        self.values: list[Value] = []
        self.left: list[Left] = []
        self.lines: dict[int, Left] = {}
        self.parts: list[_Part] = []
        self.section = -1
        self.commands = self.read = 0

    @property
    def has_too_many(self) -> str:
        """The limit that stopped reading, or ""."""
        if self.commands > MOST_COMMANDS:
            return f"{MOST_COMMANDS} commands"
        return f"{MOST_VALUES} values" if self.read > MOST_VALUES else ""

    def found(self, *, more_lines: bool) -> Found:
        self._keep_jobs()
        values, others = self._without_other_ways()
        loads = modulelines.drafted(self.loads, builds_horovod=self.page.builds_horovod)
        most = self.has_too_many or (f"{MOST_LINES} lines" if more_lines else "")
        told = f"it has more than {most}, and the rest was not read"
        left = (*self.left, *others, *([Left(Origin(self.source), told)] if most else []))
        values = directives.with_scheduler([*loads, *values])
        return Found(tuple(values), left, tuple(self.lines.values()), self.commands)

    def read_block(self, block: Block) -> None:
        script = read_script(block, known, MOST_COMMANDS - self.commands + 1)
        for line in script.rest:
            self.lines[line.line] = Left(self._origin(line), line.reason, True)
        if block.kind in packagefiles.READERS:
            self._read_all(block, packagefiles.READERS[block.kind](block, self.page))
            return
        statements = list(_without_python(script.statements))
        batch = any(each.batch for each in statements)
        if batch:  # it starts from nothing
            self.loads.purge()
        other = directives.unsupported(statements)
        self._read_all(
            block, ((each, self._read(each, other)) for each in map(self._resolved, statements))
        )
        if batch:
            self.loads.purge()
        for inner in script.inner:
            self.read_block(inner._replace(section=block.section))

    def _read_all(
        self, block: Block, read: Iterable[tuple[Statement, Iterator[Read | directives.Field]]]
    ) -> None:
        fields, before, batch = list[directives.Field](), len(self.values), False
        for statement, reads in read:
            if self.has_too_many:
                break
            self.commands += 1
            batch |= statement.batch
            for each in islice(reads, MOST_VALUES + 1):
                self.read += 1
                if isinstance(each, directives.Field):
                    fields.append(each)
                else:
                    self._keep(statement, each)
        new = self.values[before:]
        launches = any(each.key == at("launch.launcher") for each in new)
        for job in _jobs(fields):
            meant = directives.values_of(job, self._scheduler_of(job[0].statement))
            self.jobs.append(_Job(tuple(meant), launches if batch else None))
        self._note_part(block, new)

    def _note_part(self, block: Block, new: Sequence[Value]) -> None:
        """What the block adds to its section."""
        keys = {each.key for each in new if each.weight != INFERRED}
        does = frozenset(key[0] for key in keys) | (_CREATES & keys)
        part = _Part(block.line, block.line + len(block.lines) - 1, does)
        if block.section == self.section and self.parts:
            part = self.parts.pop().joined(part)
        self.parts.append(part)
        self.section = block.section

    def _without_other_ways(self) -> tuple[list[Value], list[Left]]:
        """The values of the first way to an environment, and the lines of the others.

        A section that creates another environment, or builds Horovod for another framework,
        begins another way. The job's sections belong to all of them.
        """
        ways = [_Part(0, 0)]
        for part in self.parts:
            both = ways[-1].does & part.does
            if both >= _CREATES or {"horovod", "frameworks"} <= both:
                ways.append(part)
            else:
                ways[-1] = ways[-1].joined(part)
        values, left = list[Value](), list[Left]()
        for each in self.values:
            way = next((w for w in ways[1:] if w.first <= each.origin.line <= w.last), None)
            if way and each.key[0] in _OF_WAYS:
                told = f"another way: `--lines {way.first}-{way.last}` drafts it"
                left.append(Left(each.origin, told, table=OTHER_WAY))
            else:
                values.append(each)
        return values, left

    def _keep_jobs(self) -> None:
        """Values of the jobs; not those of scripts without ranks, if others start them."""
        other = leave("the page starts ranks in another script", understood=True)
        another = any(each.launches for each in self.jobs)
        for job in self.jobs:
            for statement, read in job.read:
                self._keep(statement, other if another and job.launches is False else read)

    def _scheduler_of(self, statement: Statement) -> str:
        if statement.directive:
            return directives.scheduler_of(statement.text)
        return _REQUESTS.get(statement.words[0], self.scheduler)

    def _origin(self, line: Statement | Rest) -> Origin:
        return Origin(self.source, line.line, line.text, line.last)

    def _keep(self, statement: Statement, read: Read) -> None:
        origin = self._origin(statement)
        if isinstance(read, Left):
            table = _table_of(statement)
            placed = not read.understood or table == "job"
            left = read._replace(origin=origin, table=table if placed else "")
            if left not in self.left[-5:]:
                self.left.append(left)
        elif UNKNOWN in str(read.value) or PLACEHOLDER in str(read.value):
            told = f"the page does not state {'.'.join(read.key)}"
            self.left.append(Left(origin, told, table=".".join(read.key[:-1])))
        else:
            stated = SCRIPT if statement.batch else COMMAND
            weight = INFERRED if read.weight == INFERRED else stated
            self.values.append(read._replace(origin=origin, weight=weight))

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

    def _read(self, statement: Statement, unsupported: str) -> Iterator[Read | directives.Field]:
        if statement.directive and unsupported:
            yield leave(
                f"hvdenv does not support {unsupported}: see docs/how-to/add-a-scheduler.md"
            )
        elif statement.directive:
            self.scheduler = directives.scheduler_of(statement.text)
            yield Value(at("scheduler"), self.scheduler)
            yield from directives.fields_of_directive(statement)
        else:
            yield from self._variables(statement)
            if statement.words:
                yield from self._command(statement)

    def _variables(self, statement: Statement) -> Iterator[Read]:
        exported = bool(statement.words)
        if exported and statement.variables and not _of_environment(statement.words[0]):
            yield leave("its variables are for this command only")
            return
        for name, value in statement.variables:
            yield from variable(name, value, exported=exported)

    def _command(self, statement: Statement) -> Iterator[Read | directives.Field]:
        name, *words = statement.words
        if name in _HANDLERS:
            yield from _HANDLERS[name](self, statement)
        elif name in _CONDA:
            yield from packages.conda(words, self.page)
        elif _PIP.fullmatch(name):
            yield from packages.pip(words, self.page)
        elif _PYTHON.fullmatch(name):
            yield from self._python(name, words)
        elif name in LAUNCHERS:
            yield from launching.launch(statement)
        elif name in _REQUESTS:
            yield Value(at("scheduler"), _REQUESTS[name], weight=INFERRED)
            yield from launching.request(statement, _REQUESTS[name])
        elif name in _INTERACTIVE:
            yield leave("for an interactive job: hvdenv shell", understood=True)
        elif name in _NO_EFFECT:
            yield leave("it changes nothing that a recipe describes", understood=True)
        elif name.strip("."):
            yield leave(f"hvdenv does not know {name}")

    def _python(self, name: str, words: list[str]) -> Iterator[Read]:
        if words[:1] == ["-m"] and words[1:2] in (["venv"], ["virtualenv"]):
            yield from packages.venv(words[2:], name)
        elif words[:2] == ["-m", "pip"]:
            yield from packages.pip(words[2:], self.page)
        elif words[:1] == ["setup.py"] and {"install", "develop", "build"} & set(words):
            yield from self.page.build_source()
        else:
            yield leave("a program of the page", understood=True)

    def _module(self, statement: Statement) -> Iterator[Read]:
        name, *words = statement.words
        words = list(modulelines.words_of_ml(words) if name == "ml" else words)
        weight = SCRIPT if statement.batch else COMMAND
        for read in modulelines.module(words[: MOST_VALUES + 1]):
            if (
                isinstance(read, str)
                and "$" not in read
                and UNKNOWN not in read
                and PLACEHOLDER not in read
            ):
                self.loads.add(modulelines.Load(read, self._origin(statement), weight))
                self.read += 1
            elif isinstance(read, str):
                yield leave("the page does not state the module")
            elif isinstance(read, Value) and self.loads.refuses(read, statement.line):
                yield leave("recipes unload modules before they load others")
            else:
                yield read

    def _source(self, statement: Statement) -> Iterator[Read]:
        path = (statement.words[1:2] or ("",))[0]
        if _PROFILES.fullmatch(path) or PLACEHOLDER in path:
            yield leave("hvdenv activates the environment itself", understood=True)
        else:
            yield leave(
                "what does this script set? hvdenv does not run it; if the environment needs it, add it"
                " to modules.source: then every check, build and job runs it"
            )

    def _qsub(self, statement: Statement) -> Iterator[Read | directives.Field]:
        """qsub belongs to several batch systems: options tell which."""
        words = statement.words[1:]
        select = any(word.startswith(("select=", "nodes=")) for word in words)
        gridengine = "-pe" in words or "-g" in words
        marks = {"pbs": select, "gridengine": gridengine, "cobalt": "-n" in words}
        scheduler = self.scheduler or next((name for name, found in marks.items() if found), "")
        if scheduler in marks:
            self.scheduler = scheduler
            yield Value(at("scheduler"), scheduler, weight=INFERRED)
            yield from launching.request(statement, scheduler)
        else:
            yield leave("hvdenv submits jobs itself", understood=True)

    def _export(self, statement: Statement) -> Iterator[Read]:
        if not statement.variables:
            yield leave("the page sets its value elsewhere", understood=True)

    def _uv(self, statement: Statement) -> Iterator[Read]:
        words = statement.words[1:]
        if words[:1] == ("venv",):
            yield from packages.venv(words[1:])
        elif words[:1] == ("pip",):
            yield from packages.pip(words[1:], self.page)
        else:
            yield leave(f"recipes have no key for uv {' '.join(words[:1])}")


def _table_of(statement: Statement) -> str:
    """The table of the recipe that a command is about."""
    if statement.directive:
        return "job"
    name = (statement.words or ("",))[0]
    if name in LAUNCHERS:
        return "launch"
    if _PIP.fullmatch(name) or _PYTHON.fullmatch(name):
        return "packages"
    named = (table for table, names in _TABLES.items() if name in names)
    return next(named, "")


_EXPORTS = frozenset({"export", "declare", "local", "typeset"})
_TABLES: dict[str, Collection[str]] = {
    "environment.run": {"", *_EXPORTS},
    "modules": {"module", "ml", "source", "."},
    "job": _REQUESTS.keys() | {"qsub"},
    "conda": _CONDA,
    "packages": {"uv", "virtualenv"},
    "container": {"singularity", "apptainer"},
}


def _without_python(statements: Iterable[Statement]) -> Iterator[Statement]:
    inside = False
    for statement in statements:
        name = (statement.words or ("",))[0]
        inside = bool(len(statement.words) == 1 and _PYTHON.fullmatch(name)) or (
            inside and not known(name)
        )
        if not inside or _PYTHON.fullmatch(name):
            yield statement


def _jobs(fields: Iterable[directives.Field]) -> Iterable[list[directives.Field]]:
    """A script is one job: its directives, and the ranks that it starts. So is each command line."""
    jobs = dict[int, list[directives.Field]]()
    for each in fields:
        of_script = each.statement.directive or each.field in directives.OF_LAUNCHER
        line = 0 if of_script else each.statement.line
        jobs.setdefault(line, []).append(each)
    return jobs.values()


_HANDLERS: dict[str, Callable[[_Reader, Statement], Iterator[Read | directives.Field]]] = {
    "module": _Reader._module,
    "ml": _Reader._module,
    "source": _Reader._source,
    ".": _Reader._source,
    **dict.fromkeys(_EXPORTS, _Reader._export),
    "srun": lambda _, statement: launching.srun(statement),
    "qsub": _Reader._qsub,
    "uv": _Reader._uv,
    "virtualenv": lambda _, statement: packages.venv(statement.words[1:]),
    "git": lambda reader, statement: packages.git(statement.words[1:], reader.page),
    "singularity": lambda _, statement: launching.container(statement.words),
    "apptainer": lambda _, statement: launching.container(statement.words),
}
