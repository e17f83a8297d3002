"""Run a command in an environment, or in the image that the recipe names.

By default, run uses all hosts and slots of the allocation and the launcher of the recipe. The
exit code is that of the command; it is 125 if hvdenv cannot start the command."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdenv.cli.options import (
    add_clean,
    add_hosts,
    add_prefix,
    add_recipe,
    add_trust,
    environment_of,
    read_hostfile,
    refuse_foreign_names,
    refuse_foreign_path,
    refuse_foreign_prefix,
    requested_hosts,
    resolved_of,
)
from hvdenv.errors import OWN_FAILURE, HvdenvError, UsageError

if TYPE_CHECKING:
    from hvdenv.launch.allocation import Allocation
    from hvdenv.launch.launchers import Launch, Mpi, Start
    from hvdenv.launch.placement import Requested
    from hvdenv.model.cluster import Container
    from hvdenv.model.recipe import Recipe

EXAMPLES = """\
examples:
  hvdenv run local -n 2 -- python train.py
  hvdenv run neuron -- python train.py              all GPUs of the allocation
  hvdenv run neuron -n 8 --hosts gpu32:4,gpu33:4 --launcher mpirun -- python train.py
  hvdenv run neuron --hosts gpu[32-33]:2 --launcher horovodrun-gloo -x WANDB_MODE -- python train.py
  hvdenv run neuron --dry-run -- python train.py    prints the command line
  hvdenv run local -n 2 --clean -- python train.py  without LD_PRELOAD, HOROVOD_* and others
  hvdenv run singularity -n 4 --hosts f1:2,f2:2 -- python train.py       in its image
  hvdenv run --prefix ~/envs/horovod -n 2 -x HOROVOD_TIMELINE=t.json -- python train.py

run passes variables such as HOROVOD_*, NCCL_* and OMP_* of your shell to all ranks. Other
variables reach the ranks if the launcher passes them on (srun), or with -x.
"""


# $1 is the launcher's name, the rest is run.
_SCRIPT = (
    ' || exit 125; type -P -- "$1" >/dev/null || '
    '{ echo "error: there is no $1 here, neither in the environment nor on PATH" >&2; exit 125; }; '
    'shift; exec "$@"'
)


class Chosen(NamedTuple):
    """The environment that a command runs in.

    Attributes:
        name: recipe and variants.
        recipe: says how things are started here.
        prefix: where it lies; the image, if it is one.
        record: of its active generation; empty if it was not built, or is an image.
        container: how its image is run; None for an environment on the host.
    """

    name: str
    recipe: Recipe
    prefix: Path
    record: Mapping[str, Any]
    container: Container | None = None

    @property
    def activate(self) -> str:
        return str(self.prefix / "activate.sh")

    @property
    def inside(self) -> tuple[str, ...]:
        """The words before a program that runs in the image."""
        from hvdenv.launch.container import inside

        return inside(self.container, os.getcwd()) if self.container else ()

    @property
    def module_lines(self) -> tuple[str, ...]:
        """What loads the host's modules, where no activate.sh does."""
        from hvdenv.sites.modules import shell_lines

        modules = self.recipe.modules if self.container else None
        return shell_lines(modules, "run") if modules else ()

    @property
    def before(self) -> str:
        """Shell commands that come before everything else, the last of which may fail."""
        if not self.container:
            return f". {shlex.quote(self.activate)}"
        if not self.module_lines:
            return "true"
        return "\n".join(("hvdenv_modules() {", *self.module_lines, "}", "hvdenv_modules"))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hvdenv run RECIPE [options] -- CMD [ARG ...]"
    add_recipe(parser, optional=True)
    add_prefix(parser)
    parser.add_argument(
        "-n", "--ranks", type=int, metavar="N",
        help="number of ranks (default: all slots of the allocation, otherwise 1)",
    )  # fmt: skip
    add_hosts(parser)
    parser.add_argument(
        "--launcher", metavar="L",
        help="srun, mpirun, mpiexec, horovodrun-mpi, horovodrun-gloo, aprun, jsrun, torchrun or"
        " multiworker (default: the recipe's)",
    )  # fmt: skip
    parser.add_argument(
        "-x", "--export", metavar="NAME[=VALUE]", action="append", default=[],
        help="set a variable for every rank; may be repeated",
    )  # fmt: skip
    add_clean(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command line without running it"
    )
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    with own_failures():
        return _run(arguments)


