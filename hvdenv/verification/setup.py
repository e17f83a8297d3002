"""What verify is to do, and its parts, which run side by side as far as there are cores and time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from hvdenv.base.command import Command, Outcome
from hvdenv.base.errors import InterruptedRunError, StepError
from hvdenv.base.runner import Runner, environment
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.reports.report import Measurement
from hvdenv.sites.launchers import Launch, MpiVersion, named
from hvdenv.sites.placement import influences

FRAMEWORKS = ("torch", "tensorflow", "mxnet")
CONTROLLERS = ("MPI", "Gloo")
OPERATIONS = ("NCCL", "DDL", "CCL", "MLSL", "MPI", "Gloo")
# What ranks do after their allreduces: see standalone/ranks/rank_work.py.
EXERCISES = COLLECTIVES, TRAINING = "collectives", "training"
DEFAULT_LAUNCHERS = ("mpirun", "horovodrun-gloo")
DEFAULT_TIMEOUT = 600.0
TWO_RANKS = Launch((), 2)
# The other launchers belong to a scheduler, or to Horovod.
NEED_MPIRUN = ("mpirun", "horovodrun-mpi")

# The MPI of the mpirun that is found first, and a description; empty without an mpirun.
HostMpi = tuple[MpiVersion, str]


class Shell(NamedTuple):
    """Variables of the user's shell that change what ranks do.

    Attributes:
        passed: those that ranks get, as they do from `hvdenv run`.
        dropped: names of those that they do not get.
    """

    passed: Mapping[str, str]
    dropped: tuple[str, ...] = ()


class Effort(NamedTuple):
    """For how many seconds each program of ``verify --bench`` measures, and a directory that all hosts see."""

    seconds: float
    folder: str


class Setup(NamedTuple):
    """An environment, and how to verify it.

    Attributes:
        installation: where the environment is.
        runner: starts the processes.
        expectation: what the environment should have.
        launch: how many ranks runs have, and where.
        two_for_repeats: whether runs have two ranks if others prove their framework and their
            controller on all ranks.
        launchers: names in LAUNCHERS; the first for each controller is used.
        exercises: what ranks do after their allreduces: NAME or NAME=OPTION.
        effort: what benchmarks may take; None for no benchmarks.
        cores: how many may be used.
        seconds: for everything.
        shell: the user's variables.
    """

    installation: Installation
    runner: Runner
    expectation: Expectation = Expectation()
    launch: Launch = TWO_RANKS
    two_for_repeats: bool = False
    launchers: tuple[str, ...] = DEFAULT_LAUNCHERS
    exercises: tuple[str, ...] = ()
    effort: Effort | None = None
    cores: int = 1
    seconds: float = DEFAULT_TIMEOUT
    shell: Shell = Shell({})

    @property
    def path(self) -> str:
        """PATH of the environment's programs."""
        base = dict(self.installation.env).get("PATH")
        base = base or self.runner.environment(Command(())).get("PATH", os.defpath)
        return os.pathsep.join((*self.installation.path, base))

    def which(self, program: str) -> str:
        """The program that the environment's PATH finds; empty if there is none."""
        return shutil.which(program, path=self.path) or ""

    def command(
        self, argv: Sequence[str], timeout: float, env: tuple[tuple[str, str], ...] = ()
    ) -> Command:
        """A command in the environment; `timeout` is in seconds.

        It starts in /, because horovodrun starts Pythons that import from the current directory, which
        may be anybody's.
        """
        variables = (*self.installation.env, ("PATH", self.path), *env)
        return Command(tuple(argv), variables, "/", timeout)

    def run(
        self, argv: Sequence[str], timeout: float, env: tuple[tuple[str, str], ...] = ()
    ) -> Outcome:
        """Run a command in the environment."""
        return self.runner.branch().run(self.command(argv, timeout, env))

    def launcher(self, controller: str) -> str:
        """The first launcher whose ranks use a controller; empty if there is none."""
        own = self.launch.settings.launchers
        names = (name for name in self.launchers if named(name, own).controller == controller)
        return next(names, "")

    def can_start(self, controller: str, mpi: HostMpi) -> bool:
        """Whether a launcher is there for the ranks of a controller."""
        name = self.launcher(controller)
        return bool(name and (mpi[1] or name not in NEED_MPIRUN))

    def of_this_process(self) -> Setup:
        """With the cores, the user and the variables of this process."""
        cores = len(os.sched_getaffinity(0))
        mine, passed = influences(environment()), influences(self.runner.given)
        return self._replace(
            launch=self.launch._replace(root=os.geteuid() == 0),
            cores=cores,
            shell=Shell(passed, tuple(name for name in mine if name not in passed)),
        )


