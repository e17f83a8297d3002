"""The facts that verify judges: each comes from running something in the environment.

A fact is a function; its parameters name what it needs: other facts, or what the caller
of verify gave. One with a parameter ``framework`` or ``controller`` exists once for each;
one that needs what the caller did not give (None) does not exist.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv import RANK_PROGRAMS
from hvdenv.command import Command, Outcome
from hvdenv.environments import generations, manifest
from hvdenv.environments.installation import Expectation, Installation, mpi_prefix
from hvdenv.errors import CheckBuildError, InterruptedRunError, StepError
from hvdenv.launch.container import on_this_host, start_inside
from hvdenv.launch.launchers import LAUNCHERS, Launch, Mpi, parse_mpi_version
from hvdenv.launch.placement import Requested, exported, hidden, of_shell
from hvdenv.masking import mask, plain
from hvdenv.model.cluster import MPI_ALONE, NCCL_ALONE
from hvdenv.runner import TOKEN_VARIABLE, Runner
from hvdenv.schema import Problem
from hvdenv.standalone.ranks.events import ExtensionFacts, decode, read
from hvdenv.verification import bench, drift, ranks, training
from hvdenv.verification.bench import Benchmark, Effort, Gpus, Yardstick
from hvdenv.verification.checkbuild import CheckBuild, parse
from hvdenv.verification.drift import Observation
from hvdenv.verification.ranks import RankRun, collect

FRAMEWORKS = ("torch", "tensorflow", "mxnet")
CONTROLLERS = ("MPI", "Gloo")
ROWS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "mxnet": "MXNet"}

_EXTENSION = "@hvdenv-extension "
_OBSERVED = "@hvdenv-observed "
# They name files of the user's, which verify's ranks would overwrite.
FILES_OF_RANKS = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE_LOG")
# What activate.sh unsets.
_UNSET = ("PYTHONHOME", "PYTHONPATH")
# Files of which every byte counts: Horovod's, and the MPI's that it calls.
_CLOSELY = re.compile(r"/site-packages/horovod/|/libmpi[\w-]*\.so[.\d]*\Z")
# Others are the scheduler's, or Horovod's own.
NEED_MPIRUN = ("mpirun", "horovodrun-mpi")
# What ranks on other hosts need by name, where the launcher does not pass on all it sees.
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONNOUSERSITE", TOKEN_VARIABLE)
# Of the time for a benchmark, what its ranks have; the rest is for the yardstick.
_RANKS_PART = 0.7
# A host that is lost is noticed within 20 s, and its daemon of Open MPI 4 ends as soon, not
# after 8 minutes; a run of hours had better wait.
_KEEPALIVE = tuple(
    (f"OMPI_MCA_oob_tcp_keepalive_{name}", str(value))
    for name, value in (("time", 10), ("intvl", 3), ("probes", 3))
)
# What a launcher needs after its ranks' own deadline.
_LAUNCHER_SECONDS = 5.0
# Where launchers explain themselves at length, the cause stands far before the end.
_LAUNCHER_LINES = 200


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
        """What ``<name>_built()`` says; None if it cannot be asked."""
        return self.facts.built.get(name)


class Observed(NamedTuple):
    """What an environment has, and had at the end of its build; None where nobody knows.

    Attributes:
        why: there is nothing to compare.
    """

    was: Observation | None
    now: Observation | None
    why: str = ""


class Fact(NamedTuple):
    """How a fact is found out.

    Attributes:
        function: finds it out.
        label: what it is called for those who wait for it.
        applies: asked like the function; where it says no, the fact is None.
        cores: how many cores finding it out keeps busy, for a number of ranks.
        alone: whether nothing else may run meanwhile.
    """

    function: Callable[..., Any]
    label: str
    applies: Callable[..., bool]
    cores: Callable[[int], int]
    alone: bool = False


FACTS: dict[str, Fact] = {}


def fact(
    label: str,
    applies: Callable[..., bool] = lambda: True,
    cores: Callable[[int], int] = lambda ranks: 1,
    alone: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a fact under its function's name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FACTS[function.__name__] = Fact(function, label, applies, cores, alone)
        return function

    return register


@fact("extension files")
def libraries(installation: Installation, runner: Runner, timeout: float) -> dict[str, Extension]:
    """What the files of each framework's extension say; nothing is imported."""
    return _extensions(installation, runner, timeout, FRAMEWORKS)


