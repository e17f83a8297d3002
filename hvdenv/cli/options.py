"""Options that commands share, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdenv.cascade import Resolved, resolve

if TYPE_CHECKING:
    from hvdenv.facts import Facts, Interpreter
    from hvdenv.generations import Environment
    from hvdenv.places import Places
    from hvdenv.plan import Plan
    from hvdenv.runner import Runner

SITE_VARIABLE = "HVDENV_SITE"


def add_recipe(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """RECIPE and what is laid over it."""
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?" if optional else None,
        help="name of a shipped recipe, or path to a TOML file (with a slash or ending in .toml)",
    )  # fmt: skip
    parser.add_argument(
        "--variant",
        metavar="V",
        action="append",
        default=[],
        help="take a variant; may be repeated",
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
        help="set a value of the recipe, such as mpi.version=5.0.11; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--site", metavar="FILE", type=Path, help=f"site file (default: ${SITE_VARIABLE})"
    )


def add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        metavar="P",
        type=Path,
        help="where the environment lies (a link that hvdenv makes)",
    )


def add_python(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", metavar="X.Y", help="Python version to use, such as 3.11")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="the result as JSON on standard output, and nothing else there",
    )


def add_loudness(parser: argparse.ArgumentParser) -> None:
    """--quiet, --verbose and --color."""
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="say only what went wrong")
    loudness.add_argument(
        "-v", "--verbose", action="store_true", help="show the output of every command"
    )
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def resolved_of(arguments: argparse.Namespace) -> Resolved:
    """The recipe that the options name."""
    from hvdenv.runner import environment

    site = arguments.site or environment().get(SITE_VARIABLE) or None
    return resolve(
        arguments.recipe,
        variants=arguments.variant,
        site=Path(site) if site else None,
        overrides=arguments.overrides,
    )


def environment_of(
    arguments: argparse.Namespace, resolved: Resolved, places: Places
) -> Environment:
    """The environment that the options name."""
    from hvdenv import generations

    prefix = arguments.prefix or places.prefix(resolved.recipe.name, resolved.variants)
    return generations.at(prefix)


class Prepared(NamedTuple):
    """Everything that decides a plan.

    Attributes:
        resolved: the recipe.
        target: the environment that it is for.
        facts: of this machine, or declared.
        python: the interpreter chosen.
    """

    resolved: Resolved
    target: Environment
    facts: Facts
    python: Interpreter

    def plan_for(self, generation: Path) -> Plan:
        """The plan for a generation's folder."""
        from hvdenv.plan import make_plan

        return make_plan(
            self.resolved.recipe, self.resolved.variants, self.facts, self.python, generation
        )

    def digest(self) -> str:
        """The digest of the plan, which no folder changes."""
        from hvdenv.plan import PLACEHOLDER

        return self.plan_for(PLACEHOLDER).digest


def prepare(arguments: argparse.Namespace, *, thorough: bool) -> Prepared:
    """Read the recipe and look at the machine, or at the facts that --facts declares."""
    from hvdenv.observe import declared, observe
    from hvdenv.places import find_places
    from hvdenv.runner import Runner

    resolved = resolved_of(arguments)
    target = environment_of(arguments, resolved, find_places())
    runner = Runner()
    file = getattr(arguments, "facts", None)
    facts = declared(file) if file else observe(target.store, runner, thorough=thorough)
    python = choose_python(resolved, facts, runner, arguments.python)
    return Prepared(resolved, target, facts, python)


def add_facts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--facts",
        metavar="FILE",
        type=Path,
        help="facts of another machine: JSON, as under `facts` in `plan --json` there",
    )


def choose_python(
    resolved: Resolved, facts: Facts, runner: Runner, wanted: str | None
) -> Interpreter:
    """The interpreter to use; one that is not this process's own is asked for its version.

    Args:
        resolved: the recipe.
        facts: of the machine.
        runner: asks interpreters.
        wanted: version that the user named, such as 3.11; None for the best.

    Raises:
        IncompatibleError: none fits, with what was found and which variant would.
    """
    from hvdenv.errors import IncompatibleError
    from hvdenv.observe import ask_interpreter

    incomplete = None
    for found in _candidates(resolved, facts, wanted):
        known = facts.origin == "declared" or found.version.count(".") == 2
        asked = found if known else ask_interpreter(found.path, runner)
        if asked and asked.complete:
            return asked
        incomplete = incomplete or asked
    if incomplete:  # the rule "python-incomplete" says what it lacks
        return incomplete
    needed = resolved.recipe.python.version
    there = ", ".join(sorted({each.version for each in facts.interpreters})) or "none"
    remedy = f"install a Python {needed} (such as `uv python install 3.11`), or load a module"
    other = _variant_for(resolved, facts, wanted)
    if other:
        remedy += f"; or take --variant {other}, which works with a Python that is here"
    asked_for = f", --python asks for {wanted}" if wanted else ""
    raise IncompatibleError(
        f"the recipe needs Python {needed}{asked_for}; found here: {there}",
        where=f"{resolved.file}: python.version",
        remedy=remedy,
    )


def _candidates(resolved: Resolved, facts: Facts, wanted: str | None) -> list[Interpreter]:
    from hvdenv.plan import candidates

    return [
        each
        for each in candidates(resolved.recipe, facts)
        if wanted is None or f"{each.version}.".startswith(f"{wanted}.")
    ]


def _variant_for(resolved: Resolved, facts: Facts, wanted: str | None) -> str:
    """A variant whose Python is here; or empty."""
    for variant in resolved.offered:
        if variant not in resolved.variants:
            other = resolve(resolved.file, variants=[variant])
            if _candidates(other, facts, wanted):
                return variant
    return ""


def print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=1))
