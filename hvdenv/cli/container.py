"""Write the definition of an image that contains the recipe's environment.

container writes it for Apptainer and Singularity, or as a Dockerfile, and builds nothing. `run`,
`job` and `verify` run programs in the image that the recipe names."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from hvdenv.base.errors import UsageError
from hvdenv.base.places import named_file, write_text
from hvdenv.cli.options import add, add_options, command_line, give, read_request
from hvdenv.knowledge.observables import observables
from hvdenv.knowledge.rules import judge
from hvdenv.model.layers import Resolved
from hvdenv.model.recipe_files import known_recipes, read_layer
from hvdenv.plans import images
from hvdenv.plans.plan import Plan, choose_versions
from hvdenv.session.judge import refuse_blocked
from hvdenv.session.recipe import open_recipe

EXAMPLES = """\
examples:
  hvdenv container singularity --to horovod.def
  apptainer build --fakeroot horovod.sif horovod.def
  hvdenv container local --variant torch --set container.base=debian:bookworm-slim --format docker
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "python", "json")
    add(parser, "-q --quiet", "print errors only")
    add(
        parser,
        "--format",
        "singularity: a definition file for Apptainer and Singularity (default); docker: a"
        " Dockerfile",
        choices=get_args(images.FormatName),
        default="singularity",
    )
    add(parser, "--to FILE", "write the definition to a file instead of standard output", type=Path)
    add_options(parser, "allow")


def run(arguments: argparse.Namespace) -> int:
    if command_line(arguments) == ("container",):
        return _list()
    if not arguments.recipe:
        raise UsageError(
            "no recipe is named", remedy="`hvdenv container` lists those with an image"
        )
    resolved = open_recipe(read_request(arguments, anywhere=True))
    plan = _plan(arguments, resolved)
    text = images.define(resolved.recipe, plan, arguments.format)
    if arguments.to:
        write_text(named_file(arguments.to), text)
    document = {
        "recipe": plan.recipe,
        "variants": list(plan.variants),
        "plan": plan.digest,
        "format": arguments.format,
        "definition": text,
    }
    if arguments.to or arguments.json:
        give(arguments, document, f"wrote {arguments.to}")
    else:
        print(text, end="")
    return 0


def _list() -> int:
    for name, path in known_recipes().items():
        base = read_layer("recipe", path).values.get("container", {}).get("base")
        if base:
            print(f"hvdenv container {name}   from {base}")
    print("For other recipes, name an image: hvdenv container RECIPE --set container.base=IMAGE")
    return 0


def _plan(arguments: argparse.Namespace, resolved: Resolved) -> Plan:
    recipe = resolved.recipe
    partition = recipe.partition
    machine = partition.arch if partition else os.uname().machine
    facts = images.image_facts(recipe.container, machine, len(os.sched_getaffinity(0)))
    python = images.image_python(recipe, facts, arguments.python)
    plan = images.image_plan(recipe, resolved.variants, facts, python)
    rules = judge(observables(recipe, facts, python, choose_versions(recipe, python)))
    refuse_blocked(rules, arguments.allow, resolved, quiet=arguments.quiet)
    return plan