@fact("extension of {framework}")
def extension(
    installation: Installation,
    runner: Runner,
    timeout: float,
    libraries: Mapping[str, Extension],
    rank_runs: Mapping[tuple[str, str], RankRun | None],
    framework: str,
) -> Extension:
    """What the framework's extension is: from a rank, or from a process of its own.

    The import of a framework takes seconds, and ranks have to do it anyway.
    """
    library = libraries[framework]
    for run in rank_runs.values():
        if run and run.extension:
            return library._replace(facts=_masked(run.extension))
    if not library.present or library.cut_off:
        return library
    asked = _extensions(installation, runner, timeout, (framework,), "--import")[framework]
    if asked.facts.framework:
        return asked
    return asked._replace(facts=library.facts._replace(traceback=asked.outcome.tail(40)))


def _extensions(
    installation: Installation,
    runner: Runner,
    timeout: float,
    frameworks: tuple[str, ...],
    *options: str,
) -> dict[str, Extension]:
    probe = f"{installation.programs}/inspect/extension.py"
    argv = (*installation.inside, installation.python, "-s", probe, *options, *frameworks)
    outcome = runner.branch().run(_command(installation, runner, argv, timeout))
    found = {name: Extension(name, outcome) for name in frameworks}
    for line in outcome.output.splitlines():
        if line.startswith(_EXTENSION):
            table = json.loads(base64.b64decode(line[len(_EXTENSION) :]))
            facts = _masked(decode(ExtensionFacts, table, "extension"))
            found[facts.framework] = Extension(facts.framework, outcome, facts)
    return found


def _masked(facts: ExtensionFacts) -> ExtensionFacts:
    """The facts without secrets and control characters in what programs printed."""
    return facts._replace(
        python=mask(plain(facts.python)),
        horovod=mask(plain(facts.horovod)),
        path=mask(plain(facts.path)),
        installed=mask(plain(facts.installed)),
        version=mask(plain(facts.version)),
        error=mask(plain(facts.error)),
        traceback=mask(plain(facts.traceback)),
    )


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
    left = timeout - outcome.seconds
    if left < 1 or (table and not missing_rows(table, expectation)):
        return BuildTable(table, problem, outcome)
    again = _check_build(installation, runner, (program, "--verbose", "--check-build"), left)
    if not table and again[1]:
        outcome, table, problem = again
    return BuildTable(table, problem, outcome, again[0].tail(60))


def _check_build(
    installation: Installation, runner: Runner, argv: tuple[str, ...], timeout: float
) -> tuple[Outcome, CheckBuild | None, str]:
    # Up to 0.24.3 nothing comes out of a pipe otherwise.
    env = (("PYTHONUNBUFFERED", "1"), ("TF_CPP_MIN_LOG_LEVEL", "1"))
    argv = (*installation.inside, *argv)
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
    # The ranks need time too, even where this hangs.
    outcome = runner.branch().run(_command(installation, runner, argv, min(timeout / 3, 60.0)))
    found = parse_mpi_version(outcome.output)
    return found, f"{path} ({found.kind} {found.version})"


@fact("mpirun --version in the image", lambda installation: bool(installation.inside))
def image_mpi(installation: Installation, runner: Runner, timeout: float) -> Mpi:
    """The MPI of the image, as its own mpirun says it."""
    argv = (*installation.inside, "mpirun", "--version")
    outcome = runner.branch().run(_command(installation, runner, argv, min(timeout / 3, 60.0)))
    return parse_mpi_version(outcome.output)


@fact("files against the manifest", lambda installation: bool(installation.generation))
def changed_files(
    installation: Installation, runner: Runner, timeout: float
) -> list[manifest.Difference]:
    """What is no longer as it was when the build was finished.

    Raises:
        StepError: that could not be seen in time.
        InterruptedRunError: the runner was stopped.
    """
    end = time.monotonic() + timeout

    def go_on() -> None:
        if runner.stopped:
            raise InterruptedRunError
        if time.monotonic() > end:
            raise StepError(
                f"not all files could be looked at within {timeout:.0f} s",
                where=str(folder),
                remedy="see whether the file system is slow just now, or give more with --timeout",
            )

    folder = Path(installation.generation)
    record = generations.read_record(folder / generations.RECORD)
    listed = manifest.read(folder / manifest.NAME, record["manifest_digest"])
    return manifest.compare(folder, listed, lambda path: bool(_CLOSELY.search(path)), go_on)


