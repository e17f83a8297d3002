"""The Python packages of a lock: a PEP 751 file.

Name, version and hash identify a file; its URL is only a hint. So a mirror, a directory of wheels
or of fetched files can provide it as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hvdenv.base.schema import Pattern, Problem, decode, parse_toml
from hvdenv.locks.lockfile import ANEW, PYPI, Locked, malformed
from hvdenv.model.recipe import Sha256

if TYPE_CHECKING:
    from packaging import pylock


# What a lock may contain. PEP 751 has more; that is refused.
ADDRESS = r"(https://(?!.*/t/[^/]+/)([A-Za-z0-9-]+\.)+[A-Za-z][A-Za-z0-9-]*(:[0-9]+)?/[^\s@?#*]+)?"
Url = Annotated[str, Pattern(ADDRESS, "an https:// address without credentials")]
Required = Annotated[
    str, Pattern(r"[a-z0-9][a-z0-9-]*([<>=!~][^\s;@]*)?", "a requirement such as numpy>=1.23")
]


class Package(NamedTuple):
    """A package, by the one file that it is installed from.

    Attributes:
        name: normalised (PEP 503).
        version: the full version, with its local part.
        url: where it was found; empty if that is only valid on the machine that locked.
        requires: what its metadata requires on the machines of the lock, sorted; None in a lock
            that does not record it.
    """

    name: str
    version: str
    file: Annotated[str, Pattern(r"[A-Za-z0-9_][A-Za-z0-9_.+!-]*", "the name of a file")]
    sha256: Sha256
    url: Url = ""
    requires: tuple[Required, ...] | None = None

    @property
    def is_wheel(self) -> bool:
        return self.file.endswith(".whl")


def required(requirement: str) -> str:
    """The name at the start of a requirement, as a lock records it."""
    return re.split(r"[^a-z0-9-]", requirement, maxsplit=1)[0]


def render(packages: Iterable[Package], python: str, machine: str) -> str:
    """The text of pylock.toml for a minor Python version and a machine such as x86_64."""
    import tomlkit
    from packaging import pylock
    from packaging.markers import Marker

    marker = (
        f"sys_platform == 'linux' and platform_machine == '{machine}'"
        f" and python_version == '{python}'"
    )
    document = pylock.Pylock(
        lock_version=Version("1.0"),
        environments=[Marker(marker)],
        requires_python=SpecifierSet(f"=={python}.*"),
        created_by="hvdenv",
        packages=[_entry(each) for each in sorted(packages, key=lambda each: each.name)],
    )
    document.validate()
    return tomlkit.dumps(document.to_dict())


def _entry(package: Package) -> pylock.Package:
    from packaging import pylock, utils

    # A file without a URL is beside the lock, or pip finds it elsewhere.
    url, path = package.url or None, None if package.url else package.file
    hashes, requires = {"sha256": package.sha256}, package.requires
    wheel = pylock.PackageWheel(name=package.file, url=url, path=path, hashes=hashes)
    sdist = pylock.PackageSdist(name=package.file, url=url, path=path, hashes=hashes)
    return pylock.Package(
        name=utils.canonicalize_name(package.name),
        version=Version(package.version),
        wheels=[wheel] if package.is_wheel else None,
        sdist=None if package.is_wheel else sdist,
        tool=None if requires is None else {"hvdenv": {"requires": list(requires)}},
    )


def parse(text: str, path: Path) -> tuple[Package, ...]:
    """Read a pylock.toml: one file with its hash for each package, sorted.

    Raises:
        RecipeError: it is malformed, or contains what a lock may not contain.
    """
    from packaging import pylock

    try:
        found = tuple(map(_package, pylock.Pylock.from_dict(parse_toml(text)).packages))
    except (
        ValueError,
        pylock.PylockValidationError,
        pylock.PylockUnsupportedVersionError,
    ) as error:
        raise malformed(" ".join(str(error).split()), str(path), ANEW) from error
    for one, other in pairwise(found):
        if one.name >= other.name:
            raise malformed(
                f"{other.name}: it is in the lock twice, or not sorted", str(path), ANEW
            )
    return found


def _package(entry: pylock.Package) -> Package:
    """A package from its entry.

    Raises:
        ValueError: it cannot be installed from one file with a hash and an acceptable address, or
            not always.
    """
    files = [*(entry.wheels or ()), *([entry.sdist] if entry.sdist else ())]
    if len(files) != 1:
        raise ValueError(f"{entry.name}: expected one file to install it from, found {len(files)}")
    if entry.marker:
        raise ValueError(f"{entry.name}: hvdenv writes no markers")
    own = (entry.tool or {}).get("hvdenv", {})
    values = {
        "name": entry.name,
        "version": str(entry.version),
        "file": files[0].name,
        "sha256": files[0].hashes.get("sha256"),
        "url": files[0].url,
        "requires": own.get("requires"),
    }
    try:
        return decode(Package, {key: each for key, each in values.items() if each is not None})
    except Problem as problem:
        raise ValueError(f"{entry.name}: {problem}") from problem


def packages(locked: Locked) -> tuple[Package, ...]:
    """The Python packages of a lock; none if it has no file for them.

    Raises:
        RecipeError: the file is malformed.
    """
    text = locked.texts.get(PYPI)
    return parse(text, locked.folder / PYPI) if text else ()


def as_before(packages: Iterable[Package], before: Iterable[Package]) -> tuple[Package, ...]:
    """Packages with the entries that a lock has of the same files: another URL is no change."""
    known = {(each.file, each.sha256): each for each in before}
    found = []
    for each in packages:
        old = known.get((each.file, each.sha256), each)
        same = tuple(map(required, old.requires or ())) == each.requires
        found.append(old if same else each._replace(url=old.url or each.url))
    return tuple(found)


def listed(text: str) -> dict[str, str]:
    """Version by name of the packages that ``check_requirements.py`` lists."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, re.MULTILINE))


def requirements(
    packages: Iterable[Package], hashes: Mapping[str, Iterable[str]] | None = None
) -> str:
    """A requirements file for pip's --require-hashes.

    It has ``===``, since ``==`` treats 2.13.0 and 2.13.0+cpu as the same.

    Args:
        hashes: by name of the package, those of further files of the same version.
    """
    lines = []
    for each in packages:
        others = sorted({*(hashes or {}).get(each.name, ())} - {each.sha256})
        allowed = (f" --hash=sha256:{sha256}" for sha256 in (each.sha256, *others))
        lines.append(f"{each.name}==={each.version}{''.join(allowed)}\n")
    return "".join(lines)
