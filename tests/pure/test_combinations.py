"""Combinations of versions: their data, which one is nearest, and the script that makes the rows."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import combinations as script
from benchmarks.combinations import all_wanted
from docs import reference
from hvdenv.base.schema import Problem, encode
from hvdenv.knowledge import combinations
from hvdenv.knowledge.combinations import (
    Combination,
    Failure,
    Judged,
    TriedRow,
    all_rows,
    ask,
    combination_of,
)
from hvdenv.knowledge.failures import all_failures
from hvdenv.knowledge.patches import all_patches
from hvdenv.knowledge.rules import all_rules
from hvdenv.model.facts import Facts, Tool
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Gpu, Recipe
from tests.support.commands import Hvdenv
from tests.support.files import write

ROOT = Path(__file__).parents[2]
PASSED = (Judged("torch", "mpi", "pass"), Judged("torch", "gloo", "pass"))


def row(
    name: str = "one", torch: str = "2.6.0+cu124", python: str = "3.12.1", **other: Any
) -> TriedRow:
    known: dict[str, Any] = {
        "date": "2026-11-22",
        "hvdenv": "0.1.0",
        "horovod": "0.28.1",
        "frameworks": {"torch": torch},
        "mpi": "openmpi",
        "mpi_version": "4.1.8",
        "cuda": "",
        "patches": ("torch-cxx17",),
        "packages": {"numpy": "2.1.0"},
        "compiler": "g++ 12.2.0",
        "glibc": "2.36",
        "system": "Debian GNU/Linux 12",
        "machine": "x86_64",
        "build_seconds": 200.0,
        "verify_seconds": 60.0,
        "verdict": "pass",
        "judged": PASSED,
        "settings": {"packages.numpy": '"<2"'},
    }
    return TriedRow(name=name, python=python, **{**known, **other})


ROWS = (
    row("old", "2.1.2", "3.9.18"),
    row("new", "2.8.0", "3.12.1"),
    row("newest", "2.13.0+cpu", "3.11.7"),
    row("mpich", "2.13.0+cpu", "3.11.7", mpi="mpich", mpi_version="4.3.2"),
    row("broken", "2.14.0", verdict="not built", judged=(), failure=Failure("wheel", "no C++17")),
    row("half", "2.11.0", cuda="13.0", verdict="unproven", judged=()),
    row("keras", frameworks={"torch": "2.13.0", "tensorflow": "2.15.1"}, python="3.10.13"),
)


CASES = json.loads((ROOT / "tests/cases/combinations.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["asked"]))
def test_which_rows_answer(case: dict[str, Any]) -> None:
    answer = ask(Combination(**case["asked"]), ROWS)
    nearest = [each.name if each else "" for each in (answer.below, answer.above)]
    assert [answer.status, *nearest] == [case["status"], case["below"], case["above"]]
    assert [each.name for each in answer.rows] == case["rows"]


@pytest.mark.parametrize(
    ("changes", "nvcc", "differing"),
    [
        ({}, "", {}),
        ({"gpu": Gpu(operations="nccl")}, "", {"cuda": "any"}),
        ({"gpu": Gpu(operations="nccl")}, "13.0", {"cuda": "13.0"}),
        ({"controllers": ("gloo",)}, "", {"mpi": "", "mpi_version": ""}),
    ],
)
def test_the_combination_of_a_recipe(
    recipe: Recipe, facts: Facts, changes: dict[str, Any], nvcc: str, differing: dict[str, str]
) -> None:
    versions = {"horovod": "0.28.1", "torch": "2.13.0", "tensorflow": "2.15.1"}
    changed = recipe._replace(horovod=recipe.horovod._replace(**changes))
    here = facts._replace(nvcc=Tool("/cuda/bin/nvcc", nvcc) if nvcc else None)
    plain = Combination("2.13.0", "2.15.1", "3.11", "none", "openmpi", "4.1", "0.28.1", "x86_64")
    assert combination_of(changed, versions, "3.11.7", here) == plain._replace(**differing)


def test_the_data_is_strict() -> None:
    assert combinations.read(json.dumps({"rows": encode(ROWS)})) == ROWS
    for wrong in ({"colour": "red"}, {"date": "yesterday"}, {"frameworks": {"mxnet": "1.9"}}):
        with pytest.raises(Problem):
            combinations.read(json.dumps({"rows": [{**encode(ROWS[0]), **wrong}]}))


def test_the_rows_that_ship() -> None:
    patches, rules = {each.name for each in all_patches()}, {rule.id for rule in all_rules()}
    known = {each.name: each for each in all_wanted()}
    assert len({each.name for each in all_rows()}) == len(all_rows())
    for each in all_rows():
        expected = product(each.frameworks, ("mpi", "gloo"))
        judged = {(one.framework, one.controller): one.status for one in each.judged}
        if each.verdict == "pass":
            assert each.failure is None and judged == dict.fromkeys(expected, "pass")
        assert (each.verdict == "not built") == (each.verify_seconds == 0)
        assert each.failure or each.verdict in ("pass", "unproven")
        assert {*each.patches} <= patches and {*each.allow} <= rules
        assert each.settings == known[each.name].settings


def test_the_page_has_every_row() -> None:
    text = reference.combinations((*ROWS, row("allowed", allow=("numpy-2-with-old-torch",))))
    for each in ROWS:
        assert each.name in text and all(version in text for version in each.frameworks.values())
    assert "At wheel: no C++17" in text and "torch pass" in text and "not built" in text
    options = "--set 'packages.numpy=\"<2\"' --allow numpy-2-with-old-torch"
    assert f"$ hvdenv build local {options}    # allowed" in text


def test_check_reports_the_combination(
    monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv, cases: Path
) -> None:
    def check(*words: str) -> dict[str, Any]:
        facts = ("--facts", str(cases / "facts.json"))
        found: dict[str, Any] = json.loads(hvdenv("check", *words, *facts, "--json").out)
        return found

    assert check("local-cuda")["combination"]["status"] == "built"
    # Its frameworks are not those of the index.
    assert "combination" not in check("neuron")
    torch = ("local", "--variant", "torch")
    monkeypatch.setattr("hvdenv.cli.check.all_rows", lambda: ROWS)
    assert check(*torch)["combination"]["status"] == "proven"
    monkeypatch.setattr("hvdenv.cli.check.all_rows", lambda: ROWS[1:2])
    told = hvdenv("check", *torch, "--facts", str(cases / "facts.json")).out
    assert "never tried" in told and "nearest verified combination below (differs in torch" in told


# ---------------------------------------------------------------- the script

TORCH = ("1.12", "1.13", "2.0", "2.1", "2.4", "2.6", "2.8", "2.13", "2.15")
TENSORFLOW = ("2.10", "2.11", "2.12", "2.13", "2.15", "2.16", "2.18", "2.20", "2.21")


def test_wanted_combinations(tmp_path: Path) -> None:
    wanted = all_wanted()
    assert len({each.name for each in wanted}) == len(wanted) >= 16
    for versions, listed in (
        ([each.torch for each in wanted], TORCH),
        ([each.tensorflow for each in wanted], TENSORFLOW),
    ):
        assert {".".join(each.split(".")[:2]) for each in versions if each} >= {*listed}
    assert {each.python for each in wanted} >= {"3.8", "3.9", "3.10", "3.11", "3.12", "3.13"}
    assert {each.mpi for each in wanted} >= {None, "openmpi", "mpich"}
    for one in wanted:
        recipe = load_recipe(str(write(tmp_path / "one.toml", one.recipe))).recipe
        frameworks = {"torch": one.torch, "tensorflow": one.tensorflow}
        assert {*recipe.horovod.frameworks} == {name for name, each in frameworks.items() if each}
        assert one.mpi is None or (recipe.mpi and recipe.mpi.package == one.mpi)


def test_failures_that_are_the_machines_fault_exist() -> None:
    known = all_failures()
    assert {each.id for each in (*known.events, *known.causes)} >= script.MACHINES_FAULT
