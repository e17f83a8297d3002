"""Build an environment.

If nothing changed since the last build, build does nothing. After a build that was killed, it
resumes at the first step that had not finished."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.cli.options import (
    Prepared,
    add_allow,
    add_json,
    add_locked,
    add_loudness,
    add_prefix,
    add_python,
    add_recipe,
    add_trust,
    add_where,
    is_locked,
    prepare,
    print_json,
    refuse_foreign_path,
    refuse_foreign_prefix,
    resolved_of,
)
from hvdenv.schema import encode

if TYPE_CHECKING:
    from hvdenv.building.build import Built, Request
    from hvdenv.environments.generations import Environment
    from hvdenv.knowledge.rules import Rule
    from hvdenv.model.cluster import Workspace
    from hvdenv.sites.modules import Loaded

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
    add_recipe(parser)
    add_python(parser)
    add_prefix(parser)
    add_json(parser)
    add_loudness(parser)
    add_where(parser)
    add_allow(parser)
    add_locked(parser)
    parser.add_argument(
        "--accept-drift", metavar="NAME", action="append", default=[],
        help="continue although this differs from the lock (compiler, mpi, modules.NAME, ...); may"
" be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--rebuild", action="store_true", help="build a new generation even if nothing changed"
    )
    parser.add_argument(
        "--break-lock",
        action="store_true",
        help="take the prefix over from another build, whoever runs it",
    )
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    from hvdenv.building.build import already_built, finished

    if arguments.where == "compute":
        from hvdenv.cli.job import run_there

        return run_there(arguments, "build", nodes=1)
    resolved = resolved_of(arguments)
    wanted = resolved.recipe.places.workspace
    if wanted and not arguments.prefix:
        _allocate(wanted, arguments)
    prepared = prepare(arguments, thorough=False)
    if is_locked(arguments):
        from hvdenv.cli.find_lock import with_lock

        prepared = with_lock(arguments, prepared)
    target = prepared.target
    # A build resumes what an earlier one began.
    refuse_foreign_path(str(target.prefix), arguments)
    refuse_foreign_prefix(target.store, arguments)
    before = target.active()
    present, started = None, time.monotonic()
    if not arguments.rebuild:
        present = already_built(target, prepared.digest(), prepared.locked, arguments.accept_drift)
    if present:
        built = finished(target, present.name, prepared.locked, started, changed=False)
    else:
        built = _build(prepared, arguments)
    if not built.changed and not arguments.quiet:
        for each in built.drift:
            print(f"drift from the lock: {each}", file=sys.stderr)
    if arguments.json:
        print_json(encode(built))
    elif not arguments.quiet:
        said = f"built in {built.seconds:.0f} s" if built.changed else "nothing to do"
        print(f"{said}: {built.prefix}\nuse it with: . {built.prefix}/activate.sh")
        _say_dropped(target, before)
    return 0


def _say_dropped(target: Environment, before: str) -> None:
    """Say what the user had added to the generation that was active, and this one is without."""
    from hvdenv.environments.generations import read_record

    if before in ("", target.active()):
        return
    record = read_record(target.record(before))
    if added := record.get("additions", {}).get("requirements"):
        print(
            f"without what was added: {', '.join(added)}; to go back to that:"
            f" hvdenv envs rollback {target.prefix} --to {before}"
        )


def _allocate(wanted: Workspace, arguments: argparse.Namespace) -> None:
    """Have the workspace in which the recipe keeps its environments.

    It counts against the user's quota, so whatever else refuses the build comes first.
    """
    from hvdenv.runner import Runner
    from hvdenv.sites import workspace

    runner = Runner()
    if workspace.find(wanted, runner) is None:
        elsewhere = argparse.Namespace(**{**vars(arguments), "prefix": Path.cwd() / "unknown"})
        prepared = prepare(elsewhere, thorough=True)
        facts = prepared.facts._replace(disk_free=None, inodes_free=None, quota_free=None)
        _refuse(prepared._replace(facts=facts), arguments, quiet=True)
        workspace.allocate(wanted, runner)


def _refuse(
    prepared: Prepared, arguments: argparse.Namespace, *, quiet: bool
) -> tuple[tuple[Rule, ...], Loaded | None]:
    """Stop at what would make the build fail; the rules that apply, and what modules set."""
    from hvdenv.building.build import try_modules
    from hvdenv.cli.check import judge_recipe, refuse_blocked
    from hvdenv.runner import Runner

    rules = judge_recipe(prepared)
    refuse_blocked(rules, arguments.allow, quiet=quiet)
    return rules, try_modules(prepared.resolved.recipe, Runner())


def _build(prepared: Prepared, arguments: argparse.Namespace) -> Built:
    thorough = prepare(arguments, thorough=True)
    return build_prepared(
        prepared._replace(facts=thorough.facts, python=thorough.python), arguments
    )


def build_prepared(prepared: Prepared, arguments: argparse.Namespace) -> Built:
    """Build what was prepared, unless a rule or a module stands in the way.

    Args:
        prepared: with a thorough look at the machine.
        arguments: allow, accept_drift, prefix, quiet, verbose, rebuild and break_lock.
    """
    from hvdenv.building.build import build
    from hvdenv.cli.progress import choose
    from hvdenv.places import find_places, make_folder
    from hvdenv.plans.plan import PLACEHOLDER

    rules, modules = _refuse(prepared, arguments, quiet=arguments.quiet)
    places = find_places()
    python, target = prepared.python, prepared.target
    if not arguments.prefix:
        make_folder(target.prefix.parent)
    steps = len(prepared.plan_for(PLACEHOLDER).steps)
    with choose(steps, quiet=arguments.quiet, verbose=arguments.verbose) as progress:
        progress.note(f"building {target.prefix} with Python {python.version} ({python.path})")
        return build(
            _request(prepared, rules, modules, arguments.allow, arguments.accept_drift), target, places, progress,
            rebuild=arguments.rebuild, break_lock=arguments.break_lock,
        )  # fmt: skip


def _request(
    prepared: Prepared,
    rules: Sequence[Rule],
    modules: Loaded | None,
    allowed: Sequence[str],
    accepted: Sequence[str] = (),
) -> Request:
    from hvdenv.building.build import Request
    from hvdenv.wheels.compiled import cache_in

    wheels = prepared.resolved.recipe.places.wheels
    wheels = wheels._replace(read=(*wheels.read, *cache_in(prepared.source_folder)))
    return Request(
        prepared.plan_for,
        prepared.digest(),
        encode(prepared.resolved.recipe),
        prepared.facts,
        tuple(
            {
                "rule": rule.id,
                "severity": rule.severity,
                **({"allowed": True} if rule.id in allowed else {}),
            }
            for rule in rules
        ),
        modules,
        tuple(accepted),
        wheels,
    )
