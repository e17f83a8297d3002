"""The collectors: each finds something out by running something in the environment.

To add one, write one function with the decorator: collection.py says what its parameters mean.
Where several can start, they start in the order in which they are defined here.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv import RANK_PROGRAMS
from hvdenv.command import Command, Outcome
from hvdenv.environments import generations, manifest
from hvdenv.environments.installation import Expectation, Installation, hides_variables, mpi_prefix
from hvdenv.environments.prefix_lock import boot_id
from hvdenv.environments.search_path import PYTHON_PATH
from hvdenv.errors import (
    CheckBuildError,
    HvdenvError,
    IncompatibleError,
    InterruptedRunError,
    StepError,
)
from hvdenv.launch.container import on_this_host, start_inside
from hvdenv.launch.launchers import Launch, Mpi, parse_mpi_version
from hvdenv.launch.placement import Requested, exported, hidden, of_shell
from hvdenv.masking import clean
from hvdenv.model.cluster import MPI_ALONE, NCCL_ALONE
from hvdenv.runner import TOKEN_VARIABLE, Runner
from hvdenv.schema import Problem, decode
from hvdenv.standalone.ranks.events import Bench, ExtensionFacts, RendezvousFacts
from hvdenv.verification import bench, drift, ranks, training
from hvdenv.verification.bench import Benchmark, Effort, Yardstick
from hvdenv.verification.checkbuild import ROWS, CheckBuild, parse
from hvdenv.verification.collection import CONTROLLERS, FRAMEWORKS, Setup, collector
from hvdenv.verification.drift import Observation
from hvdenv.verification.ranks import RankRun, collect
from hvdenv.verification.received import read

# They name files of the user, which verify's ranks would overwrite.
FILES_OF_RANKS = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE_LOG")
# Files that are compared byte by byte: Horovod's, and the MPI's that it calls.
_CLOSELY = re.compile(r"/site-packages/horovod/|/libmpi[\w-]*\.so[.\d]*\Z")
# Variables that launchers are told to export to ranks on other hosts.
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONNOUSERSITE", TOKEN_VARIABLE)
_HOROVODRUN_MPI = "horovodrun-mpi"
# The ranks' share of the time for a benchmark; the rest is for the yardstick.
_RANKS_PART = 0.7
# With all of them, mpirun calls qrsh (plm/rsh of Open MPI 4.1, plm/ssh of PRRTE).
_CALLS_QRSH = {"SGE_ROOT", "ARC", "PE_HOSTFILE", "JOB_ID"}
# A lost host is noticed within 20 s, and its daemon of Open MPI 4 ends as soon instead of
# after 8 minutes. Runs of hours should not set this.
_KEEPALIVE = tuple(
    (f"OMPI_MCA_oob_tcp_keepalive_{name}", str(value))
    for name, value in (("time", 10), ("intvl", 3), ("probes", 3))
)
# An empty line of a rank, or the rest of an event that a launcher has torn.
_NO_OUTPUT = re.compile(r"(?:\[[\d,]+\]<\w+>:)?\s*(?:[\w+/.]{80,})?")
# What a launcher needs after its ranks' own deadline.
_LAUNCHER_SECONDS = 5.0
# Some launchers print the cause far before the end of a long explanation.
_LAUNCHER_LINES = 200
# Without the facts about extensions, nothing can be said about ranks.
_LEAST_SECONDS = 2.0


class BuildTable(NamedTuple):
    """What came of ``horovodrun --check-build``.

    Attributes:
        table: None if there is no whole table in the output; `problem` says why.
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
        return self.facts.built.get(name)


# What the collectors below find out for each framework, or for each framework and controller.
Extensions = Mapping[str, Extension]
RankRuns = Mapping[tuple[str, str], RankRun | None]
# The MPI of the mpirun that is found first, and a description.
HostMpi = tuple[Mpi, str]


class Observed(NamedTuple):
    """What an environment has, and had at the end of its build, or why nobody knows."""

    was: Observation | None
    now: Observation | None
    why: str = ""


