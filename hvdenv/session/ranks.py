"""How programs of a chosen environment start: where, with which MPI and variables, from which image."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.command import Command
from hvdenv.base.errors import HvdenvError, UsageError
from hvdenv.base.runner import Runner, environment
from hvdenv.environments import generations, image
from hvdenv.environments.generations import IMAGE
from hvdenv.environments.image import Packed
from hvdenv.environments.installation import PYTHON_PATH, inspect_prefix, mpi_prefix
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.recipe import Recipe
from hvdenv.session.chosen import Chosen, command_for
from hvdenv.session.output import report
from hvdenv.session.request import Request, read_hostfile
from hvdenv.sites import placement
from hvdenv.sites.allocation import Allocation, find_allocation
from hvdenv.sites.hosts import parse_hostfile, parse_hosts
from hvdenv.sites.launchers import Launch, MpiVersion, parse_mpi_version, puts_mpi_first
from hvdenv.sites.placement import Requested


def current_allocation(recipe: Recipe | None = None) -> Allocation:
    """The allocation that this process runs in; a recipe may have a scheduler of its own."""
    dialects = recipe.dialects if recipe else None
    return find_allocation(environment(), lambda path: read_hostfile(Path(path)), dialects)


def requested_ranks(ranks: int | None, hosts: str | None, hostfile: Path | None) -> Requested:
    """The number of ranks and the hosts that options name."""
    if ranks is not None and ranks < 1:
        raise UsageError(f"{ranks} ranks", where="-n", remedy="give 1 or more")
    if hostfile:
        found = parse_hostfile(read_hostfile(hostfile), str(hostfile))
        return Requested(ranks=ranks, hosts=found, hostfile=str(hostfile.absolute()))
    return Requested(ranks=ranks, hosts=parse_hosts(hosts) if hosts is not None else ())


def plan_ranks(
    recipe: Recipe,
    chosen: Chosen,
    requested: Requested,
    allocation: Allocation,
    environ: Mapping[str, str],
    words: str,
) -> tuple[str, Launch]:
    """The launcher of ranks, and all that it has to know except their program.

    Args:
        environ: the variables that ranks on other hosts may get.
        words: what names the recipe on a command line.

    Raises:
        UsageError: there is no room for so many ranks, or the launcher cannot start them there.
        IncompatibleError: Horovod lacks the launcher's controller.
    """
    name = placement.choose_launcher(recipe, requested.launcher)
    launch = placement.place(recipe, requested, allocation, root=os.geteuid() == 0)
    scheduler = allocation.scheduler or None
    placement.refuse_unfit(name, recipe, requested, scheduler, launch.nodes, words)
    exports = placement.exported_variables(
        recipe.launch.exports, activated(chosen), environ, requested
    )
    return name, with_mpi(launch, chosen)._replace(exports=exports)


def with_mpi(launch: Launch, chosen: Chosen) -> Launch:
    """The launch with the version of its MPI and the MPI's directory.

    The recipe takes precedence over the output of mpirun. For an image, the recipe describes the
    MPI inside, while the host's mpirun starts the ranks, so that one is asked.
    """
    record = chosen.record or GenerationRecord()
    variables = {**record.modules.get("run", {}).get("set", {}), **(record.variables or {})}
    built = chosen.record or chosen.foreign
    if chosen.container or (built and not launch.mpi.version):
        found, seen = _ask_mpi(chosen)
        variables = seen if chosen.container else variables
        fits = chosen.container or launch.mpi.kind in ("unknown", found.kind)
        if found.kind != "unknown" and fits:
            launch = launch._replace(mpi=found)
    return launch._replace(mpi_prefix=mpi_prefix(variables))


def found_program(
    name: str, launch: Launch, chosen: Chosen, program: tuple[str, ...]
) -> tuple[str, ...]:
    """The program with its path, if other hosts could find another one of its name first."""
    if (
        not (chosen.record or chosen.foreign)
        or "/" in program[0]
        or not puts_mpi_first(name, launch)
    ):
        return program
    return (inspect_prefix(str(chosen.prefix)).program(program[0]) or program[0], *program[1:])


def activated(chosen: Chosen) -> set[str]:
    """Names of the variables that activate.sh sets; an image sets its own."""
    if chosen.container:
        return {"PATH"}
    if chosen.foreign:
        virtual = (chosen.prefix / "pyvenv.cfg").exists()
        kept = {PYTHON_PATH} & environment().keys()
        return {"PATH", "PYTHONNOUSERSITE", "VIRTUAL_ENV" if virtual else "CONDA_PREFIX", *kept}
    recipe, record = chosen.recipe, chosen.record or GenerationRecord()
    own = {"venv": "VIRTUAL_ENV", "modules": "PATH"}.get(recipe.python.provider, "CONDA_PREFIX")
    modules = record.modules.get("run", {}).get("set", {})
    variables = recipe.environment.run if record.variables is None else record.variables
    return {"PATH", "PYTHONNOUSERSITE", own, *variables, *modules}


def _ask_mpi(chosen: Chosen) -> tuple[MpiVersion, dict[str, str]]:
    if not shutil.which("bash"):
        return parse_mpi_version(""), {}
    query = 'printf \'%s=%s\\n\' PATH "$PATH" OPAL_PREFIX "${OPAL_PREFIX-}"; exec mpirun --version'
    script = f"exec 3>&1 >/dev/null 2>&1; {chosen.before} && {{ exec >&3; {query}; }}"
    # A module that the user has loaded may set it; Runner removes it.
    kept = tuple((n, v) for n, v in environment().items() if n == "OPAL_PREFIX")
    output = Runner().run(Command(("bash", "-c", script), kept, timeout=60.0)).output
    pairs = (line.partition("=") for line in output.splitlines()[:2])
    return parse_mpi_version(output), {name: value for name, _, value in pairs}


class ImageEntry(NamedTuple):
    """How programs enter an image; all are empty without one.

    Attributes:
        words: before the program of each rank.
        source: how the kernel names the mount.
        path: of the image.
    """

    words: tuple[str, ...] = ()
    source: str = ""
    path: str = ""


def find_entry(request: Request, chosen: Chosen, job: str = "") -> ImageEntry:
    """How programs of an environment enter the image that is requested, or beside it.

    Args:
        job: see image.before().

    Raises:
        HvdenvError: a named image does not fit, or cannot be read.
        UntrustedError: another user could change it.
    """
    if chosen.record is None:
        if request.image:
            raise UsageError(
                "only an environment that hvdenv built can have an image",
                where=f"--image {request.image}",
                remedy="omit --image"
                if chosen.there
                else f"build it: {command_for(request, 'build')}",
            )
        return ImageEntry()
    built = generations.at(chosen.prefix)
    identity = built.active()
    # The one of this generation first: others only say that there is an older one.
    found = built.store.glob(f"*{IMAGE}")
    images = sorted(found, key=lambda each: each != image.default(built, identity).image)
    if request.image:
        images = [request.image.absolute()]
    if request.no_image or not (identity and images):
        return ImageEntry()
    packed = Packed(images[0])
    try:
        manifest = image.fitting(packed, built, identity)
    except HvdenvError as error:
        if request.image:
            raise
        report(f"note: the image beside the environment is not used: {error.message}")
        report("for a new image: hvdenv pack RECIPE")
        return ImageEntry()
    for path in (packed.path, packed.image, packed.program):
        request.gate.refuse_path(path)
    words = image.before(packed, manifest, built, job)
    return ImageEntry(words, f"hvdenv:{manifest.sha256}", str(packed.image))
