"""Show what build would run, in order, and why, without running it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from hvdenv.cli.options import add, add_options, is_locked, print_json
from hvdenv.cli.prepare import Prepared, prepare
from hvdenv.command import spelled_out
from hvdenv.places import environment_name
from hvdenv.plans.plan import TEMPORARY, Plan
from hvdenv.plans.script import render_bash
from hvdenv.plans.step import TextFile
from hvdenv.runner import cleaned_names, environment
from hvdenv.schema import encode
from hvdenv.sites.modules import commands

EXAMPLES = """\
examples:
  hvdenv plan local
  hvdenv plan local --format bash > build.sh    a script that needs no hvdenv
  hvdenv plan local --json                      the plan as data
  hvdenv plan local --facts node.json           for another machine
"""

SHOWN_LINES = 40


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe", "python", "prefix", "json")
    add(parser, "--format", choices=("text", "bash"), default="text")
    add_options(parser, "facts", "locked")


def run(arguments: argparse.Namespace) -> int:
    prepared = prepare(arguments, thorough=False, shown=True, anywhere=True)
    prepared = with_requested_lock(arguments, prepared)
    plan = prepared.plan(alone=arguments.format == "bash")
    if arguments.json:
        print_json({"facts": encode(prepared.facts), **encode(_placed(plan, prepared))})
    elif arguments.format == "bash":
        print(render_bash(_placed(plan, prepared), prepared.target.prefix), end="")
    else:
        print(described(plan, prepared))
    return 0


def _placed(plan: Plan, prepared: Prepared) -> Plan:
    return plan.at(prepared.target.generation(plan.digest[:12]))


def with_requested_lock(arguments: argparse.Namespace, prepared: Prepared) -> Prepared:
    if not is_locked(arguments):
        return prepared
    from hvdenv.cli.find_lock import with_lock

    return with_lock(arguments, prepared)


def described(plan: Plan, prepared: Prepared) -> str:
    plan, facts, prefix = _placed(plan, prepared), prepared.facts, prepared.target.prefix
    foreign = prepared.foreign
    compiler = "not looked at" if foreign else facts.cxx.version if facts.cxx else "none"
    head = [
        f"plan {plan.digest[:12]} of {environment_name(plan.recipe, plan.variants)}",
        f"facts {facts.origin} {'for' if foreign else 'on'} {facts.host}: {facts.machine}, glibc"
        f" {facts.glibc or 'unknown'}, g++ {compiler}, {facts.cores} cores"
        + (f" ({foreign})" if foreign else ""),
        f"Python {plan.python.version} ({plan.python.path})",
        f"{prefix} -> {plan.generation}, written as $G below; temporary files in $T",
        f"every step: {' '.join('='.join(pair) for pair in plan.step_variables.items())}; "
        f"unset here: {' '.join(cleaned_names(environment())) or 'nothing'}",
    ]
    lines: list[str] = []
    for number, step in enumerate(plan.steps, 1):
        lines += ["", f"{number}. {step.name}: {step.reason}"]
        if step.spared_by:
            lines.append("   (not run when a wheel of the same stack is in the cache)")
        if step.modules:
            lines += [f"   {line}" for line in commands(step.modules)]
        lines += [line for file in step.files for line in _written(file)]
        lines += [f"   $ {spelled_out(command)}" for command in step.commands]
    below = (line.replace(str(plan.generation), "$G") for line in lines)
    return "\n".join([*head, *below]).replace(str(TEMPORARY), "$T")


def _written(file: TextFile) -> Iterator[str]:
    """A file that a step writes; what is no program of hvdenv's, and short, is shown."""
    yield f"   write {file.path}"
    lines = file.text.splitlines()
    if file.path.suffix in (".json", ".txt") and len(lines) <= SHOWN_LINES:
        yield from (f"      {line}" for line in lines)
