"""The contents of an environment: data that can be compared and written in other formats.

from_record() makes it from the record of a generation and from what is installed. It contains no
path, user or host name of a machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from hvdenv.base.masking import mask, shown
from hvdenv.base.schema import encode
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.facts import parse_version
from hvdenv.sites.launchers import parse_mpi_version

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# ``site``: provided by modules or the system, outside of the environment's directory.
Kind = Literal["conda", "pypi", "site"]


def canonicalize_name(name: str) -> str:
    """The normalised name of a Python package (PEP 503).

    packaging.utils has the same function, but loads logging and platform in every command.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


class Package(NamedTuple):
    """A package.

    Attributes:
        name: as its index has it; normalised for a Python package (PEP 503).
        version: with the local part (``2.13.0+cpu``).
        sha256: of the file that was installed; empty if unknown.
        url: where that file was; a hint.
    """

    kind: Kind
    name: str
    version: str
    build: str = ""
    sha256: str = ""
    url: str = ""


class Horovod(NamedTuple):
    """The Horovod of an environment.

    Attributes:
        source: sha256 of the source archive; empty if modules or conda provide it.
        variables: HOROVOD_* and compiler flags of its build.
        wheel: sha256 of the installed wheel; empty if unknown.
    """

    version: str
    source: str = ""
    patches: dict[str, str] = {}
    variables: dict[str, str] = {}
    wheel: str = ""


class Contents(NamedTuple):
    """The contents of an environment.

    Attributes:
        python: full version of its Python.
        packages: sorted, without Horovod if that is a Python package.
        distributions: versions of all packages that Python finds, whoever installed them.
        modules: hash of each modulefile by the module's name; empty if unknown.
        toolchain: versions by name: compiler, mpi, cuda, glibc, driver.
    """

    recipe: str = ""
    variants: tuple[str, ...] = ()
    python: str = ""
    machine: str = ""
    packages: tuple[Package, ...] = ()
    distributions: dict[str, str] = {}
    horovod: Horovod | None = None
    modules: dict[str, str] = {}
    toolchain: dict[str, str] = {}
    created: str = ""
    hvdenv: str = ""

    @property
    def name(self) -> str:
        return "+".join((self.recipe, *self.variants))

    @property
    def digest(self) -> str:
        """Identifies the contents, whatever their origin, time and version of hvdenv."""
        packages = tuple(each._replace(url="") for each in self.packages)
        document = encode(self._replace(packages=packages, created="", hvdenv=""))
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class Installed(NamedTuple):
    """What is installed in a directory, without what modules add.

    Attributes:
        packages: conda's and Python's, including Horovod.
        distributions: versions of all Python packages, including conda's.
    """

    packages: tuple[Package, ...]
    distributions: dict[str, str]


def from_record(record: GenerationRecord, installed: Installed | None, home: str) -> Contents:
    """The contents of a generation.

    Args:
        installed: what is in its directory; None if modules provide the whole environment.
        home: home directory of the user, which becomes ``~`` in flags.
    """
    observed = record.observed or {}
    known = [_recorded(each) for each in record.packages]
    packages = _packages(known, installed, observed.get("packages", {}))
    distributions = {
        **observed.get("packages", {}),
        **(installed.distributions if installed else {}),
    }
    variables = {
        name: _neutral(name, value, (record.prefix, home))
        for name, value in sorted(record.stack.get("variables", {}).items())
    }
    return Contents(
        recipe=record.recipe,
        variants=record.variants,
        python=observed.get("python", {}).get("version", "") or record.python.get("version", ""),
        machine=record.facts.get("machine", ""),
        packages=tuple(sorted(each for each in packages if not _is_horovod(each))),
        distributions=dict(sorted(distributions.items())),
        horovod=_horovod(record, distributions, variables),
        modules=_modules(record),
        toolchain=_toolchain(record),
        created=record.created,
        hvdenv=record.hvdenv,
    )


