"""Combinations of versions that were built and verified, and which of them is nearest to a recipe.

benchmarks/combinations.py makes the rows of combinations.json; docs/generated/combinations.md shows them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from packaging.version import Version as Parsed

from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import Pattern, decode
from hvdenv.knowledge.observables import minor
from hvdenv.model.facts import Facts
from hvdenv.model.recipe import Controller, Framework, Name, Recipe, Version
from hvdenv.reports.report import Status as FindingStatus

FILE = Path(__file__).with_suffix(".json")

FRAMEWORKS: tuple[Framework, ...] = ("torch", "tensorflow")
# CUDA of any version, and no CUDA.
ANY, NONE = "any", "none"

Date = Annotated[str, Pattern(r"\d{4}-\d\d-\d\d", "a date such as 2026-11-22")]
RowName = Annotated[str, Pattern(r"[a-z0-9][a-z0-9._-]*", "a name of a-z, 0-9, ., _ and -")]
Verdict = Literal["pass", "fail", "unproven", "error", "not built"]
Status = Literal["proven", "built", "failed", "never tried"]
Kind = Literal["openmpi", "mpich", "mvapich", "cray-mpich", "intel"]


class Judged(NamedTuple):
    """The worst finding of verify about a framework under a controller."""

    framework: Framework
    controller: Controller
    status: FindingStatus


class Failure(NamedTuple):
    """Where a row failed: a step of the build, or ``verify``.

    Attributes:
        lines: the first lines that look like an error, or the findings of verify.
    """

    step: str
    cause: str = ""
    signature: str = ""
    lines: tuple[str, ...] = ()


class Combination(NamedTuple):
    """Versions to build for. An empty value matches anything, and 2.6 matches every 2.6 release.

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


