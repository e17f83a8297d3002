"""Combinations of versions that were built and verified, and which of them is nearest to a recipe.

benchmarks/combinations.py makes the rows of combinations.json; docs/generated/combinations.md shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from packaging.version import Version as Parsed

from hvdenv.knowledge.observables import minor
from hvdenv.model.facts import Facts
from hvdenv.model.recipe import Controller, Framework, Name, Recipe, Version
from hvdenv.reading import OWN, read_text
from hvdenv.reports.report import Status
from hvdenv.schema import Pattern, decode

FILE = Path(__file__).with_suffix(".json")

FRAMEWORKS: tuple[Framework, ...] = ("torch", "tensorflow")
# CUDA of any version, and no CUDA.
ANY, NONE = "any", "none"

Date = Annotated[str, Pattern(r"\d{4}-\d\d-\d\d", "a date such as 2026-11-22")]
RowName = Annotated[str, Pattern(r"[a-z0-9][a-z0-9._-]*", "a name of a-z, 0-9, ., _ and -")]
Verdict = Literal["pass", "fail", "unproven", "error", "not built"]
Kind = Literal["openmpi", "mpich", "mvapich", "cray-mpich", "intel", "spectrum"]


class Judged(NamedTuple):
    """The worst finding of verify about a framework under a controller."""

    framework: Framework
    controller: Controller
    status: Status


class Failure(NamedTuple):
    """Where a row failed: a step of the build, or ``verify``.

    Attributes:
        lines: the first lines that look like an error, or the findings of verify.
    """

    step: str
    cause: str = ""
    signature: str = ""
    lines: tuple[str, ...] = ()


class Row(NamedTuple):
    """One combination that was tried.

    Attributes:
        frameworks: versions as the frameworks themselves report them: 2.13.0+cpu.
        mpi, mpi_version: the implementation, from the package index.
        cuda: the toolkit that Horovod was built for; empty without CUDA.
        packages: versions of other packages that matter.
        verify_seconds: 0 if verify was not reached.
        settings: how its recipe differs from `local`: values for keys, as TOML.
        allow: blocking rules that the build went past.
    """

    name: RowName
    date: Date
    hvdenv: str
    horovod: Version
    python: Version
    frameworks: dict[Framework, Version]
    mpi: Kind
    mpi_version: Version
    cuda: str
    patches: tuple[Name, ...]
    packages: dict[str, str]
    compiler: str
    glibc: str
    system: str
    machine: str
    build_seconds: float
    verify_seconds: float
    verdict: Verdict
    judged: tuple[Judged, ...]
    settings: dict[str, str]
    allow: tuple[str, ...] = ()
    failure: Failure | None = None


class Table(NamedTuple):
    """The data file."""

    rows: tuple[Row, ...]


class Asked(NamedTuple):
    """The combination of a recipe. An empty value matches anything, and 2.6 matches every 2.6 release.

    Attributes:
        cuda: a version, ``any`` or ``none``.
    """

    torch: str = ""
    tensorflow: str = ""
    python: str = ""
    cuda: str = ""
    mpi: str = ""
    mpi_version: str = ""
    horovod: str = ""
    machine: str = ""

    @property
    def frameworks(self) -> tuple[Framework, ...]:
        """The frameworks that have a version."""
        return tuple(name for name in FRAMEWORKS if getattr(self, name))


class Answer(NamedTuple):
    """What the rows say of a combination.

    Attributes:
        status: ``built`` says that nothing failed, but not everything could be proven there.
        rows: of this combination, the proven ones first.
        below, above: the nearest proven rows; None if this one is proven.
    """

    status: Literal["proven", "built", "failed", "never tried"]
    rows: tuple[Row, ...] = ()
    below: Row | None = None
    above: Row | None = None


def read(text: str) -> tuple[Row, ...]:
    """The rows of the data file.

    Raises:
        ValueError: the text is not JSON, or a value does not fit (Problem).
    """
    return decode(Table, json.loads(text)).rows


@lru_cache(maxsize=1)
def all_rows() -> tuple[Row, ...]:
    """The rows that ship with hvdenv."""
    return read(read_text(FILE, OWN))


def ask(asked: Asked, rows: Sequence[Row]) -> Answer:
    """Whether a combination was tried and passed, and which proven rows are nearest."""
    found = sorted(
        (row for row in rows if not differences(asked, row)), key=lambda row: _WORTH[row.verdict]
    )
    best = found[0].verdict if found else None
    if best == "pass":
        return Answer("proven", tuple(found))
    proven = [
        row for row in rows if row.verdict == "pass" and {*asked.frameworks} <= {*row.frameworks}
    ]
    # Implementations of MPI have no order: rows of another one count only if this one has none.
    alike = [row for row in proven if asked.mpi in ("", row.mpi)] or proven
    at = _place(asked)
    below = [row for row in alike if _place(asked, row) <= at]
    above = [row for row in alike if _place(asked, row) > at]
    status: Literal["built", "failed", "never tried"]
    status = "never tried" if best is None else "built" if best == "unproven" else "failed"
    return Answer(
        status,
        tuple(found),
        max(below, key=lambda row: _place(asked, row), default=None),
        min(above, key=lambda row: _place(asked, row), default=None),
    )


_WORTH: dict[Verdict, int] = {"pass": 0, "unproven": 1, "fail": 2, "error": 3, "not built": 4}


def differences(asked: Asked, row: Row) -> tuple[str, ...]:
    """The fields in which a row differs from a combination."""
    return tuple(
        name for name, value in _of(row).items() if not _agrees(getattr(asked, name), value)
    )


def _of(row: Row) -> dict[str, str]:
    """The values of a row by the fields of Asked."""
    return {
        "torch": row.frameworks.get("torch", ""), "tensorflow": row.frameworks.get("tensorflow", ""),
        "python": row.python, "cuda": row.cuda or NONE, "mpi": row.mpi,
        "mpi_version": row.mpi_version,
        "horovod": row.horovod, "machine": row.machine,
    }  # fmt: skip


def _agrees(asked: str, value: str) -> bool:
    """Whether a value of a row matches: 2.6.1 and 2.6.0+cu124 match 2.6."""
    if asked == ANY:
        return value != NONE
    return not asked or asked == value or f"{value.partition('+')[0]}.".startswith(f"{asked}.")


def _place(asked: Asked, row: Row | None = None) -> tuple[Any, ...]:
    """What orders rows by the versions that a combination has; without a row, its own place."""
    values = _of(row) if row else {}
    place = []
    for name in (*FRAMEWORKS, "python", "horovod", "mpi_version"):
        wanted = getattr(asked, name)
        if wanted:
            value = values.get(name, wanted)
            place.append(Parsed(wanted if _agrees(wanted, value) else value))
    return tuple(place)


def asked_of(recipe: Recipe, versions: Mapping[str, Version], python: str, facts: Facts) -> Asked:
    """The combination of a recipe with these versions of frameworks and Python, on a machine."""
    mpi = recipe.mpi if "mpi" in recipe.horovod.controllers else None
    toolkit = facts.nvcc.version if facts.nvcc else ""
    return Asked(
        torch=versions.get("torch", ""),
        tensorflow=versions.get("tensorflow", ""),
        python=minor(python),
        cuda=(toolkit or ANY) if recipe.horovod.gpu else NONE,
        mpi=mpi.kind if mpi else "",
        mpi_version=minor(mpi.version or "") if mpi else "",
        horovod=recipe.horovod.version,
        machine=facts.machine,
    )


def comparable(recipe: Recipe) -> bool:
    """Whether rows can say anything of a recipe: all build Horovod from source for pip's frameworks."""
    providers = {recipe.frameworks[name].provider for name in recipe.horovod.frameworks}
    return recipe.horovod.provider == "source" and providers == {"pip"}


def summary(row: Row) -> str:
    """A row in one line."""
    frameworks = " and ".join(f"{name} {version}" for name, version in row.frameworks.items())
    cuda = f"CUDA {row.cuda}" if row.cuda else "no CUDA"
    return (
        f"{row.name}: {frameworks}, Python {row.python}, {row.mpi} {row.mpi_version}, {cuda}, "
        f"Horovod {row.horovod} ({row.verdict}, {row.date}, {row.system})"
    )


_STATUS = {
    "proven": "was built and verified",
    "built": "was built, but not everything could be proven",
    "failed": "was tried and failed",
    "never tried": "was never tried",
}


def summary_of(asked: Asked, answer: Answer) -> Iterator[str]:
    """An answer, line by line."""
    yield f"this combination of versions {_STATUS[answer.status]}"
    for row in answer.rows:
        yield f"  {summary(row)}"
        if row.failure:
            yield f"    failed at {row.failure.step}: {row.failure.cause or 'unknown cause'}"
    for side, nearest in (("below", answer.below), ("above", answer.above)):
        if nearest:
            yield f"  nearest verified combination {side} (differs in {', '.join(differences(asked, nearest))}):"
            yield f"    {summary(nearest)}"
