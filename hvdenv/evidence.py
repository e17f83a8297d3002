"""The facts that verify judges: each comes from running something in the environment.

A fact is a function; its parameters name what it needs: other facts, or what the caller
of verify gave. One with a parameter ``framework`` or ``controller`` exists once for each.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv import generations, manifest
from hvdenv.checkbuild import CheckBuild, parse
from hvdenv.command import Command, Outcome
from hvdenv.errors import CheckBuildError
from hvdenv.installation import Expectation, Installation
from hvdenv.launchers import LAUNCHERS, Launch, Mpi, parse_mpi_version
from hvdenv.masking import mask, plain
from hvdenv.ranks import RankRun, collect, parse_events
from hvdenv.runner import Runner

FRAMEWORKS = ("torch", "tensorflow", "mxnet")
CONTROLLERS = ("MPI", "Gloo")
ROWS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "mxnet": "MXNet"}

_PROBES = Path(__file__).parent / "probes"
_EXTENSION = "@hvdenv-extension "
# Launchers forward what they see, horovodrun even on command lines that others can read.
_FOR_RANKS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LC_\w+|LD_LIBRARY_PATH|PYTHONNOUSERSITE"
    r"|SLURM_\w+|PBS_\w+|LSB_\w+|LS_SUBCWD|COBALT_\w+|PE_HOSTFILE|XDG_RUNTIME_DIR"
    r"|(UCX|FI|PSM2?|OMPI_MCA|PRTE_MCA|PMIX_MCA)_\w+"
)
# What a launcher needs before and after its ranks' own deadline.
_LAUNCHER_SECONDS = 20.0


class BuildTable(NamedTuple):
    """What came of ``horovodrun --check-build``.

    Attributes:
        table: None if there is no whole table in the output.
        problem: why there is none.
        outcome: of the run that counts.
        verbose: output with ``--verbose``; only where something is missing.
    """

    table: CheckBuild | None
    problem: str
    outcome: Outcome
    verbose: str = ""


class Extension(NamedTuple):
    """One framework's part of Horovod (hvdenv/probes/extension.py reports it)."""

    framework: str
    outcome: Outcome
    facts: dict[str, Any]

    @property
    def present(self) -> bool:
        return bool(self.facts.get("size"))

    @property
    def usable(self) -> bool:
        """Whether it is there, imports, and says what it was built with."""
        return self.present and "built" in self.facts and not self.facts.get("error")

    def built(self, name: str) -> int | None:
        """What ``<name>_built()`` says; None if it cannot be asked."""
        answer = self.facts.get("built", {}).get(name)
        return None if answer is None else int(answer)


class Fact(NamedTuple):
    """How a fact is found out.

    Attributes:
        function: finds it out.
        label: what it is called for those who wait for it.
        applies: asked like the function; where it says no, the fact is None.
        cores: how many cores finding it out keeps busy, for a number of ranks.
    """

    function: Callable[..., Any]
    label: str
    applies: Callable[..., bool]
    cores: Callable[[int], int]


FACTS: dict[str, Fact] = {}