def parse_requirement(text: str) -> Requirement:
    """A requirement in pip's syntax.

    Raises:
        ValueError: it is malformed.
    """
    # The parser compiles its grammar on import, which no light command should wait for.
    from packaging.requirements import Requirement

    return Requirement(text)


def hint(url: str) -> str:
    """A URL without credentials; empty if it is only valid on this machine."""
    found = re.match(r"(git\+)?https?://([^/@]*@)?([\w-]+\.)+[A-Za-z][\w-]*(?=[:/])", url)
    if not found:
        return ""
    # Credentials are removed, not masked, since the URL must stay valid. conda has /t/TOKEN.
    url = re.sub(r"://[^/@]*@", "://", url)
    return mask(re.sub(r"(://[^/]+)/t/[^/]+/", r"\1/", url))


def _recorded(each: Mapping[str, str]) -> Package:
    kind: Kind = "conda" if "build" in each else "pypi"
    name = each["name"] if kind == "conda" else canonicalize_name(each["name"])
    build, sha256 = each.get("build", ""), each.get("sha256") or ""
    url = hint(each.get("url", ""))
    return Package(
        kind=kind, name=name, version=each["version"], build=build, sha256=sha256, url=url
    )


def _packages(
    known: Iterable[Package], installed: Installed | None, seen: Mapping[str, str]
) -> list[Package]:
    """The packages, with the hashes from the record."""
    known = list(known)
    base = installed.packages if installed else {each[:2]: each for each in known}.values()
    names = installed.distributions if installed else {each.name for each in base}
    hashes = {each[:4]: each for each in known}
    site = [Package("site", *each) for each in seen.items() if each[0] not in names]
    return [hashes.get(each[:4], each) for each in base] + site


def _is_horovod(package: Package) -> bool:
    """Whether it is Horovod itself; conda's package of it is listed like others."""
    return package.name == "horovod" and package.kind != "conda"


def _horovod(
    record: GenerationRecord, distributions: Mapping[str, str], variables: dict[str, str]
) -> Horovod | None:
    if "horovod" not in distributions:
        return None
    return Horovod(
        version=distributions["horovod"],
        source=record.stack.get("source", ""),
        patches=dict(sorted(record.stack.get("patches", {}).items())),
        variables=variables,
        wheel=record.wheel.get("sha256", ""),
    )


def _modules(record: GenerationRecord) -> dict[str, str]:
    """All modules of the build and of every run, with the hashes of their files if known."""
    phases = record.modules.values()
    names = {name for phase in phases for name in phase["loaded"]}
    seen = (record.observed or {}).get("modules", ())
    digests = {each["name"]: each.get("digest", "") for each in seen}
    return {name: digests.get(name, "") for name in sorted(names | digests.keys())}


def _toolchain(record: GenerationRecord) -> dict[str, str]:
    """What Horovod was built with, as far as the record states it."""
    observed = record.observed or {}
    stack = record.stack.get("stack", {})
    stated = stack.get("mpi", "")
    seen = (observed.get("mpirun", {}), parse_mpi_version(stated)._asdict() if stated else {})
    mpi = (f"{each.get('kind', '')} {each.get('version', '')}".strip() for each in seen)
    found = {
        "compiler": stack.get("compiler", "").partition(" Copyright")[0],
        "mpi": next(filter(None, mpi), ""),
        "cuda": parse_version("nvcc", stack.get("programs", {}).get("nvcc", "")),
        "glibc": stack.get("glibc", "") or observed.get("glibc", ""),
        "driver": observed.get("driver", ""),
    }
    return {name: version for name, version in found.items() if version}


def _neutral(name: str, value: str, folders: tuple[str, str]) -> str:
    """A flag without directories of the user who built, and without secrets."""
    for folder, word in zip(folders, ("PREFIX", "~"), strict=True):
        if len(folder) > 1:
            value = re.sub(rf"{re.escape(folder)}(?=[/:\s]|$)", word, value)
    return shown(name, value)
