"""What decides a plan: the recipe, facts of the machine, and the Python that fits both."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hvdenv.environments.generations import Environment
from hvdenv.errors import IncompatibleError
from hvdenv.locks.lockfile import Locked
from hvdenv.model.facts import Facts, Interpreter, of_partition
from hvdenv.model.layers import Resolved, load_recipe
from hvdenv.model.observe import ask_interpreter, declared, observe
from hvdenv.places import find_places
from hvdenv.plans.additions import Additions
from hvdenv.plans.plan import Plan, candidates, make_plan, site_python, steps_of
from hvdenv.runner import Runner
from hvdenv.session.recipe import open_recipe
from hvdenv.session.request import Request
from hvdenv.session.target import planned_environment
from hvdenv.sites import membership


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
    target: Environment
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
            locked=self.locked, source_folder=self.source_folder, offline=self.offline,
            caches=None if alone else find_places().cache, additions=self.additions, alone=alone,
        )  # fmt: skip
        return make_plan(maker, self.resolved.keyed)

    def place(self, plan: Plan) -> Plan:
        """The plan in the folder of its generation."""
        return plan.at(self.target.generation(plan.digest[:12]))


def prepare(request: Request, *, thorough: bool, resolved: Resolved | None = None) -> Prepared:
    """Read the recipe and look at the machine, or at the facts that --facts declares.

    On a machine that is none of the cluster's, a request that fits anywhere has the facts that the
    recipe declares for its partition.

    Args:
        thorough: look for what no plan depends on, too; see observe().
        resolved: the recipe, if it was read already.
    """
    resolved = resolved or open_recipe(request)
    target = planned_environment(request, resolved)
    runner, file = Runner(), request.facts
    facts = declared(file) if file else observe(target.store, runner, thorough=thorough)
    foreign = ""
    nodes = membership.nodes_of(resolved.recipe)
    if request.anywhere and not file and nodes:
        foreign = membership.foreign(resolved.recipe, facts.machine)
        facts = of_partition(*nodes, facts) if foreign else facts
    python = choose_python(resolved, facts, runner, request.python)
    return Prepared(resolved=resolved, target=target, facts=facts, python=python, foreign=foreign)


def choose_python(
    resolved: Resolved, facts: Facts, runner: Runner, wanted: str | None
) -> Interpreter:
    """The interpreter to use; one that is not this process's own is asked for its version.

    Args:
        wanted: version that the user named, such as 3.11; None for the best.

    Raises:
        IncompatibleError: none fits, with what was found and which variant would.
    """
    brought = site_python(resolved.recipe)
    if brought:
        return brought
    incomplete = None
    for found in _candidates(resolved, facts, wanted):
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
        f"install Python {needed} (for example with `uv python install 3.11`), or load a module"
    )
    if other := _variant_for(resolved, facts, wanted):
        remedy += f"; or use --variant {other}, which supports a Python of this machine"
    asked_for = f", --python requests {wanted}" if wanted else ""
    raise IncompatibleError(
        f"the recipe needs Python {needed}{asked_for}; this machine has {there}",
        where=resolved.where("python.version"),
        remedy=remedy,
    )


def _candidates(resolved: Resolved, facts: Facts, wanted: str | None) -> list[Interpreter]:
    return [
        each
        for each in candidates(resolved.recipe, facts)
        if wanted is None or f"{each.version}.".startswith(f"{wanted}.")
    ]


def _variant_for(resolved: Resolved, facts: Facts, wanted: str | None) -> str:
    """A variant whose Python is here; or empty."""
    for variant in resolved.offered:
        if variant not in resolved.variants:
            other = load_recipe(resolved.file, variants=[variant])
            if _candidates(other, facts, wanted):
                return variant
    return ""
