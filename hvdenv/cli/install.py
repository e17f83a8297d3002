"""Add packages to an environment, in a new generation.

Every installed package keeps its version. If a new package requires another version of an
installed one, install reports the conflict and builds nothing. Packages that you added before
are kept."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path

from hvdenv.base.errors import IncompatibleError, UsageError
from hvdenv.base.places import find_places
from hvdenv.base.schema import encode
from hvdenv.building.resolver import Resolver, here
from hvdenv.cli.options import add, add_options, give, read_request
from hvdenv.environments import generations, installed, scratch
from hvdenv.locks.packages import Contents
from hvdenv.locks.record import GenerationRecord
from hvdenv.plans import additions
from hvdenv.plans.additions import refusal
from hvdenv.plans.resolution import Resolution
from hvdenv.session.build import build_prepared
from hvdenv.session.lock import add_recorded_lock, make_resolution
from hvdenv.session.prepare import Prepared, prepare
from hvdenv.session.progress import choose
from hvdenv.session.request import Request

EXAMPLES = """\
examples:
  hvdenv install local tqdm 'scipy>=1.11,<2'
  hvdenv install local pandas --dry-run        print what would be added, build nothing
  hvdenv install local --variant torch torchvision
  hvdenv envs rollback local                   return to the previous generation
  hvdenv build local                           return to the recipe without additions
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe")
    add(parser, "packages PACKAGE", "a package, with or without versions: 'scipy<2'", nargs="+")
    add_options(parser, "python", "prefix", "json", "loudness", "allow", "lockfiles")
    add(parser, "--dry-run", "print what would be added, and build nothing")
    add_options(parser, "take-over", "trust")


def run(arguments: argparse.Namespace) -> int:
    wanted = additions.parse(arguments.packages)
    request = read_request(arguments)
    prepared = prepare(request, thorough=True)
    environment, active = prepared.environment, _active(request, prepared)
    request.gate.refuse_prefix(environment.prefix)
    record = generations.read_record(environment.record(active))
    prepared = add_recorded_lock(request, prepared, record)
    before = record.additions
    _refuse_changed(prepared._replace(additions=before if before.requirements else None), record)
    contents = installed.contents_of_folder(environment.generation(active))
    present = contents.distributions
    chosen = additions.added_to(before, wanted, present, contents.packages)
    if chosen.requirements == before.requirements:
        said = (
            f"nothing to do: {environment.prefix} has {_versions({n: present[n] for n in wanted})}"
        )
        give(arguments, {"added": {}, "changed": False}, said)
        return 0
    added = _ask(request, prepared._replace(additions=chosen), active, contents)
    others = {name: version for name, version in present.items() if name not in chosen.own}
    prepared = prepared._replace(additions=chosen._replace(new={**others, **added}))
    if arguments.dry_run:
        said = f"would add: {_versions(added)}"
        give(arguments, {"added": added, "changed": False}, said)
        return 0
    built = build_prepared(request, prepared, prepared.plan(), take_over=arguments.take_over)
    give(
        arguments,
        {"added": added, **encode(built)},
        f"added: {_versions(added)}",
        f"built in {built.seconds:.0f} s: {built.prefix}",
        f"use it with: . {built.prefix}/activate.sh",
    )
    return 0


def _active(request: Request, prepared: Prepared) -> str:
    resolved, environment = prepared.resolved, prepared.environment
    if resolved.recipe.python.provider in ("modules", "prefix"):
        raise IncompatibleError(
            "this recipe makes no Python environment of its own: nothing can be added to the site's",
            where=resolved.where("python.provider"),
            remedy="use a recipe with provider venv or clone, and system_site_packages if it is"
            " to see the site's packages",
        )
    active = environment.active()
    if not active:
        raise UsageError(
            "there is no complete environment of this recipe to add packages to",
            where=str(environment.prefix),
            remedy=f"build it first, with the same options: hvdenv build {request.named}",
        )
    return active


def _refuse_changed(prepared: Prepared, record: GenerationRecord) -> None:
    """Refuse a recipe that would make another environment now, with what was added before."""
    if prepared.plan().digest != record.plan_digest:
        raise UsageError(
            "the environment is not what the recipe makes now: more than packages would change",
            where=str(prepared.environment.prefix),
            remedy="name the options that it was built with (--variant, --set, --python, --site);"
            " or, if the recipe, this machine or hvdenv has changed since, `hvdenv build` first",
        )


def _ask(request: Request, prepared: Prepared, active: str, contents: Contents) -> dict[str, str]:
    """Have uv say what it would install without moving what is there; versions by name."""
    there = make_resolution(prepared, prepared.environment.generation(active))
    own = installed.installed_packages(there.environment).distributions
    chosen = prepared.additions
    assert chosen
    with (
        scratch.folder(find_places().scratch, "asking") as work,
        choose(1, quiet=request.quiet, verbose=request.verbose),
    ):
        maker = make_resolution(prepared, work.path)
        resolver = Resolver(
            sources=maker.sources,
            work=work.path,
            cache=find_places().cache / "uv",
            runner=work.runner,
            # The environment's own Python may not start without the modules of the recipe.
            python=(
                *here(there.python.version),
                *("--target", str(_copied(there, work.path))),
            ),
            builds=True,
        )
        # uv does not see what modules provide.
        apart = contents.distributions.keys() - own.keys()
        kept = "".join(f"{name}=={version}\n" for name, version in chosen.kept.items())
        outcome, found = resolver.additions(chosen.requirements, apart, kept)
    if not outcome:
        raise refusal(outcome, chosen)
    return found


def _copied(there: Resolution, work: Path) -> Path:
    """What tells uv which packages are installed: it would write a lock file into the environment."""
    copied = work / "installed"
    copied.mkdir()
    for each in there.environment.glob("lib/python3*/site-packages/*-info"):
        # uv does not see a link to a directory.
        (shutil.copytree if each.is_dir() else shutil.copyfile)(each, copied / each.name)
    return copied


def _versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items())
