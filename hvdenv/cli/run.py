"""Run a command in an environment, or in the image that the recipe names.

By default, run uses all hosts and slots of the allocation and the launcher of the recipe. The
exit code is that of the command; it is 125 if hvdenv cannot start the command."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from hvdenv.cli.options import add, add_options, read_hostfile, report, requested_hosts
from hvdenv.cli.target import Chosen, choose, named, take_active
from hvdenv.cli.with_image import Entry, add_image, entry_of
from hvdenv.command import Command
from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import last_used
from hvdenv.environments.installation import hides_variables, inspect_prefix, mpi_prefix
from hvdenv.environments.search_path import PYTHON_PATH
from hvdenv.errors import UsageError
from hvdenv.launch import placement
from hvdenv.launch.container import start_inside
from hvdenv.launch.launchers import (
    LAUNCHERS,
    Launch,
    Mpi,
    Variables,
    parse_mpi_version,
    puts_mpi_first,
)
from hvdenv.model.recipe import Recipe
from hvdenv.places import find_places
from hvdenv.runner import Runner, environment, hand_over
from hvdenv.sites.allocation import Allocation, find_allocation, refuse_unknown
from hvdenv.sites.batch import OPTIONS

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
variables reach the ranks if the launcher passes them on (srun, horovodrun), or with -x. Other users
can list command lines: pass a secret as -x NAME, without its value.
"""


# Begins the names of variables that are set in the activated environment. Their values are not in
# arguments, which other users can list.
_TO_SET = "HVDENV_SET_"
# $1 is the launcher's name; the other arguments are run.
_SCRIPT = (
    f' || exit 125; for hvdenv_set in "${{!{_TO_SET}@}}"; do'
    f' export "${{hvdenv_set#{_TO_SET}}}=${{!hvdenv_set}}"; unset "$hvdenv_set"; done; '
    'type -P -- "$1" >/dev/null || '
    '{ echo "error: $1 is neither in the environment nor on PATH" >&2; exit 125; }; '
    'shift; exec "$@"'
)


# What a job requests. Only a batch job has an output file.
REQUESTS = tuple(field for field in OPTIONS if field != "output")
_COUNTS = ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hvdenv run [RECIPE] [options] -- CMD [ARG ...]"
    add_options(parser, "recipe?", "prefix")
    add(
        parser, "-n --ranks N",
        "number of ranks (default: all slots of the allocation, otherwise 1)", type=int,
    )  # fmt: skip
    add_options(parser, "hosts")
    add(parser, "--launcher L", f"{', '.join(LAUNCHERS)} (default: the recipe's)")
    add(
        parser, "-x --export NAME[=VALUE]",
        "set a variable for every rank; may be repeated", action="append", default=[],
    )  # fmt: skip
    add_options(parser, "clean")
    add_image(parser)
    add(parser, "--dry-run", "print the command line without running it")
    add_options(parser, "trust")


