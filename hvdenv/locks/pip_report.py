"""What ``pip install --report`` writes, as far as hvdenv reads it.

Format: https://pip.pypa.io/en/stable/reference/installation-report/
"""

from __future__ import annotations

from typing import NamedTuple

from hvdenv.errors import StepError
from hvdenv.schema import Problem, decode


class Metadata(NamedTuple):
    """Of a package; the name is as its author writes it."""

    name: str
    version: str
    requires_dist: tuple[str, ...] = ()


class ArchiveInfo(NamedTuple):
    """Hashes of a file, in hexadecimal, by algorithm."""

    hashes: dict[str, str] = {}


class Download(NamedTuple):
    url: str
    archive_info: ArchiveInfo = ArchiveInfo()

    @property
    def sha256(self) -> str:
        """Empty if pip does not know it."""
        return self.archive_info.hashes.get("sha256", "")


class Installed(NamedTuple):
    metadata: Metadata
    download_info: Download
    requested_extras: tuple[str, ...] = ()


class PipReport(NamedTuple):
    """The report; ``environment`` has the values of markers on that machine."""

    install: tuple[Installed, ...]
    environment: dict[str, str] = {}


def decoded(document: object) -> PipReport:
    """A report from its JSON.

    Raises:
        StepError: it is not a report of pip.
    """
    try:
        return decode(PipReport, document, lenient=True)
    except Problem as problem:
        raise StepError(
            f"the report of pip cannot be read: {problem}",
            remedy="run the command again; if it fails again, report it with the output of --verbose",
        ) from problem
