"""Publish compiled wheels as an index for pip, uv and Poetry.

Users of the index do not need hvdenv: pip installs the wheels, and on import each wheel checks
that it fits the installed framework and MPI. Without recipes, `publish` adds all
wheels of the caches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hvdenv.cli.cache import caches_of
from hvdenv.cli.options import add, add_action, add_options, report, wheels_of_site
from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import generations, registry
from hvdenv.errors import StepError, UsageError
from hvdenv.places import find_places
from hvdenv.wheels import index, wheelcache
from hvdenv.wheels.cache_entry import Cache, NotUsedError, check, key, open_entry
from hvdenv.wheels.published import Source, Unpublished, compiled_for

EXAMPLES = """\
examples:
  hvdenv wheels publish /proj/group/index
  hvdenv wheels publish /proj/group/index neuron local+torch     wheels of these environments
  hvdenv wheels verify /proj/group/index
  pip install --extra-index-url file:///proj/group/index \\
      "horovod==0.28.1+hvdenv.1.torch2.13.cpu.ompi41"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        parser = add_action(actions, name, text)
        add(parser, "folder DIR", "folder of the index", type=Path)
        return parser

    publish = action("publish", "add compiled wheels to an index")
    add_options(publish, "site")
    add(
        publish, "recipes RECIPE",
        "only wheels of these environments, such as local+torch; `hvdenv envs` lists them",
        nargs="*", default=[],
    )  # fmt: skip
    add(publish, "--cache FOLDER", "use this cache only", type=Path)
    add(publish, "--dry-run", "print which wheels would be published, and change nothing")
    action("verify", "check every wheel of an index: hash, name, RECORD, and the pages")


def run(arguments: argparse.Namespace) -> int:
    return (_publish if arguments.action == "publish" else _verify)(arguments)


def _publish(arguments: argparse.Namespace) -> int:
    records = _records(arguments.recipes)
    # By the keys of the wheels, the locks that environments with them were built from; or empty.
    locks: dict[str, str] = {}
    for record in records.values():
        name = key(record.stack)
        locks[name] = locks.get(name) or (record.lock.digest if record.lock else "")
    entries = _entries(arguments, records)
    if arguments.dry_run:
        _each(entries, _would_publish)
        return 0
    target = index.prepare(arguments.folder)

    def add(source: Source) -> None:
        lock = locks.get(source.record.key, "")
        name, new = index.add(target, source, lock)
        print(f"{'published' if new else 'unchanged'} {name}")

    _each(entries, add)
    found = index.write_pages(target)
    for problem in found.problems:
        report(f"not listed: {problem}")
    count = len(found.listed)
    print(f"{count} wheel{'s' * (count != 1)} in the index file://{target}")
    return 5 if found.problems else 0


def _would_publish(source: Source) -> None:
    tags = source.record.file.removesuffix(".whl").split("-", 2)[2]
    print(f"would publish horovod {compiled_for(source).version}, {tags}")


def _entries(
    arguments: argparse.Namespace, records: Mapping[str, GenerationRecord]
) -> dict[str, Cache]:
    """The caches with the entries to publish, by their keys."""
    found: dict[str, Cache] = {}
    for cache in caches_of(arguments, wheels_of_site(arguments)):
        found = dict.fromkeys(wheelcache.names(cache), cache) | found
    if not arguments.recipes:
        if not found:
            remedy = "build an environment: hvdenv build RECIPE"
            raise UsageError("no cache has a wheel", remedy=remedy)
        return found
    for environment, record in records.items():
        if key(record.stack) not in found:
            raise UsageError(
                "no cache has the Horovod wheel of this environment", where=environment,
                remedy="build it again with --rebuild: the build stores the wheel",
            )  # fmt: skip
    wanted = {key(record.stack) for record in records.values()}
    return {name: cache for name, cache in found.items() if name in wanted}


def _records(names: Sequence[str]) -> Mapping[str, GenerationRecord]:
    places = find_places()
    if names:
        prefixes = [str(registry.find(places, name).prefix) for name in names]
    else:
        known = registry.list_environments(places)
        prefixes = [each.prefix for each in known if each.state == "complete"]
    return {
        prefix: generations.read_record(Path(prefix) / generations.RECORD) for prefix in prefixes
    }


def _each(entries: Mapping[str, Cache], publish: Callable[[Source], None]) -> None:
    """Publish entries, oldest first: of two equal versions, pip takes the last.

    Raises:
        StepError: none of them can be published.
    """
    published = 0
    with TemporaryDirectory() as folder:
        for name, cache in _by_age(entries):
            try:
                publish(_read(cache, name, Path(folder) / "wheel"))
                published += 1
            except (NotUsedError, Unpublished) as error:
                report(f"not published: {name[:12]}: {error}")
    if not published:
        raise StepError(
            f"no wheel was published: all {len(entries)} were refused, for the reasons above",
            remedy="hvdenv cache verify (lists damaged entries); hvdenv build RECIPE --rebuild"
            " compiles a wheel again",
        )


def _by_age(entries: Mapping[str, Cache]) -> Iterator[tuple[str, Cache]]:
    """Entries with their caches, oldest first; those that cannot be opened come first."""

    def age(name: str) -> tuple[str, str]:
        try:
            with open_entry(entries[name], name) as entry:
                return (entry.record.created if entry else "", name)
        except NotUsedError:
            return ("", name)

    yield from ((name, entries[name]) for name in sorted(entries, key=age))


def _read(cache: Cache, name: str, copy: Path) -> Source:
    """An entry, after all of it was checked, with a copy of its wheel."""
    with open_entry(cache, name) as entry:
        if entry is None:
            raise NotUsedError("it is gone")
        check(entry, copy)
        return Source(entry.record, entry.inputs, copy)


def _verify(arguments: argparse.Namespace) -> int:
    target = arguments.folder.absolute()
    found = index.examine(target)
    problems = [*found.problems]
    problems += [f"{name}: it does not list the wheels" for name in index.outdated(target, found)]
    for about in found.listed:
        print(f"good {about.file}")
    for problem in problems:
        print(f"bad {problem}")
    return 1 if problems else 0
