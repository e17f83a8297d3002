"""Failures that are provoked, named by doctor, and gone once its remedy is carried out.

Small programs and packages stand for Horovod where what fails is a tool that it is built
or started with.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hvdenv.knowledge.diagnosis import diagnose
from tests.support.files import write
from tests.support.index import package

CMAKELISTS = "cmake_minimum_required(VERSION 3.13)\nproject(horovod CXX)\n"
FILES = {
    "CMakeLists.txt": CMAKELISTS,
    "other/CMakeLists.txt": CMAKELISTS,
    "main.cc": "int number();\nint main() { return number(); }\n",
    "number.cc": "int number() { return 0; }\n",
    "nccl.cc": "#include <nccl.h>\nint main() { return 0; }\n",
    "there/nccl.h": "\n",
    "horovod.py": "\n",
    "packages/horovod/__init__.py": "\n",
    "packages/horovod/torch.py": "\n",
    "text": "größer\n",
    "wheels/.keep": "",
}
WHEELS = {"one": (), "two": (), "new": ("two>=1",), "old": ("two<1",)}


class Case(NamedTuple):
    """Something that fails.

    Attributes:
        cause: id of what doctor names.
        before: commands that make it possible.
        fails: the command that fails.
        remedy: what is put before that command, or stands for a part of it.
        instead: that part.
    """

    cause: str
    fails: str
    remedy: str
    instead: str = ""
    before: str = "true"


PIP = f"{sys.executable} -m pip install --no-index --find-links wheels --target out "
CASES = (
    Case("no-compiler", "CXX=/nowhere/g++ cmake -B build .", "cmake", "CXX=/nowhere/g++ cmake"),
    Case("cmake-not-found", "rm -rf build; cmake -DCMAKE_MAKE_PROGRAM= -DCMAKE_CXX_COMPILER=g++ -B build .", "", "-DCMAKE_MAKE_PROGRAM="),
    Case("another-source-in-the-build-folder", "cmake -B build other", "rm -r build;", before="cmake -B build ."),
    Case("map-failed", "ulimit -v 40000; g++ -c -O2 number.cc", "", "ulimit -v 40000;"),
    Case("flag-of-another-machine", "g++ -mno-such-flag=1 -c number.cc", "", "-mno-such-flag=1"),
    Case("compiler-too-old", "g++ -std=c++99 -c number.cc", "", "-std=c++99"),
    Case("missing-header-nccl", "g++ -c nccl.cc", "export CPATH=there;"),
    Case(
        "missing-library-to-link", "g++ main.cc -lnumber", "export LIBRARY_PATH=lib;",
        before="mkdir lib && g++ -shared -fPIC number.cc -o lib/libnumber.so",
    ),
    Case(
        "missing-library", "./a.out", "export LD_LIBRARY_PATH=lib;",
        before="mkdir lib && g++ -shared -fPIC number.cc -o lib/libnumber.so && g++ main.cc -Llib -lnumber",
    ),
    Case(
        "damaged-file", "LD_LIBRARY_PATH=lib ./a.out", "g++ -shared -fPIC number.cc -o lib/libnumber.so;",
        before="mkdir lib && g++ -shared -fPIC number.cc -o lib/libnumber.so && g++ main.cc -Llib -lnumber"
        " && : > lib/libnumber.so",
    ),
    Case("requirements-conflict", PIP + "new old", PIP + "new", PIP + "new old"),
    Case("no-such-version", PIP + "one==9", "one==1", "one==9"),
    Case("hash-mismatch", f"echo 'one==1 --hash=sha256:{'0' * 64}' > asked && {PIP} -r asked", "one", "-r asked"),
    Case("module-of-another-release", "PYTHONPATH=packages python3 -c 'import horovod.torch'", "rm horovod.py;"),
    Case("missing-module", "cd other && python3 -c 'import horovod_of_ours'", "touch other/horovod_of_ours.py;"),
    Case("locale-is-ascii", "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 python3 -c 'open(\"text\").read()'", "LC_ALL=C.UTF-8 python3", "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 python3"),
    Case("limit-reached", "ulimit -n 20; python3 -c 'print(len([open(\"text\") for _ in range(30)]))'", "", "ulimit -n 20;"),
    Case("missing-file", "python3 nowhere.py", "setup-of-ours.py", "nowhere.py", before="touch setup-of-ours.py"),
)  # fmt: skip


WITH_NEEDS = [
    pytest.param(
        case, marks=pytest.mark.needs("cmake") if "cmake" in case.fails else (), id=case.cause
    )
    for case in CASES
]


@pytest.mark.parametrize("case", WITH_NEEDS)
def test_the_remedy_is_one(case: Case, tmp_path: Path) -> None:
    for name, text in FILES.items():
        write(tmp_path / name, text)
    for name, requires in WHEELS.items():
        package(tmp_path / "wheels", name, "1", requires=requires)
    assert run(case.before, tmp_path).returncode == 0
    failed = run(case.fails, tmp_path)
    assert failed.returncode != 0
    root = diagnose(io.BytesIO(failed.stdout)).root
    assert root is not None, failed.stdout.decode(errors="replace")
    assert root.id == case.cause
    mended = (
        case.fails.replace(case.instead, case.remedy)
        if case.instead
        else f"{case.remedy} {case.fails}"
    )
    again = run(mended, tmp_path)
    assert again.returncode == 0, again.stdout.decode(errors="replace")


def run(command: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
    )
