"""Options that commands share, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdenv.model.cascade import Resolved, places_of, read_layer, resolve

if TYPE_CHECKING:
    from hvdenv.environments.generations import Environment
    from hvdenv.launch.hosts import Host
    from hvdenv.locks.lockfile import Locked
    from hvdenv.model.cluster import Places as SitePlaces
    from hvdenv.model.facts import Facts, Interpreter
    from hvdenv.model.recipe import Recipe
    from hvdenv.places import Places
    from hvdenv.plans.additions import Additions
    from hvdenv.plans.plan import Plan
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
    add_site(parser)


def add_site(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--site", metavar="FILE", type=Path, help=f"site file (default: ${SITE_VARIABLE})"
    )


def site_file(arguments: argparse.Namespace) -> Path | None:
    """The site file that the options or the environment name."""
    from hvdenv.runner import environment

    named = arguments.site or environment().get(SITE_VARIABLE)
    return Path(named) if named else None


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Where ranks go."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts", metavar="H", help="such as gpu32:4,gpu33:4 (default: the allocation's)"
    )
    where.add_argument(
        "--hostfile", metavar="F", type=Path, help="file with the hosts, one on each line"
    )


def wished_hosts(arguments: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts of --hosts or --hostfile; empty without these.

    Raises:
        UsageError: they are not understood, or the file cannot be read.
    """
    from hvdenv.launch.hosts import parse_hostfile, parse_hosts

    if arguments.hostfile:
        return parse_hostfile(read_hostfile(arguments.hostfile), str(arguments.hostfile))
    return parse_hosts(arguments.hosts) if arguments.hosts is not None else ()


def read_hostfile(path: Path) -> str:
    """What is in a file with hosts.

    Raises:
        UsageError: it cannot be read.
    """
    from hvdenv.errors import UsageError

    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"cannot read the file with the hosts: {error.strerror}", where=str(path),
            remedy="name the hosts with --hosts",
        ) from error  # fmt: skip


def add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        metavar="P",
        type=Path,
        help="where the environment lies (a link that hvdenv makes)",
    )


def add_python(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", metavar="X.Y", type=_python, help="Python version to use, such as 3.11"
    )


def _python(text: str) -> str:
    import re

    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no version such as 3.11; hvdenv finds the interpreter on PATH"
            " and where version managers put it"
        )
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="the result as JSON on standard output, and nothing else there",
    )


def add_allow(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow", metavar="RULE", action="append", default=[],
        help="go past this rule although it blocks; may be repeated",
    )  # fmt: skip


def add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        choices=("here", "compute"),
        default="here",
        help="compute: submit it as a job with what the recipe asks for, and follow it",
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
    resolved = resolve(
        arguments.recipe,
        variants=arguments.variant,
        site=site_file(arguments),
        overrides=arguments.overrides,
    )
    return resolved._replace(recipe=_for_user(resolved.recipe))


def _for_user(recipe: Recipe) -> Recipe:
    """The recipe with the user's own name and home folder where it says {user} and {home}.

    Not in variables for programs: those are filled in where and when these run.
    """
    filled: Recipe = _with_names(recipe)
    return filled._replace(environment=recipe.environment)


def places_of_site(arguments: argparse.Namespace) -> SitePlaces:
    """Where things lie, as the site file says: for what needs no recipe."""
    site = site_file(arguments)
    found: SitePlaces = _with_names(places_of(read_layer("site", site) if site else None))
    return found


def _with_names(value: Any) -> Any:
    if not any(word in repr(value) for word in ("{user}", "{home}")):
        return value
    import getpass

    return _filled_in(value, {"{user}": getpass.getuser(), "{home}": str(Path.home())})


