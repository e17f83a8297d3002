"""Build an environment.

If nothing changed since the last build, build does nothing. After a build that was killed, it
resumes at the first step that had not finished."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdenv.building.effects import try_modules
from hvdenv.building.engine import Built, already_built, build
from hvdenv.building.state import Request
from hvdenv.cli.check import judge_recipe, refuse_blocked
from hvdenv.cli.find_lock import with_lock
from hvdenv.cli.job import run_there
from hvdenv.cli.options import (
    add_dry_run,
    add_options,
    is_locked,
    print_json,
    refuse_foreign_path,
    refuse_foreign_prefix,
    resolved_of,
)
from hvdenv.cli.plan import described
from hvdenv.cli.prepare import Prepared, prepare
from hvdenv.cli.progress import choose
from hvdenv.environments.generations import Environment, read_record
from hvdenv.knowledge.rules import Rule
from hvdenv.model.cluster import Workspace
from hvdenv.model.layers import Resolved
from hvdenv.model.observe import complete
from hvdenv.model.recipe import provided_by_modules
from hvdenv.places import find_places, make_folder
from hvdenv.plans.plan import Plan
from hvdenv.runner import Runner
from hvdenv.schema import encode
from hvdenv.sites import workspace as workspaces
from hvdenv.sites.modules import Loaded
from hvdenv.wheels.compiled import cache_in

EXAMPLES = """\
examples:
  hvdenv build local
  hvdenv build local --variant torch --prefix ~/envs/horovod
  hvdenv build ./mine.toml --python 3.11
  hvdenv build local --locked                       exactly what the lock lists, or exit 4
  hvdenv build neuron --where compute               in a job; a second call follows it again

The environment is stored under $HVDENV_HOME (default: ~/.local/share/hvdenv), or at --prefix.
Activate it with `. PREFIX/activate.sh`.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe", "python", "prefix", "json", "loudness", "where")
    add_dry_run(parser, "show what would be built, or the script of the job, and do nothing")
    add_options(parser, "allow", "locked")
    parser.add_argument(
        "--accept-drift", metavar="NAME", action="append", default=[],
        help="continue although this differs from the lock (compiler, mpi, modules.NAME, ...); may"
        " be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--rebuild", action="store_true", help="build a new generation even if nothing changed"
    )
    add_options(parser, "break-lock", "trust")


def run(arguments: argparse.Namespace) -> int:
    if arguments.where == "compute":
        return run_there(arguments, "build")
    resolved = resolved_of(arguments)
    workspace = resolved.recipe.places.workspace
    if workspace and not (arguments.prefix or arguments.dry_run):
        _allocate(workspace, resolved, arguments)
    prepared = prepare(arguments, thorough=False, resolved=resolved)
    if is_locked(arguments):
        prepared = with_lock(arguments, prepared)
    target = prepared.target
    # A build resumes what an earlier one began.
    refuse_foreign_path(str(target.prefix), arguments)
    refuse_foreign_prefix(target.store, arguments)
    before, plan = target.active(), prepared.plan()
    built = None if arguments.rebuild else already_built(target, plan, arguments.accept_drift)
    if arguments.dry_run:
        print(described(plan, prepared) if built is None else f"nothing to do: {built.prefix}")
        return 0
    if built is None:
        prepared = prepared._replace(facts=complete(prepared.facts, Runner()))
        built = build_prepared(prepared, plan, arguments)
    elif not arguments.quiet:
        for each in built.drift:
            print(f"drift from the lock: {each}", file=sys.stderr)
    if arguments.json:
        print_json(encode(built))
    elif not arguments.quiet:
        print(
            f"{_result(built, prepared)}: {built.prefix}\nuse it with: . {built.prefix}/activate.sh"
        )
        _report_dropped(target, before)
    return 0


def _result(built: Built, prepared: Prepared) -> str:
    recipe = prepared.resolved.recipe
    if provided_by_modules(recipe):
        return f"nothing to build: modules provide Horovod {recipe.horovod.version}; wrote what loads them"
    return f"built in {built.seconds:.0f} s" if built.changed else "nothing to do"


def _report_dropped(target: Environment, before: str) -> None:
    """Name the packages that the user had added to the generation that was active before."""
    if before in ("", target.active()):
        return
    record = read_record(target.record(before))
    if added := record.additions.get("requirements"):
        print(
            f"without what was added: {', '.join(added)}; to go back to that:"
            f" hvdenv envs rollback {target.prefix} --to {before}"
        )


def _allocate(workspace: Workspace, resolved: Resolved, arguments: argparse.Namespace) -> None:
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
    request = Request(
        plan=plan,
        resolved=encode(prepared.resolved.recipe),
        facts=prepared.facts,
        findings=_findings(rules, arguments.allow),
        modules=modules,
        accepted=tuple(arguments.accept_drift),
        wheels=wheels._replace(read=(*wheels.read, *cache_in(prepared.source_folder))),
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
    """The rules that apply, for the record."""
    return tuple(
        {
            "rule": rule.id,
            "severity": rule.severity,
            **({"allowed": True} if rule.id in allowed else {}),
        }
        for rule in rules
    )
