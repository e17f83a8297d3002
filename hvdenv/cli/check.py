"""Report known incompatibilities of a recipe with this machine, before you build it.

check also reports whether this combination of versions was ever built and verified. On a cluster
it reports which of the recipe's modules exist, and which modules provide Horovod."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

from hvdenv.base.errors import HvdenvError, IncompatibleError
from hvdenv.base.places import find_places
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.cli.options import add, add_options, read_request
from hvdenv.environments import prefix_lock
from hvdenv.knowledge.combinations import (
    Answer,
    Combination,
    all_rows,
    ask,
    combination_of,
    summary,
)
from hvdenv.knowledge.rules import Edit, Rule
from hvdenv.model.cluster import Modules
from hvdenv.plans.plan import choose_versions
from hvdenv.plans.resolution import Availability
from hvdenv.session.judge import (
    blocking_rules,
    judge_recipe,
    plan_refused,
    refuse_unknown,
    suggest,
    told,
)
from hvdenv.session.output import print_json, report
from hvdenv.session.prepare import Prepared, prepare
from hvdenv.session.progress import Silent
from hvdenv.sites import module_shell
from hvdenv.sites.module_shell import Examined
from hvdenv.sites.modules import offers

# How long indexes and channels may take in all.
LOOKUP_SECONDS = 120.0

EXAMPLES = """\
examples:
  hvdenv check local
  hvdenv check local --python 3.12 --json
  hvdenv check local --facts compute-node.json
  hvdenv check ./mine.toml --offline                without package indexes and conda channels

`make docs` in a checkout writes a page of all rules. --allow RULE continues although a rule blocks.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe", "python", "prefix", "json", "facts", "allow", "trust")
    add(parser, "--offline", "do not ask package indexes and conda channels")


class Checked(NamedTuple):
    """What check found.

    Attributes:
        modules: of the recipe on this machine; None if it has none, or they were not looked at.
        unseen: why they were not.
        tried: the recipe's combination of versions, and whether it was built and verified; None
            unless Horovod is built from source for frameworks of pip.
    """

    prepared: Prepared
    answer: Availability
    rules: tuple[Rule, ...]
    suggested: dict[str, Edit]
    modules: ModulesHere | None
    unseen: str
    tried: tuple[Combination, Answer] | None


def run(arguments: argparse.Namespace) -> int:
    refuse_unknown(arguments.allow)
    found = _checked(arguments)
    blocked = bool(blocking_rules(found.rules, arguments.allow)) or bool(
        found.modules and any(each.state != "loads" for each in found.modules.examined)
    )
    if arguments.json:
        print_json(_document(found, arguments.allow))
    else:
        for line in _lines(found, blocked):
            print(line)
    return IncompatibleError.exit_code if blocked else 0


def _checked(arguments: argparse.Namespace) -> Checked:
    request = read_request(arguments, anywhere=True)
    prepared = prepare(request, thorough=True)
    answer = _looked_up(arguments, prepared)
    rules = judge_recipe(prepared, answer.wrong)
    wanted = prepared.resolved.recipe.modules
    modules, unseen = None, ""
    if wanted and prepared.facts.origin != "observed":
        unseen = prepared.foreign or "facts are declared"
    elif wanted:
        modules = _modules_here(wanted)
        unseen = "" if modules else "this machine has no module system"
    return Checked(
        prepared=prepared,
        answer=answer,
        rules=rules,
        suggested=suggest(request, prepared, rules, answer.wrong),
        modules=modules,
        unseen=unseen,
        tried=_tried(prepared),
    )


