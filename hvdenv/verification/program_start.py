"""Runs a training program on ranks that observe it (standalone/program/observe.py)."""

import base64
import json
import os
import time
from collections.abc import Sequence
from itertools import dropwhile
from typing import NamedTuple

from hvdenv.base.errors import UsageError
from hvdenv.base.runner import end_marked
from hvdenv.reports.report import Finding
from hvdenv.sites.launchers import Launch, named
from hvdenv.sites.placement import filled
from hvdenv.standalone.ranks.events import FileUse, TrainingStep
from hvdenv.verification.inspection import host_mpi
from hvdenv.verification.program import Program, finding, unproven
from hvdenv.verification.program_rules import judge
from hvdenv.verification.rank_run import RankRun
from hvdenv.verification.rank_start import start_ranks
from hvdenv.verification.setup import HostMpi, Setup
from hvdenv.verification.verify import ended_by_signals

EXERCISE = "program"
DEFAULT_STEPS = 20
# The first learning rate of every optimizer is known by then.
_REFERENCE_STEPS = 2
_WITHOUT_EFFECT = ("-u", "-B", "-s", "-q")


class ProgramRequest(NamedTuple):
    """A training program to prove.

    Attributes:
        argv: SCRIPT ARGS..., or -m MODULE ARGS...
        directory: where it starts.
        steps: how many training steps are observed.
    """

    argv: tuple[str, ...]
    directory: str
    steps: int = DEFAULT_STEPS

    @property
    def name(self) -> str:
        """How findings name it."""
        return os.path.basename(self.argv[1] if self.argv[0] == "-m" else self.argv[0])


def read_command(words: Sequence[str], steps: int = DEFAULT_STEPS) -> ProgramRequest:
    """The program that a command line of Python runs.

    Raises:
        UsageError: the command is no such line, or has no such script.
    """
    where, rest = "the command after --", list(words)
    if os.path.basename(words[0]).startswith("python"):
        rest = list(dropwhile(lambda word: word in _WITHOUT_EFFECT, words[1:]))
    if not rest or not (rest[0].endswith(".py") or (rest[0] == "-m" and len(rest) > 1)):
        raise UsageError(
            f"{' '.join(words[:3])} is not a Python program that verify can observe",
            where=where,
            remedy="verify starts the ranks itself, so write only the program: -- python train.py"
            " ARG ..., or -- python -m MODULE ARG ...",
        )
    if rest[0] != "-m" and not os.path.exists(rest[0]):
        raise UsageError(
            f"there is no file {rest[0]}",
            where=where,
            remedy="name the script as it is called from this directory",
        )
    return ProgramRequest(tuple(rest), os.getcwd(), steps)


def prove(setup: Setup, request: ProgramRequest) -> list[Finding]:
    """Run a program and judge what its ranks did.

    Args:
        setup: as for verify(); its runner is stopped by signals.
        request: the program.
    """
    setup = setup.of_this_process()
    with ended_by_signals(setup.runner):
        end = time.monotonic() + setup.seconds
        mpi = host_mpi(setup, setup.seconds)
        controller = _controller(setup, mpi)
        if not controller:
            message = "no launcher here can start ranks of this environment"
            return [finding(request.name, "", unproven(message, "use --launcher"))]
        run = _observed(setup, mpi, request, controller, end - time.monotonic())
        reference: dict[int, float] = {}
        if run.size > 1 and any(rank.all(TrainingStep) for rank in run.ranks):
            # Another run, because only the program knows what its learning rate depends on.
            alone = setup._replace(launch=with_one_rank(setup.launch))
            short = request._replace(steps=_REFERENCE_STEPS)
            left = max(end - time.monotonic(), 1.0)
            reference = _rates_alone(_observed(alone, mpi, short, controller, left, ends=True), run)
        end_marked(setup.runner.token)  # workers that the program has started
    return judge(Program(request.name, run, reference))


def with_one_rank(launch: Launch) -> Launch:
    """The launch of one rank on its first host."""
    hosts = filled(launch.hosts, 1)
    return launch._replace(
        ranks=1,
        hosts=hosts,
        hostfile="",
        ranks_per_node=min(launch.ranks_per_node, 1),
        placed=bool(hosts),
    )


def _controller(setup: Setup, mpi: HostMpi) -> str:
    """The controller of the first launcher that can start ranks of this environment."""
    wanted = setup.expectation.controllers or ("MPI", "Gloo")
    own = setup.launch.settings.launchers
    controllers = [named(name, own).controller for name in setup.launchers]
    found = (each for each in controllers if each in wanted and setup.can_start(each, mpi))
    return next(found, "")


def _observed(
    setup: Setup,
    mpi: HostMpi,
    request: ProgramRequest,
    controller: str,
    seconds: float,
    *,
    ends: bool = False,
) -> RankRun:
    """One run, which `ends` right after the steps that are observed, or goes on to an epoch's end."""
    spec = {
        "argv": request.argv,
        "directory": request.directory,
        "steps": request.steps,
        "short": ends,
    }
    word = base64.b64encode(json.dumps(spec).encode()).decode("ascii")
    ready = setup._replace(exercises=(f"{EXERCISE}={word}",))
    frameworks = setup.expectation.frameworks or ("torch",)
    return start_ranks(ready, seconds, mpi, frameworks[0], controller)


def _rates_alone(run: RankRun, before: RankRun) -> dict[int, float]:
    """The first learning rate of each optimizer on one rank, by the optimizer's number.

    There are none if this run may have loaded them from the run before it.
    """
    saved, loaded = (
        {
            os.path.dirname(use.path)
            for rank in one.ranks
            for use in rank.all(FileUse)
            if use.write == w
        }
        for one, w in ((before, True), (run, False))
    )
    if saved & loaded:
        return {}
    steps = [step for rank in run.ranks for step in rank.all(TrainingStep)]
    return {step.optimizer: step.rate for step in reversed(steps) if step.rate is not None}
