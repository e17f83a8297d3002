"""Read the table that ``horovodrun --check-build`` prints.

There are two forms: up to Horovod 0.18.2 the third section has a row MLSL, since 0.19.0 a row
CCL. Frameworks and ``--verbose`` print lines of their own around the table.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hvdenv.masking import plain

_SECTIONS: dict[str, tuple[list[str], ...]] = {
    "Available Frameworks": (["TensorFlow", "PyTorch", "MXNet"],),
    "Available Controllers": (["MPI", "Gloo"],),
    "Available Tensor Operations": (
        ["NCCL", "DDL", "CCL", "MPI", "Gloo"],
        ["NCCL", "DDL", "MLSL", "MPI", "Gloo"],
    ),
}
# The rows of frameworks, by the names of their modules.
ROWS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "mxnet": "MXNet"}
_TITLE = re.compile(r"\s*Horovod v(?P<version>\d+\.\d[\w.+!-]*):\s*")
_SECTION = re.compile(r"\s*(?P<name>Available \w+(?: \w+)*):\s*")
_ROW = re.compile(r"\s*\[(?P<mark>.?)\] (?P<name>\w+)\s*")


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
        ValueError: the table is not whole; the message says what is missing.
    """
    version, sections = "", list[str]()
    rows: list[list[tuple[str, str]]] = [[]]
    for line in plain(text).split("\n"):
        if not version and (title := _TITLE.fullmatch(line)):
            version = title["version"]
        elif section := _SECTION.fullmatch(line):
            sections.append(section["name"])
            rows.append([])
        elif row := _ROW.fullmatch(line):
            rows[-1].append((row["name"], row["mark"]))
    if not version:
        raise ValueError("the line `Horovod v...:` is missing" if text.strip() else "no output")
    if sections != list(_SECTIONS) or rows[0]:
        raise ValueError(f"its sections are {', '.join(sections) or 'missing'}")
    for (name, known), found in zip(_SECTIONS.items(), rows[1:], strict=True):
        if [row for row, _ in found] not in known or any(mark not in "X " for _, mark in found):
            shown = ", ".join(f"[{mark}] {row}" for row, mark in found)
            raise ValueError(f"the rows under {name} are {shown or 'missing'}")
    return CheckBuild(version, *({row: mark == "X" for row, mark in each} for each in rows[1:]))
