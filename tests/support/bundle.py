"""hvdenv as a directory of wheels, as one carries it to a machine without internet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.workers import one_at_a_time

ROOT = Path(__file__).parents[2]


def make_bundle(folder: Path) -> Path:
    """Put the wheels of hvdenv and of all that it needs into a directory, unless it is there."""
    with one_at_a_time(folder):
        if not folder.exists():
            words = ["-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder), str(ROOT)]
            subprocess.run([sys.executable, *words], check=True, timeout=600)
    return folder


def install_from(bundle: Path, python: str, folder: Path) -> Path:
    """Install hvdenv into a new environment from nothing but a bundle; returns its program."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    words = ["-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(bundle), "hvdenv"]
    # Nor from where pip is configured to look.
    only = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"}
    subprocess.run([f"{folder}/bin/python", *words], check=True, timeout=600, env=only)
    return folder / "bin" / "hvdenv"
