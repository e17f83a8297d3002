"""Packages that a user adds to an environment, and what may not move for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdenv.contents.packages import Package, normal
from hvdenv.errors import IncompatibleError, UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# pip names one line for each version of a package that it has tried.
_MOST_LINES = 10


class Additions(NamedTuple):
    """What a generation has beyond its recipe.

    Attributes:
        base: digest of the plan without it.
        requirements: what was asked for, sorted, such as ``tqdm>=4``.
        own: version of each Python package that the recipe alone gave; none of them moves.
        earlier: version of each that came with earlier additions; these stay as well.
        conda: conda packages that the recipe gave, as ``name=version=build``.
    """

    base: str
    requirements: tuple[str, ...]
    own: dict[str, str]
    earlier: dict[str, str] = {}
    conda: tuple[str, ...] = ()

    @property
    def kept(self) -> dict[str, str]:
        """Versions that pip has to keep to; without those that are no versions to pip."""
        from packaging.version import InvalidVersion, Version

        found = {}
        for name, version in sorted({**self.own, **self.earlier}.items()):
            try:
                Version(version)
            except InvalidVersion:
                continue
            found[name] = version
        return found

    @property
    def constraints(self) -> str:
        """A constraints file for pip."""
        return "".join(f"{name}=={version}\n" for name, version in self.kept.items())


class Move(NamedTuple):
    """A package that pip would have to install in another version."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


def parse(words: Iterable[str]) -> dict[str, Requirement]:
    """What the user named, by the normal form of each name.

    Raises:
        UsageError: one is not a name with extras and versions, or stands there twice.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    found: dict[str, Requirement] = {}
    for word in words:
        try:
            wanted = Requirement(word)
        except InvalidRequirement as error:
            raise _no_package(word, str(error).splitlines()[0]) from error
        if wanted.url or wanted.marker:
            raise _no_package(word, "an address" if wanted.url else "a condition after `;`")
        if normal(wanted.name) in found:
            raise UsageError(
                f"{wanted.name} is named twice",
                remedy=f"name all conditions at once: '{wanted.name}>=1,<2'",
            )
        found[normal(wanted.name)] = wanted
    return found


def _no_package(word: str, reason: str) -> UsageError:
    return UsageError(
        f"{word!r} is no name of a package with versions: {reason}",
        remedy="write a name, or a name with versions in quotes: tqdm 'scipy>=1.11,<2'",
    )


def added_to(
    before: Additions | None,
    base: str,
    wanted: Mapping[str, Requirement],
    present: Mapping[str, str],
    packages: Iterable[Package],
) -> Additions:
    """What a generation is to have beyond its recipe.

    Args:
        before: what the active one has beyond it; None for nothing.
        base: digest of the plan without additions.
        wanted: what the user names now: it replaces what was asked for by the same name.
        present: version of each Python package of the active generation.
        packages: of the active generation.

    Returns:
        The same requirements as before if all that is wanted is there.

    Raises:
        IncompatibleError: another version of what the recipe gives is wanted.
    """
    own = before.own if before else dict(sorted(present.items()))
    asked = {normal(_name(text)): text for text in before.requirements} if before else {}
    new = {
        name: str(requirement)
        for name, requirement in wanted.items()
        if not (_satisfied(requirement, present) and (name in own or name in asked))
    }
    for name in sorted(new.keys() & own.keys()):
        if not wanted[name].specifier.contains(own[name], prereleases=True):
            raise IncompatibleError(
                f"the environment has {name} {own[name]}, and what the recipe gives stays;"
                f" {new[name]} would move it",
                remedy="take a version that fits; or change the recipe (--set, or a recipe of your"
                " own) and build that: it is another environment",
            )
    return Additions(
        base=base,
        requirements=tuple(sorted({**asked, **new}.values())),
        own=own,
        earlier={
            name: version
            for name, version in sorted(present.items())
            if name not in own and name not in new
        },
        conda=before.conda if before else _conda(packages),
    )


def _name(text: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(text).name


def _satisfied(wanted: Requirement, present: Mapping[str, str]) -> bool:
    """Whether it is there. What an extra brings is not known, so it is asked for."""
    version = present.get(normal(wanted.name))
    if version is None or wanted.extras:
        return False
    return wanted.specifier.contains(version, prereleases=True)


def _conda(packages: Iterable[Package]) -> tuple[str, ...]:
    return tuple(
        f"{each.name}={each.version}={each.build}" for each in packages if each.kind == "conda"
    )


def reported(report: Mapping[str, Any]) -> dict[str, str]:
    """Versions by name of what pip would install, or has installed, sorted."""
    packages = (each["metadata"] for each in report["install"])
    return dict(sorted((normal(each["name"]), each["version"]) for each in packages))


def moves(found: Mapping[str, str], present: Mapping[str, str]) -> tuple[Move, ...]:
    """What of the packages that are there would get another version."""
    return tuple(
        Move(name, present[name], version)
        for name, version in found.items()
        if present.get(name, version) != version
    )


_CONSTRAINT = re.compile(r"^ +The user requested \(constraint\) ([^\s=]+)==(\S+)$", re.MULTILINE)
_DEPENDS = re.compile(
    r"^ +(\S+ \S+) depends on ([\w.-]+)((?:[^\w.;\n-][^;\n]*)?)(?:;.*)?$", re.MULTILINE
)


def reasons(output: str) -> tuple[str, ...]:
    """Who wants what, in what pip says of a conflict."""
    kept = {normal(name): version for name, version in _CONSTRAINT.findall(output)}
    found = [
        f"{who} wants {name}{spec.strip().replace(' and ', ',')};"
        f" {normal(name)} {kept[normal(name)]} would have to move"
        for who, name, spec in _DEPENDS.findall(output)
        if normal(name) in kept
    ]
    return tuple(found[:_MOST_LINES])


def refusal(moved: Iterable[Move], output: str, additions: Additions) -> IncompatibleError:
    """The error where something would have to move.

    Args:
        moved: what pip would move if it could.
        output: what pip said when it could not.
        additions: what is asked for.
    """
    moved = tuple(moved)
    lines = [*reasons(output), *(f"would move: {each}" for each in moved)]
    free = [each.name for each in moved if each.name in additions.earlier]
    remedy = "take a version of it that fits; or change the recipe and build that"
    if free and len(free) == len(moved):
        remedy = f"these were added before: name them too, so that they may move: {' '.join(free)}"
    return IncompatibleError(
        "what is asked for does not go with what the environment has",
        where=", ".join(additions.requirements),
        detail="\n".join(lines),
        remedy=remedy,
    )
