"""List, prune and publish the wheels that builds have compiled.

`publish` makes an index for pip and uv, of all wheels or of those of some environments.
Users of the index do not need hvdenv: on import each wheel checks that it fits the installed
framework and MPI."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from hvdenv.base.errors import StepError, UsageError
from hvdenv.base.masking import plain
from hvdenv.base.places import find_places
from hvdenv.building import published, wheelcache
from hvdenv.building.published import CheckedWheel
from hvdenv.building.wheelcache import Cache, Listed, NotUsedError
from hvdenv.cli.options import add, add_action, add_options
from hvdenv.environments import generations, registry
from hvdenv.session.output import print_json, report
from hvdenv.session.recipe import shared_wheels
from hvdenv.session.request import site_file

EXAMPLES = """\
examples:
  hvdenv wheels list                                  your own cache, and shared ones
  hvdenv wheels prune
  hvdenv wheels publish /proj/group/index
  hvdenv wheels publish /proj/group/index neuron local+torch     wheels of these environments
  pip install --extra-index-url file:///proj/group/index \\
      "horovod==0.28.1+hvdenv.6.torch2.13.cpu.ompi41"

$HVDENV_WHEEL_CACHE and `places.wheels` in a site file name shared caches.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = add_action(actions, "list", "list and check the wheels of the caches")
    add_options(listing, "site", "json")
    prune = add_action(
        actions,
        "prune",
        "remove wheels of yours: unusable ones, and the least recently used beyond"
        " places.wheels.own_gb",
    )
    add_options(prune, "site")
    publish = add_action(actions, "publish", "add compiled wheels to an index")
    add(publish, "folder DIR", "directory of the index", type=Path)
    add_options(publish, "site")
    add(
        publish,
        "recipes RECIPE",
        "only wheels of these environments, such as local+torch; `hvdenv envs` lists them",
        nargs="*",
        default=[],
    )


def run(arguments: argparse.Namespace) -> int:
    actions = {"list": _list, "prune": _prune, "publish": _publish}
    return actions[arguments.action](arguments)


def _caches(arguments: argparse.Namespace) -> tuple[Cache, ...]:
    return (
        wheelcache.own(find_places()),
        *wheelcache.shared(shared_wheels(site_file(arguments.site))),
    )


def _list(arguments: argparse.Namespace) -> int:
    found, unread = wheelcache.find_all(_caches(arguments))
    for problem in unread:
        report(f"error: {problem}")
    entries = [wheelcache.describe(cache, name) for cache, name in found]
    if arguments.json:
        print_json([each._asdict() for each in entries])
    else:
        for each in entries:
            _show(each)
        if not entries and not unread:
            print("no wheels yet; `hvdenv build` stores those that it compiles")
    return int(bool(unread) or any(each.problem for each in entries))


def _show(entry: Listed) -> None:
    lines = [entry.key[:12]]
    if entry.wheel:
        built = " ".join(f"{name} {version}" for name, version in sorted(entry.frameworks.items()))
        used = f", used {entry.used[:10]}" if entry.used else ""
        where = f"shared: {entry.cache}" if entry.shared else "own"
        stored = f"{entry.bytes / 1e6:.1f} MB, stored {entry.created[:10]}"
        # Horovod, or a framework from source.
        name, version, python = (*entry.wheel.split("-"), "", "")[:3]
        about = ", ".join(filter(None, [f"{name} {version}", built, python]))
        lines = [
            f"{entry.key[:12]}  {about}",
            "; ".join(each for each in (entry.mpi, entry.compiler) if each),
            f"{stored}{used}, {where}",
        ]
    if entry.problem:
        lines.append(f"not used: {entry.problem}")
    print(plain("\n    ".join(line for line in lines if line)))


def _prune(arguments: argparse.Namespace) -> int:
    """Remove wheels of the user's own cache."""
    largest = shared_wheels(site_file(arguments.site)).own_gb * 1e9
    gone = wheelcache.prune(wheelcache.own(find_places()), largest=largest, thorough=True)
    for each, is_removed in gone:
        verb = "removed" if is_removed else "kept (no permission)"
        print(f"{verb} {each.key[:12]}, {each.bytes / 1e6:.1f} MB")
    return 0 if all(is_removed for _, is_removed in gone) else 5


def _publish(arguments: argparse.Namespace) -> int:
    entries, count = _entries(arguments), 0
    target = published.prepare(arguments.folder)
    with TemporaryDirectory() as folder:
        for name, cache in sorted(entries.items()):
            try:
                record = wheelcache.read(cache, name)
                if record is None:
                    continue
                source = CheckedWheel(record, Path(folder) / "wheel")
                wheelcache.check(cache, record, source.wheel)
                file, is_new = published.publish(target, source)
                print(f"{'published' if is_new else 'unchanged'} {file}")
                count += 1
            except NotUsedError as error:
                report(f"not published: {name[:12]}: {error}")
    if not count:
        raise StepError(
            f"no wheel was published: all {len(entries)} were refused, for the reasons above",
            remedy="hvdenv wheels list (says which are damaged); hvdenv build RECIPE --rebuild"
            " compiles a wheel again",
        )
    listed = published.write_page(target)
    index = arguments.folder.expanduser().absolute().as_uri()
    print(f"{listed} wheel{'s' * (listed != 1)} in the index {index}")
    return 0


def _entries(arguments: argparse.Namespace) -> dict[str, Cache]:
    """The caches with the entries to publish, by their keys."""
    listed, unread = wheelcache.find_all(_caches(arguments))
    for problem in unread:
        report(f"error: {problem}")
    found = {name: cache for cache, name in reversed(listed)}  # the first one counts
    wanted = {}
    for environment in arguments.recipes:
        named = registry.find(find_places(), environment)
        generations.require(named)
        prefix = named.prefix
        name = wheelcache.key(generations.read_record(prefix / generations.RECORD).stack)
        if name not in found:
            raise UsageError(
                "no cache has the Horovod wheel of this environment",
                where=str(prefix),
                remedy="build it again with --rebuild: the build stores the wheel",
            )
        wanted[name] = found[name]
    if not found:
        remedy = "build an environment: hvdenv build RECIPE"
        raise UsageError("no cache has a wheel", remedy=remedy)
    return wanted or found