def add_requests(group: argparse._ActionsContainer) -> None:
    """Options for fields of a job; their names are those of the fields."""
    helps = {"time": "such as 1:30:00 or 2-00:00:00", "partition": "partition or queue"}
    for field in REQUESTS:
        kind: type = int if field in _COUNTS else str
        metavar = "N" if kind is int else field.upper()
        add(group, f"--{field.replace('_', '-')} {metavar}", helps.get(field), type=kind)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.program:
        remedy = "write it after --: hvdenv run RECIPE -- python train.py"
        raise UsageError("no command to run", remedy=remedy)
    take_active(arguments)
    chosen = choose(arguments, built=not arguments.dry_run, image=True)
    recipe, requested = chosen.recipe, _requested(arguments)
    environ = placement.of_shell(environment(), clean=arguments.clean, kept=requested.exports)
    allocation = current_allocation(recipe)
    if not (allocation.scheduler or requested.hosts):
        refuse_unknown(environ, f"hvdenv run {named(arguments)}")
    name = placement.choose_launcher(recipe, requested.launcher)
    launch = placement.place(
        recipe, tuple(arguments.program), requested, allocation,
        cores=len(os.sched_getaffinity(0)), root=os.geteuid() == 0,
    )  # fmt: skip
    # A dry run prints the command for an allocation of the site's scheduler.
    scheduler = allocation.scheduler or (recipe.scheduler if arguments.dry_run else None)
    placement.refuse_unfit(name, recipe, requested, scheduler, len(launch.hosts), named(arguments))
    launch = with_mpi(launch, chosen)._replace(
        exports=placement.exported(recipe.launch.exports, activated(chosen), environ, requested),
        interactive=True,
    )
    entry = entry_of(arguments, chosen.prefix, recipe) if chosen.record else Entry()
    program = (*entry.words, *found_program(name, launch, chosen, launch.program))
    launch = launch._replace(program=program)
    start = start_inside(name, launch, chosen.inside, os.uname().nodename)
    # What is not built yet will.
    patched = not (chosen.there and (chosen.of_modules or not hides_variables(chosen.prefix)))
    placement.refuse_exposed(name, requested, patched=patched, words=named(arguments))
    unset = placement.hidden(name, environ, activated(chosen), patched=patched)
    # After modules are loaded: `module` itself is stored in variables that are hidden here.
    words = ("env", *(word for each in unset for word in ("-u", each))) if unset else ()
    line = (*words, *start.argv)
    if arguments.dry_run:
        _print(line, start.env, chosen, [each for each in environment() if each not in environ])
        return 0
    if not chosen.of_modules:
        last_used.note(find_places(), chosen.prefix)
    words = ("bash", "-c", chosen.before + _SCRIPT, "hvdenv", start.argv[0], *line)
    to_set = tuple((_TO_SET + each, value) for each, value in start.env)
    return hand_over(Command(words, to_set), environ)


def current_allocation(recipe: Recipe | None = None) -> Allocation:
    """The allocation that this process runs in; a recipe may have a scheduler of its own."""
    dialects = recipe.dialects if recipe else None
    return find_allocation(environment(), lambda path: read_hostfile(Path(path)), dialects)


def requested_ranks(arguments: argparse.Namespace) -> placement.Requested:
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"{arguments.ranks} ranks", where="-n", remedy="give 1 or more")
    file = str(arguments.hostfile.absolute()) if arguments.hostfile else ""
    return placement.Requested(
        ranks=arguments.ranks, hosts=requested_hosts(arguments), hostfile=file
    )


def _requested(arguments: argparse.Namespace) -> placement.Requested:
    requested = requested_ranks(arguments)
    pairs = [text.partition("=") for text in arguments.export]
    for name, _, value in pairs:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII) or "\0" in value:
            raise UsageError(
                f"{name!r} is not the name of a variable", where="-x",
                remedy="write NAME, or NAME=VALUE",
            )  # fmt: skip
    return requested._replace(
        launcher=arguments.launcher or "",
        variables=tuple((name, value) for name, equals, value in pairs if equals),
        exports=tuple(name for name, equals, _ in pairs if not equals),
    )


def with_mpi(launch: Launch, chosen: Chosen) -> Launch:
    """The launch with the version of its MPI and the MPI's folder.

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


def _ask_mpi(chosen: Chosen) -> tuple[Mpi, dict[str, str]]:
    if not shutil.which("bash"):
        return parse_mpi_version(""), {}
    query = 'printf \'%s=%s\\n\' PATH "$PATH" OPAL_PREFIX "${OPAL_PREFIX-}"; exec mpirun --version'
    script = f"exec 3>&1 >/dev/null 2>&1; {chosen.before} && {{ exec >&3; {query}; }}"
    # A module that the user has loaded may set it; Runner removes it.
    kept = tuple((n, v) for n, v in environment().items() if n == "OPAL_PREFIX")
    output = Runner().run(Command(("bash", "-c", script), kept, timeout=60.0)).output
    pairs = (line.partition("=") for line in output.splitlines()[:2])
    return parse_mpi_version(output), {name: value for name, _, value in pairs}


def _print(
    line: tuple[str, ...], variables: Variables, chosen: Chosen, dropped: Sequence[str]
) -> None:
    words = shlex.join(line)
    first = f"unset {shlex.join(dropped)}; " if dropped else ""
    # `export` is no program, and so has no command line that other users see.
    steps = [chosen.before] if chosen.before != "true" else []
    steps += [f"export {name}={shlex.quote(value)}" for name, value in variables]
    plain = not (first or steps)
    print(words if plain else f"( {first}{' && '.join([*steps, f'exec {words}'])} )")
    if not chosen.there:
        report(f"note: {chosen.name} is not built yet")
