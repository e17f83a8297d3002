"""Manage caches of compiled wheels: your own, and those that a site shares.

Without --cache, `list`, `verify` and `copy` use all caches, and `prune` changes your own."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hvdenv.cli.options import (
    add,
    add_action,
    add_options,
    age,
    print_json,
    report,
    time_ago,
    wheels_of_site,
)
from hvdenv.environments.storage import Counter
from hvdenv.errors import HvdenvError, UsageError
from hvdenv.masking import plain
from hvdenv.model.cluster import Wheels
from hvdenv.places import find_places, make_folder, named_folder
from hvdenv.runner import Runner
from hvdenv.wheels import downloads, wheelcache
from hvdenv.wheels.cache_entry import Cache
from hvdenv.wheels.wheelcache import Listed

EXAMPLES = """\
examples:
  hvdenv cache                                      lists the entries of the caches
  hvdenv cache verify --cache /proj/group/wheels
  hvdenv cache prune --max-size 2GB --older-than 90d --damaged
  hvdenv cache prune --downloads --older-than 30d
  hvdenv cache copy f3c7 0a51 --to /media/wheels    entries by the first digits of their keys
  hvdenv cache copy --cache /media/wheels           into your own cache

$HVDENV_WHEEL_CACHE and `places.wheels` in a site file name shared caches.
"""

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    parser.set_defaults(action="list", site=None, cache=None, json=False)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        parser = add_action(actions, name, text)
        add_options(parser, "site")
        add(parser, "--cache FOLDER", "use this cache only", type=Path)
        return parser

    add_options(action("list", "list the entries of the caches"), "json")
    add_options(action("verify", "check every entry: hash, record, owner"), "json")
    prune = action("prune", "remove entries, least recently used first")
    add(
        prune, "--max-size SIZE",
        "remove entries until the cache is this small, such as 500MB or 2GB (default, without"
        " other options: places.wheels.own_gb for your own cache)", type=_size,
    )  # fmt: skip
    add(
        prune, "--older-than AGE",
        "remove entries not used for this long, such as 90d or 8w", type=age,
    )  # fmt: skip
    add(prune, "--damaged", "remove damaged entries")
    add(
        prune, "--downloads",
        "prune downloaded and unpacked files instead of wheels (default --max-size: 20GB)",
    )  # fmt: skip
    copy = action("copy", "copy entries into another cache")
    add(copy, "--to FOLDER", "created if missing (default: your own cache)", type=Path)
    add(copy, "keys KEY", "first digits of keys (default: all entries)", nargs="*")


def _size(text: str) -> float:
    """Bytes that are meant by 500MB, 2G or 1.5TB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)B?", text.upper())
    if not match or (float(match[1]) and text[-1].isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 2GB")
    return float(match[1]) * _UNITS[match[2]]


def run(arguments: argparse.Namespace) -> int:
    wheels = wheels_of_site(arguments)
    caches = caches_of(arguments, wheels)
    action = arguments.action
    if action == "prune":
        return _prune(arguments, caches[0], wheels)
    if action == "copy":
        return _copy(arguments, caches, wheels)
    return _list(arguments, caches)


def caches_of(arguments: argparse.Namespace, wheels: Wheels) -> tuple[Cache, ...]:
    own, shared = wheelcache.own(find_places()), wheelcache.shared(wheels)
    if arguments.cache:
        folder = arguments.cache.absolute()
        named = wheelcache.shared(wheels._replace(publish=str(folder)))
        return (own,) if folder == own.folder else named[:1]
    return (own,) if arguments.action == "prune" else (own, *shared)


def _list(arguments: argparse.Namespace, caches: tuple[Cache, ...]) -> int:
    """`list`, and `verify`, which reads every byte."""
    verifies = arguments.action == "verify"
    entries, unread = [], False
    for cache in caches:
        try:
            entries += [
                wheelcache.describe(cache, name, thorough=verifies)
                for name in wheelcache.names(cache)
            ]
        except HvdenvError as error:
            unread = True
            report(f"error: {error}")
    if arguments.json:
        print_json(
            [{**each._asdict(), "horovod": each.horovod, "python": each.python} for each in entries]
        )
    else:
        for each in entries:
            _show(each, verifies)
        if not entries and not unread:
            print("no wheels yet; `hvdenv build` stores those that it compiles")
    return int(unread or (verifies and any(each.problem for each in entries)))


def _show(entry: Listed, verified: bool) -> None:
    lines = [entry.key[:12]]
    if entry.wheel:
        built = " ".join(f"{name} {version}" for name, version in sorted(entry.frameworks.items()))
        used = f", used {entry.used[:10]}" if entry.used else ""
        where = f"shared: {entry.cache}" if entry.shared else "own"
        stored = f"{entry.bytes / 1e6:.1f} MB, stored {entry.created[:10]}"
        about = ", ".join(filter(None, [entry.package, built, entry.python]))
        lines = [
            f"{entry.key[:12]}  {about}",
            "; ".join(each for each in (entry.mpi, entry.compiler) if each),
            f"{stored}{used}, {where}",
        ]
    if entry.problem:
        lines.append(f"not used: {entry.problem}")
    elif verified:
        lines.append("good")
    print(plain("\n    ".join(line for line in lines if line)))


def _prune(arguments: argparse.Namespace, cache: Cache, wheels: Wheels) -> int:
    if arguments.downloads:
        return _prune_downloads(arguments)
    largest, oldest = arguments.max_size, time_ago(arguments.older_than)
    if largest is None and not (oldest or arguments.damaged or cache.shared):
        largest = wheels.own_gb * 1e9
    entries = [
        wheelcache.describe(cache, name, thorough=arguments.damaged)
        for name in wheelcache.names(cache)
    ]
    going = [each for each in entries if arguments.damaged and each.damaged]
    others = [each for each in entries if not each.damaged]
    going += wheelcache.least_recently_used(others, largest=largest, oldest=oldest)
    kept = [each for each in going if not wheelcache.remove(cache, each.key)]
    for each in going:
        print(f"{'kept' if each in kept else 'removed'} {each.key[:12]}, {each.bytes / 1e6:.1f} MB")
    swept = wheelcache.sweep(cache)
    if swept:
        print(f"removed temporary files of {swept} killed processes")
    if kept:
        report(f"you have no permission to change {cache.folder}")
    return 5 if kept else 0


def _prune_downloads(arguments: argparse.Namespace) -> int:
    if arguments.damaged or arguments.cache:
        raise UsageError(
            "--downloads can only be combined with --max-size and --older-than",
            remedy="hvdenv cache prune --downloads --older-than 30d",
        )
    largest, oldest = arguments.max_size, time_ago(arguments.older_than)
    places = find_places()
    if largest is None and not oldest:
        largest = downloads.LARGEST_FILES
    entries = downloads.kept(places, Counter())
    status = 0
    for each in wheelcache.least_recently_used(entries, largest=largest, oldest=oldest):
        gone = downloads.remove(places, each, Runner())
        status = status if gone else 5
        verb = "removed" if gone else "kept (in use, or no permission)"
        print(f"{verb} {each.path.relative_to(places.cache)}, {each.bytes / 1e6:.1f} MB")
    return status


def _chosen(caches: tuple[Cache, ...], prefixes: list[str]) -> dict[str, Cache]:
    """The keys that begin so, each with the first cache that has it."""
    known: dict[str, Cache] = {}
    for cache in caches:
        known = dict.fromkeys(wheelcache.names(cache), cache) | known
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in known):
            raise UsageError(
                f"there is no entry whose key begins with {prefix}",
                remedy="`hvdenv cache list` shows the keys",
            )
    return {
        name: cache
        for name, cache in known.items()
        if not prefixes or name.startswith(tuple(prefixes))
    }


def _copy(arguments: argparse.Namespace, caches: tuple[Cache, ...], wheels: Wheels) -> int:
    chosen, target = _chosen(caches, arguments.keys), wheelcache.own(find_places())
    if arguments.to:
        folder = make_folder(named_folder(arguments.to))
        target = wheelcache.shared(wheels._replace(publish=str(folder)))[0]
    wheelcache.copy(chosen, target)
    print(f"copied {len(chosen)} wheel{'s' * (len(chosen) != 1)} to {target.folder}")
    return 0
