"""Open an interactive shell in an environment.

With --nodes, --time or another resource option, shell requests an allocation and opens the shell
on its first node. The exit code is that of the shell; it is 125 if hvdenv cannot start it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdenv.cli.options import add_clean, add_prefix, add_recipe, add_trust
from hvdenv.cli.run import Chosen, choose, current_allocation, own_failures
from hvdenv.errors import UsageError

if TYPE_CHECKING:
    from hvdenv.places import Places

EXAMPLES = """\
examples:
  hvdenv shell local
  hvdenv shell neuron --nodes 2 --time 8:00:00
  hvdenv shell neuron --partition cas_v100_4 --gpus-per-node 2 --ranks-per-node 2
  hvdenv shell polaris --nodes 1 --account myproject
  hvdenv shell neuron --nodes 2 --dry-run           prints the command line

Other resources come from [job] in the recipe. PBS and Cobalt start your login shell; hvdenv then
prints the command to type there.
"""

# Options of an allocation; a terminal has no output file.
_NUMBERS = ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node")
_WORDS = ("account", "name", "comment")
_ASKS = (*_NUMBERS, "time", "partition", *_WORDS)

_BASH = """\
if [ -r /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi
if [ -r ~/.bashrc ]; then . ~/.bashrc; fi
"""
_ZSHENV = """\
if [[ -r ~/.zshenv ]]; then . ~/.zshenv; fi
ZDOTDIR={folder}
"""
_ZSH = """\
ZDOTDIR=$HOME
if [[ -r ~/.zshrc ]]; then . ~/.zshrc; fi
"""
_ACTIVATE = """\
. {activate}
PS1={prompt}"${{PS1-}}"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, optional=True)
    add_prefix(parser)
    asks = parser.add_argument_group("in a new allocation, with these resources")
    for name in _NUMBERS:
        asks.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    asks.add_argument("--time", metavar="T", help="such as 1:30:00")
    asks.add_argument("--partition", metavar="P", help="partition or queue")
    for name in _WORDS:
        asks.add_argument(f"--{name}", metavar=name.upper())
    add_clean(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command line without running it"
    )
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    with own_failures():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from hvdenv.command import Command
    from hvdenv.environments import last_used
    from hvdenv.launch.placement import of_shell
    from hvdenv.places import find_places
    from hvdenv.runner import environment, hand_over

    chosen = choose(arguments, built=not arguments.dry_run)
    shell = os.path.basename(environment().get("SHELL", ""))
    places = find_places()
    words = shell_command(shell, _write(chosen, places))
    asked = {name: getattr(arguments, name) for name in _ASKS}
    if given := {name: value for name, value in asked.items() if value is not None}:
        words = _in_allocation(given, chosen, words)
    if arguments.dry_run:
        print(shlex.join(words))
        return 0
    last_used.note(places, chosen.prefix)
    if words[0] == "qsub":
        print(f"type this there: . {shlex.quote(chosen.activate)}", file=sys.stderr)
    return hand_over(Command(words), of_shell(environment(), clean=arguments.clean))


def shell_command(shell: str, folder: Path) -> tuple[str, ...]:
    """The command of a shell that reads what start_files() made.

    Args:
        shell: the name of the user's; bash where activate.sh is not for it.
        folder: with the files.
    """
    if shell == "zsh":
        return ("env", f"ZDOTDIR={folder}", "zsh", "-i")
    if shell in ("sh", "dash"):
        return ("env", f"ENV={folder / 'shrc'}", shell, "-i")
    return ("bash", "--rcfile", str(folder / "bashrc"), "-i")


def start_files(activate: str, name: str, folder: Path) -> dict[str, str]:
    """What shells read at their start: the user's own files first, which may change PATH.

    Args:
        activate: path of activate.sh.
        name: of the environment, for the prompt.
        folder: where the files lie.
    """
    last = _ACTIVATE.format(activate=shlex.quote(activate), prompt=shlex.quote(f"({name}) "))
    return {
        "bashrc": _BASH + last,
        ".zshenv": _ZSHENV.format(folder=shlex.quote(str(folder))),
        ".zshrc": _ZSH + last,
        "shrc": last,
    }


def _write(chosen: Chosen, places: Places) -> Path:
    """Put the files where the hosts of an allocation see them too, beside the environments."""
    import hashlib

    from hvdenv.places import make_folder, write_text

    # Two environments may have one name.
    digest = hashlib.sha256(os.fsencode(chosen.prefix)).hexdigest()[:12]
    folder = make_folder(places.home / "shells" / digest)
    for file, text in start_files(chosen.activate, chosen.name, folder).items():
        write_text(folder / file, text)
    return folder


def _in_allocation(
    given: Mapping[str, Any], chosen: Chosen, program: tuple[str, ...]
) -> tuple[str, ...]:
    from hvdenv.launch.allocation import interactive
    from hvdenv.sites.batch import check, merge

    scheduler = chosen.recipe.scheduler
    if scheduler is None:
        raise UsageError(
            f"the recipe {chosen.recipe.name} is for a machine without a scheduler",
            remedy=f"leave {_options(given)} out",
        )
    allocation = current_allocation()
    if allocation.scheduler:
        raise UsageError(
            f"this is in job {allocation.job} already",
            remedy=f"leave {_options(given)} out for a shell in it, or leave the job",
        )
    job = merge(chosen.recipe.job, scheduler, given)
    partition = check(job, scheduler, chosen.recipe.partitions, given)
    return interactive(scheduler, job, partition, program)


def _options(given: Mapping[str, Any]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in given)
