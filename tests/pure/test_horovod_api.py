"""The list of Horovod's public names is true of the programs that ranks run."""

from __future__ import annotations

import ast

from docs import horovod_api
from hvdenv import INSPECT_PROGRAMS, RANK_PROGRAMS
from hvdenv.verification.verify import EXERCISES
from tests.standalone import load

CASES = load("collective_cases")
# What every rank runs, besides its exercises.
COMMON = ("rank_work", "context", "allreduce", "datapath", "gpus")
# Launchers of hvdenv write these arguments, not the programs of ranks.
PROGRAMS = ("horovodrun",)


def called() -> set[str]:
    """Names in the syntax trees of programs, and those that cases of operations are made of."""
    files = [RANK_PROGRAMS / f"{name}.py" for name in (*COMMON, *EXERCISES, "collective_cases")]
    found: set[str] = set()
    for path in (*files, INSPECT_PROGRAMS / "extension.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    for _, batches in CASES.operations(3):
        cases = [case for batch in batches for case in batch]
        names = {CASES.function_of(case) for case in cases}
        found |= names | {f"{name}_async" for name in names}
    return found


EXERCISED = [
    (module, name)
    for group in horovod_api.groups()
    for module in group.modules
    for name in group.names
    if group.exercised != "no" and module not in PROGRAMS
]


def test_a_name_that_is_exercised_is_called() -> None:
    names = called()
    listed = {name for _, name in EXERCISED}
    assert listed
    missing = {name for name in listed if name.split(".")[-1] not in names}
    built = {name for name in missing if name.endswith("_built")}  # NAME_built, for each NAME
    assert missing - built == set()


def test_no_name_is_listed_twice() -> None:
    pairs = [pair for group in horovod_api.groups() for pair in sorted(horovod_api.known([group]))]
    assert len(set(pairs)) == len(pairs)


def test_each_name_says_how_or_why() -> None:
    for group in horovod_api.groups():
        assert group.how and group.names and group.modules
    page = horovod_api.page()
    assert all(f"`{name}`" in page for _, name in EXERCISED)
