"""hvdenv gets onto a machine that has no package index."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from hvdenv import __version__
from tests.support.bundle import install_from, make_bundle
from tests.support.workers import session_folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(session_folder(tmp_path_factory) / "bundle")


@pytest.fixture(scope="module")
def program(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hvdenv, installed on the other side."""
    copied = tmp_path_factory.mktemp("copied") / "bundle"
    shutil.copytree(bundle, copied)
    return install_from(copied, sys.executable, copied.with_name("hvdenv"))


def say(program: Path, *words: str) -> str:
    return subprocess.run(
        [program, *words],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "HOME": str(program.parent)},
    ).stdout


def test_the_bundle_is_all_that_is_needed(program: Path) -> None:
    assert say(program, "--version") == f"hvdenv {__version__}\n"
    assert "\nlocal " in f"\n{say(program, 'recipes')}"
    assert "horovod.version" in say(program, "show", "local")


def test_the_wheel_has_what_steps_and_users_need(bundle: Path) -> None:
    (wheel,) = bundle.glob("hvdenv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    assert fields["Requires-Python"] == ">=3.10"
    needed = {
        "hvdenv/recipes/local.toml",
        "hvdenv/examples/pytorch_mnist.py",
        "hvdenv/model/defaults.toml",
        "hvdenv/standalone/ranks/rank.py",
    }
    assert needed <= names
    assert wheel.name == f"hvdenv-{__version__}-py3-none-any.whl"
