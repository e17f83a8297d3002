"""Poetry installs from a published index, over HTTP (installs Poetry; a minute)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdenv.base.places import Places
from hvdenv.building.wheelcache import own, store
from hvdenv.cli.main import main
from hvdenv.knowledge.patches import set_number
from tests.support.index import package, served
from tests.support.wheels import TORCH_INPUTS, compiled_wheel

VERSION = f"0.28.1+hvdenv.{set_number()}.torch2.13.cpu.ompi41"
PROJECT = """
[project]
name = "training"
version = "1"
requires-python = "~={python}.0"
dependencies = ["horovod=={version}"]
[tool.poetry]
package-mode = false
[tool.poetry.dependencies]
horovod = {{ source = "site" }}
[[tool.poetry.source]]
name = "others"
url = "{others}/simple/"
[[tool.poetry.source]]
name = "site"
url = "{site}/"
priority = "explicit"
"""


def simple_index(folder: Path) -> None:
    """The packages that the wheel requires, with nothing in them."""
    for name, version in (("torch", "2.13.0"), ("cloudpickle", "3.1")):
        path = package(folder / "simple" / name, name, version)
        (path.parent / "index.html").write_text(f'<a href="{path.name}">{path.name}</a>')


def test_poetry_locks_and_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDENV_HOME", str(tmp_path / "home"))
    store(own(Places(tmp_path / "home")), TORCH_INPUTS, compiled_wheel(tmp_path))
    assert main(["wheels", "publish", str(tmp_path / "index")]) == 0
    simple_index(tmp_path / "others")
    venv, project = tmp_path / "venv", tmp_path / "project"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([str(venv / "bin/pip"), "install", "--quiet", "poetry"], check=True)
    project.mkdir()
    environment = {
        **os.environ,
        "POETRY_VIRTUALENVS_IN_PROJECT": "1",
        "POETRY_CACHE_DIR": str(tmp_path / "cache"),
    }
    with served(tmp_path / "index") as site, served(tmp_path / "others") as others:
        python = "{}.{}".format(*sys.version_info)
        text = PROJECT.format(python=python, version=VERSION, site=site.url, others=others.url)
        (project / "pyproject.toml").write_text(text)
        subprocess.run(
            [str(venv / "bin/poetry"), "install", "--no-interaction"],
            cwd=project,
            env=environment,
            check=True,
        )
    (wheel,) = (tmp_path / "index/files").glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in (project / "poetry.lock").read_text()
    asked = "from importlib.metadata import version as v; print(v('horovod'), v('torch'))"
    said = subprocess.run(
        [str(project / ".venv/bin/python"), "-c", asked], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == [VERSION, "2.13.0"]
