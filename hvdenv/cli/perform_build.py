"""Building what a command has prepared: with rules, modules and progress."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdenv.building.effects import try_modules
from hvdenv.building.engine import build
from hvdenv.building.finished import Built
from hvdenv.building.state import Request
from hvdenv.cli.check import judge_recipe, refuse_blocked
from hvdenv.cli.options import refuse_foreign_prefix
from hvdenv.cli.prepare import Prepared, prepare
from hvdenv.cli.progress import choose
from hvdenv.environments import generations
from hvdenv.knowledge.rules import Rule
from hvdenv.model.cluster import Workspace
from hvdenv.model.layers import Resolved
from hvdenv.places import find_places, make_folder
from hvdenv.plans.plan import Plan
from hvdenv.runner import Runner
from hvdenv.schema import encode
from hvdenv.sites import workspace as workspaces
from hvdenv.sites.modules import Loaded
from hvdenv.wheels import wheelcache


def allocate_workspace(
    workspace: Workspace, resolved: Resolved, arguments: argparse.Namespace
) -> None:
    """Allocate the workspace in which the recipe keeps its environments.

    It counts against the user's quota, so everything else that could refuse the build comes first.
    """
    runner = Runner()
    if workspaces.find(workspace, runner) is None:
        elsewhere = argparse.Namespace(**{**vars(arguments), "prefix": Path.cwd() / "unknown"})
        prepared = prepare(elsewhere, thorough=True, resolved=resolved)
        facts = prepared.facts._replace(disk_free=None, inodes_free=None, quota_free=None)
        _refuse(prepared._replace(facts=facts), arguments, quiet=True)
        workspaces.allocate(workspace, runner)


def _refuse(
    prepared: Prepared, arguments: argparse.Namespace, *, quiet: bool
) -> tuple[tuple[Rule, ...], Loaded | None]:
    """Stop if a rule or a module would make the build fail.

    Returns:
        The rules that apply, and what the modules set.
    """
    rules = judge_recipe(prepared)
    refuse_blocked(rules, arguments.allow, prepared.resolved, quiet=quiet)
    return rules, try_modules(prepared.resolved.recipe, Runner())


def build_prepared(prepared: Prepared, plan: Plan, arguments: argparse.Namespace) -> Built:
    """Build a plan, unless a rule or a module would make it fail; facts must be complete()."""
    rules, modules = _refuse(prepared, arguments, quiet=arguments.quiet)
    target, wheels = prepared.target, prepared.resolved.recipe.places.wheels
    if not arguments.prefix:
        make_folder(target.prefix.parent)
    # Where everybody can make it, it must be there before it is judged.
    generations.claim(target)
    refuse_foreign_prefix(target.store, arguments)
    fetched = prepared.source_folder and prepared.source_folder / wheelcache.CARRIED
    carried = (str(fetched),) if fetched and fetched.is_dir() else ()
    request = Request(
        plan=plan,
        resolved=encode(prepared.resolved.recipe),
        facts=prepared.facts,
        findings=_findings(rules, arguments.allow),
        modules=modules,
        accepted=tuple(arguments.accept_drift),
        wheels=wheels._replace(read=(*wheels.read, *carried)),
    )
    with choose(len(plan.steps), quiet=arguments.quiet, verbose=arguments.verbose) as progress:
        progress.note(
            f"building {target.prefix} with Python {plan.python.version} ({plan.python.path})"
        )
        return build(
            request, target, find_places(), progress,
            rebuild=arguments.rebuild, break_lock=arguments.break_lock,
        )  # fmt: skip


def _findings(
    rules: Sequence[Rule], allowed: Sequence[str]
) -> tuple[Mapping[str, str | bool], ...]:
    return tuple(
        {"rule": each.id, "severity": each.severity}
        | ({"allowed": True} if each.id in allowed else {})
        for each in rules
    )
