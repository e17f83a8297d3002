"""The GPU kit's stages: what run.py starts, and what counts as right."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

KIT = Path(__file__).parents[2] / "gpukit"


@pytest.fixture
def kit(tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpukit_run", KIT / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.KIT = tmp_path  # type: ignore[attr-defined]
    return module


def stages(kit: ModuleType, gpus: int) -> dict[str, tuple[list[str], int, tuple[int, ...]]]:
    return {name: (words, seconds, right) for name, words, seconds, right in kit.stages("/o", gpus)}


@pytest.mark.parametrize(
    ("gpus", "unproven", "right"),
    [
        (0, ["NCCL in torch"], True),
        (1, ["NCCL in torch"], True),
        (2, ["process sets, torch over MPI"], True),
        (2, ["process sets, torch over MPI", "NCCL in torch"], False),
        (3, ["process sets, torch over MPI"], False),
    ],
)
def test_what_may_be_unproven_with_so_many_gpus(
    kit: ModuleType, tmp_path: Path, gpus: int, unproven: list[str], right: bool
) -> None:
    report = tmp_path / "nccl.json"
    findings = [{"status": "unproven", "subject": each} for each in unproven]
    report.write_text(json.dumps({"findings": [{"status": "pass", "subject": "x"}, *findings]}))
    codes = stages(kit, max(gpus, 1))["nccl"][2]
    assert kit.is_right(7, codes, report, gpus) == right
    assert kit.is_right(0, codes, report, gpus)
    assert not kit.is_right(1, codes, report, gpus)


@pytest.mark.parametrize(("gpus", "shared"), [(1, "3"), (2, "3"), (8, "8")])
def test_nccl_has_a_gpu_for_each_rank_and_sharing_has_ranks_for_process_sets(
    kit: ModuleType, gpus: int, shared: str
) -> None:
    found = stages(kit, gpus)
    ranks = {
        name: words[words.index("-n") + 1] for name, (words, *_) in found.items() if "-n" in words
    }
    assert ranks == {"nccl": str(gpus), "shared-gpu": shared, "bench": str(gpus)}
    assert found["shared-gpu"][2] == (0,)


def test_the_tests_of_horovod_run_only_where_the_kit_has_them(kit: ModuleType) -> None:
    assert "horovod-tests" not in stages(kit, 1)
    (kit.KIT / "test").mkdir()
    (kit.KIT / "horovod_tests.txt").write_text((KIT / "horovod_tests.txt").read_text())
    assert "test_horovod_sync_batch_norm" in stages(kit, 1)["horovod-tests"][0][-1]


def test_a_stage_that_hangs_is_ended(kit: ModuleType, tmp_path: Path) -> None:
    assert kit.run_stage(tmp_path, "slow", ["sleep", "60"], 0.2) == 124
    assert kit.run_stage(tmp_path, "quick", ["sh", "-c", "echo out; echo err >&2; exit 7"], 20) == 7
    assert (tmp_path / "quick.json").read_text() == "out\n"
    assert (tmp_path / "quick.log").read_text() == "err\n"


def test_the_page_and_the_program_name_the_same_stages(kit: ModuleType) -> None:
    (kit.KIT / "test").mkdir()
    (kit.KIT / "horovod_tests.txt").write_text("test_a\n")
    page = (KIT.parent / "docs/how-to/prove-the-gpu-path.md").read_text(encoding="utf-8")
    table = page.split("| stage |")[1].split("\n\n")[0]
    assert set(
        re.findall(r"`([a-z-]+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:]))
    ) == set(stages(kit, 1))
