"""List the environments that hvdenv built with their size, return to an earlier generation, remove
environments, or remove generations that are no longer needed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hvdenv.base.errors import HvdenvError, UsageError
from hvdenv.base.places import Places, environment_name, find_places
from hvdenv.base.runner import Runner
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
  hvdenv envs storage                         size of the caches, and free space
  hvdenv envs rollback local                  to the previous generation
  hvdenv envs rollback local --generation 3f2a9c81d004
  hvdenv envs prune --keep 2
  hvdenv envs prune --older-than 90d --unused-for 60d --dry-run
  hvdenv envs remove ~/envs/horovod

prune keeps the active generation and those that processes on this host use. hvdenv cannot see an idle
shell that sourced activate.sh, but it sees one of `hvdenv shell`. The last use of a generation is its
last verify, run, shell or job, or else the access time of its activate.sh.
The caches of uv and conda grow without limit. While no build runs, you can remove them.
"""

_NAMED = "a name that `hvdenv envs` lists, such as local+torch, or a path with a slash"


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "json")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    storage = add_action(actions, "storage", "show the size of the caches and the free space")
    add(storage, "--json", default=argparse.SUPPRESS)
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
    add(prune, "--unused-for AGE", "only generations not used for this long, such as 60d", type=age)
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
    elif arguments.action == "storage":
        _storage(places, arguments.json)
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
    _report(target, cleared, {}, "removed")
    if not (cleared.removed or cleared.kept):  # a removal that was interrupted
        print(f"removed what was left of {target.prefix}")
    registry.forget(places, target)
    for identity in cleared.removed:
        registry.forget_use(places, target.generation(identity))


def _prune(arguments: argparse.Namespace, places: Places) -> None:
    from hvdenv.environments import prune  # needs psutil

    before, idle = time_ago(arguments.older_than), time_ago(arguments.unused_for)
    by_age = bool(before or idle)
    keep = arguments.keep if arguments.keep is not None else 0 if by_age else 1
    if keep < 1 and not by_age:
        raise UsageError("--keep must be 1 or more", remedy="to keep none, add --older-than 0d")
    if arguments.environment:
        chosen = [registry.find(places, arguments.environment)]
    else:
        known = [each.environment for each in registry.list_environments(places)]
        chosen = [each for each in known if os.path.lexists(each.store)]
    removed = 0
    for target in chosen:
        listed = registry.list_generations(target, places)
        found, remains = {each.generation: each for each in listed}, target.remains()
        if idle and not registry.keeps_access_times(target.store):
            report(
                f"{target.prefix}: this file system keeps no access times (noatime), so uses of"
                " activate.sh without hvdenv are unknown"
            )
        try:
            cleared = prune.prune(
                target, keep=keep, spare=_spared(found, before, idle), dry_run=arguments.dry_run
            )
        except HvdenvError as error:  # a build holds it, or others own it
            if arguments.environment:
                raise
            report(f"kept {target.prefix}: {error.message}")
            continue
        left = () if arguments.dry_run else target.remains()
        gone = [each for each in remains if each not in left]
        cleared = cleared._replace(removed=(*cleared.removed, *gone))
        _report(target, cleared, found, "would remove" if arguments.dry_run else "removed")
        removed += len(cleared.removed)
        for identity in () if arguments.dry_run else cleared.removed:
            registry.forget_use(places, target.generation(identity))
    if not removed:
        print("nothing to remove")


def _spared(found: Mapping[str, Generation], before: str, idle: str) -> Callable[[str], bool]:
    """Whether to keep a generation because it is too young or was used too recently.

    Args:
        before: keep what was built after this time; empty to ignore it.
        idle: keep what was used after this time; empty to ignore it.
    """

    def spare(identity: str) -> bool:
        if not (before or idle):
            return False
        known = found.get(identity)
        # A new one, or one of unknown age, is kept.
        if known is None or not known.created:
            return True
        return bool(before and known.created > before) or bool(idle and known.since > idle)

    return spare


def _report(
    target: Environment, cleared: Cleared, found: Mapping[str, Generation], verb: str
) -> None:
    for identity in cleared.removed:
        known = found.get(identity)
        details = f" ({_size(known)}, {_history(known)})" if known else ""
        print(f"{verb} {target.prefix}: {identity}{details}")
    for identity, reason in cleared.kept:
        report(f"kept {target.prefix}: {identity}: {reason}")
    if cleared.unseen:
        some = "1 process" if cleared.unseen == 1 else f"{cleared.unseen} processes"
        report(f"{some} of other users could not be checked")


def _list(places: Places, json: bool) -> None:
    runner = Runner()
    entries = [
        (
            each,
            registry.list_generations(each.environment, places),
            registry.space_warnings(each.environment, runner),
        )
        for each in registry.list_environments(places)
    ]
    if json:
        print_json(
            [
                {**listed._asdict(), "sizes": [each._asdict() for each in size], "warnings": warned}
                for listed, size, warned in entries
            ]
        )
        return
    if not entries:
        print("no environments yet; build one with `hvdenv build local`")
    for each in entries:
        _print_environment(*each)
    _storage(places, json=False)


def _storage(places: Places, json: bool) -> None:
    caches = registry.list_caches(places)
    folders = [each.environment.prefix.parent for each in registry.list_environments(places)]
    rooms = registry.free_space([places.home, *folders], Runner())
    if json:
        # Fields that are None stay.
        print_json(
            {
                "caches": [each._asdict() for each in caches],
                "filesystems": [each._asdict() for each in rooms],
            }
        )
        return
    for cache in caches:
        print(f"cache {cache.name}: {_bytes(cache.bytes)}, {cache.files} files  {cache.path}")
    for room in rooms:
        free = [
            _bytes(room.disk_free) if room.disk_free is not None else "",
            f"{room.inodes_free} files" if room.inodes_free is not None else "",
        ]
        quota = f"; quota: {_bytes(room.quota_free)}" if room.quota_free is not None else ""
        print(f"free at {room.path}: {', '.join(filter(None, free)) or 'unknown'}{quota}")


def _print_environment(
    listed: ListedEnvironment, sizes: Sequence[Generation], warnings: Sequence[str]
) -> None:
    name = environment_name(listed.recipe, listed.variants)
    print(f"{name}  {listed.state}  {listed.prefix}")
    for each in sizes:
        added = f"; added: {', '.join(each.added)}" if each.added else ""
        print(f"    {each.generation}  {each.state}: {_size(each)}, {_history(each)}{added}")
    if len(sizes) > 1:
        size, files = sum(each.bytes for each in sizes), sum(each.files for each in sizes)
        print(f"    total: {_bytes(size)}, {files} files")
    for warning in warnings:
        print(f"    warning: {warning}")


def _size(generation: Generation) -> str:
    return f"{_bytes(generation.bytes)}, {generation.files} files"


def _history(generation: Generation) -> str:
    verb = "changed" if generation.state in ("unfinished", "damaged") else "built"
    built = f"{verb} {generation.created[:10] or '(date unknown)'}"
    if not generation.used:
        return f"{built}, never used as far as known"
    return f"{built}, used {generation.used[:10]} (by {generation.used_by})"


def _bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"