def fact(
    label: str,
    applies: Callable[..., bool] = lambda: True,
    cores: Callable[[int], int] = lambda ranks: 1,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a fact under its function's name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FACTS[function.__name__] = Fact(function, label, applies, cores)
        return function

    return register


@fact("extension of {framework}")
def extension(
    installation: Installation, runner: Runner, timeout: float, framework: str
) -> Extension:
    """What the framework's extension is, from a process of its own."""
    argv = (installation.python, "-s", str(_PROBES / "extension.py"), framework)
    outcome = runner.branch().run(_command(installation, runner, argv, timeout))
    for line in outcome.output.splitlines():
        if line.startswith(_EXTENSION):
            facts = json.loads(base64.b64decode(line[len(_EXTENSION) :]))
            return Extension(framework, outcome, {n: _masked(v) for n, v in facts.items()})
    return Extension(framework, outcome, {})


def _masked(value: object) -> object:
    return mask(plain(value)) if isinstance(value, str) else value


@fact("horovodrun --check-build")
def build_table(
    installation: Installation, runner: Runner, timeout: float, expectation: Expectation
) -> BuildTable:
    """Horovod's own table, once more with --verbose where it is not as it should be."""
    program = installation.program("horovodrun")
    argv = (program, "--check-build")
    if not program:
        return BuildTable(None, "there is no horovodrun", Outcome(Command(argv), 127, "", 0.0))
    outcome, table, problem = _check_build(installation, runner, argv, timeout)
    if table and not missing_rows(table, expectation):
        return BuildTable(table, "", outcome)
    again = _check_build(installation, runner, (program, "--verbose", "--check-build"), timeout)
    if not table and again[1]:
        outcome, table, problem = again
    return BuildTable(table, problem, outcome, again[0].tail(60))


def _check_build(
    installation: Installation, runner: Runner, argv: tuple[str, ...], timeout: float
) -> tuple[Outcome, CheckBuild | None, str]:
    # Up to 0.24.3 nothing comes out of a pipe otherwise.
    env = (("PYTHONUNBUFFERED", "1"), ("TF_CPP_MIN_LOG_LEVEL", "1"))
    outcome = runner.branch().run(_command(installation, runner, argv, timeout, env))
    try:
        return outcome, parse(outcome.output), ""
    except CheckBuildError as error:
        return outcome, None, error.message


def missing_rows(table: CheckBuild, expectation: Expectation) -> list[str]:
    """Rows that are expected and not marked."""
    frameworks = [ROWS[name] for name in expectation.frameworks or ()]
    return [
        *(name for name in frameworks if not table.frameworks.get(name)),
        *(name for name in expectation.controllers or () if not table.controllers.get(name)),
        *(name for name in expectation.operations or () if not table.tensor_operations.get(name)),
    ]


@fact("mpirun --version")
def mpi(installation: Installation, runner: Runner, timeout: float) -> tuple[Mpi, str]:
    """The MPI whose mpirun is found first, and where that is; both empty without one."""
    path = shutil.which("mpirun", path=_path(installation, runner))
    if not path:
        return Mpi("unknown"), ""
    argv = (path, "--version")
    outcome = runner.branch().run(_command(installation, runner, argv, min(timeout, 60.0)))
    found = parse_mpi_version(outcome.output)
    return found, f"{path} ({found.kind} {found.version})"


@fact("files against the manifest", lambda installation: bool(installation.generation))
def changed_files(installation: Installation) -> list[manifest.Difference]:
    """What is no longer as it was when the build was finished."""
    folder = Path(installation.generation)
    record = generations.read_record(folder / generations.RECORD)
    listed = manifest.read(folder / manifest.NAME, record["manifest_digest"])
    return manifest.compare(folder, listed)


def _can_run(
    extension: Extension,
    mpi: tuple[Mpi, str],
    launchers: tuple[str, ...],
    framework: str,
    controller: str,
) -> bool:
    """Whether ranks of a framework can be started over a controller."""
    return bool(
        framework != "mxnet"
        and extension.usable
        and extension.built(controller)
        and _launcher(launchers, controller)
        and (controller != "MPI" or mpi[1])
    )


def _launcher(launchers: tuple[str, ...], controller: str) -> str:
    names = (name for name in launchers if LAUNCHERS[name].controller == controller)
    return next(names, "")


# Ranks mostly import on one core and wait for each other, so that half of them count.
@fact("{framework} over {controller}", _can_run, lambda ranks: max(ranks // 2, 1))
def rank_run(
    installation: Installation,
    runner: Runner,
    mpi: tuple[Mpi, str],
    launchers: tuple[str, ...],
    ranks: int,
    cores: int,
    timeout: float,
    framework: str,
    controller: str,
) -> RankRun:
    """Allreduces on N ranks.

    Raises:
        IncompatibleError: the launcher cannot start ranks of this MPI.
    """
    name = _launcher(launchers, controller)
    token = uuid.uuid4().hex
    launch = Launch(
        program=(
            *(installation.python, "-S", "-u", str(_PROBES / "rank.py")),
            *(token, f"{timeout:g}", framework, "mpi" if controller == "MPI" else "-"),
        ),
        ranks=ranks,
        cores=cores,
        root=os.geteuid() == 0,
        mpi=mpi[0],
        start_timeout=max(int(timeout), 1),
    )
    start = LAUNCHERS[name].start(launch)
    program = installation.program(start.argv[0]) or start.argv[0]
    command = _command(
        installation, runner, (program, *start.argv[1:]), timeout + _LAUNCHER_SECONDS, start.env
    )
    outcome = runner.branch(_FOR_RANKS).run(command)
    return RankRun(
        launcher=name,
        controller=controller,
        argv=command.argv,
        size=ranks,
        ranks=collect(parse_events(outcome.output, token)),
        returncode=outcome.returncode,
        timed_out=outcome.timed_out,
        tail=_without_events(outcome, token),
        launched_by=mpi[1] if controller == "MPI" else program,
        timeout=timeout,
    )


def _without_events(outcome: Outcome, token: str) -> str:
    lines = [line for line in outcome.output.splitlines() if token not in line and line.strip()]
    lines = [line for line in lines if not re.fullmatch(r"\[[\d,]+\]<\w+>:\s*", line)]
    return "\n".join(lines[-15:])


def _path(installation: Installation, runner: Runner) -> str:
    base = runner.environment(Command(())).get("PATH", os.defpath)
    return os.pathsep.join((*installation.path, base))


def _command(
    installation: Installation,
    runner: Runner,
    argv: tuple[str, ...],
    timeout: float,
    env: tuple[tuple[str, str], ...] = (),
) -> Command:
    path = ("PATH", _path(installation, runner))
    return Command(argv, (path, *installation.env, *env), timeout=timeout)
