"""What programs in an environment show about it: its extensions, its MPI, its files.

Each function takes the seconds that it has as `timeout`.
"""

import base64
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv.base.command import Command, Outcome
from hvdenv.base.errors import InterruptedRunError, StepError
from hvdenv.base.masking import clean, plain
from hvdenv.base.schema import Problem, decode, mapped
from hvdenv.environments import generations, manifest
from hvdenv.environments.installation import PYTHON_PATH, Installation
from hvdenv.sites.launchers import MpiVersion, parse_mpi_version
from hvdenv.standalone.ranks.events import ExtensionFacts, RendezvousFacts
from hvdenv.verification import drift
from hvdenv.verification.setup import FRAMEWORKS, HostMpi, Setup

# The rows of frameworks, by the names of their modules.
CHECK_BUILD_ROWS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "mxnet": "MXNet"}
_LINE = re.compile(
    r"\s*(?:(?P<title>Horovod) v(?P<version>\d+\.\d[\w.+!-]*):|Available (?P<section>\w+(?: \w+)*):"
    r"|\[(?P<mark>[X ])\] (?P<row>\w+))\s*"
)
# The lines of a table. Up to Horovod 0.18.2 it has a row MLSL, since 0.19.0 a row CCL.
_TABLES = [
    [
        *("Horovod", "Frameworks", "TensorFlow", "PyTorch", "MXNet", "Controllers", "MPI", "Gloo"),
        *("Tensor Operations", "NCCL", "DDL", third, "MPI", "Gloo"),
    ]
    for third in ("CCL", "MLSL")
]


class CheckBuild(NamedTuple):
    """What was built according to ``horovodrun --check-build``: evidence, not proof.

    Attributes:
        tensor_operations: ``NCCL``, ``DDL``, ``CCL`` (``MLSL`` up to 0.18.2), ``MPI``, ``Gloo``.
    """

    version: str
    frameworks: dict[str, bool]
    controllers: dict[str, bool]
    tensor_operations: dict[str, bool]


def parse_check_build(text: str) -> CheckBuild:
    """The table in an output of ``horovodrun --check-build``, of any Horovod.

    Other lines before, in and after the table are ignored.

    Raises:
        ValueError: the table is not whole; the message says what is missing.
    """
    found = [line for line in map(_LINE.fullmatch, plain(text).split("\n")) if line]
    names = [line["title"] or line["section"] or line["row"] for line in found]
    if names not in _TABLES:
        raise ValueError(
            f"its lines are {', '.join(names) or 'missing'}" if text.strip() else "no output"
        )
    marks = [(line["row"], line["mark"] == "X") for line in found]
    return CheckBuild(found[0]["version"], dict(marks[2:5]), dict(marks[6:8]), dict(marks[9:]))


# Files that are compared byte by byte: Horovod's, and the MPI's that it calls.
_CLOSELY = re.compile(r"/site-packages/horovod/|/libmpi[\w-]*\.so[.\d]*\Z")


class BuildTable(NamedTuple):
    """The result of ``horovodrun --check-build``.

    Attributes:
        table: None if there is no whole table in the output; `problem` says why.
    """

    table: CheckBuild | None
    problem: str
    outcome: Outcome


class Extension(NamedTuple):
    """One framework's part of Horovod (hvdenv/standalone/inspect/extension.py reports it)."""

    framework: str
    outcome: Outcome
    facts: ExtensionFacts = ExtensionFacts()

    @property
    def present(self) -> bool:
        return bool(self.facts.size)

    @property
    def cut_off(self) -> bool:
        """Whether its file is shorter than it says itself: to load it is to crash."""
        return self.facts.size < self.facts.size_by_header

    @property
    def usable(self) -> bool:
        """Whether it is there, imports, and says what it was built with."""
        return self.present and bool(self.facts.built) and not self.facts.error

    def built(self, name: str) -> int | None:
        return self.facts.built.get(name)


# By framework.
Extensions = Mapping[str, Extension]


# What an environment had at the end of its build, and has; None if its build recorded nothing
# that can be compared.
Observed = tuple[drift.Observation, drift.Observation] | None


def host_mpi(setup: Setup, timeout: float) -> HostMpi:
    """The MPI of the mpirun that is found first."""
    path = setup.which("mpirun")
    if not path:
        return MpiVersion("unknown"), ""
    # The ranks need time too, even if this hangs.
    found = parse_mpi_version(setup.run((path, "--version"), min(timeout / 3, 60.0)).output)
    return found, f"{path} ({found.kind} {found.version})"


def image_mpi(setup: Setup, timeout: float) -> MpiVersion:
    """The MPI of the image, as its own mpirun reports it."""
    argv = (*setup.installation.inside, "mpirun", "--version")
    return parse_mpi_version(setup.run(argv, min(timeout / 3, 60.0)).output)


def hidden_modules(installation: Installation) -> dict[str, str]:
    """Files on PYTHONPATH that are imported instead of modules of Python itself."""
    found: dict[str, str] = {}
    folders = dict(installation.env).get(PYTHON_PATH, "").split(os.pathsep)
    for folder in filter(os.path.isabs, () if installation.inside else folders):
        for path in sorted(Path(folder).glob("*")):
            name, _, ending = path.name.partition(".")
            module = ending.endswith(("py", "so")) or (path / "__init__.py").exists()
            if module and name in sys.stdlib_module_names:
                found.setdefault(name, str(path))
    return found