def _filled_in(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(word, text)
        return value
    if hasattr(value, "_fields"):
        return type(value)(*(_filled_in(each, words) for each in value))
    if isinstance(value, dict):
        return {key: _filled_in(each, words) for key, each in value.items()}
    return tuple(_filled_in(each, words) for each in value) if isinstance(value, tuple) else value


def environment_of(
    arguments: argparse.Namespace, resolved: Resolved, places: Places
) -> Environment:
    """The environment that the options name, or the one where the recipe keeps them.

    Raises:
        UsageError: the recipe's workspace is not allocated.
    """
    from hvdenv.environments import generations
    from hvdenv.places import environment_name

    if arguments.prefix:
        return generations.at(arguments.prefix)
    recipe = resolved.recipe
    if recipe.places.workspace and getattr(arguments, "facts", None) is None:
        folder = _workspace(recipe)
    elif recipe.places.environments:
        folder = Path(recipe.places.environments)
    else:
        folder = places.envs
    return generations.at(folder / environment_name(recipe.name, resolved.variants))


def _workspace(recipe: Recipe) -> Path:
    from hvdenv.errors import UsageError
    from hvdenv.runner import Runner
    from hvdenv.sites import workspace

    wanted = recipe.places.workspace
    assert wanted
    found = workspace.find(wanted, Runner())
    if found is None:
        raise UsageError(
            f"the workspace {wanted.name} is not allocated, or it has expired",
            remedy="`hvdenv build` allocates it and builds there; or name a folder with --prefix",
        )
    return found


class Prepared(NamedTuple):
    """Everything that decides a plan.

    Attributes:
        resolved: the recipe.
        target: the environment that it is for.
        facts: of this machine, or declared.
        python: the interpreter chosen.
        locked: the lock to build from, if that was asked for.
        source_folder: with files that were fetched before.
        offline: whether no index is asked.
        additions: packages that the user adds.
        alone: whether a script runs the plan, without hvdenv and its caches.
    """

    resolved: Resolved
    target: Environment
    facts: Facts
    python: Interpreter
    locked: Locked | None = None
    source_folder: Path | None = None
    offline: bool = False
    additions: Additions | None = None
    alone: bool = False

    def plan_for(self, generation: Path) -> Plan:
        """The plan for a generation's folder."""
        from hvdenv.places import find_places
        from hvdenv.plans.plan import make_plan

        return make_plan(
            self.resolved.recipe, self.resolved.variants, self.facts, self.python, generation,
            locked=self.locked, source_folder=self.source_folder, offline=self.offline,
            caches=find_places().cache if self.locked and not self.alone else None,
            additions=self.additions, alone=self.alone,
        )  # fmt: skip

    def digest(self) -> str:
        """The digest of the plan, which no folder changes."""
        from hvdenv.plans.plan import PLACEHOLDER

        return self.plan_for(PLACEHOLDER).digest


def prepare(arguments: argparse.Namespace, *, thorough: bool) -> Prepared:
    """Read the recipe and look at the machine, or at the facts that --facts declares."""
    from hvdenv.model.observe import declared, observe
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
    from hvdenv.model.observe import ask_interpreter
    from hvdenv.plans.plan import brought_python

    brought = brought_python(resolved.recipe)
    if brought:
        return brought
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
    from hvdenv.plans.plan import candidates

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


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust", action="store_true", help="run a recipe from a file that others can write"
    )


def refuse_foreign(resolved: Resolved, arguments: argparse.Namespace) -> None:
    """Running what a recipe names needs a recipe that nobody else can write, or --trust.

    Raises:
        RecipeError: somebody else owns a file of it or can write it.
    """
    if not arguments.trust:
        for file in resolved.foreign_files:
            refuse_untrusted(Path(file))


def refuse_untrusted(path: Path) -> None:
    """Building runs what recipe and site file name: they must be the user's or the system's.

    Raises:
        RecipeError: somebody else owns the file or can write it.
    """
    import os
    import stat

    from hvdenv.errors import RecipeError

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


def add_lockfiles(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lockfiles", metavar="DIR", type=Path,
        help="folder of the locks (default: lockfiles beside the recipe, or beside its folder"
        " if that is called recipes)",
    )  # fmt: skip


def add_locked(parser: argparse.ArgumentParser) -> None:
    """What build and plan take to go by a lock."""
    parser.add_argument(
        "--locked", action="store_true", help="build what the lock says, or stop with exit 4"
    )
    add_lockfiles(parser)
    parser.add_argument(
        "--lock", metavar="FOLDER", type=Path, help="this very lock, where there are several"
    )
    parser.add_argument(
        "--require-signed", action="store_true",
        help="only a lock that is signed by a key of places.locks.signers; always so where a site"
        " file sets that",
    )  # fmt: skip
    parser.add_argument(
        "--from", metavar="DIR", type=Path, dest="source_folder",
        help="take files from what `hvdenv fetch` put there",
    )  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="ask no index: use no network")


def is_locked(arguments: argparse.Namespace) -> bool:
    """Whether a lock is asked for, by options that go together."""
    from hvdenv.errors import UsageError

    if arguments.offline and not arguments.source_folder:
        raise UsageError(
            "--offline goes with --from: nothing else has all that is needed",
            remedy="`hvdenv fetch` fills such a folder where there is a network",
        )
    for name in ("lock", "source_folder", "accept_drift", "require_signed"):
        if getattr(arguments, name, None) and not arguments.locked:
            option = {"source_folder": "from"}.get(name, name.replace("_", "-"))
            raise UsageError(f"--{option} goes with --locked")
    return bool(arguments.locked)
