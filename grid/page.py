"""The grid as a page of the documentation."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from hvdenv.knowledge.grid import Row, options

_HEAD = """\
# Combinations that were built and verified

`python -m grid.run` tried {count} combinations of versions, each in a new environment and without cached
wheels. {passed} of them built and passed `hvdenv verify`. `hvdenv check` uses the same data,
`hvdenv/knowledge/grid.json`.

"pass" means: on that machine, two ranks got correct results from every operation and the same model
from a training run, with each framework under each controller. None of the machines had a GPU. Times
are from machines that were also doing other work.
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
        lines += ["", "## Reproduce them", "", *_again(rows)]
    if suites := [row for row in rows if row.suite]:
        lines += ["", "## Horovod's own tests", "", *_suites(suites)]
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


def _suites(rows: Sequence[Row]) -> Iterator[str]:
    yield "[`hvdenv verify --suite`](../explanation/how-verify-proves.md#horovods-own-tests) on two ranks:"
    yield ""
    yield _cells(("row", "tests", "passed", "skipped", "known to fail", "new failures", "date"))
    yield _cells(["---"] * 7)
    for row in rows:
        for each in row.suite:
            new = [f"`{test}`" for test in each.new] or ["none"]
            new += [each.problem] if each.problem else []
            numbers = (str(each.passed), str(each.skipped), str(each.known))
            yield _cells((row.name, each.subject, *numbers, ", ".join(new), row.date))


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        assert row.failure
        cause = (
            f"{row.failure.cause} [{row.failure.signature}]"
            if row.failure.cause
            else "an unknown cause"
        )
        yield f"### {row.name}"
        yield ""
        yield f"At {row.failure.step}: {cause}."
        yield ""
        yield "```text"
        yield from row.failure.lines
        yield "```"
        yield ""
