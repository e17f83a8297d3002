"""Comparing a lock: with what a recipe asks for now, and with what a build is made with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from hvdenv.locks.lockfile import Built, Inputs
from hvdenv.locks.pypi import Package, required
from hvdenv.schema import encode

# What a lock may still satisfy although the recipe words it otherwise: compared item by item.
_WISHES = ("packages", "conda.packages")
# What has no part in which packages fit together.
_NO_PACKAGES = ("horovod.", "mpi", "sources.")

# What only builds for CUDA require.
_OF_CUDA = re.compile(r"nvidia-|cuda-|triton$")

# What a build may be made with otherwise; and modules.NAME.
DRIFTS = ("python", "compiler", "mpi", "nvcc", "glibc", "driver", "wheel")


class Difference(NamedTuple):
    """One value that differs.

    Attributes:
        name: which, such as ``horovod.variables.HOROVOD_WITH_MPI``.
        locked: in the lock; empty if it has none.
        found: now; empty if there is none.
        severity: of a drift: whether the build stops.
        reason: the rule that says so.
    """

    name: str
    locked: str
    found: str
    severity: Literal["note", "error"] = "error"
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.locked or 'none'} in the lock, {self.found or 'none'} here"


def changed(locked: Inputs, now: Inputs) -> tuple[Difference, ...]:
    """What the recipe asks for otherwise than when it was locked, sorted by name."""
    before, after = dict(_flat(encode(locked))), dict(_flat(encode(now)))
    return tuple(
        Difference(name, before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys())
        if before.get(name, "") != after.get(name, "")
    )


def is_request(difference: Difference) -> bool:
    """Whether it is only about which packages are asked for: the lock may have them."""
    return difference.name.startswith(tuple(f"{name}." for name in _WISHES))


def moves_packages(difference: Difference) -> bool:
    """Whether it may change which packages fit together."""
    return not is_request(difference) and not difference.name.startswith(_NO_PACKAGES)


def unsatisfied(versions: Mapping[str, str], requirements: Iterable[str]) -> tuple[str, ...]:
    """What is asked of pip, and the lock does not have.

    Args:
        versions: of Python packages, by normalised name; empty if any will do.
        requirements: as pip takes them.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    problems = []
    for text in requirements:
        wanted = Requirement(text)
        version = versions.get(canonicalize_name(wanted.name))
        if version is None:
            problems.append(f"{text}: not in the lock")
        elif version and not wanted.specifier.contains(version, prereleases=True):
            problems.append(f"{text}: the lock has {version}")
    return tuple(problems)


def unclosed(packages: Iterable[Package], others: Mapping[str, str]) -> tuple[str, ...]:
    """What packages of a lock require, by their recorded metadata, and the lock does not have.

    Args:
        packages: of pylock.toml.
        others: versions of Python packages that conda brings, by normalised name.
    """
    packages = tuple(packages)
    if any(each.requires is None for each in packages):
        return (
            "the lock does not record what its packages require, so hvdenv cannot check that it is"
            " complete; `hvdenv lock` adds that, and keeps every version",
        )
    # The virtual environment comes with pip.
    versions = {"pip": "", **others, **{each.name: each.version for each in packages}}
    return tuple(
        f"required by {each.name} {each.version}: {problem}"
        for each in packages
        for problem in unsatisfied(versions, each.requires or ())
    )


def unneeded(packages: Iterable[Package], requirements: Iterable[str]) -> tuple[str, ...]:
    """Packages of a lock that neither the recipe nor another package requires.

    Args:
        packages: of pylock.toml, with their requirements.
        requirements: what pip is asked for.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    packages = tuple(packages)
    names = {canonicalize_name(Requirement(text).name) for text in requirements}
    needed = _with_what_they_require(packages, names)
    return tuple(
        f"{each.name} {each.version}: neither the recipe nor a package of the lock requires it"
        for each in packages
        if each.name not in needed
    )


def cuda_builds(packages: Iterable[Package], names: Iterable[str]) -> tuple[str, ...]:
    """Packages that were to be builds for CPUs, and require CUDA's.

    Args:
        packages: of pylock.toml, with their requirements.
        names: of those that are to be builds for CPUs.
    """
    packages = tuple(packages)
    versions = {each.name: each.version for each in packages}
    found = []
    for name in names:
        cuda = sorted(filter(_OF_CUDA.match, _with_what_they_require(packages, [name])))
        if cuda:
            such = f"{len(cuda)} packages such as {cuda[0]}"
            found.append(f"{name} {versions[name]} is a CUDA build, which requires {such}")
    return tuple(found)


def _with_what_they_require(packages: Iterable[Package], names: Iterable[str]) -> set[str]:
    """Names of packages of a lock, with those that they require, directly or not."""
    known = {each.name: each for each in packages}
    waiting, reached = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in known and name not in reached:
            reached.add(name)
            waiting += map(required, known[name].requires or ())
    return reached


def drift(locked: Built, found: Built) -> tuple[Difference, ...]:
    """What a build is made with otherwise than the one that the lock was filled in by.

    What neither build has, or only one of them can know, is no drift.
    """
    differences = [
        _judged(name, was, now)
        for name in DRIFTS
        if (was := getattr(locked, name)) and (now := getattr(found, name)) and was != now
    ]
    return (*differences, *_modules(locked.modules, found.modules))


def _judged(name: str, locked: str, found: str) -> Difference:
    """A drift, and whether one of the rules makes it an error."""
    reason = ""
    if name == "compiler" and _family(locked) != _family(found):
        reason = "another compiler may have another C++ interface"
    if name in ("mpi", "nvcc") and _series(locked) != _series(found):
        reason = "Horovod is bound to the implementation and its series (major.minor)"
    return Difference(name, locked, found, "error" if reason else "note", reason)


def _modules(locked: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted(locked.keys() - found.keys()):
        yield Difference(
            f"modules.{name}", "loaded", "", "error", "the module system chose another"
        )
    for name in sorted(found.keys() - locked.keys()):
        yield Difference(
            f"modules.{name}", "", "loaded", "error", "the module system chose another"
        )
    for name in sorted(locked.keys() & found.keys()):
        if locked[name] and found[name] and locked[name] != found[name]:
            yield Difference(f"modules.{name}", locked[name][:12], found[name][:12], "note")


def _family(said: str) -> str:
    """Whose compiler it is: GCC prints whatever name it was called by."""
    known = {"clang": "Clang", "icpx": "Intel", "intel": "Intel", "nvc": "NVIDIA", "cray": "Cray"}
    return next((name for word, name in known.items() if word in said.lower()), "GCC")


def _series(said: str) -> tuple[str, str]:
    """Name and major.minor of what a program says of itself."""
    version = (re.findall(r"(?<![0-9])[0-9]+(?:\.[0-9]+)+", said) or [""])[-1]
    return re.sub(r"[0-9].*", "", said), ".".join(version.split(".")[:2])


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else key)
    elif name in _WISHES:
        yield from ((f"{name}.{each}", "asked for") for each in value)
    elif value not in ([], ""):
        yield name, ", ".join(value) if isinstance(value, list) else str(value)
