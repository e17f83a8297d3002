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
RUNS = (
    (
        "pytorch.py",
        "local rank to the sampler",
        "all ranks save",
        "own metric",
        "rate",
        "state loaded before wrapping",
        "as for ROCm",
    ),
    (
        "pytorch.py",
        "second optimizer",
        "local rank 0 saves",
        "uneven",
        "state broadcast after the parameters",
    ),
    (
        "pytorch.py",
        "no broadcast",
        "read too early",
        "no set_epoch",
        "sparse gradients",
        "clipped before synchronize()",
    ),
    (
        "pytorch.py",
        "clipped too early",
        "in a group",
        "another epoch",
        "decides by its own loss",
        "os._exit()",
        "tests before training",
        "loaded after the broadcast",
    ),
    (
        "pytorch.py",
        "sampler with a seed of its own",
        "schedule",
        "constants of its own",
        "averaged by hand",
        "workers",
        "a directory of its own",
    ),
    ("tensorflow2.py", "some variables left out", "local rank 0 saves", "own metric", "schedule"),
    ("keras_fit.py", "state lost"),
    ("keras_fit.py", "not wrapped", "local rank 0 saves", "own metrics", "rate", "resumed"),
)
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


@pytest.mark.parametrize("names", RUNS, ids=" and ".join)
def test_planted_mistakes_are_found(
    cli: Cli, local_prefix: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    program, *planted = names
    variants = [VARIANTS[program, name] for name in planted]
    done = prove(cli, plant(variants, tmp_path))
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
