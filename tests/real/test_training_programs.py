"""Training programs on real ranks: right ones, and ones with mistakes planted.

Each run has several mistakes that do not hide each other. The layer `optin` plants each alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.conftest import Cli
from tests.real.training import mistakes_tensorflow, mistakes_torch
from tests.real.training.variants import Variant, judge, plant, prove

VARIANTS = {
    (each.program, each.name): each
    for lists in (mistakes_torch, mistakes_tensorflow)
    for each in (*lists.WRONG, *lists.RIGHT)
}
RUNS = {
    number: [each for each in VARIANTS.values() if each.run == number]
    for number in sorted({each.run for each in VARIANTS.values()} - {0})
}
# Parameters after five steps, written by the program itself.
FIFTH = Variant(
    "pytorch.py",
    "fifth",
    (
        ("for epoch in range(2):", "count = 0\nfor epoch in range(2):"),
        (
            "        optimizer.step()\n",
            "        optimizer.step()\n        count += 1\n        if count == 5:\n"
            "            import numpy\n            flat = [each.detach().numpy().ravel()"
            " for each in model.parameters()]\n"
            "            numpy.concatenate(flat).tofile(f'{sys.argv[1]}/fifth.{hvd.rank()}')\n",
        ),
    ),
)


@pytest.mark.parametrize("number", RUNS)
def test_planted_mistakes_are_found(
    cli: Cli, local_prefix: Path, tmp_path: Path, number: int
) -> None:
    variants = RUNS[number]
    done = prove(cli, plant(variants, tmp_path), *variants[0].options)
    judge(done.json["findings"], variants)
    assert done.returncode == any(each.status == "fail" and each.check for each in variants)


def test_a_right_program_computes_what_it_does_alone(
    cli: Cli, local_prefix: Path, tmp_path: Path
) -> None:
    launcher = "horovodrun-gloo"  # the runs above are mpirun's
    script = plant([FIFTH], tmp_path)
    done = prove(cli, script, "--launcher", launcher)
    findings = done.json["findings"]
    judge(findings, [])
    assert done.returncode == 0, findings
    passed = {each["check"]: each["message"] for each in findings if each["status"] == "pass"}
    assert "the mean of the ranks' own" in passed["program-gradients"]
    seen = [(tmp_path / f"fifth.{rank}").read_bytes() for rank in (0, 1)]
    words = ("run", "local", "-n", "2", "--launcher", launcher)
    cli(*words, "--", "python", str(script), str(tmp_path))
    alone = [(tmp_path / f"fifth.{rank}").read_bytes() for rank in (0, 1)]
    assert seen == alone
    assert seen[0] == seen[1] != b""
