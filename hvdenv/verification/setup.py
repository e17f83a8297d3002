"""What verify is to do: an environment, what is expected of it, and how to start its ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvdenv.command import Command, Outcome
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.launch.launchers import Launch, Mpi, named
from hvdenv.launch.variables import influences
from hvdenv.runner import Runner, environment

FRAMEWORKS = ("torch", "tensorflow", "mxnet")
CONTROLLERS = ("MPI", "Gloo")
OPERATIONS = ("NCCL", "DDL", "CCL", "MLSL", "MPI", "Gloo")
DEFAULT_LAUNCHERS = ("mpirun", "horovodrun-gloo")
DEFAULT_TIMEOUT = 600.0
TWO_RANKS = Launch((), 2)
# The other launchers belong to a scheduler, or to Horovod.
NEED_MPIRUN = ("mpirun", "horovodrun-mpi")

# The MPI of the mpirun that is found first, and a description; empty without an mpirun.
HostMpi = tuple[Mpi, str]


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
        full: whether each framework trains over every controller, and horovodrun starts ranks
            over MPI, too.
        effort: what benchmarks may take; None for no benchmarks.
        cores: how many may be used.
        seconds: for everything.
        shell: the user's variables.
        without_shell: the command that verifies again without the variables of the shell.
        tell: where a part reports ``stage`` and ``failed`` while it runs.
    """

    installation: Installation
    runner: Runner
    expectation: Expectation = Expectation()
    launch: Launch = TWO_RANKS
    two_for_repeats: bool = False
    launchers: tuple[str, ...] = DEFAULT_LAUNCHERS
    exercises: tuple[str, ...] = ()
    full: bool = False
    effort: Effort | None = None
    cores: int = 1
    seconds: float = DEFAULT_TIMEOUT
    shell: Shell = Shell({})
    without_shell: str = "hvdenv verify --clean"
    tell: Callable[[str, str], None] = lambda what, detail: None

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
            launch=self.launch._replace(root=os.geteuid() == 0, cores=cores),
            cores=cores,
            shell=Shell(passed, tuple(name for name in mine if name not in passed)),
        )
