"""Every shipped recipe, on a machine that has Python and coreutils and is of no cluster."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from hvdenv.model.layers import Resolved, load_recipe
from tests.commands import Hvdenv
from tests.shipped import CHOICES


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with nothing but Python and coreutils, in a shell that knows no modules."""
    listed = (
        "basename cat chmod cp cut date dirname env head ls mkdir mv rm sort stat tail tr uname"
    )
    for program in listed.split():
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    (tmp_path / "python3").symlink_to(sys.executable)
    # Some recipes need these.
    for minor in ("3.10", "3.12"):
        python = tmp_path / f"python{minor}"
        python.write_text(f"#!/bin/sh\necho {minor}.9 True True\n")
        python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in [*os.environ]:
        if name.startswith(("LMOD", "MODULE", "SLURM", "PBS", "LSB", "COBALT")):
            monkeypatch.delenv(name)


def machine_of(resolved: Resolved) -> str:
    partition = resolved.recipe.partition
    return partition.arch if partition else os.uname().machine


@pytest.mark.parametrize(("name", "variant"), CHOICES)
@pytest.mark.usefixtures("bare")
def test_what_builds_nothing_works_on_any_machine(name: str, variant: str, hvdenv: Hvdenv) -> None:
    resolved = load_recipe(name, variants=[variant] if variant else [])
    words = (name, *(("--variant", variant) if variant else ()))
    clusters = resolved.recipe.scheduler is not None

    # Without a cluster, a compiler must be here.
    checked = json.loads(hvdenv("check", *words, "--json", code=(0 if clusters else 3)).out)
    blocking = {each["id"] for each in checked["findings"] if each["severity"] == "block"}
    # local-cuda names a directory that not every machine has, and the Python here may have no headers.
    assert blocking - {"folder-is-missing", "python-incomplete"} == (
        set() if clusters else {"no-compiler"}
    )
    assert not clusters or not blocking
    assert ("modules_not_examined" in checked) == (resolved.recipe.modules is not None)

    text = hvdenv("plan", *words, "--json").out
    plan, machine = json.loads(text), machine_of(resolved)
    assert plan["facts"]["machine"] == machine
    assert plan["facts"]["origin"] == ("declared" if clusters else "observed")
    assert "-mavx" not in text or machine == "x86_64"

    if clusters:
        account = ("--account", "a") if "account" in resolved.recipe.job.requires else ()
        assert "python train.py" in hvdenv("job", *words, *account, "--", "python", "train.py").out
    assert "python train.py" in hvdenv("run", *words, "--dry-run", "--", "python", "train.py").out