def _document(found: Checked, allowed: Sequence[str]) -> dict[str, object]:
    return {
        "facts": found.prepared.facts.origin,
        "python": found.prepared.python.path,
        "findings": [
            {
                **{key: value for key, value in encode(rule).items() if key != "edits"},
                "edit": found.suggested.get(rule.id, {}),
                "allowed": rule.id in allowed,
            }
            for rule in found.rules
        ],
        **({"modules": encode(found.modules)} if found.modules else {}),
        **({"modules_not_examined": found.unseen} if found.unseen else {}),
        **({"combination": encode(found.tried[1])} if found.tried else {}),
        "looked_up": found.answer.looked_up,
        "not_looked_up": found.answer.not_looked_up,
    }


def _lines(found: Checked, blocked: bool) -> Iterator[str]:
    facts, python, resolved = found.prepared.facts, found.prepared.python, found.prepared.resolved
    place = "for" if found.prepared.foreign else "on"
    yield f"facts {facts.origin} {place} {facts.host}; Python {python.version} ({python.path})"
    yield from (told(rule, resolved, found.suggested) for rule in found.rules)
    yield from summary(*found.tried) if found.tried else ()
    yield from _told_modules(found.modules) if found.modules else ()
    unseen = (f"modules of the recipe: {found.unseen}",) if found.unseen else ()
    yield from (f"looked up: {each}" for each in found.answer.looked_up)
    not_looked_up = (*found.answer.not_looked_up, *unseen)
    yield from (f"not looked up: {each}" for each in not_looked_up)
    if blocked:
        verdict = "hvdenv would refuse to build this, or the build would fail"
    elif not_looked_up:
        verdict = "nothing that was looked at prevents a build, but the rest may"
    else:
        verdict = "no known problem prevents a build"
    yield verdict


def _looked_up(arguments: argparse.Namespace, prepared: Prepared) -> Availability:
    """What indexes and channels answer; that they were not asked, with --offline."""
    if arguments.offline:
        return Availability(not_looked_up=("packages: --offline",))
    from hvdenv.building.lookup import Questions, look_up
    from hvdenv.session.lock import make_resolution

    places = find_places()
    if sys.stderr.isatty():
        report(f"asking package indexes, for at most {LOOKUP_SECONDS:g} s (--offline does not)")
    # Users without a home directory, as in containers, can check too.
    if plan_refused(prepared):
        return Availability(not_looked_up=("packages: no plan can be made",))
    writable = os.access(places.home, os.W_OK)
    root = places.scratch if writable else Path(gettempdir())
    try:
        with prefix_lock.scratch_folder(root, "check") as work:
            return look_up(
                Questions(
                    maker=make_resolution(prepared, work.path),
                    work=work.path,
                    cache=(places.cache if writable else work.path) / "uv",
                    runner=work.runner,
                    progress=Silent(),
                    end=time.monotonic() + LOOKUP_SECONDS,
                    where=prepared.resolved.where,
                )
            )
    except HvdenvError as error:  # such as a full disk, which the rules report
        return Availability(not_looked_up=(f"packages: {error.message}",))


class ModulesHere(NamedTuple):
    """The modules of a recipe on this machine, and others that offer Horovod or what it needs."""

    system: str
    examined: tuple[Examined, ...]
    offers: dict[str, tuple[str, ...]]


def _modules_here(wanted: Modules) -> ModulesHere | None:
    """The recipe's modules; None without a module system, for example on a laptop."""
    try:
        attempt = module_shell.try_out(wanted, "build", Runner(), listing=True)
    except IncompatibleError:
        return None
    return ModulesHere(attempt.system, attempt.examined, offers(attempt.available))


def _tried(prepared: Prepared) -> tuple[Combination, Answer] | None:
    recipe = prepared.resolved.recipe
    versions = choose_versions(recipe, prepared.python)
    asked = combination_of(recipe, versions, prepared.python.version, prepared.facts)
    return (asked, ask(asked, all_rows())) if asked else None


def _told_modules(there: ModulesHere) -> Iterator[str]:
    yield f"modules of the recipe ({there.system}):"
    yield from (f"  {each}" for each in there.examined)
    for what, modules in there.offers.items():
        yield f"modules that offer {what}: {', '.join(modules) or 'none'}"