@contextmanager
def own_failures() -> Iterator[None]:
    """Every failure of hvdenv's own has one exit code, which is none of the command's."""
    try:
        yield
    except HvdenvError as error:
        error.exit_code = OWN_FAILURE
        raise


def _run(arguments: argparse.Namespace) -> int:
    from hvdenv.command import Command
    from hvdenv.environments import last_used
    from hvdenv.launch.container import start_inside
    from hvdenv.launch.placement import choose_launcher, hidden, of_shell, place, refuse_unfit
    from hvdenv.places import find_places
    from hvdenv.runner import environment, hand_over

    if not arguments.program:
        raise UsageError(
            "there is no command to run",
            remedy="write it after --: hvdenv run RECIPE -- python train.py",
        )
    chosen = choose(arguments, built=not arguments.dry_run, image=True)
    requested = _requested(arguments)
    environ = of_shell(environment(), clean=arguments.clean, kept=requested.exports)
    allocation = current_allocation()
    name = choose_launcher(chosen.recipe, requested.launcher)
    launch = place(
        chosen.recipe, tuple(arguments.program), requested, allocation,
        cores=len(os.sched_getaffinity(0)), root=os.geteuid() == 0,
    )  # fmt: skip
    # A dry run shows the line for the site's own allocations.
    scheduler = allocation.scheduler or (chosen.recipe.scheduler if arguments.dry_run else None)
    refuse_unfit(name, chosen.recipe, requested, scheduler, len(launch.hosts))
    launch = _completed(name, launch, chosen, requested, environ)
    start = start_inside(name, launch, chosen.inside, os.uname().nodename)
    line = _line(start, hidden(name, environ, requested, activated(chosen)))
    if arguments.dry_run:
        _print(line, chosen, [name for name in environment() if name not in environ])
        return 0
    last_used.note(find_places(), chosen.prefix)
    words = ("bash", "-c", chosen.before + _SCRIPT, "hvdenv", start.argv[0], *line)
    return hand_over(Command(words), environ, alone=True)


def choose(arguments: argparse.Namespace, *, built: bool, image: bool = False) -> Chosen:
    """The environment that the options name.

    Args:
        arguments: with recipe or prefix.
        built: whether it has to be there.
        image: whether it may be an image: that of a recipe which names one, if no prefix
            is named.

    Raises:
        UsageError: none is named, or it is not there.
        StepError: its record is damaged.
    """
    from hvdenv.environments import generations
    from hvdenv.launch.container import image_of
    from hvdenv.model.recipe import Recipe
    from hvdenv.places import environment_name, find_places
    from hvdenv.schema import decode

    if arguments.recipe:
        resolved = resolved_of(arguments)
        name = environment_name(resolved.recipe.name, resolved.variants)
        container = image_of(resolved.recipe, os.getcwd()) if image else None
        if container and not arguments.prefix:
            if built:
                refuse_missing_image(container, named(arguments), os.getcwd())
            refuse_foreign_path(str(container.image), arguments)
            return Chosen(name, resolved.recipe, Path(str(container.image)), {}, container)
        environment = environment_of(arguments, resolved, find_places())
        remedy = f"hvdenv build {named(arguments)}"
    elif arguments.prefix:
        environment, name = generations.at(arguments.prefix), str(arguments.prefix)
        remedy = "name a prefix that `hvdenv envs` lists"
    else:
        raise UsageError("no environment is named", remedy="name a recipe, or a --prefix")
    active = environment.active()
    if not active and (built or not arguments.recipe):
        if damage := environment.damage(environment.pointed()):
            raise UsageError(
                f"files of this environment are damaged: {damage}",
                where=str(environment.prefix),
                remedy="rebuild it: hvdenv build "
                f"{named(arguments) if arguments.recipe else 'RECIPE'} --rebuild",
            )
        which = f"{name} at" if arguments.recipe else "at"
        raise UsageError(f"there is no environment {which} {environment.prefix}", remedy=remedy)
    record = generations.read_record(environment.record(active)) if active else {}
    refuse_foreign_prefix(environment.prefix, arguments, also=elsewhere(record))
    recipe = resolved.recipe if arguments.recipe else decode(Recipe, record["resolved"])
    if not arguments.recipe:
        name = environment_name(record["recipe"], record["variants"])
        refuse_foreign_names(recipe, arguments, str(environment.prefix))
    return Chosen(name, recipe, environment.prefix, record)


