"""The GPU kit made for real and run without a network, beside the torch of local-cuda.

Needs Python 3.12 and a CUDA 13 toolkit. Without a GPU the stages run in the host's memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdenv.base.places import find_places

ROOT = Path(__file__).parents[2]


def test_the_kit_runs_without_a_network(tmp_path: Path) -> None:
    if not shutil.which("nvcc", path="/usr/local/cuda/bin"):
        pytest.skip("there is no CUDA toolkit at /usr/local/cuda")
    archive = tmp_path / "gpu-kit.tar.gz"
    subprocess.run([sys.executable, "gpukit/make.py", str(archive)], check=True, cwd=ROOT)
    assert archive.stat().st_size < 50_000_000
    subprocess.run(["tar", "xf", str(archive)], check=True, cwd=tmp_path)
    python = find_places().envs / "local-cuda" / "venv/bin/python"
    words = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    words += [str(python), "gpu-kit/run.py", "reports"]
    code = subprocess.run(words, check=False, cwd=tmp_path).returncode
    summary = json.loads((tmp_path / "reports/summary.json").read_text())
    statuses = {stage["stage"]: stage["status"] for stage in summary["stages"]}
    if not summary["gpus"]:
        assert (code, set(statuses.values())) == (7, {"unproven"}), summary
    assert "fail" not in statuses.values(), summary
    assert all(stage["why"] for stage in summary["stages"] if stage["status"] == "unproven")
    assert not any("not run" in stage["why"] for stage in summary["stages"]), summary
