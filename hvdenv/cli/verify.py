"""Judge an environment: that what was asked for was built, loads, and computes right
results on several ranks. It need not be one that hvdenv built (--prefix)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.cli.options import (
    add_json,
    add_loudness,
    add_prefix,
    add_recipe,
    environment_of,
    print_json,
    resolved_of,
)
from hvdenv.errors import UsageError

if TYPE_CHECKING:
    from hvdenv.installation import Expectation, Installation
    from hvdenv.places import Places
    from hvdenv.recipe import Recipe
    from hvdenv.report import Report

EXAMPLES = """\
examples:
  hvdenv verify                                the environment that was built last
  hvdenv verify local -n 4
  hvdenv verify --prefix ~/venv --framework torch --controller Gloo
  hvdenv verify local --json > report.json

exit codes: 0 everything expected is proven, 1 something failed, 7 nothing failed but
this host cannot prove everything (NCCL without a GPU)
"""

_CONTROLLERS = {"mpi": "MPI", "gloo": "Gloo"}


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, optional=True)
    add_prefix(parser)
    add_json(parser)
    add_loudness(parser)
    parser.add_argument("-n", "--ranks", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="for each process (default 300)",
    )
    parser.add_argument(
        "--launcher", action="append", metavar="L",
        help="mpirun, horovodrun-gloo or horovodrun-mpi; may be repeated (default: the first two)",
    )  # fmt: skip
    stated = parser.add_argument_group("what is expected, for an environment without a recipe")
    stated.add_argument("--framework", action="append", choices=("torch", "tensorflow", "mxnet"))
    stated.add_argument("--controller", action="append", choices=("MPI", "Gloo"))
    stated.add_argument(
        "--operation", action="append", choices=("NCCL", "DDL", "CCL", "MPI", "Gloo")
    )


def run(arguments: argparse.Namespace) -> int:
    from hvdenv.launchers import LAUNCHERS
    from hvdenv.places import find_places
    from hvdenv.report import EXIT_CODES
    from hvdenv.runner import Runner
    from hvdenv.verify import DEFAULT_LAUNCHERS, verify

    launchers = tuple(arguments.launcher or DEFAULT_LAUNCHERS)
    if unknown := [name for name in launchers if name not in LAUNCHERS]:
        raise UsageError(
            f"unknown launcher {unknown[0]}", remedy=f"known are {', '.join(LAUNCHERS)}"
        )
    if arguments.ranks < 1 or arguments.timeout <= 0:
        raise UsageError("--ranks and --timeout have to be above zero")
    places = find_places()
    installation, expectation = _chosen(arguments, places)
    _say_whose(installation)
    quiet = arguments.quiet

    def tell(what: str, label: str, seconds: float) -> None:
        if what == "finished" and not quiet:
            print(f"  {label} ({seconds:.1f} s)", file=sys.stderr, flush=True)

    if not quiet:
        print(f"verifying {installation.prefix}", file=sys.stderr, flush=True)
    report = verify(
        installation, expectation, Runner(), ranks=arguments.ranks, timeout=arguments.timeout,
        launchers=launchers, on_event=tell,
    )  # fmt: skip
    kept = _keep(report, places)
    if arguments.json:
        print_json(report.to_json())
    else:
        from hvdenv.render import render

        colour = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
        print(render(report, colour=colour))
        if not quiet:
            print(kept, file=sys.stderr)
    return EXIT_CODES[report.verdict]


def _chosen(arguments: argparse.Namespace, places: Places) -> tuple[Installation, Expectation]:
    """The environment to judge and what it should have."""
    from hvdenv import generations
    from hvdenv.installation import inspect_prefix

    recipe: Recipe | None = None
    if arguments.recipe:
        resolved = resolved_of(arguments)
        recipe = resolved.recipe
        name = "+".join((recipe.name, *resolved.variants))
        prefix = environment_of(arguments, resolved, places).prefix
        if not os.path.lexists(prefix):
            raise UsageError(
                f"{name} was not built: there is no {prefix}",
                remedy=f"hvdenv build {arguments.recipe}"
                + "".join(f" --variant {each}" for each in arguments.variant),
            )
    elif arguments.prefix:
        prefix, name = arguments.prefix, ""
    else:
        prefix, name = _last_built(places)
    environment = generations.at(prefix)
    active = environment.active()
    folder = environment.generation(active) if active else Path(prefix)
    installation = inspect_prefix(str(folder))._replace(prefix=str(prefix), recipe=name)
    if recipe is None and active:
        record = generations.read_record(environment.record(active))
        return installation._replace(recipe=_name(record)), _recorded(arguments, record["resolved"])
    return installation, _expected(arguments, recipe)


def _last_built(places: Places) -> tuple[Path, str]:
    from hvdenv import registry

    known = [each for each in registry.list_environments(places) if each.state == "complete"]
    if not known:
        raise UsageError(
            "no environment was built yet",
            remedy="hvdenv build local; or name an environment with --prefix",
        )
    last = max(known, key=lambda each: each.created)
    return Path(last.prefix), "+".join((last.recipe, *last.variants))


def _name(record: dict[str, object]) -> str:
    variants = record.get("variants", [])
    return "+".join((str(record["recipe"]), *(variants if isinstance(variants, list) else [])))


def _expected(arguments: argparse.Namespace, recipe: Recipe | None) -> Expectation:
    """Options say more than the recipe."""
    from hvdenv.installation import Expectation

    frameworks = recipe.horovod.frameworks if recipe else None
    controllers = tuple(_CONTROLLERS[c] for c in recipe.horovod.controllers) if recipe else None
    return Expectation(
        tuple(arguments.framework) if arguments.framework else frameworks,
        tuple(arguments.controller) if arguments.controller else controllers,
        tuple(arguments.operation) if arguments.operation else controllers,
    )


def _recorded(arguments: argparse.Namespace, resolved: dict[str, object]) -> Expectation:
    """What a generation was built to have, from its record."""
    from hvdenv.recipe import Recipe
    from hvdenv.schema import decode

    return _expected(arguments, decode(Recipe, {"mpi": None, **resolved}))


def _say_whose(installation: Installation) -> None:
    """Say before anything of another user's is run."""
    import pwd

    owner = os.stat(installation.python).st_uid
    folder_owner = os.stat(installation.prefix).st_uid
    for number in {owner, folder_owner} - {0, os.geteuid()}:
        try:
            name = pwd.getpwuid(number).pw_name
        except KeyError:
            name = str(number)
        print(
            f"note: {installation.prefix} belongs to {name}; verify runs its programs as you",
            file=sys.stderr,
        )


def _keep(report: Report, places: Places) -> str:
    """Keep a report under HVDENV_HOME: nothing is written into the environment.

    Returns:
        Where it lies, or why it does not: a full disk takes nobody's verdict away.
    """
    from hvdenv.errors import StepError
    from hvdenv.places import make_folder, write_json

    stamp = report.started.replace(":", "").replace("+", "_")
    try:
        path = make_folder(places.reports) / f"{stamp}-{os.getpid()}.json"
        write_json(path, report.to_json())
    except StepError as error:
        return f"the report was not kept: {error}"
    return f"report: {path}"
