"""conda_env.py: its request, the conda programs that it runs, and the files that it rewrites."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdenv import STEP_PROGRAMS
from tests.support.files import programs, write
from tests.support.standalone import load

PROGRAM = STEP_PROGRAMS / "conda_env.py"
PLACEHOLDER = "/opt/" + "placehold_" * 25
SPEC: dict[str, Any] = {
    "channels": ["https://conda.example.org/site", "conda-forge"],
    "specs": ["python 3.10.*", "pytorch 1.12.0", "cudatoolkit 11.3.*", "numpy >=1.21,<2"],
    "platform": "linux-64",
    "virtual": {"__cuda": "11.4", "__glibc": "2.17"},
}


conda_clone, conda_program, conda_spec = map(load, ("conda_clone", "conda_program", "conda_spec"))


def run(*words: str | Path, path: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    """Run it without py-rattler and, unless PATH has one, without a conda program."""
    return subprocess.run(
        [sys.executable, "-E", "-S", str(PROGRAM), *map(str, words)],
        env={"PATH": path},
        text=True,
        check=False,
        timeout=60,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def written(folder: Path, **changed: Any) -> Path:
    path = folder / "conda.json"
    path.write_text(json.dumps({**SPEC, **changed}))
    return path


# What is asked for


def test_the_machine_is_what_the_document_says_and_old_otherwise() -> None:
    def found(document: dict[str, Any]) -> list[str]:
        return [" ".join(each) for each in conda_spec.virtual_packages(document)]

    unix = "__unix 0 0"
    old = ["__glibc 2.17 0", "__linux 3.10 0", unix]
    assert found(SPEC) == ["__cuda 11.4 0", *old, "__archspec 1 x86_64"]
    power = {"platform": "linux-ppc64le", "virtual": {"__archspec": "power9", "__linux": "4.18"}}
    assert found(power) == ["__glibc 2.17 0", "__linux 4.18 0", unix, "__archspec 1 power9"]


def test_what_a_conda_program_sees() -> None:
    assert conda_program.variables_of(SPEC, "/work/unpacked") == {
        "CONDA_OVERRIDE_CUDA": "11.4",
        "CONDA_OVERRIDE_GLIBC": "2.17",
        "CONDA_OVERRIDE_LINUX": "3.10",
        "CONDA_OVERRIDE_UNIX": "0",
        "CONDA_OVERRIDE_ARCHSPEC": "x86_64",
        "CONDA_SUBDIR": "linux-64",
        "CONDA_ALWAYS_COPY": "true",
        "MAMBA_ALWAYS_COPY": "true",
        "CONDA_CHANNEL_PRIORITY": "strict",
        "MAMBA_CHANNEL_PRIORITY": "strict",
        "CONDA_PKGS_DIRS": "/work/unpacked",
    }
    without = conda_program.variables_of({**SPEC, "virtual": {}}, "")
    assert without["CONDA_OVERRIDE_CUDA"] == ""


def test_which_conda_program(tmp_path: Path) -> None:
    programs(tmp_path / "one", conda="", micromamba="")
    programs(tmp_path / "two", mamba="")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")

    def find(path: str, **variables: str) -> object:
        return conda_program.find_program({"PATH": path, **variables})

    assert find(f"{two}:{one}") == f"{one}/micromamba"
    assert find(two) == f"{two}/mamba"
    assert find(two, CONDA_EXE=f"{one}/conda") == f"{one}/conda"
    assert find(two, CONDA_EXE="/gone/conda") == f"{two}/mamba"
    assert find(str(tmp_path)) is None


# `check` does not blame the recipe for what begins so.
NOTHING = "conda_env: cannot install conda packages: "


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        (
            {},
            [
                NOTHING,
                "has no py-rattler",
                "no micromamba, mamba or conda on PATH",
                " -m pip install 'py-rattler<1,>=0.28'",
            ],
        ),
        ({"program": "/bin/true"}, ["/bin/true create does not print what it chose"]),
        ({"program": "/bin/false"}, ["failed with exit status 1"]),
        ({"program": "/sw/conda"}, ["conda_env: /sw/conda: No such file or directory"]),
        (
            {"platform": "linux-riscv64"},
            ["platform linux-riscv64: known are linux-64, linux-aarch64"],
        ),
    ],
)
def test_what_cannot_be_installed(
    tmp_path: Path, changed: dict[str, str], printed: list[str]
) -> None:
    done = run(written(tmp_path, **changed), tmp_path / "env")
    assert done.returncode == 1
    assert all(each in done.stdout for each in printed), done.stdout
    assert "Traceback" not in done.stdout
    assert os.listdir(tmp_path) == ["conda.json"]


def test_a_document_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"channels": [')
    assert "half.json is not JSON" in run(tmp_path / "half.json", tmp_path / "env").stdout
    done = run(tmp_path / "gone.json", tmp_path / "env")
    assert done.returncode == 1
    assert "gone.json: No such file or directory" in done.stdout
    # What is there is left alone.
    mine = write(tmp_path / "env/mine", "work of weeks")
    done = run(written(tmp_path), tmp_path / "env")
    assert done.returncode == 1
    assert "exists already" in done.stdout
    assert mine.read_text() == "work of weeks"
    assert not (tmp_path / "env.unfinished").exists()


# The prefix in files

OLD, LONGER = b"/soft/conda", b"/scratch/of/a/user/somewhere"
PATTERN = conda_clone.naming([OLD])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"x=/soft/conda\n", b"x=/new\n"),
        (b"-L/soft/conda/lib:/soft/conda", b"-L/new/lib:/new"),
        (b"see /soft/conda.", b"see /new."),
        (b"/soft/conda-2021/lib", b"/soft/conda-2021/lib"),
        (b"/soft/condas /soft/conda.old", b"/soft/condas /soft/conda.old"),
        (b"#!/soft/conda/bin/python -u\nx\n", b"#!/new/bin/python -u\nx\n"),
    ],
)
def test_text(text: bytes, expected: bytes) -> None:
    assert conda_clone.in_text(text, PATTERN, b"/new") == expected


@pytest.mark.parametrize("folder", ["deep/" * 30 + "env", "with a blank/env"])
def test_a_first_line_that_no_kernel_takes(folder: str, tmp_path: Path) -> None:
    new = tmp_path / folder
    (new / "bin").mkdir(parents=True)
    (new / "bin/python3.10").symlink_to(sys.executable)
    text = b"#!/soft/conda/bin/python3.10 -E\nimport sys; print(sys.argv[1:], sys.flags.ignore_environment)\n"
    program = new / "bin/program"
    program.write_bytes(conda_clone.in_text(text, PATTERN, bytes(new)))
    program.chmod(0o755)
    printed = subprocess.run([program, "a b"], env={}, capture_output=True, text=True).stdout
    assert printed == "['a b'] 1\n"
    perl = conda_clone.in_text(b"#!/soft/conda/bin/perl -w\n", PATTERN, bytes(new))
    assert perl == b"#!/usr/bin/env perl -w\n"
    assert (
        conda_clone.in_text(b"#!/bin/sh\n/soft/conda/x", PATTERN, b"/a b") == b"#!/bin/sh\n/a b/x"
    )


def installed(package: bytes, prefix: bytes) -> bytes:
    """What an installer makes of a packed binary file: each string as long as it was."""
    found = []
    for string in package.split(b"\0"):
        changed = string.replace(PLACEHOLDER.encode(), prefix)
        found.append(changed.ljust(len(string), b"\0"))
    return b"\0".join(found)


def test_a_binary_file_without_a_record_has_room_for_a_shorter_path_only() -> None:
    library = b"\x7fELF\0/soft/conda/lib:/soft/conda/lib64\0symbol\0"
    expected = b"\x7fELF\0/new/lib:/new/lib64" + b"\0" * 15 + b"symbol\0"
    assert conda_clone.in_binary(library, PATTERN, b"/new", None) == expected
    assert conda_clone.in_binary(library, PATTERN, b"/soft/other", None)
    assert conda_clone.in_binary(library, PATTERN, LONGER, None) is None


# A copy of an environment


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment as conda leaves it, and what pip and people added."""
    root = tmp_path / "site/conda"
    packed = b"\x7fELF\0" + PLACEHOLDER.encode() + b"/etc\0end\0"
    files = {
        "bin/tool": f"#!{root}/bin/python\n".encode(),
        "bin/entry": f"#!{root}/bin/python\nimport entry\n".encode(),
        "lib/libtool.so": installed(packed, str(root).encode()),
        "lib/plain.so": b"\x7fELF\0plain",
        "lib/by-hand.so": b"\x7fELF\0" + str(root).encode() + b"/lib\0",
        "lib/archive": b"PK\0\0" + str(root).encode(),
        "lib/a.pth": f"{root}/src\n".encode(),
        "lib/__pycache__/a.pyc": b"\0\0" + str(root).encode(),
        "empty": b"",
        # No part of a root environment are its packages and other environments.
        **dict.fromkeys(("condabin/file", "pkgs/file", "envs/mine/file", "lib/envs/file"), b""),
        "conda-meta/history": b"",
    }
    placed = {"path_type": "hardlink", "prefix_placeholder": PLACEHOLDER}
    paths = [
        {"_path": "bin/tool", "file_mode": "text", **placed},
        {"_path": "lib/libtool.so", "file_mode": "binary", **placed},
        {"_path": "bin/entry", "path_type": "unix_python_entry_point"},
        {"_path": "lib/plain.so", "path_type": "hardlink", "sha256_in_prefix": "cd"},
    ]
    channel = "https://conda.example.org/site/linux-64"
    record = {**TOOL, "channel": channel, "paths_data": {"paths": paths}}
    files["conda-meta/tool-1.0-0.json"] = json.dumps(record).encode()
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "bin/tool").chmod(0o555)
    (root / "bin/absolute").symlink_to(root / "bin/tool")
    (root / "bin/relative").symlink_to("tool")
    (root / "lib64").symlink_to("lib")
    return root


