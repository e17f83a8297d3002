"""What decides a plan: the recipe, facts of the machine, and the Python that fits both."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.command import spelled_out
from hvdenv.base.errors import IncompatibleError
from hvdenv.base.places import environment_name, find_places
from hvdenv.base.runner import Runner, cleaned_names, environment
from hvdenv.environments.generations import Environment
from hvdenv.locks.lockfile import Locked
from hvdenv.locks.record import Additions
from hvdenv.model.cluster import Partition
from hvdenv.model.facts import Facts, Interpreter, of_partition
from hvdenv.model.layers import Resolved
from hvdenv.model.observe import ask_interpreter, declared, observe
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import TEMPORARY, Plan, candidates, make_plan, site_python, steps_of
from hvdenv.plans.step import TextFile
from hvdenv.session.recipe import open_recipe, planned_environment
from hvdenv.session.request import Request
from hvdenv.sites.modules import BACKENDS, USUAL_SCRIPTS, commands


def _job_partition(recipe: Recipe) -> tuple[str, Partition] | None:
    """The partition of the recipe's jobs with its name, or the only one; None if there is none."""
    named = [recipe.job.partition] if recipe.job.partition else [*recipe.partitions]
    found = recipe.partitions.get(named[0]) if len(named) == 1 else None
    return (named[0], found) if found else None


def _why_foreign(recipe: Recipe, machine: str) -> str:
    """Why this machine does not belong to the cluster; empty if it may be one."""
    nodes = _job_partition(recipe)
    if nodes is None:
        return ""
    name, partition = nodes
    if partition.arch != machine:
        return f"this machine is {machine}, and the nodes of {name} are {partition.arch}"
    if recipe.modules:
        return "" if _has_modules(recipe.modules.init) else "this machine has no module system"
    dialect = recipe.dialect
    if dialect is None or dialect.job_id in environment() or shutil.which(dialect.program):
        return ""
    return f"this machine has no {dialect.program}"


def _has_modules(init: str | None) -> bool:
    """Whether there seems to be a module system."""
    scripts = [*([init] if init else []), *(each for each in USUAL_SCRIPTS if "$" not in each)]
    variables = ("BASH_FUNC_module%%", "MODULESHOME", *(each.variable for each in BACKENDS))
    return any(map(environment().get, variables)) or any(map(os.path.exists, scripts))


# A longer file of a step is not shown.
_SHOWN_LINES = 40


class Prepared(NamedTuple):
    """Everything that decides a plan.

    Attributes:
        facts: of this machine, or declared.
        foreign: why the facts are not of this machine, although no --facts says so; or empty.
        locked: the lock to build from, if that was asked for.
        source_folder: with files that were fetched before.
        offline: whether no index is asked.
    """

    resolved: Resolved
    environment: Environment
    facts: Facts
    python: Interpreter
    foreign: str = ""
    locked: Locked | None = None
    source_folder: Path | None = None
    offline: bool = False
    additions: Additions | None = None

    def plan(self, *, alone: bool = False) -> Plan:
        """Make the plan. A command does so once, and hands it on.

        Args:
            alone: whether a script runs the plan, without hvdenv and its caches.
        """
        maker = steps_of(self.resolved.recipe, self.facts, self.python)._replace(
            locked=self.locked,
            source_folder=self.source_folder,
            offline=self.offline,
            caches=None if alone else find_places().cache,
            additions=self.additions,
            alone=alone,
        )
        return make_plan(maker, self.resolved.keyed)

    def place(self, plan: Plan) -> Plan:
        """The plan in the directory of its generation."""
        return plan.at(self.environment.generation(plan.digest[:12]))


def prepare(request: Request, *, thorough: bool, resolved: Resolved | None = None) -> Prepared:
    """Read the recipe and look at the machine, or at the facts that --facts declares.

    On a machine that is none of the cluster's, a request that fits anywhere has the facts that the
    recipe declares for its partition.

    Args:
        thorough: look for what no plan depends on, too; see observe().
        resolved: the recipe, if it was read already.
    """
    resolved = resolved or open_recipe(request)
    planned = planned_environment(request, resolved)
    runner, file = Runner(), request.facts
    facts = declared(file) if file else observe(planned.store, runner, thorough=thorough)
    foreign = ""
    nodes = _job_partition(resolved.recipe)
    if request.anywhere and not file and nodes:
        foreign = _why_foreign(resolved.recipe, facts.machine)
        facts = of_partition(*nodes, facts) if foreign else facts
    python = choose_python(resolved, facts, runner, request.python)
    return Prepared(
        resolved=resolved, environment=planned, facts=facts, python=python, foreign=foreign
    )


def choose_python(
    resolved: Resolved, facts: Facts, runner: Runner, wanted: str | None
) -> Interpreter:
    """The interpreter to use; one that is not this process's own is asked for its version.

    Args:
        wanted: version that the user named, such as 3.11; None for the best.

    Raises:
        IncompatibleError: none fits, with what was found.
    """
    brought = site_python(resolved.recipe)
    if brought:
        return brought
    incomplete = None
    for found in candidates(resolved.recipe, facts):
        if wanted and not f"{found.version}.".startswith(f"{wanted}."):
            continue
        known = facts.origin == "declared" or found.version.count(".") == 2
        asked = found if known else ask_interpreter(found.path, runner)
        if asked and asked.complete:
            return asked
        incomplete = incomplete or asked
    if incomplete:  # the rule "python-incomplete" says what it lacks
        return incomplete
    needed = resolved.recipe.python.version
    there = ", ".join(sorted({each.version for each in facts.interpreters})) or "none"
    remedy = (
        f"install it (for example with `uv python install '{needed}'`), or load a module;"
        " for an image, choose another one (--set container.base=...)"
    )
    asked_for = f", --python requests {wanted}" if wanted else ""
    raise IncompatibleError(
        f"the recipe needs Python {needed}{asked_for}; {facts.host} has {there}",
        where=resolved.where("python.version"),
        remedy=remedy,
    )


def describe(plan: Plan, prepared: Prepared) -> str:
    plan, facts, prefix = prepared.place(plan), prepared.facts, prepared.environment.prefix
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
        if step.name == "packages" and plan.locked:
            lines.append("   (copied instead if an environment has the packages of this lock)")
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
