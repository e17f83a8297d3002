"""A plan as text, with the facts that it was made from."""

from __future__ import annotations

from collections.abc import Iterator

from hvdenv.command import spelled_out
from hvdenv.places import environment_name
from hvdenv.plans.plan import TEMPORARY, Plan
from hvdenv.plans.step import TextFile
from hvdenv.runner import cleaned_names, environment
from hvdenv.session.prepare import Prepared
from hvdenv.sites.modules import commands

_SHOWN_LINES = 40


def describe(plan: Plan, prepared: Prepared) -> str:
    plan, facts, prefix = prepared.place(plan), prepared.facts, prepared.target.prefix
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
    if file.path.suffix in (".json", ".txt") and len(lines) <= _SHOWN_LINES:
        yield from (f"      {line}" for line in lines)