TOOL = {
    "name": "tool",
    "version": "1.0",
    "build": "0",
    "sha256": "ab",
    "url": "https://conda.example.org/site/linux-64/tool-1.0-0.conda",
}


def test_a_copy(site: Path, tmp_path: Path) -> None:
    """By a link to it, and where a killed run has left something."""
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    copy = tmp_path / "a-longer-path/than/that/of/the/site"
    (tmp_path / "a-longer-path/than/that/of/the/site.unfinished/half").mkdir(parents=True)
    (tmp_path / "link").symlink_to(site.parent)
    words = ("--clone", tmp_path / "link/conda", copy, "--report", tmp_path / "report.json")
    done = run(*words)
    assert done.returncode == 0, done.stdout
    assert not copy.with_name("site.unfinished").exists()

    assert (copy / "bin/tool").read_text() == f"#!{copy}/bin/python\n"
    assert (copy / "bin/entry").read_text() == f"#!{copy}/bin/python\nimport entry\n"
    assert (copy / "lib/a.pth").read_text() == f"{copy}/src\n"
    packed = b"\x7fELF\0" + PLACEHOLDER.encode() + b"/etc\0end\0"
    assert (copy / "lib/libtool.so").read_bytes() == installed(packed, str(copy).encode())
    assert os.readlink(copy / "bin/absolute") == str(copy / "bin/tool")
    assert os.readlink(copy / "bin/relative") == "tool"
    assert os.readlink(copy / "lib64") == "lib"
    assert (copy / "empty").read_bytes() == b""
    assert stat.S_IMODE((copy / "bin/tool").stat().st_mode) == 0o755
    for name in ("conda-meta/history", "condabin/file", "lib/envs/file"):
        assert (copy / name).exists()
    assert not (copy / "pkgs").exists() and not (copy / "envs").exists()

    # What cannot be changed is as it was, and printed.
    assert f"these still name {tmp_path}/link/conda" in done.stdout
    for name in ("lib/by-hand.so", "lib/archive"):
        assert (copy / name).read_bytes() == before[site / name]
        assert f"  {name}\n" in done.stdout
    assert ".pyc" not in done.stdout

    record = json.loads((copy / "conda-meta/tool-1.0-0.json").read_text())
    assert record == json.loads(before[site / "conda-meta/tool-1.0-0.json"])
    assert json.loads((tmp_path / "report.json").read_text()) == [TOOL]
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
    # A copy of the copy has as much room, and the same content at the first path.
    other = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert run("--clone", copy, tmp_path / "short").returncode == 0
    shutil.rmtree(copy)
    assert run("--clone", tmp_path / "short", copy).returncode == 0
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == other


def refused(source: Path, target: Path) -> str:
    done = run("--clone", source, target)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert not target.exists()
    assert not Path(f"{target}.unfinished").exists()
    return done.stdout


def test_copies_that_are_refused(site: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert "is not a conda environment" in refused(tmp_path, copy)
    assert "is not a conda environment" in refused(tmp_path / "gone", copy)
    assert "which is to be copied" in refused(site, site / "copy")
    printed = refused(site, tmp_path / ("x" * 200) / ("y" * 100))
    assert f"lib/libtool.so of the environment {site} has room for {len(PLACEHOLDER)}" in printed
    assert "shorter path" in printed
    moved = site.rename(tmp_path / "moved")
    assert "made at another path" in refused(moved, copy)
    (moved / "conda-meta/other.json").write_text("{")
    assert "other.json is not JSON" in refused(moved, copy)
