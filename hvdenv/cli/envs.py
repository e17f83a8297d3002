"""List the environments that hvdenv built with their size, return to an earlier generation, remove
environments, or remove generations that are no longer needed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdenv.base.errors import HvdenvError, UsageError
from hvdenv.base.places import Places, environment_name, find_places
from hvdenv.cli.options import add, add_action, add_options, age, time_ago
from hvdenv.environments import registry
from hvdenv.environments.generations import Environment
from hvdenv.environments.registry import Generation, ListedEnvironment
from hvdenv.session.output import print_json, report

if TYPE_CHECKING:
    from hvdenv.environments.prune import Cleared

EXAMPLES = """\
examples:
  hvdenv envs
  hvdenv envs rollback local                  to the previous generation
  hvdenv envs rollback local --generation 3f2a9c81d004
  hvdenv envs prune --keep 2
  hvdenv envs prune --older-than 90d --dry-run
  hvdenv envs remove ~/envs/horovod

prune keeps the active generation and those that processes on this host use. hvdenv cannot see an idle
shell that sourced activate.sh, but it sees one of `hvdenv shell`.
The caches of uv and conda grow without limit: cache/uv and cache/conda in $HVDENV_HOME (default:
~/.local/share/hvdenv). While no build runs, you can remove them.
"""

_NAMED = "a name that `hvdenv envs` lists, such as local+torch, or a path with a slash"


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "json")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    rollback = add_action(actions, "rollback", "point a prefix to an earlier generation")
    add(rollback, "environment NAME_OR_PREFIX", _NAMED)
    add(
        rollback,
        "--generation GENERATION",
        "the one to return to, or its first digits (default: the previous one)",
        default="",
    )
    remove = add_action(actions, "remove", "remove an environment with all its generations")
    add(remove, "environment NAME_OR_PREFIX", _NAMED)
    add(remove, "--force", "remove it even if processes use it")
    prune = add_action(actions, "prune", "remove generations that are neither active nor in use")
    add(prune, "environment NAME_OR_PREFIX", f"{_NAMED} (default: all)", nargs="?")
    add(
        prune,
        "--keep N",
        "number of newest generations to keep beside the active one (default: 1; 0 with an age)",
        type=int,
    )
    add(
        prune,
        "--older-than AGE",
        "only generations built longer ago than this, such as 90d, 12h or 8w",
        type=age,
    )
    add(prune, "--dry-run", "print what would be removed, and remove nothing")


def run(arguments: argparse.Namespace) -> int:
    places = find_places()
    if arguments.action == "prune":
        _prune(arguments, places)
    elif arguments.action == "remove":
        _remove(arguments, places)
    elif arguments.action == "rollback":
        from hvdenv.environments import prune  # needs psutil

        target = registry.find(places, arguments.environment)
        print(f"{target.prefix} -> {prune.rollback(target, arguments.generation)}")
    else:
        _list(places, arguments.json)
    return 0


def _remove(arguments: argparse.Namespace, places: Places) -> None:
    from hvdenv.environments import prune  # needs psutil

    target = registry.find(places, arguments.environment)
    left = os.path.lexists(target.store) or os.path.lexists(target.prefix)
    if not left and registry.forget(places, target):
        print(f"{target.prefix}: nothing was left of it; `hvdenv envs` no longer lists it")
        return
    cleared = prune.remove(target, force=arguments.force)
    _report(target, cleared, "removed")
    if not (cleared.removed or cleared.kept):  # a removal that was interrupted
        print(f"removed what was left of {target.prefix}")
    registry.forget(places, target)


def _prune(arguments: argparse.Namespace, places: Places) -> None:
    from hvdenv.environments import prune  # needs psutil

    before = time_ago(arguments.older_than)
    keep = arguments.keep if arguments.keep is not None else 0 if before else 1
    if keep < 1 and not before:
        raise UsageError("--keep must be 1 or more", remedy="to keep none, add --older-than 0d")
    if arguments.environment:
        chosen = [registry.find(places, arguments.environment)]
    else:
        known = [each.environment for each in registry.list_environments(places)]
        chosen = [each for each in known if os.path.lexists(each.store)]
    removed = 0
    for target in chosen:
        remains = target.remains()
        try:
            cleared = prune.prune(target, keep=keep, before=before, dry_run=arguments.dry_run)
        except HvdenvError as error:  # a build holds it, or others own it
            if arguments.environment:
                raise
            report(f"kept {target.prefix}: {error.message}")
            continue
        left = () if arguments.dry_run else target.remains()
        gone = [each for each in remains if each not in left]
        cleared = cleared._replace(removed=(*cleared.removed, *gone))
        _report(target, cleared, "would remove" if arguments.dry_run else "removed")
        removed += len(cleared.removed)
    if not removed:
        print("nothing to remove")


def _report(target: Environment, cleared: Cleared, verb: str) -> None:
    for identity in cleared.removed:
        print(f"{verb} {target.prefix}: {identity}")
    for identity, reason in cleared.kept:
        report(f"kept {target.prefix}: {identity}: {reason}")


def _list(places: Places, json: bool) -> None:
    entries = [
        (each, registry.list_generations(each.environment))
        for each in registry.list_environments(places)
    ]
    if json:
        print_json(
            [
                {**listed._asdict(), "sizes": [each._asdict() for each in sizes]}
                for listed, sizes in entries
            ]
        )
        return
    if not entries:
        print("no environments yet; build one with `hvdenv build local`")
    for each in entries:
        _print_environment(*each)


def _print_environment(listed: ListedEnvironment, sizes: Sequence[Generation]) -> None:
    name = environment_name(listed.recipe, listed.variants)
    print(f"{name}  {listed.state}  {listed.prefix}")
    for each in sizes:
        added = f"; added: {', '.join(each.added)}" if each.added else ""
        print(f"    {each.generation}  {each.state}{_size(each)}{added}")
    if len(sizes) > 1:
        size, files = sum(each.bytes for each in sizes), sum(each.files for each in sizes)
        print(f"    total: {_bytes(size)}, {files} files")


def _size(generation: Generation) -> str:
    if not generation.created:
        return ""
    size = f": {_bytes(generation.bytes)}, {generation.files} files"
    return f"{size}, built {generation.created[:10]}"


def _bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"
