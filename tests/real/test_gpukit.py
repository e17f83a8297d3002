"""The GPU kit's cases on real ranks, in the host's memory: the program is right, the GPU is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdenv.base.command import Command
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation

CASES = Path(__file__).parents[2] / "gpukit/cuda_cases.py"


@pytest.mark.needs("openssh-client")  # mpirun of Open MPI 4 does not start without it
def test_the_cases_of_the_gpu_kit(original: Installation, runner: Runner) -> None:
    words = (
        "mpirun",
        "-np",
        "2",
        "--bind-to",
        "none",
        "--oversubscribe",
        original.python,
        str(CASES),
    )
    root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    mpirun = original.program("mpirun") or words[0]
    outcome = runner.run(
        Command((mpirun, *words[1:]), tuple((name, "1") for name in root), timeout=300)
    )
    assert outcome, outcome.tail()
    found = [json.loads(line) for line in outcome.output.splitlines() if line.startswith("{")]
    assert {(each["case"], each["rank"]) for each in found if each["status"] == "pass"} == {
        (case, rank)
        for case in (
            "gradients",
            "splits_on_the_device",
            "another_stream",
            "half_precision",
            "mixed_places",
        )
        for rank in (0, 1)
    }
    assert {each["case"] for each in found if each["status"] == "skip"} == {"sync_batch_norm"}