@collector("mpirun --version")
def mpi(setup: Setup, timeout: float) -> HostMpi:
    """Both are empty without an mpirun."""
    path = setup.which("mpirun")
    if not path:
        return Mpi("unknown"), ""
    # The ranks need time too, even if this hangs.
    found = parse_mpi_version(setup.run((path, "--version"), min(timeout / 3, 60.0)).output)
    return found, f"{path} ({found.kind} {found.version})"


@collector(
    "modules on PYTHONPATH",
    applies=lambda installation: PYTHON_PATH in dict(installation.env) and not installation.inside,
)
def hiding(installation: Installation) -> dict[str, str]:
    """Files on PYTHONPATH that are imported instead of modules of Python itself."""
    found: dict[str, str] = {}
    for folder in dict(installation.env)[PYTHON_PATH].split(os.pathsep):
        for path in sorted(Path(folder).glob("*")) if os.path.isabs(folder) else ():
            name, _, ending = path.name.partition(".")
            module = ending.endswith(("py", "so")) or (path / "__init__.py").exists()
            if module and name in sys.stdlib_module_names:
                found.setdefault(name, str(path))
    return found


@collector("extension files")
def libraries(setup: Setup, timeout: float) -> dict[str, Extension]:
    """The facts about each framework's extension that its files show; nothing is imported."""
    return _extensions(setup, timeout, FRAMEWORKS)


def _extensions(
    setup: Setup, timeout: float, frameworks: tuple[str, ...], *options: str
) -> dict[str, Extension]:
    outcome, answers = _inspect(setup, timeout, "extension", *options, *frameworks)
    found = {name: Extension(name, outcome) for name in frameworks}
    for table in answers:
        facts = _masked(decode(ExtensionFacts, table, lenient=True))
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


def _masked(facts: ExtensionFacts) -> ExtensionFacts:
    """The facts without secrets and control characters in what programs printed."""
    texts: dict[str, Any] = {
        key: clean(value) for key, value in facts._asdict().items() if isinstance(value, str)
    }
    return facts._replace(**texts)


@collector("servers of horovodrun")
def rendezvous(setup: Setup, timeout: float) -> RendezvousFacts:
    """Whether they accept requests that the advisories describe, sent within this host."""
    outcome, answers = _inspect(setup, timeout, "rendezvous")
    for table in answers:
        return decode(RendezvousFacts, table, lenient=True)
    return RendezvousFacts(error="the probe printed no result", traceback=outcome.tail(20))


@collector("horovodrun --check-build")
def build_table(setup: Setup, timeout: float, libraries: Extensions) -> BuildTable:
    """Horovod's own table; once more with --verbose if it cannot be read or lacks a row."""
    installation = setup.installation
    program = installation.program("horovodrun")
    if not program:
        command = Command(("horovodrun", "--check-build"))
        return BuildTable(None, "there is no horovodrun", Outcome(command, 127, "", 0.0))
    quick = f"{installation.programs}/inspect/check_build.py"
    present = (name for name, each in libraries.items() if each.present and not each.cut_off)
    argv = (installation.python, "-s", quick, program, *present)
    outcome, table, problem = _check_build(setup, argv, timeout)
    left = timeout - outcome.seconds
    if left < 1 or (table and not missing_rows(table, setup.expectation)):
        return BuildTable(table, problem, outcome)
    # As a user runs it: each framework may work in a process of its own only.
    again = _check_build(setup, (program, "--verbose", "--check-build"), left)
    if again[1] or not table:
        outcome, table, problem = again
    return BuildTable(table, problem, outcome, again[0].tail(60))


def _check_build(
    setup: Setup, argv: tuple[str, ...], timeout: float
) -> tuple[Outcome, CheckBuild | None, str]:
    # Up to 0.24.3 a pipe gets no output otherwise.
    env = (("PYTHONUNBUFFERED", "1"), ("TF_CPP_MIN_LOG_LEVEL", "1"), ("OMP_NUM_THREADS", "1"))
    outcome = setup.run((*setup.installation.inside, *argv), timeout, env)
    try:
        return outcome, parse(outcome.output), ""
    except CheckBuildError as error:
        return outcome, None, error.message