@fact("changes since the build", lambda installation: bool(installation.generation))
def observed(
    installation: Installation, runner: Runner, timeout: float, mpi: tuple[Mpi, str]
) -> Observed:
    """What the environment has now, and what its record says that it had."""
    record = generations.read_record(Path(installation.generation) / generations.RECORD)
    if "observed" not in record:
        built_by = record.get("hvdenv") or "unknown"
        return Observed(None, None, f"its build recorded nothing to compare (hvdenv {built_by})")
    try:
        was = drift.read(record["observed"])
    except Problem as problem:
        return Observed(None, None, f"its record is of another kind: observed.{problem}")
    return Observed(was, observe(installation, runner, timeout, mpi[0]))


def observe(installation: Installation, runner: Runner, timeout: float, mpi: Mpi) -> Observation:
    """What an environment has; no framework is imported.

    Args:
        installation: its generation is what paths are relative to.
        runner: starts the probe.
        timeout: seconds that it has.
        mpi: of the mpirun that is found first.

    Raises:
        StepError: there is no answer, or none that can be read.
    """
    probe = f"{installation.programs}/inspect/observe_env.py"
    argv = (installation.python, "-s", probe, installation.generation)
    outcome = runner.branch().run(_command(installation, runner, argv, timeout))
    told = [line for line in outcome.output.splitlines() if line.startswith(_OBSERVED)]
    try:
        found = json.loads(base64.b64decode(told[-1][len(_OBSERVED) :]))
        found["mpirun"].update(kind=mpi.kind, version=mpi.version)
        return drift.read(found)
    except (IndexError, ValueError, Problem) as error:
        raise StepError(
            "what this environment has could not be observed",
            where=installation.python,
            detail=outcome.tail(15) if not told else str(error),
        ) from error


def _can_run(
    libraries: Mapping[str, Extension],
    expectation: Expectation,
    mpi: tuple[Mpi, str],
    launchers: tuple[str, ...],
    framework: str,
    controller: str,
) -> bool:
    """Whether ranks of a framework are to be started over a controller, and can be."""
    return bool(
        framework != "mxnet"
        and libraries[framework].present
        and not libraries[framework].cut_off
        and expectation.asks(framework, controller)
        and _can_start(controller, launchers, mpi)
    )


def _can_start(controller: str, launchers: tuple[str, ...], mpi: tuple[Mpi, str]) -> bool:
    """Whether a launcher is there for the ranks of a controller."""
    name = launcher_for(launchers, controller)
    return bool(name and (mpi[1] or name not in NEED_MPIRUN))


def launcher_for(launchers: tuple[str, ...], controller: str) -> str:
    """The first launcher whose ranks use a controller; empty if there is none."""
    names = (name for name in launchers if LAUNCHERS[name].controller == controller)
    return next(names, "")


