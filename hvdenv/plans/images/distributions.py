"""Linux distributions that images may start from: their compilers, Pythons and packages."""

from __future__ import annotations

import re
from typing import NamedTuple

from hvdenv.errors import IncompatibleError


class Distribution(NamedTuple):
    """What an image of a Linux distribution has.

    Attributes:
        pattern: found in the name of an image of it.
        hpccm: the name hpccm knows it by, or one with the same package manager.
        packages: what a build and mpirun need.
        pythons: versions with their packages, the best first.
    """

    pattern: str
    name: str
    hpccm: str
    glibc: str
    gcc: str
    packages: tuple[str, ...]
    pythons: dict[str, tuple[str, ...]]


# Packages that a build and mpirun need, and the parts of a Python. Without ssh, mpirun of a package
# starts no ranks, not even on one host.
_DEBIAN = ("ca-certificates", "g++", "gcc", "openssh-client"), ("dev", "venv")
_RED_HAT = ("ca-certificates", "gcc", "gcc-c++", "openssh-clients"), ("devel",)


def _on(
    family: tuple[tuple[str, ...], tuple[str, ...]],
    pattern: str,
    name: str,
    hpccm: str,
    glibc: str,
    gcc: str,
    *versions: str,
) -> Distribution:
    """``3.9=3`` among the versions is a Python 3.9 whose packages are called python3."""
    packages, parts = family
    pythons = {}
    for each in versions:
        version, _, named = each.partition("=")
        python = f"python{named or version}"
        pythons[version] = (python, *(f"{python}-{part}" for part in parts))
    return Distribution(
        pattern=pattern,
        name=name,
        hpccm=hpccm,
        glibc=glibc,
        gcc=gcc,
        packages=packages,
        pythons=pythons,
    )


# One line adds a distribution.
DISTRIBUTIONS = (
    _on(_DEBIAN, r"ubuntu[:-]?20\.04|\bfocal\b", "Ubuntu 20.04", "ubuntu20", "2.31", "9.4.0", "3.9", "3.8"),
    _on(_DEBIAN, r"ubuntu[:-]?22\.04|\bjammy\b", "Ubuntu 22.04", "ubuntu22", "2.35", "11.4.0", "3.10"),
    _on(_DEBIAN, r"ubuntu[:-]?24\.04|\bnoble\b", "Ubuntu 24.04", "ubuntu24", "2.39", "13.3.0", "3.12"),
    _on(_DEBIAN, r"debian[:-]?12|\bbookworm\b", "Debian 12", "ubuntu22", "2.36", "12.2.0", "3.11"),
    _on(_DEBIAN, r"debian[:-]?13|\btrixie\b", "Debian 13", "ubuntu24", "2.41", "14.2.0", "3.13"),
    _on(_RED_HAT, r"(rockylinux|almalinux|ubi)[:-]?8\b", "Red Hat 8", "rockylinux8", "2.28", "8.5.0", "3.11", "3.12"),
    _on(_RED_HAT, r"(rockylinux|almalinux|ubi)[:-]?9\b", "Red Hat 9", "rockylinux9", "2.34", "11.5.0", "3.11", "3.12", "3.9=3"),
)  # fmt: skip


def distribution_of(base: str) -> Distribution:
    """The distribution of a base image, by its name.

    Raises:
        IncompatibleError: the name does not say it.
    """
    for each in DISTRIBUTIONS:
        if re.search(each.pattern, base):
            return each
    raise IncompatibleError(
        "the name of this image does not say which distribution it is",
        where=f"container.base: {base}",
        remedy="choose an image whose name includes the release, such as debian:bookworm-slim or"
        " nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04; hvdenv supports "
        + ", ".join(each.name for each in DISTRIBUTIONS),
    )