def extension_files(setup: Setup, timeout: float) -> Extensions:
    """The facts about each framework's extension that its files show; nothing is imported."""
    return _extensions(setup, timeout, FRAMEWORKS)


def import_extension(setup: Setup, timeout: float, library: Extension) -> Extension:
    """The facts about an extension that an import in a process of its own shows, if it is whole."""
    if not library.present or library.cut_off:
        return library
    found = _extensions(setup, timeout, (library.framework,), "--import")[library.framework]
    if found.facts.framework:
        return found
    return found._replace(facts=library.facts._replace(traceback=found.outcome.tail(40)))


def _extensions(
    setup: Setup, timeout: float, frameworks: tuple[str, ...], *options: str
) -> dict[str, Extension]:
    outcome, answers = _inspect(setup, timeout, "extension", *options, *frameworks)
    found = {name: Extension(name, outcome) for name in frameworks}
    for table in answers:
        facts = mapped(decode(ExtensionFacts, table, lenient=True), clean)
        found[facts.framework] = Extension(facts.framework, outcome, facts)
    return found


def _inspect(
    setup: Setup, timeout: float, program: str, *words: str
) -> tuple[Outcome, Iterator[Any]]:
    """Run a program of standalone/inspect; returns what it reports as well, to be decoded."""
    installation = setup.installation
    path = f"{installation.programs}/inspect/{program}.py"
    outcome = setup.run((*installation.inside, installation.python, "-s", path, *words), timeout)
    lines = [line.split(" ", 1) for line in outcome.output.splitlines()]
    payloads = [each[1] for each in lines if each[0] == f"@hvdenv-{program}" and each[1:]]
    return outcome, (json.loads(base64.b64decode(payload)) for payload in payloads)


def rendezvous(setup: Setup, timeout: float) -> RendezvousFacts:
    """Whether servers of horovodrun accept requests that the advisories describe."""
    outcome, answers = _inspect(setup, timeout, "rendezvous")
    for table in answers:
        return decode(RendezvousFacts, table, lenient=True)
    return RendezvousFacts(error="the probe printed no result", traceback=outcome.tail(20))


def build_table(setup: Setup, timeout: float, libraries: Extensions) -> BuildTable:
    """Horovod's own table."""
    installation = setup.installation
    program = installation.program("horovodrun")
    if not program:
        command = Command(("horovodrun", "--check-build"))
        return BuildTable(None, "there is no horovodrun", Outcome(command, 127, "", 0.0))
    quick = (f"{installation.programs}/inspect/horovodrun.py", "check")
    present = (name for name, each in libraries.items() if each.present and not each.cut_off)
    found = _check_build(setup, (installation.python, "-s", *quick, program, *present), timeout)
    left = timeout - found.outcome.seconds
    if found.table or left < 1:
        return found
    # As a user runs it: each framework may work in a process of its own only.
    return _check_build(setup, (program, "--check-build"), left)


def _check_build(setup: Setup, argv: tuple[str, ...], timeout: float) -> BuildTable:
    # Up to 0.24.3 a pipe gets no output otherwise.
    env = (("PYTHONUNBUFFERED", "1"), ("TF_CPP_MIN_LOG_LEVEL", "1"), ("OMP_NUM_THREADS", "1"))
    outcome = setup.run((*setup.installation.inside, *argv), timeout, env)
    try:
        return BuildTable(parse_check_build(outcome.output), "", outcome)
    except ValueError as error:
        return BuildTable(None, str(error), outcome)


def changed_files(setup: Setup, timeout: float) -> list[manifest.ChangedFile]:
    """The files of a generation that differ from those at the end of its build.

    Raises:
        StepError: the time was too short.
        InterruptedRunError: the runner was stopped.
    """
    end = time.monotonic() + timeout
    folder = Path(setup.installation.generation)

    def go_on() -> None:
        if setup.runner.stopped:
            raise InterruptedRunError
        if time.monotonic() > end:
            raise StepError(
                f"not all files could be compared within {timeout:.0f} s",
                where=str(folder),
                remedy="check whether the file system is slow, or allow more time with --timeout",
            )

    record = generations.read_record(folder / generations.RECORD)
    listed = manifest.read(folder / manifest.NAME, record.manifest_digest)
    return manifest.compare(folder, listed, lambda path: bool(_CLOSELY.search(path)), go_on)


def observed(setup: Setup, timeout: float, mpi: HostMpi) -> Observed:
    """What a generation has now, and what it had according to its record."""
    record = generations.read_record(Path(setup.installation.generation) / generations.RECORD)
    try:
        was = decode(drift.Observation, record.observed, lenient=True)
    except Problem:
        return None
    return was, observe(setup, timeout, mpi[0])


def observe(setup: Setup, timeout: float, mpi: MpiVersion) -> drift.Observation:
    """What an environment has, with the MPI of the mpirun found first; no framework is imported.

    Paths are relative to the generation of the installation.

    Raises:
        StepError: there is no answer, or none that can be read.
    """
    installation = setup.installation
    outcome, answers = _inspect(setup, timeout, "observe_env", installation.generation)
    try:
        found = [*answers][-1]
        found["mpirun"].update(kind=mpi.kind, version=mpi.version)
        return decode(drift.Observation, found, lenient=True)
    except (IndexError, ValueError, Problem) as error:
        raise StepError(
            "the contents of this environment could not be observed",
            where=installation.python,
            detail=outcome.tail(15) if isinstance(error, IndexError) else str(error),
            remedy=f"see whether this Python works: {installation.python} -c 'import sysconfig'",
        ) from error
