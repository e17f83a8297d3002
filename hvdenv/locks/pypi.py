"""Python packages of a lock: a PEP 751 file, by the library packaging.

Name, version and hash decide; a URL is a hint. So a mirror, a wheelhouse or a folder
of fetched files serves as well.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from hvdenv.composition.contents import hint
from hvdenv.errors import LockError, RecipeError
from hvdenv.locks.lockfile import ANEW, PYPI, Locked
from hvdenv.masking import mask


class Package(NamedTuple):
    """One package, by the one file that it is installed from.

    Attributes:
        name: normalised, as PEP 503 has it.
        version: the whole version, its local part included.
        file: name of a wheel or of a source archive.
        sha256: of that file.
        url: where it was seen; empty where that is only known to the machine that locked.
    """

    name: str
    version: str
    file: str
    sha256: str
    url: str = ""

    @property
    def is_wheel(self) -> bool:
        return self.file.endswith(".whl")


def from_report(report: Mapping[str, Any], hints: Mapping[str, str]) -> tuple[Package, ...]:
    """The packages that pip would install, sorted by name.

    Args:
        report: of ``pip install --dry-run --report``.
        hints: by name of a package, the index that the recipe names for it: where such a
            file is to be had from, if this machine has it in a folder.

    Raises:
        LockError: a package has no hash, or is no file of an index.
    """
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    found = []
    for each in report["install"]:
        name = canonicalize_name(each["metadata"]["name"])
        download = each["download_info"]
        address = urlsplit(download["url"])
        sha256 = download.get("archive_info", {}).get("hashes", {}).get("sha256", "")
        if not sha256:
            raise LockError(
                f"{name} {each['metadata']['version']} has no sha256 at {mask(download['url'])}",
                remedy="take it from an index or a folder of wheels: what has no hash cannot be"
                " locked",
            )
        file = unquote(posixpath.basename(address.path))
        url = hint(download["url"].partition("#")[0].partition("?")[0])
        if address.scheme == "file" and name in hints:
            url = f"{hints[name].rstrip('/')}/{quote(file)}"
        version = str(Version(each["metadata"]["version"]))
        found.append(Package(name, version, file, sha256, url))
    return tuple(sorted(found))


def render(packages: Iterable[Package], python: str, machine: str) -> str:
    """The text of pylock.toml.

    Args:
        packages: of one environment.
        python: minor version.
        machine: such as x86_64.
    """
    import tomlkit
    from packaging.markers import Marker
    from packaging.pylock import Package as Entry
    from packaging.pylock import PackageSdist, PackageWheel, Pylock
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    def entry(package: Package) -> Entry:
        # A file without a URL is one that lies beside the lock, or that pip finds elsewhere.
        where = {"url": package.url} if package.url else {"path": package.file}
        file: dict[str, Any] = {
            "name": package.file, "hashes": {"sha256": package.sha256}, **where,
        }  # fmt: skip
        kind: dict[str, Any] = (
            {"wheels": [PackageWheel(**file)]}
            if package.is_wheel
            else {"sdist": PackageSdist(**file)}
        )
        return Entry(name=canonicalize_name(package.name), version=Version(package.version), **kind)

    marker = (
        f"sys_platform == 'linux' and platform_machine == '{machine}'"
        f" and python_version == '{python}'"
    )
    document = Pylock(
        lock_version=Version("1.0"),
        environments=[Marker(marker)],
        requires_python=SpecifierSet(f"=={python}.*"),
        created_by="hvdenv",
        packages=[entry(package) for package in sorted(packages)],
    )
    document.validate()
    return tomlkit.dumps(document.to_dict())


def parse(text: str, path: Path, python: str = "") -> tuple[Package, ...]:
    """Read pylock.toml as hvdenv writes it: one file for each package, with its hash.

    Args:
        text: of the file.
        path: of the file, for messages.
        python: the minor version that it has to be for.

    Raises:
        RecipeError: it is malformed, for another Python, or a package has no file or no hash.
    """
    from packaging.pylock import Pylock, PylockUnsupportedVersionError, PylockValidationError

    from hvdenv.schema import parse_toml

    try:
        document = Pylock.from_dict(parse_toml(text))
    except (ValueError, PylockValidationError, PylockUnsupportedVersionError) as error:
        raise RecipeError(str(error), where=str(path), remedy=ANEW) from error
    if python and str(document.requires_python) != f"=={python}.*":
        raise RecipeError(f"is not for Python {python}", where=str(path), remedy=ANEW)
    found: list[Package] = []
    for entry in document.packages:
        files = [*(entry.wheels or ()), *([entry.sdist] if entry.sdist else ())]
        hashes = [file.hashes.get("sha256", "") for file in files]
        whole = len(files) == 1 and re.fullmatch("[0-9a-f]{64}", hashes[0]) and not entry.marker
        if not whole or entry.version is None or entry.name in {each.name for each in found}:
            raise RecipeError(
                f"{entry.name} has to be there once, with a version and one file with its sha256",
                where=str(path),
                remedy=ANEW,
            )
        file = files[0]
        name = file.name or posixpath.basename(unquote(urlsplit(file.url or "").path))
        if not name or "/" in name or name.startswith("."):
            raise RecipeError(
                f"{entry.name}: {name!r} is no name of a file", where=str(path), remedy=ANEW
            )
        found.append(Package(entry.name, str(entry.version), name, hashes[0], file.url or ""))
    return tuple(sorted(found))


def packages(locked: Locked) -> tuple[Package, ...]:
    """The Python packages of a lock; none if it has no file for them.

    Raises:
        RecipeError: the file is malformed, or for another Python.
    """
    text, path = locked.texts.get(PYPI), locked.folder / PYPI
    if not text:
        return ()
    return parse(text, path, locked.lock.inputs.python)


def labels(packages: Iterable[Package], frameworks: Iterable[str]) -> tuple[str, ...]:
    """Local versions of the frameworks, such as ``cpu``."""
    from packaging.version import Version

    wanted = set(frameworks)
    found = {Version(each.version).local for each in packages if each.name in wanted}
    return tuple(sorted(label for label in found if label))


def with_urls_of(packages: Iterable[Package], before: Iterable[Package]) -> tuple[Package, ...]:
    """Packages with the URLs that are known of the same files: where they were seen last is no change."""
    known = {each.sha256: each.url for each in before}
    return tuple(each._replace(url=known.get(each.sha256) or each.url) for each in packages)


def platforms(packages: Iterable[Package]) -> tuple[str, ...]:
    """The platforms that wheels are for, as their names say, sorted."""
    from packaging.utils import parse_wheel_filename

    wheels = (each.file for each in packages if each.is_wheel)
    found = {tag.platform for file in wheels for tag in parse_wheel_filename(file)[3]}
    return tuple(sorted(found - {"any"}))


def requirements(packages: Iterable[Package]) -> str:
    """A requirements file for pip's --require-hashes.

    To ``==``, 2.13.0 and 2.13.0+cpu are the same.
    """
    return "".join(
        f"{each.name}==={each.version} --hash=sha256:{each.sha256}\n" for each in packages
    )
