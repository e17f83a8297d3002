"""How a lock differs from the recipe, and a build from the one that filled in the lock."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hvdenv.base.schema import encode
from hvdenv.locks import condalock, pypi
from hvdenv.locks.lockfile import CONDA, BuiltWith, Inputs, Locked
from hvdenv.locks.packages import canonicalize_name, from_record, parse_requirement
from hvdenv.locks.pypi import Package, required
from hvdenv.locks.record import GenerationRecord

# Lists of which each item is compared.
_REQUESTS = ("packages", "conda.packages")
# Inputs that do not affect which packages fit together.
_NO_PACKAGES = ("horovod.", "mpi", "sources.")
# Only CUDA builds require these.
_CUDA_PACKAGE = re.compile(r"nvidia-|cuda-|triton$")


class LockDifference(NamedTuple):
    """A value that differs from the lock.

    Attributes:
        name: which, such as ``horovod.variables.HOROVOD_WITH_MPI``.
        locked: in the lock; empty if it has none.
        reason: why a build must not differ in it.
    """

    name: str
    locked: str
    found: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.locked or 'none'} in the lock, {self.found or 'none'} here"


def problems(
    locked: Locked, inputs: Inputs, cpu_packages: Iterable[str] = (), ignored: tuple[str, ...] = ()
) -> list[str]:
    """Why a lock does not satisfy a recipe; empty if it does.

    Args:
        cpu_packages: packages that must be CPU builds.
        ignored: how names of inputs begin that do not matter.
    """
    return [
        *(
            str(each)
            for each in changed(locked.lock.inputs, inputs)
            if not each.name.startswith(ignored)
        ),
        *package_problems(locked, inputs),
        *cuda_builds(pypi.packages(locked), cpu_packages),
    ]


def package_problems(locked: Locked, inputs: Inputs) -> list[str]:
    """Packages that are requested or required but missing from a lock."""
    packages = pypi.packages(locked)
    conda_versions: dict[str, str] = {}
    found: list[str] = []
    if inputs.conda or CONDA in locked.texts:
        requested = inputs.conda.packages if inputs.conda else ()
        if CONDA not in locked.texts:
            return [f"{each}: not in the lock" for each in requested]
        conda = condalock.packages(locked)
        found += condalock.unsatisfied(conda.packages, requested)
        conda_versions = condalock.for_pip(conda.packages)
    versions = {each.name: each.version for each in packages} | conda_versions
    found += unsatisfied(versions, inputs.packages)
    return [*found, *unclosed(packages, conda_versions)]


def packages_still_fit(locked: Locked, inputs: Inputs, cpu_packages: Iterable[str]) -> bool:
    """Whether the packages of a lock are still the ones to install."""
    return not problems(locked, inputs, cpu_packages, ignored=_NO_PACKAGES)


def changed(locked: Inputs, now: Inputs) -> tuple[LockDifference, ...]:
    """What the recipe asks for differently than when it was locked, sorted by name."""
    before, after = dict(_flat(encode(locked))), dict(_flat(encode(now)))
    return tuple(
        LockDifference(name, before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys())
        if before.get(name, "") != after.get(name, "")
    )


def unsatisfied(versions: Mapping[str, str], requirements: Iterable[str]) -> tuple[str, ...]:
    """Requirements that are not met.

    Args:
        versions: of Python packages, by normalised name; an empty one meets any requirement.
        requirements: in pip's syntax.
    """
    found = []
    for text in requirements:
        requirement = parse_requirement(text)
        version = versions.get(canonicalize_name(requirement.name))
        if version is None:
            found.append(f"{text}: not in the lock")
        elif version and not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{text}: the lock has {version}")
    return tuple(found)


def fitting(versions: Mapping[str, str], requirements: Iterable[str]) -> set[str]:
    """The packages whose versions meet all requirements on them."""
    wrong = {text.partition(":")[0] for text in unsatisfied(versions, requirements)}
    names = {canonicalize_name(parse_requirement(text).name) for text in wrong}
    return versions.keys() - names


def unclosed(packages: Sequence[Package], others: Mapping[str, str]) -> tuple[str, ...]:
    """Requirements in the recorded metadata of packages that the lock does not meet.

    Args:
        others: versions of Python packages from conda, by normalised name.
    """
    if any(each.requires is None for each in packages):
        return (
            "the lock does not record what its packages require, so hvdenv cannot check that it is"
            " complete; `hvdenv lock` adds that, and keeps every version",
        )
    # Every virtual environment has pip.
    versions = {"pip": "", **others, **{each.name: each.version for each in packages}}
    return tuple(
        f"required by {each.name} {each.version}: {problem}"
        for each in packages
        for problem in unsatisfied(versions, each.requires or ())
    )


def cuda_builds(packages: Sequence[Package], cpu_packages: Iterable[str]) -> tuple[str, ...]:
    """Packages that must be CPU builds, but require CUDA packages."""
    found, names = [], {*cpu_packages}
    for each in packages:
        cuda = sorted(filter(_CUDA_PACKAGE.match, map(required, each.requires or ())))
        if cuda and each.name in names:
            found.append(
                f"{each.name} {each.version} is a CUDA build, which requires {len(cuda)} packages"
                f" such as {cuda[0]}"
            )
    return tuple(found)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else key)
    elif name in _REQUESTS:
        yield from ((f"{name}.{each}", "requested") for each in value)
    elif value not in ([], ""):
        yield name, ", ".join(value) if isinstance(value, list) else str(value)


def built_with(record: GenerationRecord) -> BuiltWith:
    """What a lock keeps of a build, from as much of the record as is known."""
    contents = from_record(record, None, "")
    tools = contents.toolchain
    return BuiltWith(
        hvdenv=contents.hvdenv,
        python=contents.python,
        compiler=tools.get("compiler", ""),
        mpi=tools.get("mpi", ""),
        nvcc=tools.get("cuda", ""),
        glibc=tools.get("glibc", ""),
        driver=tools.get("driver", ""),
        modules=contents.modules,
        wheel=record.wheel.get("sha256", ""),
    )


def drift(locked: BuiltWith, found: BuiltWith) -> Iterator[LockDifference]:
    """What a build must not have other than the one recorded in the lock. Unknown values are not compared."""
    bound = "Horovod is bound to the implementation and its series (major.minor)"
    for name, kind, reason in (
        ("compiler", _vendor, "another compiler may have another C++ ABI"),
        ("mpi", _series, bound),
        ("nvcc", _series, bound),
    ):
        before, now = getattr(locked, name), getattr(found, name)
        if before and now and kind(before) != kind(now):
            yield LockDifference(name, before, now, reason)
    for name in sorted(locked.modules.keys() ^ found.modules.keys()):
        states = ("loaded", "") if name in locked.modules else ("", "loaded")
        reason = "the module system chose another module"
        yield LockDifference(f"modules.{name}", *states, reason)


def _vendor(version: str) -> str:
    """Vendor of a compiler. GCC prints the name that it was called by, so it is the default."""
    known = {"clang": "Clang", "icpx": "Intel", "intel": "Intel", "nvc": "NVIDIA", "cray": "Cray"}
    return next((name for word, name in known.items() if word in version.lower()), "GCC")


def _series(text: str) -> str:
    """Name and major.minor in the version text of a program."""
    version = (re.findall(r"(?<![0-9])[0-9]+(?:\.[0-9]+)+", text) or [""])[-1]
    return re.sub(r"[0-9].*", "", text) + ".".join(version.split(".")[:2])
