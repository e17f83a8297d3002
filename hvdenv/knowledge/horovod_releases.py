"""Horovod's releases and the SHA-256 of their source archives."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hvdenv.reading import OWN, read_text
from hvdenv.schema import decode, parse_toml

_FILE = Path(__file__).with_suffix(".toml")


class Release(NamedTuple):
    """A source archive on the package index.

    Attributes:
        uploaded: the date, YYYY-MM-DD.
        size: of the archive, in bytes.
        requires_python: the versions of Python that it states; empty before 0.20.0.
    """

    version: str
    uploaded: str
    size: int
    sha256: str
    requires_python: str = ""


class _Table(NamedTuple):
    release: tuple[Release, ...]


@lru_cache(maxsize=1)
def releases() -> dict[str, Release]:
    """All releases by version, oldest first."""
    table = decode(_Table, parse_toml(read_text(_FILE, OWN)))
    return {release.version: release for release in table.release}
