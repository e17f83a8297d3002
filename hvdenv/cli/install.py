"""Add packages to an environment, in a new generation.

Every installed package keeps its version. If a new package requires another version of an
installed one, install reports the conflict and builds nothing. Packages that you added before
are kept."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.base.command import Outcome
from hvdenv.base.errors import HvdenvError, IncompatibleError, StepError, UsageError
from hvdenv.base.places import find_places
from hvdenv.base.schema import encode
from hvdenv.building.resolver import Resolver, here
from hvdenv.cli.options import add, add_options, give, read_request
from hvdenv.environments import generations, installed, prefix_lock
from hvdenv.locks.packages import Contents, Package, canonicalize_name, parse_requirement
from hvdenv.locks.record import Additions, GenerationRecord
from hvdenv.plans.resolution import Resolution
from hvdenv.session.build import build_prepared
from hvdenv.session.lock import add_recorded_lock, make_resolution
from hvdenv.session.prepare import Prepared, prepare
from hvdenv.session.progress import choose
from hvdenv.session.request import Request

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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
    wanted = parse(arguments.packages)
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
    chosen = added_to(before, wanted, present, contents.packages)
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
        prefix_lock.scratch_folder(find_places().scratch, "asking") as work,
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


def parse(words: Iterable[str]) -> dict[str, Requirement]:
    """What the user requested, by the normal form of each name.

    Raises:
        UsageError: a word is not a name with extras and versions, or a name is repeated.
    """
    found: dict[str, Requirement] = {}
    for word in words:
        try:
            requirement = parse_requirement(word)
        except ValueError as error:
            raise _no_package(word, str(error).splitlines()[0]) from error
        if requirement.url or requirement.marker:
            raise _no_package(word, "a URL" if requirement.url else "a condition after `;`")
        if canonicalize_name(requirement.name) in found:
            raise UsageError(
                f"{requirement.name} is named twice",
                remedy=f"put all conditions into one argument: '{requirement.name}>=1,<2'",
            )
        found[canonicalize_name(requirement.name)] = requirement
    return found


def _no_package(word: str, reason: str) -> UsageError:
    return UsageError(
        f"{word!r} is not a package name with versions: {reason}",
        remedy="name a package, with versions in quotes: tqdm 'scipy>=1.11,<2'",
    )


def added_to(
    before: Additions,
    requested: Mapping[str, Requirement],
    present: Mapping[str, str],
    packages: Iterable[Package],
) -> Additions:
    """The additions of the next generation, without the versions of what is requested.

    Args:
        before: those of the active generation.
        requested: by name; replaces an earlier request of the same name.
        present: version of each Python package of the active generation.

    Returns:
        The same requirements as before if everything requested is installed.

    Raises:
        IncompatibleError: the request needs another version of a package of the recipe.
    """
    if not before.requirements:
        conda = (each for each in packages if each.kind == "conda")
        kept = tuple(f"{each.name}={each.version}={each.build}" for each in conda)
        before = Additions((), own=dict(sorted(present.items())), new={}, conda=kept)
    own = before.own
    earlier: dict[str, str] = {
        canonicalize_name(parse_requirement(text).name): text for text in before.requirements
    }
    new = {
        name: str(requirement)
        for name, requirement in requested.items()
        if not (_satisfied(requirement, present) and (name in own or name in earlier))
    }
    for name in sorted(new.keys() & own.keys()):
        if not requested[name].specifier.contains(own[name], prereleases=True):
            raise IncompatibleError(
                f"the environment has {name} {own[name]} by its recipe, which does not change;"
                f" {new[name]} would change it",
                remedy="request a version that fits; or change the recipe (--set, or a recipe of"
                " your own) and build that: it is another environment",
            )
    stays = (each for each in sorted(before.new.items()) if each[0] not in new)
    requirements = tuple(sorted({**earlier, **new}.values()))
    return before._replace(requirements=requirements, new=dict(stays))


def _satisfied(requirement: Requirement, present: Mapping[str, str]) -> bool:
    """Whether it is installed. What an extra adds is unknown, so pip decides that."""
    version = present.get(canonicalize_name(requirement.name))
    if version is None or requirement.extras:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def refusal(outcome: Outcome, additions: Additions) -> HvdenvError:
    """The error if uv cannot add the packages, or only with another version of an installed one."""
    text = " ".join(outcome.output.partition("error: ")[2].split()) or outcome.tail(15)
    where = ", ".join(additions.requirements)
    if not any(f"{name}=={version}" in text for name, version in additions.kept.items()):
        return StepError(
            "the packages cannot be resolved",
            where=where,
            detail=text,
            remedy="check their names and versions, the network, and pip's configuration",
        )
    return IncompatibleError(
        "what you request conflicts with what the environment has",
        where=where,
        detail=text,
        remedy="request a version that fits; name packages that you added before too, so that they"
        " may change; or change the recipe and build that",
    )
