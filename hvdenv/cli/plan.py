"""Show what build would run, in order, and why; nothing is run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.cli.options import (
    add_facts,
    add_json,
    add_prefix,
    add_python,
    add_recipe,
    prepare,
    print_json,
)
from hvdenv.command import spelled_out
from hvdenv.runner import ALWAYS_SET, cleaned_names, environment

if TYPE_CHECKING:
    from hvdenv.facts import Facts
    from hvdenv.plan import Plan

EXAMPLES = """\
examples:
  hvdenv plan local
  hvdenv plan local --format bash > build.sh    a script that needs no hvdenv
  hvdenv plan local --json                      the plan as data
  hvdenv plan local --facts node.json           for another machine
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_python(parser)
    add_prefix(parser)
    add_json(parser)
    parser.add_argument("--format", choices=("text", "bash"), default="text")
    add_facts(parser)


def run(arguments: argparse.Namespace) -> int:
    prepared = prepare(arguments, thorough=False)
    target = prepared.target
    plan = prepared.plan_for(target.generation(prepared.digest()[:12]))
    if arguments.json:
        from hvdenv.schema import encode

        print_json({"facts": encode(prepared.facts), **encode(plan)})
    elif arguments.format == "bash":
        from hvdenv.script import render_bash

        print(render_bash(plan, target.prefix), end="")
    else:
        print(_text(plan, prepared.facts, target.prefix))
    return 0


def _text(plan: Plan, facts: Facts, prefix: Path) -> str:
    lines = [
        f"plan {plan.digest[:12]} of {'+'.join((plan.recipe, *plan.variants))}",
        f"facts {facts.origin} on {facts.host}: {facts.machine}, glibc {facts.glibc or 'unknown'}, "
        f"g++ {facts.cxx.version if facts.cxx else 'none'}, {facts.cores} cores",
        f"Python {plan.python.version} ({plan.python.path})",
        f"{prefix} -> {plan.generation}",
        f"every step: {' '.join('='.join(pair) for pair in ALWAYS_SET)}; "
        f"taken away here: {' '.join(cleaned_names(environment())) or 'nothing'}",
    ]
    for number, step in enumerate(plan.steps, 1):
        lines += ["", f"{number}. {step.name}: {step.reason}"]
        if step.spared_by_cache:
            lines.append("   (not run when a wheel of the same stack is in the cache)")
        lines += [f"   write {file.path}" for file in step.files]
        lines += [f"   $ {spelled_out(command)}" for command in step.commands]
    return "\n".join(lines)
