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
        pythons: their versions, the best first.
    """

    pattern: str
    name: str
    hpccm: str
    glibc: str
    gcc: str
    pythons: tuple[str, ...]

    def packages(self, python: str) -> set[str]:
        """What a build and mpirun need, and a Python.

        Without ssh, mpirun of a package starts no ranks, not even on one host.
        """
        if self.hpccm.startswith("ubuntu"):
            parts = {f"python{python}", f"python{python}-dev", f"python{python}-venv"}
            return {"ca-certificates", "g++", "gcc", "openssh-client", *parts}
        # Red Hat's own Python.
        name = "python3" if (self.name, python) == ("Red Hat 9", "3.9") else f"python{python}"
        return {"ca-certificates", "gcc", "gcc-c++", "openssh-clients", name, f"{name}-devel"}


# In the order of the fields. One line adds a distribution.
_ROWS = (
    (r"ubuntu[:-]?20\.04|\bfocal\b", "Ubuntu 20.04", "ubuntu20", "2.31", "9.4.0", ("3.9", "3.8")),
    (r"ubuntu[:-]?22\.04|\bjammy\b", "Ubuntu 22.04", "ubuntu22", "2.35", "11.4.0", ("3.10",)),
    (r"ubuntu[:-]?24\.04|\bnoble\b", "Ubuntu 24.04", "ubuntu24", "2.39", "13.3.0", ("3.12",)),
    (r"debian[:-]?12|\bbookworm\b", "Debian 12", "ubuntu22", "2.36", "12.2.0", ("3.11",)),
    (r"debian[:-]?13|\btrixie\b", "Debian 13", "ubuntu24", "2.41", "14.2.0", ("3.13",)),
    (r"(rockylinux|almalinux|ubi)[:-]?8\b", "Red Hat 8", "rockylinux8", "2.28", "8.5.0", ("3.11", "3.12")),
    (r"(rockylinux|almalinux|ubi)[:-]?9\b", "Red Hat 9", "rockylinux9", "2.34", "11.5.0", ("3.11", "3.12", "3.9")),
)  # fmt: skip
DISTRIBUTIONS = tuple(map(Distribution._make, _ROWS))


def find_distribution(base: str) -> Distribution:
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
