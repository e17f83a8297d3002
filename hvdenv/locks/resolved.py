"""What uv resolves, as packages of a lock."""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from packaging.markers import Environment, default_environment
from packaging.pylock import PackageSdist, PackageWheel, Pylock, PylockSelectError
from packaging.tags import Tag, compatible_tags, cpython_tags

from hvdenv.contents.packages import hint
from hvdenv.errors import LockError
from hvdenv.locks.pypi import ADDRESS, Package
from hvdenv.masking import mask
from hvdenv.schema import parse_toml

# A package in the output of uv, and which packages require it.
_RESOLVED = re.compile(r"^([a-z0-9-]+)==[^#\n]+(?:# via (.*))?$", re.MULTILINE)

# Names from before PEP 600, by the minor version of glibc 2.
_OLD_NAMES = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


class Target(NamedTuple):
    """The machine that packages are locked for.

    Attributes:
        python: a full version.
        machine: such as x86_64.
    """

    python: str
    machine: str
    glibc: str

    @property
    def environment(self) -> Environment:
        """Values of markers."""
        known = default_environment()
        known["python_version"] = ".".join(self.python.split(".")[:2])
        known["python_full_version"] = self.python
        known["platform_machine"] = self.machine
        return known

    @property
    def tags(self) -> list[Tag]:
        """Tags of the wheels that are installed there, best first."""
        platforms = []
        for minor in range(int(self.glibc.split(".")[1]), 4, -1):
            platforms.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in _OLD_NAMES:
                platforms.append(f"{_OLD_NAMES[minor]}_{self.machine}")
        platforms.append(f"linux_{self.machine}")
        version = [int(part) for part in self.python.split(".")[:2]]
        own = cpython_tags(version, platforms=platforms)
        return [*own, *compatible_tags(version, "cp{}{}".format(*version), platforms)]


def from_uv(pylock_text: str, resolved: str, target: Target) -> tuple[Package, ...]:
    """The packages that uv has resolved, sorted by name.

    Args:
        pylock_text: in the format of PEP 751.
        resolved: as requirements, each with a comment that names the packages that require it.

    Raises:
        LockError: a package has no hash, or is not a file of an index.
    """
    requires: dict[str, set[str]] = {}
    for name, by in _RESOLVED.findall(resolved):
        for each in filter(None, by.split(", ")):
            requires.setdefault(each, set()).add(name)
    document = Pylock.from_dict(parse_toml(pylock_text))
    try:
        chosen = [*document.select(environment=target.environment, tags=target.tags)]
    except PylockSelectError as error:
        raise LockError(
            f"a package has no wheel for linux-{target.machine}: {error}",
            remedy="request a version that has one, under `packages` in the recipe; source archives"
            " are only locked on the machine that they are for",
        ) from error
    found, names = [], {entry.name for entry, _ in chosen}
    for entry, file in chosen:
        assert isinstance(file, (PackageWheel, PackageSdist))
        url, sha256 = file.url or "", file.hashes.get("sha256", "")
        if not sha256:
            raise LockError(
                f"{entry.name} {entry.version} has no sha256 at {mask(url)}",
                remedy="install it from an index or a directory of wheels: only files with a hash"
                " can be locked",
            )
        known = hint(url.partition("#")[0].partition("?")[0])
        package = Package(
            name=entry.name,
            version=str(entry.version),
            file=unquote(posixpath.basename(urlsplit(url).path)),
            sha256=sha256,
            url=known if re.fullmatch(ADDRESS, known) else "",
            # Where uv resolves for several platforms, others may require more.
            requires=tuple(sorted(names.intersection(requires.get(entry.name, ())))),
        )
        found.append(package)
    return tuple(sorted(found, key=lambda each: each.name))


def all_hashes(pylock_text: str) -> dict[str, list[str]]:
    """The hashes of all files that uv has found of each package, by name."""
    document = Pylock.from_dict(parse_toml(pylock_text))
    found: dict[str, list[str]] = {}
    for entry in document.packages:
        files = [*(entry.wheels or ()), *([entry.sdist] if entry.sdist else ())]
        hashes = (file.hashes.get("sha256") for file in files)
        found[entry.name] = [each for each in hashes if each]
    return found
