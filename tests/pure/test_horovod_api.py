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


def test_the_list_is_complete_and_a_name_that_is_exercised_is_called() -> None:
    names, page, listed = called(), horovod_api.page(), set[str]()
    for group in horovod_api.groups():
        assert group.how and group.names and group.modules
        if group.exercised != "no" and not set(group.modules) <= set(PROGRAMS):
            listed |= set(group.names)
    assert listed
    assert all(f"`{name}`" in page for name in listed)
    missing = {name for name in listed if name.split(".")[-1] not in names}
    # They are made of the names of what is built.
    assert {name for name in missing if not name.endswith("_built")} == set()
    pairs = [pair for group in horovod_api.groups() for pair in sorted(horovod_api.known([group]))]
    assert len(set(pairs)) == len(pairs)