def elsewhere(record: Mapping[str, Any]) -> str:
    """The folder of an environment's Python, where that is the site's; or empty."""
    folder = str(record.get("environment", ""))
    return folder if folder.startswith("/") else ""


def named(arguments: argparse.Namespace) -> str:
    """The recipe and its variants, for a command to type."""
    variants = (word for each in arguments.variant for word in ("--variant", each))
    return shlex.join((arguments.recipe, *variants))


def refuse_missing_image(container: Container, recipe: str, folder: str) -> None:
    """See that an image is there, as its runtime wants it.

    Args:
        container: from inside.image_of().
        recipe: for a command to type.
        folder: where programs will start; / if that does not matter.

    Raises:
        UsageError: it is not, with how to get it.
    """
    from hvdenv.launch.container import shown

    image = Path(str(container.image))
    if not image.exists():
        raise UsageError(
            f"there is no image of {recipe} on this host", where=str(image),
            remedy=f"build it with `hvdenv container {recipe} --build`, or copy it here; on other"
            f" hosts `hvdenv container {recipe} --preflight --hosts H1,H2 --copy` puts it",
        )  # fmt: skip
    if container.runtime != "ch-run" or not image.is_dir():
        return
    for each in shown(container, folder):
        place = each.rpartition(":")[2]
        if not (image / place.lstrip("/")).exists():
            raise UsageError(
                f"the image has no {place}, on which ch-run could show that of the host",
                where=str(image),
                remedy=f"mkdir -p {shlex.quote(str(image) + place)}; or go to a folder below /tmp"
                " or one of container.binds",
            )
    listed = image / "ch/environment"
    if not listed.is_file():
        raise UsageError(
            "ch-run finds no file with the variables of the image", where=str(listed),
            remedy="make the folder with ch-convert, or write the file: NAME=value on each line,"
            " PATH at least",
        )  # fmt: skip


def current_allocation() -> Allocation:
    """The allocation that this process is in."""
    from hvdenv.launch.allocation import find_allocation, hostfile
    from hvdenv.runner import environment

    path = hostfile(environment())
    return find_allocation(environment(), read_hostfile(Path(path)) if path else "")


def _requested(arguments: argparse.Namespace) -> Requested:
    import re

    from hvdenv.launch.placement import Requested

    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"{arguments.ranks} ranks are none", where="-n", remedy="take 1 or more")
    pairs = [text.partition("=") for text in arguments.export]
    for name, _, value in pairs:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII) or "\0" in value:
            raise UsageError(
                f"{name!r} is no name of a variable", where="-x",
                remedy="write NAME, or NAME=VALUE",
            )  # fmt: skip
    return Requested(
        arguments.ranks,
        requested_hosts(arguments),
        str(arguments.hostfile.absolute()) if arguments.hostfile else "",
        arguments.launcher or "",
        tuple((name, value) for name, equals, value in pairs if equals),
        tuple(name for name, equals, _ in pairs if not equals),
    )


def _completed(
    name: str, launch: Launch, chosen: Chosen, requested: Requested, environ: Mapping[str, str]
) -> Launch:
    """What only the environment and this process know."""
    from hvdenv.launch.placement import exported

    names = activated(chosen)
    launch = with_mpi(launch, chosen)._replace(
        exports=exported(chosen.recipe.launch.exports, names, environ, requested),
        interactive=True,
    )
    return launch._replace(program=found_program(name, launch, chosen, launch.program))


