"""Environments that hvdenv did not build are compared."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from tests.real.conftest import Cli

# Small, of pure Python, and nothing needs them to be compiled.
PACKAGES = ("six", "termcolor")


def test_two_environments_are_compared(cli: Cli, tmp_path: Path) -> None:
    """The interpreter of the tests is in a virtual environment that hvdenv did not build."""
    base = tmp_path / "venv"
    venv.create(base, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    words = ["--python", str(base / "bin/python"), "install", "--no-deps", *PACKAGES]
    subprocess.run([*pip, *words], check=True)
    assert cli("diff", str(base), str(base), "--exit-code").stdout.endswith("same\n")
    found = cli("diff", str(base), sys.prefix, "--json", "--exit-code", code=1).json
    kinds = {each["subject"]: each["kind"] for each in found["changes"]}
    assert {kinds["hypothesis"], kinds["pytest"]} == {"added"}
    assert kinds["termcolor"] == "removed"