# Ranks mostly import on one core and wait for each other, so that half of them count.
@fact("{framework} over {controller}", _can_run, lambda ranks: max(ranks // 2, 1))
def rank_run(
    installation: Installation,
    runner: Runner,
    mpi: tuple[Mpi, str],
    launchers: tuple[str, ...],
    launch: Launch,
    timeout: float,
    exercises: tuple[str, ...],
    framework: str,
    controller: str,
    expectation: Expectation,
) -> RankRun:
    """Allreduces on N ranks, and exercises after them.

    Raises:
        IncompatibleError: the launcher cannot start ranks of this MPI.
    """
    name = launcher_for(launchers, controller)
    startable = [each for each in CONTROLLERS if _can_start(each, launchers, mpi)]
    if not _comes_first(controller, startable, expectation):
        exercises = tuple(word for word in exercises if word != training.FIRST)
    token = uuid.uuid4().hex
    deadline = timeout - min(_LAUNCHER_SECONDS, timeout / 4)
    watcher = (
        *(installation.python, "-S", "-u", f"{installation.programs}/ranks/rank.py"),
        *(token, f"{deadline:g}@{time.time() + deadline:.1f}"),
        *(framework, controller, _device(expectation), *exercises),
    )
    launch = on_this_host(name, launch, installation.inside)._replace(program=watcher, mpi=mpi[0])
    outcome = _start(installation, runner, name, launch, timeout, installation.inside)
    command = outcome.command
    return RankRun(
        launcher=name,
        controller=controller,
        argv=command.argv,
        size=launch.ranks,
        hosts=tuple(host.name for host in launch.hosts),
        ranks=collect(read(outcome.output, token)),
        returncode=outcome.returncode,
        timed_out=outcome.timed_out,
        tail=_without_events(outcome, token),
        launched_by=mpi[1] if controller == "MPI" else command.argv[0],
        timeout=deadline,
        exercises=tuple(word.partition("=")[0] for word in exercises),
    )


def _comes_first(controller: str, startable: Sequence[str], expectation: Expectation) -> bool:
    """Whether it is the first one that is expected; each may be where nothing was stated."""
    stated = [each for each in startable if each in (expectation.controllers or ())]
    return not stated or controller == stated[0]


def _device(expectation: Expectation) -> str:
    """Whether ranks may use GPUs; they see for themselves whether they can."""
    asked = expectation.operations
    return "gpu" if asked is None or "NCCL" in asked else "host"


def _start(
    installation: Installation,
    runner: Runner,
    name: str,
    launch: Launch,
    timeout: float,
    inside: tuple[str, ...] = (),
) -> Outcome:
    """What came of a program on all ranks; the words `inside` put each into an image."""
    variables = dict(installation.env)
    activated = {"PATH", "PYTHONNOUSERSITE", *variables}
    environ = for_ranks(name, runner.given, activated, inside)
    names = exported(launch.settings.exports, activated, environ, Requested())
    # An image's ranks are started by an MPI that nothing but PATH leads to.
    seen = {"PATH": _path(installation, runner), **variables} if inside else variables
    launch = launch._replace(
        start_timeout=max(int(timeout), 1),
        exports=tuple(dict.fromkeys([*_EXPORTED, *variables, *names])) if launch.remote else (),
        mpi_prefix=mpi_prefix(seen),
    )
    start = start_inside(name, launch, inside, os.uname().nodename)
    argv = (installation.program(start.argv[0]) or start.argv[0], *start.argv[1:])
    env = (*_bounded_ssh(launch, environ), *(_KEEPALIVE if launch.remote else ()), *start.env)
    command = _command(installation, runner, argv, timeout, env)
    return runner.branch(environ).run(command)


def for_ranks(
    launcher: str,
    given: Mapping[str, str],
    activated: Collection[str],
    inside: tuple[str, ...] = (),
) -> dict[str, str]:
    """The variables that a launcher starts ranks from: those that `hvdenv run` hands it.

    Args:
        launcher: its name.
        given: the variables of the user's shell.
        activated: names of those that the environment sets.
        inside: the words that put a rank into an image, where no activate.sh is sourced.
    """
    environ = of_shell(given)
    unset = () if inside else _UNSET
    left_out = {*FILES_OF_RANKS, *unset, *hidden(launcher, environ, Requested(), activated)}
    return {name: value for name, value in environ.items() if name not in left_out}


def _bounded_ssh(launch: Launch, environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Options for the ssh of mpirun, which would wait minutes for a host that is down.

    Where somebody has said how mpirun reaches other hosts, that is left alone.
    """
    named = (*launch.settings.mca, *environ)
    if not launch.remote or any("plm_" in name for name in named):
        return ()
    options = "-o BatchMode=yes -o ConnectTimeout=10"
    return (("OMPI_MCA_plm_rsh_args", options), ("PRTE_MCA_plm_ssh_args", options))


def _can_bench(rank_run: RankRun | None) -> bool:
    return rank_run is not None and ranks.judge(rank_run).status != "fail"


@fact("speed of {framework} over {controller}", _can_bench, alone=True)
def bench_run(
    installation: Installation,
    runner: Runner,
    mpi: tuple[Mpi, str],
    launchers: tuple[str, ...],
    launch: Launch,
    timeout: float,
    effort: Effort,
    expectation: Expectation,
    framework: str,
    controller: str,
) -> Benchmark:
    """Timed allreduces and training steps on all ranks, and the yardstick right after them."""
    end = time.monotonic() + timeout
    words = tuple(f"{name}={effort.seconds:g}" for name in bench.EXERCISES)
    where, what = (installation, runner, mpi, launchers, launch), (framework, controller)
    run: RankRun = rank_run(*where, timeout * _RANKS_PART, words, *what, expectation)
    points, left = bench.allreduces(run), end - time.monotonic()
    if not points or left < 1:
        return Benchmark(run, Yardstick((), "the ranks gave no figures in time"))
    name = NCCL_ALONE if bench.on_gpus(run) else MPI_ALONE
    gpus = bench.libraries_of_gpus(run) if name == NCCL_ALONE else None
    if name == NCCL_ALONE and not gpus:
        problem = "the ranks loaded no libnccl and libcudart that a program could open"
        return Benchmark(run, Yardstick((), problem, name=name))
    yardstick = measure_yardstick(*where, left, effort, points[-1].amount, gpus)
    return Benchmark(run, yardstick._replace(name=name))


@fact("scaling of {framework} over {controller}", _can_bench, alone=True)
def speed_runs(
    installation: Installation,
    runner: Runner,
    mpi: tuple[Mpi, str],
    launchers: tuple[str, ...],
    launch: Launch,
    timeout: float,
    effort: Effort,
    expectation: Expectation,
    framework: str,
    controller: str,
) -> tuple[RankRun, ...]:
    """Timed training steps on 1, 2, 4 ... ranks, fewer than all."""
    end = time.monotonic() + timeout
    counts, what = bench.fewer(launch.ranks), (framework, controller)
    runs = []
    for done, count in enumerate(counts):
        share = (end - time.monotonic()) / (len(counts) - done)
        where = (installation, runner, mpi, launchers, bench.with_fewer(launch, count))
        words = (f"speed={effort.seconds:g}",)
        runs.append(rank_run(*where, share, words, *what, expectation))
    return tuple(runs)


def measure_yardstick(
    installation: Installation,
    runner: Runner,
    mpi: tuple[Mpi, str],
    launchers: tuple[str, ...],
    launch: Launch,
    timeout: float,
    effort: Effort,
    largest: int,
    gpus: Gpus | None = None,
) -> Yardstick:
    """What MPI alone gives on the same ranks, by a program compiled with its own compiler.

    With ``gpus``, what NCCL alone gives: MPI only starts the program and tells ranks of each other.
    """
    name, path = launcher_for(launchers, "MPI"), _path(installation, runner)
    mpirun, compiler = shutil.which("mpirun", path=path), shutil.which("mpicc", path=path)
    if mpirun and (beside := Path(mpirun).with_name("mpicc")).exists():
        compiler = str(beside)  # not another MPI's
    if not _can_start("MPI", launchers, mpi):
        return Yardstick((), "nothing here starts programs by MPI")
    if not compiler:
        return Yardstick((), "there is no mpicc in the environment or on PATH")
    try:
        Path(effort.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="yardstick-", dir=effort.folder) as folder:
            program = f"{folder}/yardstick"
            argv = (compiler, "-O2", "-o", program, str(RANK_PROGRAMS / "yardstick.c"), "-ldl")
            built = runner.branch().run(_command(installation, runner, argv, timeout))
            if built.returncode:
                return Yardstick((), f"{compiler} does not compile", built.tail(20))
            words = (program, f"{effort.seconds:g}", str(largest), str(int(timeout) + 1))
            launch = launch._replace(program=(*words, *(gpus or ())), mpi=mpi[0])
            outcome = _start(installation, runner, name, launch, timeout)
    except OSError as error:
        return Yardstick((), f"it cannot be compiled in {effort.folder}: {error.strerror}")
    points = bench.parse_yardstick(outcome.output)
    if not points or points[0].ranks != launch.ranks:
        size = f"{points[0].ranks} ranks" if points else "no figures"
        problem = f"{name} ran what {compiler} compiled: {size} (exit {outcome.returncode})"
        return Yardstick((), problem, outcome.tail(20))
    return Yardstick(points)


def _without_events(outcome: Outcome, token: str) -> str:
    lines = [line for line in outcome.output.splitlines() if token not in line and line.strip()]
    lines = [line for line in lines if not re.fullmatch(r"\[[\d,]+\]<\w+>:\s*", line)]
    return "\n".join(lines[-_LAUNCHER_LINES:])


def _path(installation: Installation, runner: Runner) -> str:
    base = dict(installation.env).get("PATH") or runner.environment(Command(())).get(
        "PATH", os.defpath
    )
    return os.pathsep.join((*installation.path, base))


def _command(
    installation: Installation,
    runner: Runner,
    argv: tuple[str, ...],
    timeout: float,
    env: tuple[tuple[str, str], ...] = (),
) -> Command:
    path = ("PATH", _path(installation, runner))
    return Command(argv, (*installation.env, path, *env), timeout=timeout)
