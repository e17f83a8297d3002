"""Write the definition of an image that contains the recipe's environment.

container writes it for Apptainer and Singularity, or as a Dockerfile, and builds nothing. `run`,
`job` and `verify` run programs in the image that the recipe names."""

from __future__ import annotations

import argparse
import os
from typing import get_args

from hvdenv.base.runner import Runner
from hvdenv.cli.options import add, add_options, read_request
from hvdenv.knowledge.observables import observables
from hvdenv.knowledge.rules import judge
from hvdenv.model.layers import Resolved
from hvdenv.plans import images
from hvdenv.plans.plan import Plan, choose_versions
from hvdenv.session.judge import refuse_blocked
from hvdenv.session.output import print_json
from hvdenv.session.prepare import choose_python
from hvdenv.session.recipe import open_recipe

EXAMPLES = """\
examples:
  hvdenv container singularity > horovod.def
  apptainer build --fakeroot horovod.sif horovod.def
  hvdenv container local --variant torch --set container.base=debian:bookworm-slim --format docker
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe", "python", "json")
    add(parser, "-q --quiet", "print errors only")
    add(
        parser,
        "--format",
        "singularity: a definition file for Apptainer and Singularity (default); docker: a"
        " Dockerfile",
        choices=get_args(images.FormatName),
        default="singularity",
    )
    add_options(parser, "allow")


def run(arguments: argparse.Namespace) -> int:
    resolved = open_recipe(read_request(arguments, anywhere=True))
    plan = _plan(arguments, resolved)
    text = images.define(resolved.recipe, plan, arguments.format)
    if arguments.json:
        print_json(
            {
                "recipe": plan.recipe,
                "variants": list(plan.variants),
                "plan": plan.digest,
                "format": arguments.format,
                "definition": text,
            }
        )
    else:
        print(text, end="")
    return 0


def _plan(arguments: argparse.Namespace, resolved: Resolved) -> Plan:
    recipe = resolved.recipe
    partition = recipe.partition
    machine = partition.arch if partition else os.uname().machine
    facts = images.image_facts(recipe.container, machine, len(os.sched_getaffinity(0)))
    python = choose_python(resolved, facts, Runner(), arguments.python)
    plan = images.image_plan(recipe, resolved.variants, facts, python)
    rules = judge(observables(recipe, facts, python, choose_versions(recipe, python)))
    refuse_blocked(rules, arguments.allow, resolved, quiet=arguments.quiet)
    return plan
