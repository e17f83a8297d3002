"""The combinations that are to be tried, and the recipe of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from hvdenv.knowledge.grid import Kind, RowName
from hvdenv.model.recipe import Name, Version
from hvdenv.schema import decode, parse_toml

FILE = Path(__file__).parent / "wanted.toml"
NAME = "grid"


class Wanted(NamedTuple):
    """One combination.

    Attributes:
        name: of its row.
        python: minor version.
        torch, tensorflow: versions; one of them at least.
        base: the recipe that it extends.
        mpi, mpi_version: a package of the index; that of the recipe if not given.
        set: further keys of the recipe, as TOML.
        allow: rules that block it, to be gone past: to see whether they are right.
    """

    name: RowName
    python: Version
    torch: Version | None = None
    tensorflow: Version | None = None
    base: Name = "local"
    mpi: Kind | None = None
    mpi_version: Version | None = None
    set: dict[str, str] = {}
    allow: tuple[Name, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """How its recipe differs from the one that it extends: values for keys, as TOML."""
        both = {"torch": self.torch, "tensorflow": self.tensorflow}
        versions = {name: version for name, version in both.items() if version}
        mpi = {"kind": self.mpi, "package": self.mpi, "version": self.mpi_version}
        plain = {
            "python.version": f"=={self.python}.*",
            "horovod.frameworks": list(versions),
            **{f"frameworks.{name}.version": version for name, version in versions.items()},
            **{f"mpi.{key}": value for key, value in mpi.items() if value},
        }
        # Words and lists of words are the same in JSON and in TOML.
        return {**{key: json.dumps(value) for key, value in plain.items()}, **self.set}

    @property
    def recipe(self) -> str:
        """Its recipe, as text."""
        head = f'format = 1\nextends = "{self.base}"\nname = "{NAME}"\n'
        return head + "".join(f"{key} = {value}\n" for key, value in self.settings.items())


class _File(NamedTuple):
    wanted: tuple[Wanted, ...]


def all_wanted() -> tuple[Wanted, ...]:
    """All combinations, in the order in which they are tried."""
    return decode(_File, parse_toml(FILE.read_text(encoding="utf-8"))).wanted
