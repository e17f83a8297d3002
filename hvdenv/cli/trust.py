"""Trust a file or folder of other users, instead of passing --trust each time.

hvdenv trusts a file (a recipe, site file or file of a lock) by its hash, until it changes. It
trusts a folder (an environment, modulefiles, recipes) together with the users and groups that can
change it now, and refuses files of other users in it."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from hvdenv import trust
from hvdenv.cli.options import add, add_options, named_by_site, print_json, usable
from hvdenv.errors import UsageError
from hvdenv.places import find_places
from hvdenv.trust import Granted, Policy, described, real_path

EXAMPLES = """\
examples:
  hvdenv trust ./from-a-colleague.toml        read it first: it can name any program
  hvdenv trust /proj/group/envs/horovod       an environment that a colleague published
  hvdenv trust --list
  hvdenv trust --remove ./from-a-colleague.toml

hvdenv records this in $HVDENV_HOME/trusted, for you only. A site file that belongs to root can name
owners and groups for all users: [trust] owners = ["hpc-support"].
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add(parser, "paths PATH", "file or folder", nargs="*", type=Path)
    what = parser.add_mutually_exclusive_group()
    add(what, "--list", "list what you trust")
    add(what, "--remove", "stop trusting these paths")
    add_options(parser, "json", "site")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list and arguments.paths:
        raise UsageError("--list lists all that you trust", remedy="hvdenv trust --list")
    if arguments.remove and not arguments.paths:
        raise UsageError("--remove needs a path", remedy="hvdenv trust --remove ./mine.toml")
    places, policy = find_places(), named_by_site(arguments)
    trust.refuse_home(places.home, policy, way=False)
    granted = {each.path: each for each in trust.read_granted(places)}
    if not arguments.paths:
        _tell(granted.values(), arguments)
        return 0
    if arguments.remove:
        touched = [_removed(path, granted) for path in arguments.paths]
    else:
        touched = [_granted(path, policy) for path in arguments.paths]
        granted |= {each.path: each for each in touched}
    trust.write_granted(places, granted.values())
    _tell(touched, arguments)
    return 0


def _granted(path: Path, policy: Policy) -> Granted:
    with usable(path, "name a file or a folder"):
        return trust.grant(path, policy)


def _removed(path: Path, granted: dict[str, Granted]) -> Granted:
    try:
        return granted.pop(real_path(path))
    except KeyError as error:
        raise UsageError(
            "is not trusted", where=real_path(path), remedy="list what is: hvdenv trust --list"
        ) from error


def _tell(what: Collection[Granted], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json([each._asdict() for each in what])
        return
    if not what:
        print("you trust no files of other users; `hvdenv trust PATH` trusts a file or folder")
    said = "no longer trusted: " if arguments.remove else ""
    for each in what:
        print(f"{said}{each.path}: {described(each)}")
