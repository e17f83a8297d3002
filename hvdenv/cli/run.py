"""Run a command in an environment, or in the image that the recipe names.

By default, run uses all hosts and slots of the allocation and the launcher of the recipe. The
exit code is that of the command; it is 125 if hvdenv cannot start the command."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence

from hvdenv.base.command import Command
from hvdenv.base.errors import UsageError
from hvdenv.base.runner import environment, replace_process
from hvdenv.cli.options import add, add_options, read_request
from hvdenv.environments.installation import hides_variables
from hvdenv.session.chosen import Chosen, choose, with_active
from hvdenv.session.output import report
from hvdenv.session.ranks import (
    activated,
    current_allocation,
    find_entry,
    found_program,
    plan_ranks,
    requested_ranks,
)
from hvdenv.sites import placement
from hvdenv.sites.allocation import refuse_unknown
from hvdenv.sites.container import start_in_image
from hvdenv.sites.launchers import LAUNCHERS, Variables

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


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hvdenv run [RECIPE] [options] -- CMD [ARG ...]"
    add_options(parser, "recipe?", "prefix")
    add(
        parser,
        "-n --ranks N",
        "number of ranks (default: all slots of the allocation, otherwise 1)",
        type=int,
    )
    add_options(parser, "hosts")
    add(parser, "--launcher LAUNCHER", f"{', '.join(LAUNCHERS)} (default: the recipe's)")
    add(
        parser,
        "-x --export NAME[=VALUE]",
        "set a variable for every rank; may be repeated",
        action="append",
        default=[],
    )
    add_options(parser, "clean", "image")
    add(parser, "--dry-run", "print the command line without running it")
    add_options(parser, "trust")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.program:
        remedy = "write it after --: hvdenv run RECIPE -- python train.py"
        raise UsageError("no command to run", remedy=remedy)
    request = with_active(read_request(arguments, anywhere=arguments.dry_run))
    chosen = choose(request, image=True)
    recipe, requested = chosen.recipe, _requested(arguments)
    environ = placement.shell_variables(
        environment(), clean=arguments.clean, kept=requested.exports
    )
    if lost := sorted({*requested.exports} - environ.keys() - activated(chosen)):
        report(f"warning: -x {', '.join(lost)}: not exported by your shell, so ranks do not get it")
    allocation = current_allocation(recipe)
    if not (allocation.scheduler or requested.hosts):
        refuse_unknown(environ, f"hvdenv run {request.named}")
    if arguments.dry_run and not allocation.scheduler:
        # It prints the command for an allocation of the site's scheduler.
        allocation = allocation._replace(scheduler=recipe.scheduler or "")
    name, launch = plan_ranks(recipe, chosen, requested, allocation, environ, request.named)
    if full := placement.overload(launch, allocation):
        report(f"warning: {full}")
    entry = find_entry(request, chosen)
    program = (*entry.words, *found_program(name, launch, chosen, tuple(arguments.program)))
    launch = launch._replace(program=program)
    start = start_in_image(name, launch, chosen.inside, os.uname().nodename)
    # What is not built yet will.
    patched = not (chosen.there and (chosen.of_modules or not hides_variables(chosen.prefix)))
    placement.refuse_exposed(name, requested, patched=patched, words=request.named)
    unset = placement.hidden_variables(name, environ, activated(chosen), patched=patched)
    # After modules are loaded: `module` itself is stored in variables that are hidden here.
    words = ("env", *(word for each in unset for word in ("-u", each))) if unset else ()
    line = (*words, *start.argv)
    if arguments.dry_run:
        _print(line, start.env, chosen, [each for each in environment() if each not in environ])
        return 0
    words = ("bash", "-c", chosen.before + _SCRIPT, "hvdenv", start.argv[0], *line)
    to_set = tuple((_TO_SET + each, value) for each, value in start.env)
    return replace_process(Command(words, to_set), environ)


def _requested(arguments: argparse.Namespace) -> placement.Requested:
    requested = requested_ranks(arguments.ranks, arguments.hosts, arguments.hostfile)
    pairs = [text.partition("=") for text in arguments.export]
    for name, _, value in pairs:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII) or "\0" in value:
            raise UsageError(
                f"{name!r} is not the name of a variable",
                where="-x",
                remedy="write NAME, or NAME=VALUE",
            )
    return requested._replace(
        launcher=arguments.launcher or "",
        variables=tuple((name, value) for name, equals, value in pairs if equals),
        exports=tuple(name for name, equals, _ in pairs if not equals),
    )


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
