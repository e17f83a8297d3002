"""docs/generated/grid.md, made of the rows."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hvdenv.knowledge.grid import Row, options

PAGE = Path(__file__).parents[1] / "docs" / "grid.md"

_HEAD = """\
# The grid: combinations that were built and verified

{count} combinations were tried for real by `python -m grid.run`, each in an environment of its own and
without a wheel from before; {passed} of them were built and passed `hvdenv verify`. `hvdenv grid`
answers from the same rows, and `hvdenv check` says which is nearest to a recipe. This page is made from
`hvdenv/knowledge/grid.json`.

What "pass" says: on that machine two ranks got right numbers from every operation and the same
model from a training, with each framework under each controller. None of the machines had a GPU. Seconds
are those of a machine that had other work to do.
"""


def page(rows: Iterable[Row]) -> str:
    """The whole page."""
    rows = tuple(rows)
    passed = sum(row.verdict == "pass" for row in rows)
    lines = [_HEAD.format(count=len(rows), passed=passed)]
    if rows:
        common = set.intersection(*({*row.patches} for row in rows))
        machines = list(dict.fromkeys(_machine(row) for row in rows))
        lines += [f"Patches in all of them: {', '.join(sorted(common)) or 'none'}.", ""]
        lines += ["Machines, by the number in the last column:", ""]
        lines += [f"{number}. {each}" for number, each in enumerate(machines, 1)]
        lines += ["", *_table(rows, common, machines)]
        lines += ["", "## How to have them again", "", *_again(rows)]
    if failed := [row for row in rows if row.failure]:
        lines += ["", "## What failed", "", *_failures(failed)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _machine(row: Row) -> str:
    return f"{row.system}, {row.machine}, glibc {row.glibc}, {row.compiler}"


def _table(rows: Sequence[Row], common: set[str], machines: Sequence[str]) -> Iterator[str]:
    titles = (
        "row", "frameworks", "Python", "MPI", "CUDA", "Horovod", "further patches", "with",
        "over MPI", "over Gloo", "build", "verify", "date", "hvdenv", "machine",
    )  # fmt: skip
    yield _cells(titles)
    yield _cells(["---"] * len(titles))
    for row in rows:
        yield _cells(
            (
                row.name,
                ", ".join(f"{name} {version}" for name, version in row.frameworks.items()),
                row.python,
                f"{row.mpi} {row.mpi_version}",
                row.cuda or "none",
                row.horovod,
                ", ".join(sorted({*row.patches} - common)) or "none",
                ", ".join(f"{name} {version}" for name, version in row.packages.items()),
                _judged(row, "mpi"),
                _judged(row, "gloo"),
                f"{row.build_seconds:.0f} s",
                f"{row.verify_seconds:.0f} s" if row.verify_seconds else "",
                row.date,
                row.hvdenv,
                str(machines.index(_machine(row)) + 1),
            )
        )


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _judged(row: Row, controller: str) -> str:
    found = [each for each in row.judged if each.controller == controller]
    if row.verdict == "not built":
        return row.verdict
    return ", ".join(f"{each.framework} {each.status}" for each in found) or "not asked for"


def _again(rows: Sequence[Row]) -> Iterator[str]:
    yield "```console"
    for row in rows:
        yield f"$ {shlex.join(options(row))}    # {row.name}"
    yield "```"


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        assert row.failure
        cause = (
            f"{row.failure.cause} [{row.failure.signature}]"
            if row.failure.cause
            else "a cause that is not known"
        )
        yield f"### {row.name}"
        yield ""
        yield f"At {row.failure.step}: {cause}."
        yield ""
        yield "```text"
        yield from row.failure.lines
        yield "```"
        yield ""