class TriedRow(NamedTuple):
    """One combination that was tried.

    Attributes:
        frameworks: versions as the frameworks themselves report them: 2.13.0+cpu.
        mpi, mpi_version: the implementation, from the package index.
        cuda: the toolkit that Horovod was built for; empty without CUDA.
        packages: versions of other packages that matter.
        verify_seconds: 0 if verify was not reached.
        settings: how its recipe differs from `base`: values for keys, as TOML.
        allow: blocking rules that the build went past.
        base: a shipped recipe.
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
    base: Name = "local"
    failure: Failure | None = None

    @property
    def combination(self) -> Combination:
        return Combination(
            torch=self.frameworks.get("torch", ""),
            tensorflow=self.frameworks.get("tensorflow", ""),
            python=self.python,
            cuda=self.cuda or NONE,
            mpi=self.mpi,
            mpi_version=self.mpi_version,
            horovod=self.horovod,
            machine=self.machine,
        )

    def __str__(self) -> str:
        """The row in one line."""
        frameworks = " and ".join(f"{name} {version}" for name, version in self.frameworks.items())
        cuda = f"CUDA {self.cuda}" if self.cuda else "no CUDA"
        return (
            f"{self.name}: {frameworks}, Python {self.python}, {self.mpi} {self.mpi_version}, {cuda}, "
            f"Horovod {self.horovod} ({self.verdict}, {self.date}, {self.system})"
        )


class Answer(NamedTuple):
    """What the rows say of a combination.

    Attributes:
        status: ``built`` says that nothing failed, but not everything could be proven there.
        rows: of this combination, the proven ones first.
        below, above: the nearest proven rows; None if this one is proven.
    """

    status: Status
    rows: tuple[TriedRow, ...] = ()
    below: TriedRow | None = None
    above: TriedRow | None = None


def read(text: str) -> tuple[TriedRow, ...]:
    """The rows of the data file.

    Raises:
        ValueError: the text is not JSON, or a value does not fit (Problem).
    """
    return decode(dict[str, tuple[TriedRow, ...]], json.loads(text))["rows"]


@lru_cache(maxsize=1)
def all_rows() -> tuple[TriedRow, ...]:
    """The rows that ship with hvdenv."""
    return read(read_text(FILE, OWN))


_STATUS: dict[Verdict, Status] = {
    "pass": "proven",
    "unproven": "built",
    "fail": "failed",
    "error": "failed",
    "not built": "failed",
}


def ask(asked: Combination, rows: Sequence[TriedRow]) -> Answer:
    """Whether a combination was tried and passed, and which proven rows are nearest."""
    order = [*_STATUS]
    found = [row for row in rows if not differences(asked, row)]
    found.sort(key=lambda row: order.index(row.verdict))
    status = _STATUS[found[0].verdict] if found else "never tried"
    if status == "proven":
        return Answer(status, tuple(found))
    frameworks = {name for name in FRAMEWORKS if getattr(asked, name)}
    proven = [row for row in rows if row.verdict == "pass" and frameworks <= {*row.frameworks}]
    # Implementations of MPI have no order: rows of another one count only if this one has none.
    alike = [row for row in proven if asked.mpi in ("", row.mpi)] or proven
    places = [(_place(asked, row.combination), row) for row in alike]
    at = _place(asked, asked)
    below = max((each for each in places if each[0] <= at), key=itemgetter(0), default=None)
    above = min((each for each in places if each[0] > at), key=itemgetter(0), default=None)
    return Answer(status, tuple(found), below and below[1], above and above[1])


def differences(asked: Combination, row: TriedRow) -> tuple[str, ...]:
    """The fields in which a row differs from a combination."""
    fields = zip(Combination._fields, asked, row.combination, strict=True)
    return tuple(name for name, wanted, value in fields if not _agrees(wanted, value))


def _agrees(asked: str, value: str) -> bool:
    """Whether a value of a row matches: 2.6.1 and 2.6.0+cu124 match 2.6."""
    if asked == ANY:
        return value != NONE
    return not asked or asked == value or f"{value.partition('+')[0]}.".startswith(f"{asked}.")


def _place(asked: Combination, found: Combination) -> tuple[Parsed, ...]:
    """What orders combinations by the versions that are asked for."""
    names = (*FRAMEWORKS, "python", "horovod", "mpi_version")
    pairs = [(getattr(asked, name), getattr(found, name)) for name in names if getattr(asked, name)]
    return tuple(Parsed(wanted if _agrees(wanted, value) else value) for wanted, value in pairs)


def combination_of(
    recipe: Recipe, versions: Mapping[str, Version], python: str, facts: Facts
) -> Combination | None:
    """The combination of a recipe with these versions of frameworks and Python, on a machine.

    None if rows say nothing of it: they build Horovod from source for frameworks of pip.
    """
    providers = {recipe.frameworks[name].provider for name in recipe.horovod.frameworks}
    if recipe.horovod.provider != "source" or providers != {"pip"}:
        return None
    mpi = recipe.mpi if "mpi" in recipe.horovod.controllers else None
    toolkit = facts.nvcc.version if facts.nvcc else ""
    return Combination(
        torch=versions.get("torch", ""),
        tensorflow=versions.get("tensorflow", ""),
        python=minor(python),
        cuda=(toolkit or ANY) if recipe.horovod.gpu else NONE,
        mpi=mpi.kind if mpi else "",
        mpi_version=minor(mpi.version or "") if mpi else "",
        horovod=recipe.horovod.version,
        machine=facts.machine,
    )


_SENTENCES: dict[Status, str] = {
    "proven": "was built and verified",
    "built": "was built, but not everything could be proven",
    "failed": "was tried and failed",
    "never tried": "was never tried",
}


def summary(asked: Combination, answer: Answer) -> Iterator[str]:
    """An answer, line by line."""
    yield f"this combination of versions {_SENTENCES[answer.status]}"
    for row in answer.rows:
        yield f"  {row}"
        if row.failure:
            yield f"    failed at {row.failure.step}: {row.failure.cause or 'unknown cause'}"
    for side, nearest in (("below", answer.below), ("above", answer.above)):
        if nearest:
            differing = ", ".join(differences(asked, nearest))
            yield f"  nearest verified combination {side} (differs in {differing}):"
            yield f"    {nearest}"
