"""The script of a plan, run without hvdenv, makes an environment that verify passes.

Not part of `make test`, since it compiles Horovod: `python -m pytest tests/optin/test_script_runs.py`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.real.conftest import Cli


def test_script_of_the_plan_makes_an_equivalent_environment(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home")
    words = ("--variant", "torch")
    script = tmp_path / "build.sh"
    script.write_text(cli("plan", "local", *words, "--format", "bash").stdout)
    folder = tmp_path / "made-by-script"
    subprocess.run(["bash", str(script), str(folder)], check=True, capture_output=True)
    report = cli(
        "verify",
        "--prefix",
        str(folder),
        "--framework",
        "torch",
        "--controller",
        "MPI",
        "--controller",
        "Gloo",
        "--quick",
        "--json",
    ).json
    assert report["verdict"] == "pass"
    shutil.rmtree(folder)
