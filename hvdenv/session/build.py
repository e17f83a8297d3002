"""Building what a command has prepared: with rules, modules and progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdenv.base.places import find_places, make_folder
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.building.effects import try_modules
from hvdenv.building.engine import build
from hvdenv.building.state import BuildRequest, Built
from hvdenv.environments import generations
from hvdenv.knowledge.rules import Rule
from hvdenv.model.cluster import Workspace
from hvdenv.model.layers import Resolved
from hvdenv.plans.plan import Plan
from hvdenv.session.judge import judge_recipe, refuse_blocked, suggest
from hvdenv.session.prepare import Prepared, prepare
from hvdenv.session.progress import choose
from hvdenv.session.request import Request
from hvdenv.sites import workspace as workspaces
from hvdenv.sites.modules import Loaded


def allocate_workspace(request: Request, workspace: Workspace, resolved: Resolved) -> None:
    """Allocate the workspace in which the recipe keeps its environments.

    It counts against the user's quota, so everything else that could refuse the build comes first.
    """
    runner = Runner()
    if workspaces.find(workspace, runner) is None:
        elsewhere = request._replace(prefix=Path.cwd() / "unknown", quiet=True)
        prepared = prepare(elsewhere, thorough=True, resolved=resolved)
        facts = prepared.facts._replace(disk_free=None, inodes_free=None)
        _refuse(elsewhere, prepared._replace(facts=facts))
        workspaces.allocate(workspace, runner)


def _refuse(request: Request, prepared: Prepared) -> tuple[tuple[Rule, ...], Loaded | None]:
    """Stop if a rule or a module would make the build fail.

    Returns:
        The rules that apply, and what the modules set.
    """
    rules = judge_recipe(prepared)
    suggested = suggest(request, prepared, rules)
    refuse_blocked(rules, request.allow, prepared.resolved, suggested, quiet=request.quiet)
    return rules, try_modules(prepared.resolved.recipe, Runner())


def build_prepared(
    request: Request,
    prepared: Prepared,
    plan: Plan,
    *,
    rebuild: bool = False,
    take_over: bool = False,
) -> Built:
    """Build a plan, unless a rule or a module would make it fail; facts must be complete().

    Args:
        rebuild: build a new generation even if nothing changed.
        take_over: take the prefix over from another build.
    """
    rules, modules = _refuse(request, prepared)
    environment = prepared.environment
    if not request.prefix:
        make_folder(environment.prefix.parent)
    # Where everybody can make it, it must be there before it is judged.
    generations.claim(environment)
    request.gate.refuse_prefix(environment.store)
    wanted = BuildRequest(
        plan=plan,
        resolved=encode(prepared.resolved.recipe),
        facts=prepared.facts,
        findings=_findings(rules, request.allow),
        modules=modules,
        wheels=prepared.resolved.recipe.places.wheels,
    )
    with choose(len(plan.steps), quiet=request.quiet, verbose=request.verbose) as progress:
        progress.note(
            f"building {environment.prefix} with Python {plan.python.version} ({plan.python.path})"
        )
        return build(
            wanted,
            environment,
            find_places(),
            progress,
            rebuild=rebuild,
            break_lock=take_over,
        )


def _findings(
    rules: Sequence[Rule], allowed: Sequence[str]
) -> tuple[Mapping[str, str | bool], ...]:
    return tuple(
        {"rule": each.id, "severity": each.severity}
        | ({"allowed": True} if each.id in allowed else {})
        for each in rules
    )
