"""List the environments that hvdenv made, go back to an earlier generation, remove
environments, or drop generations that are no longer needed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.cli.options import add_json, print_json
from hvdenv.errors import UsageError

if TYPE_CHECKING:
    from hvdenv.generations import Environment
    from hvdenv.registry import Listed
    from hvdenv.upkeep import Cleared

EXAMPLES = """\
examples:
  hvdenv envs
  hvdenv envs rollback local                  to the generation before
  hvdenv envs rollback local --to 3f2a9c81d004
  hvdenv envs prune --keep 2
  hvdenv envs remove ~/envs/horovod
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    rollback = actions.add_parser("rollback", help="point a prefix to an earlier generation")
    rollback.add_argument("environment", metavar="NAME_OR_PREFIX")
    rollback.add_argument("--to", metavar="GENERATION", default="")
    remove = actions.add_parser("remove", help="remove an environment with all its generations")
    remove.add_argument("environment", metavar="NAME_OR_PREFIX")
    remove.add_argument("--force", action="store_true", help="although processes use it")
    prune = actions.add_parser("prune", help="drop generations that are neither active nor in use")
    prune.add_argument("environment", metavar="NAME_OR_PREFIX", nargs="?")
    prune.add_argument(
        "--keep", type=int, default=1, metavar="N", help="generations to keep (default 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    from hvdenv import generations, registry, upkeep
    from hvdenv.places import find_places

    places = find_places()
    known = registry.list_environments(places)
    if arguments.action == "rollback":
        target = _find(known, arguments.environment)
        print(f"{target.prefix} -> {upkeep.rollback(target, arguments.to)}")
    elif arguments.action == "remove":
        target = _find(known, arguments.environment)
        _tell(target, upkeep.remove(target, force=arguments.force))
        registry.forget(places, target)
    elif arguments.action == "prune":
        if arguments.keep < 1:
            raise UsageError(
                "--keep has to be 1 or more", remedy="`envs remove` removes everything"
            )
        chosen = [_find(known, arguments.environment)] if arguments.environment else [
            generations.at(Path(each.prefix)) for each in known
        ]  # fmt: skip
        for target in chosen:
            _tell(target, upkeep.prune(target, keep=arguments.keep))
    elif arguments.json:
        print_json([each._asdict() for each in known])
    else:
        _table(known)
    return 0


def _find(known: Sequence[Listed], name: str) -> Environment:
    """An environment by its name (`local+torch`) or its prefix."""
    from hvdenv import generations

    if "/" in name:
        return generations.at(Path(name))
    named = [each for each in known if "+".join((each.recipe, *each.variants)) == name]
    if len(named) == 1:
        return generations.at(Path(named[0].prefix))
    if named:
        raise UsageError(
            f"{len(named)} environments are named {name}",
            detail="\n".join(each.prefix for each in named),
            remedy="name its prefix",
        )
    raise UsageError(f"there is no environment named {name}", remedy="`hvdenv envs` lists them")


def _tell(target: Environment, cleared: Cleared) -> None:
    for identity in cleared.removed:
        print(f"removed {target.prefix}: {identity}")
    for identity, reason in cleared.kept:
        print(f"kept {target.prefix}: {identity}: {reason}", file=sys.stderr)
    if cleared.unseen:
        print(
            f"{cleared.unseen} processes of other users could not be looked into", file=sys.stderr
        )


def _table(known: Sequence[Listed]) -> None:
    if not known:
        print("no environments yet; `hvdenv build local` makes one")
    for each in known:
        name = "+".join((each.recipe, *each.variants))
        size = f"{each.bytes / 1e9:.1f} GB, {each.files} files" if each.bytes else ""
        older = len(each.generations) - 1
        extra = f", {older} older generations" if older > 0 else ""
        print(f"{name}  {each.state}  {each.prefix}")
        if size:
            print(f"    {size}, created {each.created[:16]}{extra}")