def missing_rows(table: CheckBuild, expectation: Expectation) -> list[str]:
    expected = (
        ([ROWS[name] for name in expectation.frameworks or ()], table.frameworks),
        (expectation.controllers or (), table.controllers),
        (expectation.operations or (), table.tensor_operations),
    )
    return [name for names, rows in expected for name in names if not rows.get(name)]


def _can_run(
    libraries: Extensions, setup: Setup, mpi: HostMpi, framework: str, controller: str
) -> bool:
    """Whether ranks of a framework are to be started over a controller, and can be."""
    return bool(
        framework != "mxnet"
        and libraries[framework].present
        and not libraries[framework].cut_off
        and setup.expectation.asks(framework, controller)
        and setup.can_start(controller, mpi)
    )


# Ranks mostly import on one core and wait for each other, so half of them count.
@collector(
    "{framework} over {controller}",
    applies=_can_run,
    cores=lambda ranks: max(ranks // 2, 1),
    starts_ranks=True,
)
def rank_run(
    setup: Setup, mpi: HostMpi, timeout: float, framework: str, controller: str
) -> RankRun:
    """Allreduces on N ranks, and exercises after them.

    Raises:
        IncompatibleError: the launcher cannot start ranks of this MPI.
    """
    installation, expectation = setup.installation, setup.expectation
    name, exercises = setup.launcher(controller), setup.exercises
    startable = [each for each in CONTROLLERS if setup.can_start(each, mpi)]
    if not (setup.full or _trains(framework, controller, startable, expectation)):
        exercises = tuple(word for word in exercises if word != training.EXERCISE)
    # Whether ranks may use GPUs; they find out themselves whether they can.
    host_only = expectation.operations is not None and "NCCL" not in expectation.operations
    token = uuid.uuid4().hex
    deadline = timeout - min(_LAUNCHER_SECONDS, timeout / 4)
    program = (
        *(installation.python, "-S", "-u", f"{installation.programs}/ranks/rank.py"),
        *(token, _deadline(deadline)),
        *(framework, controller, "host" if host_only else "gpu", *exercises),
    )
    launch = on_this_host(name, setup.launch, installation.inside)
    launch = launch._replace(program=program, mpi=mpi[0])
    through = _through(setup, name, framework)
    setup.tell("stage", "start-up")
    on_line = ranks.listener(token, setup.tell)
    outcome = _start(setup, name, launch, timeout, installation.inside, through, on_line)
    argv = outcome.command.argv
    run = RankRun(
        launcher=name,
        controller=controller,
        argv=argv,
        size=launch.ranks,
        hosts=tuple(host.name for host in launch.hosts),
        ranks=collect(read(outcome.output, token)),
        returncode=outcome.returncode,
        timed_out=outcome.timed_out,
        tail=_without_events(outcome, token),
        launched_by=mpi[1] if controller == "MPI" else argv[len(through)],
        timeout=deadline,
        exercises=tuple(word.partition("=")[0] for word in exercises),
    )
    trained = training.judge(run) if training.EXERCISE in run.exercises else ()
    whole = () if "program" in run.exercises else (ranks.judge(run),)
    for judgement in (*whole, *(each for _, each in trained)):
        if judgement.status == "fail":
            setup.tell("failed", judgement.message)
    return run


def _deadline(seconds: float) -> str:
    """When ranks end, as rank.py takes it."""
    wall, steady = time.time() + seconds, time.monotonic() + seconds
    return f"{seconds:g}@{wall:.1f}@{boot_id()}@{steady:.1f}"


def _over_mpi(libraries: Extensions, setup: Setup, mpi: HostMpi) -> list[str]:
    """The frameworks whose ranks `horovodrun --mpi` is to start: with --full, on this host."""
    wanted = setup.full and not setup.installation.inside
    if not wanted or mpi[0].kind != "Open MPI" or setup.launcher("MPI") == _HOROVODRUN_MPI:
        return []
    return [each for each in FRAMEWORKS if _can_run(libraries, setup, mpi, each, "MPI")]


@collector(
    "horovodrun --mpi",
    applies=lambda libraries, setup, mpi: bool(_over_mpi(libraries, setup, mpi)),
    starts_ranks=True,
)
def horovodrun_run(
    libraries: Extensions, setup: Setup, mpi: HostMpi, timeout: float
) -> RankRun | HvdenvError:
    """Allreduces on two ranks that `horovodrun --mpi` starts, for one framework."""
    launch = setup.launch._replace(ranks=2, hosts=(), host_list="", hostfile="", placed=False)
    here = setup._replace(launch=launch, launchers=(_HOROVODRUN_MPI,), exercises=())
    try:
        return rank_run(here, mpi, timeout, _over_mpi(libraries, setup, mpi)[0], "MPI")
    except IncompatibleError as error:  # the recipe sets what horovodrun sets, too
        return error


def _trains(
    framework: str, controller: str, startable: Collection[str], expectation: Expectation
) -> bool:
    """Whether a framework trains over a controller; over all if none is stated.

    Expected frameworks take turns, so that two of them train over both controllers.
    """
    stated = [each for each in startable if each in (expectation.controllers or ())]
    return not stated or controller == stated[_place(framework, expectation) % len(stated)]


def _place(framework: str, expectation: Expectation) -> int:
    """The place of a framework among those that are expected; 0 if none is stated."""
    named = {framework, *(expectation.frameworks or ())}
    return [each for each in FRAMEWORKS if each in named].index(framework)


def _through(setup: Setup, launcher: str, framework: str) -> tuple[str, ...]:
    """The words before a launcher's command.

    horovodrun imports TensorFlow to find out whether Gloo was built. It does so for the first
    framework; for others, the program horovodrun.py answers.
    """
    installation = setup.installation
    asked = not _place(framework, setup.expectation)
    if launcher != "horovodrun-gloo" or installation.inside or asked:
        return ()
    return (installation.python, "-s", f"{installation.programs}/inspect/horovodrun.py")


def _start(
    setup: Setup,
    name: str,
    launch: Launch,
    timeout: float,
    inside: tuple[str, ...] = (),
    through: tuple[str, ...] = (),
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Start a program on all ranks.

    Args:
        setup: of the environment.
        name: of the launcher.
        launch: what it has to know.
        timeout: in seconds.
        inside: words that put each rank into an image.
        through: words before the launcher's command.
        on_line: called with every line that it prints.
    """
    variables = dict(setup.installation.env)
    activated = {"PATH", "PYTHONNOUSERSITE", *variables}
    patched = hides_variables(setup.installation.prefix)
    unset = setup.installation.unset
    environ = for_ranks(name, setup.runner.given, activated, unset, patched=patched)
    names = exported(launch.settings.exports, activated, environ, Requested())
    # The MPI that starts an image's ranks is found by PATH only.
    seen = {"PATH": setup.path, **variables} if inside else variables
    launch = launch._replace(
        program=(*setup.installation.image, *launch.program),
        start_timeout=max(int(timeout), 1),
        exports=tuple(dict.fromkeys([*_EXPORTED, *variables, *names])) if launch.remote else (),
        mpi_prefix=mpi_prefix(seen),
    )
    start = start_inside(name, launch, inside, os.uname().nodename)
    program = setup.installation.program(start.argv[0]) or start.argv[0]
    argv = (*through, program, *start.argv[1:])
    env = (*_bounded_ssh(launch, environ), *(_KEEPALIVE if launch.remote else ()), *start.env)
    command = setup.command(argv, timeout, env)
    return setup.runner.branch(environ).run(command, on_line=on_line)


def for_ranks(
    launcher: str,
    given: Mapping[str, str],
    activated: Collection[str],
    unset: Collection[str] = (),
    *,
    patched: bool = False,
) -> dict[str, str]:
    """The variables from which a launcher starts ranks: those that `hvdenv run` passes to it.

    Args:
        given: the variables of the user's shell.
        activated: names of those that the environment sets.
        unset: names of those that it unsets.
        patched: whether Horovod keeps variables off command lines.
    """
    environ = of_shell(given)
    exposed = hidden(launcher, environ, activated, patched=patched)
    left_out = {*FILES_OF_RANKS, *unset, *exposed}
    return {name: value for name, value in environ.items() if name not in left_out}


def _bounded_ssh(launch: Launch, environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Options for mpirun's ssh, which otherwise waits minutes for a host that is down.

    They are not set if the user configured how mpirun reaches other hosts, nor in a job of Grid
    Engine: there mpirun calls qrsh instead of ssh and gives it the same options, which it rejects.
    """
    named = (*launch.settings.mca, *environ)
    if not launch.remote or any("plm_" in name for name in named) or environ.keys() >= _CALLS_QRSH:
        return ()
    options = "-o BatchMode=yes -o ConnectTimeout=10"
    return (("OMPI_MCA_plm_rsh_args", options), ("PRTE_MCA_plm_ssh_args", options))


def _without_events(outcome: Outcome, token: str) -> str:
    lines = [line for line in outcome.output.splitlines() if token not in line]
    lines = [line for line in lines if not _NO_OUTPUT.fullmatch(line)]
    return "\n".join(lines[-_LAUNCHER_LINES:])


@collector("extension of {framework}", least=_LEAST_SECONDS)
def extension(
    setup: Setup, timeout: float, libraries: Extensions, rank_runs: RankRuns, framework: str
) -> Extension:
    """The facts about a framework's extension: from a rank, or from a process of its own.

    The import of a framework takes seconds, and ranks import it anyway.
    """
    library = libraries[framework]
    for run in rank_runs.values():
        if run and run.extension:
            return library._replace(facts=_masked(run.extension))
    if not library.present or library.cut_off:
        return library
    found = _extensions(setup, timeout, (framework,), "--import")[framework]
    if found.facts.framework:
        return found
    return found._replace(facts=library.facts._replace(traceback=found.outcome.tail(40)))


def _is_built(installation: Installation) -> bool:
    return bool(installation.generation)


@collector("files against the manifest", applies=_is_built)
def changed_files(
    installation: Installation, runner: Runner, timeout: float
) -> list[manifest.Difference]:
    """The files that differ from those at the end of the build.

    Raises:
        StepError: the time was too short.
        InterruptedRunError: the runner was stopped.
    """
    end = time.monotonic() + timeout
    folder = Path(installation.generation)

    def go_on() -> None:
        if runner.stopped:
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


@collector("changes since the build", applies=_is_built)
def observed(setup: Setup, timeout: float, mpi: HostMpi) -> Observed:
    """What the environment has now, and what it had according to its record."""
    record = generations.read_record(Path(setup.installation.generation) / generations.RECORD)
    if record.observed is None:
        built_by = record.hvdenv or "unknown"
        return Observed(None, None, f"its build recorded nothing to compare (hvdenv {built_by})")
    try:
        was = drift.read(record.observed)
    except Problem as problem:
        return Observed(None, None, f"its record has another format: observed.{problem}")
    return Observed(was, observe(setup, timeout, mpi[0]))


def observe(setup: Setup, timeout: float, mpi: Mpi) -> Observation:
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
        return drift.read(found)
    except (IndexError, ValueError, Problem) as error:
        raise StepError(
            "the contents of this environment could not be observed",
            where=installation.python,
            detail=outcome.tail(15) if isinstance(error, IndexError) else str(error),
            remedy=f"see whether this Python works: {installation.python} -c 'import sysconfig'",
        ) from error


@collector("mpirun --version in the image", applies=lambda installation: bool(installation.inside))
def image_mpi(setup: Setup, timeout: float) -> Mpi:
    """The MPI of the image, as its own mpirun reports it."""
    argv = (*setup.installation.inside, "mpirun", "--version")
    return parse_mpi_version(setup.run(argv, min(timeout / 3, 60.0)).output)


def ranks_are_right(rank_run: RankRun | None) -> bool:
    return rank_run is not None and ranks.judge(rank_run).status != "fail"


@collector(
    "speed of {framework} over {controller}", applies=ranks_are_right, alone=True, starts_ranks=True
)
def bench_run(
    setup: Setup, effort: Effort, mpi: HostMpi, timeout: float, framework: str, controller: str
) -> Benchmark:
    """Timed allreduces and training steps on all ranks, and the yardstick right after them."""
    end = time.monotonic() + timeout
    words = tuple(f"{name}={effort.seconds:g}" for name in bench.EXERCISES)
    timed = setup._replace(exercises=words)
    run = rank_run(timed, mpi, timeout * _RANKS_PART, framework, controller)
    points, left = bench.allreduces(run), end - time.monotonic()
    if not points or left < 1:
        return Benchmark(run, Yardstick((), "the ranks gave no figures in time"))
    on_gpus = any(each.device for rank in run.ranks for each in rank.all(Bench))
    name = NCCL_ALONE if on_gpus else MPI_ALONE
    gpus = bench.libraries_of_gpus(run) if on_gpus else ()
    if gpus is None:
        problem = "the ranks loaded no libnccl and libcudart that a program could open"
        return Benchmark(run, Yardstick((), problem, name=name))
    yardstick = measure_yardstick(setup, effort, mpi[0], left, points[-1].amount, gpus)
    return Benchmark(run, yardstick._replace(name=name))


@collector(
    "scaling of {framework} over {controller}",
    applies=ranks_are_right,
    alone=True,
    starts_ranks=True,
)
def speed_runs(
    setup: Setup, effort: Effort, mpi: HostMpi, timeout: float, framework: str, controller: str
) -> tuple[RankRun, ...]:
    """Timed training steps on 1, 2, 4 ... ranks, fewer than all."""
    end = time.monotonic() + timeout
    counts = bench.fewer(setup.launch.ranks)
    timed = setup._replace(exercises=(f"speed={effort.seconds:g}",))
    runs = []
    for done, count in enumerate(counts):
        share = (end - time.monotonic()) / (len(counts) - done)
        fewer = timed._replace(launch=bench.with_fewer(setup.launch, count))
        runs.append(rank_run(fewer, mpi, share, framework, controller))
    return tuple(runs)


def measure_yardstick(
    setup: Setup, effort: Effort, mpi: Mpi, timeout: float, largest: int, gpus: Sequence[str] = ()
) -> Yardstick:
    """The speed of MPI alone on the same ranks, by a program compiled with its own compiler.

    With libraries of GPUs, the speed of NCCL alone: MPI only starts and connects the ranks.
    """
    name, mpirun, compiler = setup.launcher("MPI"), setup.which("mpirun"), setup.which("mpicc")
    if mpirun and (beside := Path(mpirun).with_name("mpicc")).exists():
        compiler = str(beside)  # not another MPI's
    if not setup.can_start("MPI", (mpi, mpirun)):
        return Yardstick((), "no launcher here starts programs with MPI")
    if not compiler:
        return Yardstick((), "there is no mpicc in the environment or on PATH")
    try:
        Path(effort.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="yardstick-", dir=effort.folder) as folder:
            program = f"{folder}/yardstick"
            argv = (compiler, "-O2", "-o", program, str(RANK_PROGRAMS / "yardstick.c"), "-ldl")
            built = setup.run(argv, timeout)
            if built.returncode:
                return Yardstick((), f"{compiler} does not compile", built.tail(20))
            words = (program, f"{effort.seconds:g}", str(largest), str(int(timeout) + 1))
            launch = setup.launch._replace(program=(*words, *gpus), mpi=mpi)
            outcome = _start(setup, name, launch, timeout)
    except OSError as error:
        return Yardstick((), f"it cannot be compiled in {effort.folder}: {error.strerror}")
    points = bench.parse_yardstick(outcome.output)
    if not points or points[0].ranks != launch.ranks:
        size = f"{points[0].ranks} ranks" if points else "no figures"
        problem = f"{name} ran what {compiler} compiled: {size} (exit {outcome.returncode})"
        return Yardstick((), problem, outcome.tail(20))
    return Yardstick(points)
