"""Packages that a user adds to an environment, without changing installed versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hvdenv.base.command import Outcome
from hvdenv.base.errors import HvdenvError, IncompatibleError, StepError, UsageError
from hvdenv.locks.packages import Package, canonicalize_name, parse_requirement
from hvdenv.locks.record import Additions

if TYPE_CHECKING:
    from packaging.requirements import Requirement


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