def with_mpi(launch: Launch, chosen: Chosen) -> Launch:
    """The launch with the version of its MPI, and where that lies.

    What the recipe says goes before what mpirun says, but of an image the recipe says what
    is inside: the host's own mpirun starts its ranks, and tells what it is and where it lies.
    """
    from hvdenv.environments.installation import mpi_prefix

    variables = variables_of(chosen)
    if chosen.container or (chosen.record and not launch.mpi.version):
        found, seen = _ask_mpi(chosen)
        variables = seen if chosen.container else variables
        fits = chosen.container or launch.mpi.kind in ("unknown", found.kind)
        if found.kind != "unknown" and fits:
            launch = launch._replace(mpi=found)
    return launch._replace(mpi_prefix=mpi_prefix(variables))


def found_program(
    name: str, launch: Launch, chosen: Chosen, program: tuple[str, ...]
) -> tuple[str, ...]:
    """The program by its path, where other hosts could find another one of its name first.

    Args:
        name: of the launcher.
        launch: what it is told.
        chosen: the environment.
        program: and its arguments.
    """
    from hvdenv.environments.installation import inspect_prefix
    from hvdenv.launch.launchers import puts_mpi_first

    if not chosen.record or "/" in program[0] or not puts_mpi_first(name, launch):
        return program
    return (inspect_prefix(str(chosen.prefix)).program(program[0]) or program[0], *program[1:])


def variables_of(chosen: Chosen) -> dict[str, str]:
    """What the modules set when the environment was built, and what it sets itself."""
    record = chosen.record
    modules = record.get("modules", {}).get("run", {}).get("set", {})
    return {**modules, **record.get("variables", {})}


def activated(chosen: Chosen) -> set[str]:
    """Names of the variables that activate.sh sets; an image has its own inside."""
    if chosen.container:
        return {"PATH"}
    recipe, record = chosen.recipe, chosen.record
    own = {"venv": "VIRTUAL_ENV", "modules": "PATH"}.get(recipe.python.provider, "CONDA_PREFIX")
    modules = record.get("modules", {}).get("run", {}).get("set", {})
    variables = record.get("variables", recipe.environment.run)
    return {"PATH", "PYTHONNOUSERSITE", own, *variables, *modules}


def _ask_mpi(chosen: Chosen) -> tuple[Mpi, dict[str, str]]:
    """The MPI whose mpirun programs find, and the variables that say where it lies."""
    from hvdenv.command import Command
    from hvdenv.launch.launchers import parse_mpi_version
    from hvdenv.runner import Runner, environment

    asks = 'printf \'%s=%s\\n\' PATH "$PATH" OPAL_PREFIX "${OPAL_PREFIX-}"; exec mpirun --version'
    script = f"exec 3>&1 >/dev/null 2>&1; {chosen.before} && {{ exec >&3; {asks}; }}"
    # Of a module that the user has loaded; a runner takes it away.
    kept = tuple((n, v) for n, v in environment().items() if n == "OPAL_PREFIX")
    output = Runner().run(Command(("bash", "-c", script), kept, timeout=60.0)).output
    pairs = (line.partition("=") for line in output.splitlines()[:2])
    return parse_mpi_version(output), {name: value for name, _, value in pairs}


def _line(start: Start, hidden: tuple[str, ...]) -> tuple[str, ...]:
    """The launcher with its variables, once the environment is the current one."""
    # Modules are loaded before: `module` itself lives in variables that are hidden then.
    unset = tuple(word for name in hidden for word in ("-u", name))
    variables = tuple(f"{name}={value}" for name, value in start.env)
    return ("env", *unset, *variables, *start.argv) if unset or variables else start.argv


def _print(line: tuple[str, ...], chosen: Chosen, dropped: Sequence[str]) -> None:
    """The line, for a shell; in one of its own, which it does not change."""
    words = shlex.join(line)
    first = f"unset {shlex.join(dropped)}; " if dropped else ""
    plain = chosen.before == "true" and not first
    print(words if plain else f"( {first}{chosen.before} && exec {words} )")
    if not (chosen.prefix.exists() if chosen.container else chosen.record):
        print(f"note: {chosen.name} was not built yet", file=sys.stderr)
