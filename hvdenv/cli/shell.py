"""Open an interactive bash in an environment.

With --nodes, --time or another resource option, shell requests an allocation and opens the shell
on its first node. The exit code is that of the shell; it is 125 if hvdenv cannot start it."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from hvdenv.base.command import Command
from hvdenv.base.errors import UsageError
from hvdenv.base.places import find_places, make_folder, write_text
from hvdenv.base.runner import environment, replace_process
from hvdenv.cli.options import REQUESTS, add, add_options, add_requests, read_request
from hvdenv.environments.activation import SHELL
from hvdenv.session.chosen import Chosen, choose, with_active
from hvdenv.session.output import report
from hvdenv.session.ranks import current_allocation, find_entry
from hvdenv.sites.allocation import interactive
from hvdenv.sites.batch import charged, check, merge
from hvdenv.sites.jobs import without_scheduler
from hvdenv.sites.placement import shell_variables

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

# Reads the user's own files first, which may change PATH.
_START = """\
if [ -r /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi
if [ -r ~/.bashrc ]; then . ~/.bashrc; fi
. {activate}
PS1={prompt}"${{PS1-}}"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "prefix")
    add_requests(parser.add_argument_group("request an allocation with"))
    add_options(parser, "clean", "image")
    add(parser, "--dry-run", "print the command line, which can be pasted, without running it")
    add_options(parser, "trust")


def run(arguments: argparse.Namespace) -> int:
    request = with_active(read_request(arguments, anywhere=arguments.dry_run))
    chosen = choose(request)
    bash = ("bash", "--rcfile", str(_write_start(chosen)), "-i")
    words = (*find_entry(request, chosen).words, *bash)
    options = {name: getattr(arguments, name) for name in REQUESTS}
    if given := {name: value for name, value in options.items() if value is not None}:
        words = _in_allocation(given, chosen, words)
    variables = shell_variables(environment(), clean=arguments.clean)
    if arguments.dry_run:
        dropped = [word for each in environment() if each not in variables for word in ("-u", each)]
        print(shlex.join((*(("env", *dropped) if dropped else ()), *words)))
        if not chosen.there:
            report(f"note: {chosen.name} is not built yet")
        return 0
    dialect = chosen.recipe.dialect
    if given and dialect and not shutil.which(words[0]):
        raise without_scheduler(dialect, words[0])
    if given and dialect and not dialect.runs_programs:
        report(f"type this there: . {shlex.quote(chosen.activate)}")
    return replace_process(Command(words, ((SHELL, os.path.realpath(chosen.prefix)),)), variables)


def _write_start(chosen: Chosen) -> Path:
    """Write what bash reads first, under HVDENV_HOME, which the hosts of an allocation see too."""
    # Two environments may have one name.
    digest = hashlib.sha256(os.fsencode(chosen.prefix)).hexdigest()[:12]
    file = make_folder(find_places().home / "shells" / digest) / "bashrc"
    prompt = shlex.quote(f"({chosen.name}) ")
    write_text(file, _START.format(activate=shlex.quote(chosen.activate), prompt=prompt))
    return file


def _in_allocation(
    given: Mapping[str, object], chosen: Chosen, program: tuple[str, ...]
) -> tuple[str, ...]:
    dialect = chosen.recipe.dialect
    options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
    if dialect is None:
        raise UsageError(
            f"the recipe {chosen.recipe.name} has no scheduler", remedy=f"omit {options}"
        )
    allocation = current_allocation(chosen.recipe)
    if allocation.scheduler:
        raise UsageError(
            f"this process already runs in job {allocation.job}",
            remedy=f"omit {options} for a shell in this job, or leave the job",
        )
    job = merge(chosen.recipe.job, given)
    partition = check(job, dialect, chosen.recipe.partitions, given)
    report(f"allocation: {charged(job)}")
    return interactive(dialect, job, partition, program)
