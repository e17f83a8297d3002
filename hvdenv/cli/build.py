"""Build an environment. A second call with nothing changed does nothing; a call after
a build that was killed goes on from its last finished step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.cli.options import (
    Prepared,
    add_json,
    add_loudness,
    add_prefix,
    add_python,
    add_recipe,
    prepare,
    print_json,
)
from hvdenv.errors import RecipeError
from hvdenv.schema import encode

if TYPE_CHECKING:
    from hvdenv.build import Built, Request
    from hvdenv.rules import Rule

EXAMPLES = """\
examples:
  hvdenv build local
  hvdenv build local --variant torch --prefix ~/envs/horovod
  hvdenv build ./mine.toml --python 3.11

The environment lies under $HVDENV_HOME (default: ~/.local/share/hvdenv) unless
--prefix says where. Use it with `. PREFIX/activate.sh`.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_python(parser)
    add_prefix(parser)
    add_json(parser)
    add_loudness(parser)
    parser.add_argument(
        "--allow",
        metavar="RULE",
        action="append",
        default=[],
        help="build although this rule blocks",
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="make a new generation even if nothing changed"
    )
    parser.add_argument(
        "--break-lock", action="store_true", help="take over from another build, whoever runs it"
    )
    parser.add_argument(
        "--trust", action="store_true", help="run a recipe from a file that others can write"
    )


def run(arguments: argparse.Namespace) -> int:
    from hvdenv.build import Built, already_built

    prepared = prepare(arguments, thorough=False)
    resolved, target = prepared.resolved, prepared.target
    if not arguments.trust:
        for file in resolved.foreign_files:
            refuse_untrusted(Path(file))
    present = None if arguments.rebuild else already_built(target, prepared.digest())
    built = Built(target.prefix, present, False, 0.0) if present else _build(arguments)
    if arguments.json:
        print_json(encode(built))
    elif not arguments.quiet:
        said = f"built in {built.seconds:.0f} s" if built.changed else "nothing to do"
        print(f"{said}: {built.prefix}\nuse it with: . {built.prefix}/activate.sh")
    return 0


def _build(arguments: argparse.Namespace) -> Built:
    from hvdenv.build import build
    from hvdenv.cli.check import judge_recipe, refuse_blocked
    from hvdenv.cli.progress import choose
    from hvdenv.places import find_places, make_folder
    from hvdenv.plan import PLACEHOLDER

    prepared = prepare(arguments, thorough=True)
    rules = judge_recipe(prepared)
    refuse_blocked(rules, arguments.allow, quiet=arguments.quiet)
    places = find_places()
    if not arguments.prefix:
        make_folder(places.envs)
    python, target = prepared.python, prepared.target
    steps = len(prepared.plan_for(PLACEHOLDER).steps)
    with choose(steps, quiet=arguments.quiet, verbose=arguments.verbose) as progress:
        progress.note(f"building {target.prefix} with Python {python.version} ({python.path})")
        return build(
            _request(prepared, rules), target, places, progress,
            rebuild=arguments.rebuild, break_lock=arguments.break_lock,
        )  # fmt: skip


def _request(prepared: Prepared, rules: Sequence[Rule]) -> Request:
    from hvdenv.build import Request

    return Request(
        prepared.plan_for,
        prepared.digest(),
        encode(prepared.resolved.recipe),
        prepared.facts,
        tuple({"rule": rule.id, "severity": rule.severity} for rule in rules),
    )


def refuse_untrusted(path: Path) -> None:
    """Building runs what recipe and site file name: they must be the user's or the system's.

    Raises:
        RecipeError: somebody else owns the file or can write it.
    """
    import os
    import stat

    found = path.stat()
    problem = ""
    if found.st_uid not in (0, os.geteuid()):
        problem = "belongs to another user"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "can be written by others"
    if problem:
        raise RecipeError(
            f"this file {problem}, and a build runs what it names",
            where=str(path),
            remedy="read it, then `chmod go-w` it or copy it; or build with --trust",
        )
