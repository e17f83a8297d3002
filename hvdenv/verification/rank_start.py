"""Starts ranks, and gathers what they report."""

import os
import re
import time
import uuid
from collections.abc import Collection, Mapping
from typing import NamedTuple

from hvdenv.base.command import Outcome
from hvdenv.base.runner import TOKEN_VARIABLE
from hvdenv.environments.installation import hides_variables, mpi_prefix
from hvdenv.environments.prefix_lock import boot_id
from hvdenv.sites.container import launch_here, start_in_image
from hvdenv.sites.launchers import Launch
from hvdenv.sites.placement import Requested, exported_variables, hidden_variables, shell_variables
from hvdenv.verification.inspection import Extension
from hvdenv.verification.rank_run import RankRun, collect, read_events
from hvdenv.verification.setup import CONTROLLERS, FRAMEWORKS, TRAINING, TWO_RANKS, HostMpi, Setup

# They name files of the user, which verify's ranks would overwrite.
FILES_OF_RANKS = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE_LOG")
# Variables that launchers export to ranks on other hosts.
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONNOUSERSITE", TOKEN_VARIABLE)
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


class Pair(NamedTuple):
    """What a run of ranks is of."""

    framework: str
    controller: str

    @property
    def subject(self) -> str:
        return f"{self.framework} over {self.controller}"


PAIRS = tuple(Pair(framework, each) for framework in FRAMEWORKS for each in CONTROLLERS)


def can_run(setup: Setup, pair: Pair, library: Extension, mpi: HostMpi) -> bool:
    """Whether ranks of a framework are to be started over a controller, and can be."""
    return bool(
        pair.framework != "mxnet"
        and library.present
        and not library.cut_off
        and setup.expectation.asks(*pair)
        and setup.can_start(pair.controller, mpi)
    )


def start_ranks(
    setup: Setup, timeout: float, mpi: HostMpi, framework: str, controller: str
) -> RankRun:
    """Allreduces on N ranks, and exercises after them.

    Raises:
        IncompatibleError: the launcher cannot start ranks of this MPI.
    """
    installation, expectation = setup.installation, setup.expectation
    name, exercises = setup.launcher(controller), setup.exercises
    # Whether ranks may use GPUs; they find out themselves whether they can.
    host_only = expectation.operations is not None and "NCCL" not in expectation.operations
    token = uuid.uuid4().hex
    deadline = timeout - min(_LAUNCHER_SECONDS, timeout / 4)
    program = (
        *(installation.python, "-S", "-u", f"{installation.programs}/ranks/rank.py"),
        *(token, _deadline(deadline)),
        *(framework, controller, "host" if host_only else "gpu", *exercises),
    )
    launch = launch_here(name, setup.launch, installation.inside)
    launch = launch._replace(program=program, mpi=mpi[0])
    through = words_before_launcher(setup, name)
    outcome = start_program(
        setup, name, launch, timeout, inside=installation.inside, through=through
    )
    argv = outcome.command.argv
    return RankRun(
        launcher=name,
        controller=controller,
        argv=argv,
        size=launch.ranks,
        hosts=tuple(host.name for host in launch.hosts),
        ranks=collect(read_events(outcome.output, token)),
        returncode=outcome.returncode,
        timed_out=outcome.timed_out,
        tail=_without_events(outcome, token),
        launched_by=mpi[1] if controller == "MPI" else argv[len(through)],
        timeout=deadline,
        exercises=tuple(word.partition("=")[0] for word in exercises),
    )


def _deadline(seconds: float) -> str:
    """When ranks end, as rank.py takes it."""
    wall, steady = time.time() + seconds, time.monotonic() + seconds
    return f"{seconds:g}@{wall:.1f}@{boot_id()}@{steady:.1f}"


def setups_of_runs(setup: Setup, pairs: Collection[Pair]) -> dict[Pair, Setup]:
    """The setup of each run of ranks: not all of them train, or need all ranks.

    Frameworks take turns, so that two of them train over both controllers. All runs train if no
    controllers are stated: perhaps Horovod has only one of them.
    """
    stated = [each for each in setup.expectation.controllers or () if each in {p[1] for p in pairs}]
    controllers = sorted(stated, key=CONTROLLERS.index)
    frameworks = [each for each in FRAMEWORKS if each in {pair.framework for pair in pairs}]
    trained = [
        pair
        for pair in pairs
        if not controllers
        or pair.controller == controllers[frameworks.index(pair.framework) % len(controllers)]
    ]
    setups = {}
    for pair in pairs:
        launch, exercises = setup.launch, setup.exercises
        if pair not in trained:
            exercises = tuple(word for word in exercises if word != TRAINING)
            repeats = all(each in {word for one in trained for word in one} for each in pair)
            if repeats and setup.two_for_repeats:
                launch = launch._replace(ranks=TWO_RANKS.ranks)
        setups[pair] = setup._replace(launch=launch, exercises=exercises)
    return setups


def words_before_launcher(setup: Setup, launcher: str) -> tuple[str, ...]:
    """The words before a launcher's command.

    horovodrun imports TensorFlow to find out whether Gloo was built, which `horovodrun --check-build`
    has answered. So the program horovodrun.py answers.
    """
    installation = setup.installation
    if launcher != "horovodrun-gloo" or installation.inside:
        return ()
    return (installation.python, "-s", f"{installation.programs}/inspect/horovodrun.py", "start")


def start_program(
    setup: Setup,
    name: str,
    launch: Launch,
    timeout: float,
    *,
    inside: tuple[str, ...] = (),
    through: tuple[str, ...] = (),
) -> Outcome:
    """Start a program on all ranks.

    Args:
        setup: of the environment.
        name: of the launcher.
        launch: what it has to know.
        timeout: in seconds.
        inside: words that put each rank into an image.
        through: words before the launcher's command.
    """
    variables = dict(setup.installation.env)
    activated = {"PATH", "PYTHONNOUSERSITE", *variables}
    patched = hides_variables(setup.installation.prefix)
    unset = setup.installation.unset
    environ = variables_for_ranks(name, setup.runner.given, activated, unset, patched=patched)
    names = exported_variables(launch.settings.exports, activated, environ, Requested())
    # The MPI that starts an image's ranks is found by PATH only.
    seen = {"PATH": setup.path, **variables} if inside else variables
    launch = launch._replace(
        program=(*setup.installation.image, *launch.program),
        start_timeout=max(int(timeout), 1),
        exports=tuple(dict.fromkeys([*_EXPORTED, *variables, *names])) if launch.remote else (),
        mpi_prefix=mpi_prefix(seen),
    )
    start = start_in_image(name, launch, inside, os.uname().nodename)
    program = setup.installation.program(start.argv[0]) or start.argv[0]
    argv = (*through, program, *start.argv[1:])
    env = (*_bounded_ssh(launch, environ), *(_KEEPALIVE if launch.remote else ()), *start.env)
    command = setup.command(argv, timeout, env)
    return setup.runner.branch(environ).run(command)


def variables_for_ranks(
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
    environ = shell_variables(given)
    exposed = hidden_variables(launcher, environ, activated, patched=patched)
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
