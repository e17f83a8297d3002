"""Read the table that ``horovodrun --check-build`` prints.

There are two forms: up to Horovod 0.18.2 the third section has a row MLSL, since 0.19.0 a row
CCL. Frameworks and ``--verbose`` print lines of their own around the table.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hvdenv.errors import CheckBuildError
from hvdenv.masking import plain

_SECTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Available Frameworks": (("TensorFlow", "PyTorch", "MXNet"),),
    "Available Controllers": (("MPI", "Gloo"),),
    "Available Tensor Operations": (
        ("NCCL", "DDL", "CCL", "MPI", "Gloo"),
        ("NCCL", "DDL", "MLSL", "MPI", "Gloo"),
    ),
}
# The rows of frameworks, by the names of their modules.
ROWS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "mxnet": "MXNet"}
_TITLE = re.compile(r"\s*Horovod v(?P<version>\d+\.\d[\w.+!-]*):\s*")
_SECTION = re.compile(r"\s*(?P<name>Available \w+(?: \w+)*):\s*")
_ROW = re.compile(r"\s*\[(?P<mark>.?)\] (?P<name>\w+)\s*")
_REMEDY = (
    "run `PYTHONUNBUFFERED=1 horovodrun --verbose --check-build` with the environment's own"
    " horovodrun, and report its whole output"
)


class CheckBuild(NamedTuple):
    """What was built according to ``horovodrun --check-build``: evidence, not proof.

    Attributes:
        tensor_operations: ``NCCL``, ``DDL``, ``CCL`` (``MLSL`` up to 0.18.2), ``MPI``, ``Gloo``.
    """

    version: str
    frameworks: dict[str, bool]
    controllers: dict[str, bool]
    tensor_operations: dict[str, bool]


def parse(text: str) -> CheckBuild:
    """The table in an output of ``horovodrun --check-build``, of any Horovod.

    Other lines before, in and after the table are ignored.

    Raises:
        CheckBuildError: the text is not one whole table: a title, a section or a row
            is missing, cut, unknown, out of order or there twice.
    """
    version = ""
    tables: list[tuple[str, dict[str, bool]]] = []
    for number, line in enumerate(plain(text).split("\n"), 1):
        if title := _TITLE.fullmatch(line):
            if version:
                raise _error("a second title line", number)
            version = title["version"]
        elif section := _SECTION.fullmatch(line):
            tables.append((section["name"], {}))
        elif row := _ROW.fullmatch(line):
            _take_row(tables, row, number)
    if not version:
        raise _error(
            "the line `Horovod v...:` is missing" if text.strip() else "there is no output"
        )
    _require_whole(tables)
    return CheckBuild(version, *(rows for _, rows in tables))


def _take_row(tables: list[tuple[str, dict[str, bool]]], row: re.Match[str], number: int) -> None:
    if not tables:
        raise _error(f"the row {row['name']} is before any section", number)
    name, rows = tables[-1]
    if row["name"] in rows:
        raise _error(f"the row {row['name']} is twice under {name}", number)
    if row["mark"] not in ("X", " "):
        raise _error(f"the mark of the row {row['name']} is neither [X] nor [ ]", number)
    rows[row["name"]] = row["mark"] == "X"


def _require_whole(tables: list[tuple[str, dict[str, bool]]]) -> None:
    for (name, known), (found, rows) in zip(_SECTIONS.items(), tables, strict=False):
        if found != name:
            raise _error(f"the section {found} is where {name} should be")
        if tuple(rows) not in known:
            got = ", ".join(rows) or "none"
            raise _error(f"the rows under {name} are {got}; they should be {', '.join(known[0])}")
    if len(tables) != len(_SECTIONS):
        raise _error(f"{len(tables)} sections instead of {len(_SECTIONS)}")


def _error(what: str, line: int = 0) -> CheckBuildError:
    return CheckBuildError(
        f"this is not a complete output of horovodrun --check-build: {what}",
        where=f"line {line}" if line else "",
        remedy=_REMEDY,
    )