# Processes that hang are ended within this time.
_ENDING_SECONDS = 3.0
# Less time than this does not show whether ranks hang or import slowly.
_SHARE_SECONDS = 60.0
# Ranks leave this time to the parts that explain their results, and these always have a little.
_RESERVE_SECONDS, _LEAST_SECONDS = 30.0, 2.0

T = TypeVar("T")
# Called with ``started``, ``failed`` or ``finished``, the label of a part, and for ``failed``
# with what is wrong.
Progress = Callable[[str, str, str], None]


class Parts(AbstractContextManager["Parts"]):
    """Runs functions of a setup and of the seconds that they have, in the order of their start.

    Attributes:
        measurements: how long each part took.
    """

    def __init__(self, setup: Setup, on_event: Progress) -> None:
        self.measurements: list[Measurement] = []
        self._setup = setup
        self._on_event = on_event
        self._end = time.monotonic() + setup.seconds - min(_ENDING_SECONDS, setup.seconds / 10)
        # Ranks mostly import on one core and wait for each other, so half of them count.
        each = max(setup.launch.ranks // 2, 1)
        self._pool = ThreadPoolExecutor(max(setup.cores // each, min(setup.cores, 2)))
        self._futures: list[Future[Any]] = []

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def start(
        self,
        label: str,
        part: Callable[..., T],
        *arguments: object,
        setup: Setup | None = None,
        runs: int = 0,
    ) -> Future[T]:
        """Start a part as soon as there is room.

        Args:
            label: how progress and measurements call it.
            part: a function of a setup and of the seconds that it has.
            arguments: what it takes besides; the results of futures are waited for.
            setup: another one than that of all parts.
            runs: of a part that starts ranks: how many such parts share the time that is left
                when it begins, this one included.
        """
        future = self._pool.submit(self._run, label, part, arguments, setup or self._setup, runs)
        self._futures.append(future)
        return future

    def wait(self) -> None:
        """Wait for all parts that were started."""
        wait(self._futures)

    def _run(
        self,
        label: str,
        part: Callable[..., T],
        arguments: tuple[object, ...],
        setup: Setup,
        runs: int,
    ) -> T:
        if self._setup.runner.stopped:
            raise InterruptedRunError
        timeout = self._share(runs) if runs else max(self._end - time.monotonic(), _LEAST_SECONDS)
        began = time.monotonic()
        self._on_event("started", label, "")
        try:
            known = (each.result() if isinstance(each, Future) else each for each in arguments)
            return part(setup, timeout, *known)
        except Exception as error:
            if not isinstance(error, InterruptedRunError):
                self._on_event("failed", label, str(error))
            raise
        finally:
            seconds = round(time.monotonic() - began, 3)
            self.measurements.append(Measurement(label, seconds, "s"))
            self._on_event("finished", label, "")

    def _share(self, runs: int) -> float:
        """Seconds for a run of ranks: one that hangs must not use up the time of all others.

        Raises:
            StepError: there is no time left.
        """
        seconds = self._setup.seconds
        left = self._end - time.monotonic() - min(_RESERVE_SECONDS, seconds / 4)
        if left < 1:
            raise StepError(
                f"not tried: verify had used up its {seconds:.0f} seconds",
                remedy="fix what took so long, or allow more time with --timeout",
            )
        return max(left / runs, min(left, _SHARE_SECONDS))
