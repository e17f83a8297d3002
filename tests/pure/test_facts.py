from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.errors import RecipeError
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.model.facts import (
    Facts,
    Interpreter,
    Tool,
    parse_cpu_flags,
    parse_driver,
    parse_memory,
    parse_version,
)
from hvdenv.model.observe import ask_interpreter, declared, observe, own_interpreter
from tests.support.files import EXECUTABLE, programs, write

NVCC = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.4, V12.4.99\n"


@pytest.mark.parametrize(
    ("fact", "output", "version"),
    [
        ("cc", "12.2.0\n", "12.2.0"),
        ("cxx", "8\n", "8"),
        ("cc", "gcc: error: unrecognized option\n", ""),
        ("cmake", "cmake version 3.25.1\n\nCMake suite maintained\n", "3.25.1"),
        ("cmake", "cmake3 version 3.17.5\n", "3.17.5"),
        ("mpirun", "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org\n", "4.1.4"),
        ("mpirun", "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\n", "2021.9"),
        ("nvcc", NVCC, "12.4"),
        ("nvcc", "", ""),
    ],
)
def test_versions_in_the_answers_of_programs(fact: str, output: str, version: str) -> None:
    assert parse_version(fact, output) == version


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("flags\t\t: fpu avx2 avx\n\nprocessor\t: 1\nflags\t\t: fpu\n", ("avx", "avx2", "fpu")),
        ("processor\t: 0\nFeatures\t: fp asimd\n", ("asimd", "fp")),
        ("cpu\t\t: POWER9, altivec supported\n", ()),
        ("", ()),
    ],
)
def test_cpuinfo(text: str, flags: tuple[str, ...]) -> None:
    assert parse_cpu_flags(text) == flags


def test_the_driver_and_the_memory_that_the_control_group_leaves() -> None:
    closed = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    )
    assert parse_driver(f"{closed}GCC version:  gcc version 12.2.0\n") == "535.129.03"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    assert parse_driver(opened) == "580.65.06"
    assert parse_driver("") == ""
    meminfo = "MemTotal:        1000 kB\nMemFree:          10 kB\n"
    assert parse_memory(meminfo) == parse_memory(meminfo, "max\n") == 1_024_000
    assert parse_memory(meminfo, "500\n") == 500
    assert parse_memory("", "") is None


def test_this_machine_is_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@proxy:3128")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    seen = observe(tmp_path / "not" / "yet" / "there", Runner(), thorough=True)
    assert seen.origin == "observed"
    assert seen.cores >= 1
    assert seen.disk_free is not None
    assert seen.interpreters[0] == own_interpreter()
    assert ask_interpreter(own_interpreter().path, Runner()) == own_interpreter()
    assert all(isinstance(each, Interpreter) for each in seen.interpreters)
    # Variables by name only.
    assert {"HTTP_PROXY", "HOROVOD_FUSION_THRESHOLD"} <= set(seen.variables)
    assert "SOMETHING_ELSE" not in seen.variables
    assert "secret" not in repr(seen)
    # What is seen here can be declared elsewhere.
    path = write(tmp_path / "facts.json", json.dumps(encode(seen)))
    assert declared(path) == seen._replace(origin="declared")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"coers": 8}, 'coers: unknown key; did you mean "cores"?'),
        ({"interpreters": [{"path": "/p", "version": "3.x"}]}, "interpreters[0].version: expected"),
        ({"cxx": {"path": "/usr/bin/g++", "version": "twelve"}}, "cxx.version: expected a version"),
        (b"{", "not valid JSON: "),
        (b"\xff", "not valid JSON: "),
        (b"[" * 100_000, "not valid JSON: "),
        (b"[]", "expected a table, found []"),
    ],
)
def test_declared_facts_that_are_wrong(
    facts: Facts, tmp_path: Path, change: dict[str, Any] | bytes, said: str
) -> None:
    if isinstance(change, dict):
        change = json.dumps({**encode(facts), **change}).encode()
    path = tmp_path / "facts.json"
    path.write_bytes(change)
    with pytest.raises(RecipeError) as caught:
        declared(path)
    assert str(caught.value).startswith(f"{path}: {said}")


# As a Python that was compiled without libffi; here it only says so.
LACKING = """\
#!{}
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == {!r} else find(name)
exec(sys.argv[3])
"""


@pytest.mark.parametrize("lacking", ["_ctypes", "_ssl", "zlib", "ensurepip", "venv"])
def test_an_interpreter_that_lacks_a_module_is_not_complete(tmp_path: Path, lacking: str) -> None:
    path = tmp_path / "python"
    program = str(write(path, LACKING.format(sys.executable, lacking), EXECUTABLE))
    expected = Interpreter(program, own_interpreter().version, complete=False)
    assert ask_interpreter(program, Runner()) == expected


@pytest.mark.parametrize("program", ["/none", "/bin/false", "/bin/echo"])
def test_what_is_no_interpreter(program: str) -> None:
    assert ask_interpreter(program, Runner()) is None


def test_programs_are_found_where_builds_look_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers = dict.fromkeys(("gcc", "g++"), "echo 12.2.0")
    programs(tmp_path, **compilers)
    programs(tmp_path / "cuda", nvcc="echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    nvcc = str(tmp_path / "cuda/nvcc")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("hvdenv.model.observe._USUAL_PLACES", {"nvcc": nvcc})
    seen = observe(tmp_path, Runner(), thorough=True)
    assert [seen.cc, seen.cxx] == [Tool(str(tmp_path / each), "12.2.0") for each in compilers]
    assert seen.nvcc == Tool(nvcc, "13.0")
    monkeypatch.setattr("hvdenv.model.observe._USUAL_PLACES", {})
    assert observe(tmp_path, Runner(), thorough=True).nvcc is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file away")
def test_interpreters_of_another_user_are_not_found_but_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo -E` keeps another user's HOME."""
    folder = programs(tmp_path / ".pyenv/versions/3.99.1/bin", **{"python3.99": ""})
    monkeypatch.setenv("HOME", str(tmp_path))

    def found(path: str) -> bool:
        monkeypatch.setenv("PATH", path)
        interpreters = observe(tmp_path, Runner(), thorough=False).interpreters
        return str(folder / "python3.99") in [each.path for each in interpreters]

    assert found("/usr/bin")
    os.chown(folder / "python3.99", 12345, 12345)
    assert not found("/usr/bin")
    assert found(f"/usr/bin:{folder}")


def test_folders_that_may_not_be_looked_into_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`su` keeps the PATH of root."""

    def look(folder: Path, pattern: str = "") -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "glob", look)
    monkeypatch.setattr(os, "listdir", look)
    found = observe(tmp_path, Runner(), thorough=False).interpreters
    assert found == (own_interpreter(),)
