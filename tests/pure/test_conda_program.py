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
from hvdenv.libraries import install_command
from tests.standalone import load

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
    assert conda_spec.virtual_packages(SPEC) == [
        ("__cuda", "11.4", "0"),
        ("__glibc", "2.17", "0"),
        ("__linux", "3.10", "0"),
        ("__unix", "0", "0"),
        ("__archspec", "1", "x86_64"),
    ]
    power = {"platform": "linux-ppc64le", "virtual": {"__archspec": "power9", "__linux": "4.18"}}
    assert conda_spec.virtual_packages(power) == [
        ("__glibc", "2.17", "0"),
        ("__linux", "4.18", "0"),
        ("__unix", "0", "0"),
        ("__archspec", "1", "power9"),
    ]


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
    for name in ("one/conda", "one/micromamba", "two/mamba"):
        program = tmp_path / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("")
        program.chmod(0o755)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")

    def find(path: str, **variables: str) -> object:
        return conda_program.find_program({"PATH": path, **variables})

    assert find(f"{two}:{one}") == f"{one}/micromamba"
    assert find(two) == f"{two}/mamba"
    assert find(two, CONDA_EXE=f"{one}/conda") == f"{one}/conda"
    assert find(two, CONDA_EXE="/gone/conda") == f"{two}/mamba"
    assert find(str(tmp_path)) is None


def test_neither_library_nor_program_says_what_to_install(tmp_path: Path) -> None:
    done = run(written(tmp_path), tmp_path / "env")
    assert done.returncode == 1
    # `check` does not blame the recipe for what begins so.
    assert "conda_env: cannot install conda packages: " in done.stdout
    assert "has no py-rattler" in done.stdout
    assert "no micromamba, mamba or conda on PATH" in done.stdout
    assert install_command("py-rattler").removeprefix(sys.executable) in done.stdout
    assert "Traceback" not in done.stdout
    assert os.listdir(tmp_path) == ["conda.json"]


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("/bin/true", "/bin/true create does not print what it chose"),
        ("/bin/false", "failed with exit status 1"),
        ("/sw/conda/bin/conda", "conda_env: /sw/conda/bin/conda: No such file or directory"),
    ],
)
def test_a_program_that_fails(tmp_path: Path, program: str, printed: str) -> None:
    done = run(written(tmp_path, program=program), tmp_path / "env")
    assert done.returncode == 1
    assert printed in done.stdout
    assert "Traceback" not in done.stdout
    assert os.listdir(tmp_path) == ["conda.json"]


def test_a_platform_that_conda_does_not_have(tmp_path: Path) -> None:
    done = run(written(tmp_path, platform="linux-riscv64"), tmp_path / "env")
    assert done.returncode == 1
    assert "platform linux-riscv64: known are linux-64, linux-aarch64" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_document_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"channels": [')
    assert "half.json is not JSON" in run(tmp_path / "half.json", tmp_path / "env").stdout
    done = run(tmp_path / "gone.json", tmp_path / "env")
    assert done.returncode == 1
    assert "gone.json: No such file or directory" in done.stdout


# Where it is made


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env/mine").write_text("work of weeks")
    done = run(written(tmp_path), tmp_path / "env")
    assert done.returncode == 1
    assert "exists already" in done.stdout
    assert (tmp_path / "env/mine").read_text() == "work of weeks"
    assert not (tmp_path / "env.unfinished").exists()


def test_temporary_files_of_a_killed_run_are_removed(site: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.unfinished/half").mkdir(parents=True)
    assert run("--clone", site, tmp_path / "copy").returncode == 0
    assert not (tmp_path / "copy.unfinished").exists()


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
    }
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / "bin/tool").chmod(0o555)
    (root / "bin/absolute").symlink_to(root / "bin/tool")
    (root / "bin/relative").symlink_to("tool")
    (root / "lib64").symlink_to("lib")
    placed = {"path_type": "hardlink", "prefix_placeholder": PLACEHOLDER}
    record = {
        "name": "tool",
        "version": "1.0",
        "build": "0",
        "sha256": "ab",
        "url": "https://conda.example.org/site/linux-64/tool-1.0-0.conda",
        "channel": "https://conda.example.org/site/linux-64",
        "paths_data": {
            "paths": [
                {"_path": "bin/tool", "file_mode": "text", **placed},
                {"_path": "lib/libtool.so", "file_mode": "binary", **placed},
                {"_path": "bin/entry", "path_type": "unix_python_entry_point"},
                {"_path": "lib/plain.so", "path_type": "hardlink", "sha256_in_prefix": "cd"},
            ]
        },
    }
    (root / "conda-meta").mkdir()
    (root / "conda-meta/history").touch()
    (root / "conda-meta/tool-1.0-0.json").write_text(json.dumps(record))
    return root


def test_a_copy(site: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    copy = tmp_path / "a-longer-path/than/that/of/the/site"
    done = run("--clone", site, copy, "--report", tmp_path / "report.json")
    assert done.returncode == 0, done.stdout

    assert (copy / "bin/tool").read_text() == f"#!{copy}/bin/python\n"
    assert (copy / "bin/entry").read_text() == f"#!{copy}/bin/python\nimport entry\n"
    assert (copy / "lib/a.pth").read_text() == f"{copy}/src\n"
    packed = b"\x7fELF\0" + PLACEHOLDER.encode() + b"/etc\0end\0"
    assert (copy / "lib/libtool.so").read_bytes() == installed(packed, str(copy).encode())
    assert os.readlink(copy / "bin/absolute") == str(copy / "bin/tool")
    assert os.readlink(copy / "bin/relative") == "tool"
    assert os.readlink(copy / "lib64") == "lib"
    assert (copy / "empty").read_bytes() == b""
    assert (copy / "conda-meta/history").exists()
    assert stat.S_IMODE((copy / "bin/tool").stat().st_mode) == 0o755

    # What cannot be changed is as it was, and printed.
    assert f"these still name {site}" in done.stdout
    for name in ("lib/by-hand.so", "lib/archive"):
        assert (copy / name).read_bytes() == before[site / name]
        assert f"  {name}\n" in done.stdout
    assert ".pyc" not in done.stdout

    record = json.loads((copy / "conda-meta/tool-1.0-0.json").read_text())
    assert record == json.loads((site / "conda-meta/tool-1.0-0.json").read_text())
    assert json.loads((tmp_path / "report.json").read_text()) == [
        {
            "name": "tool",
            "version": "1.0",
            "build": "0",
            "sha256": "ab",
            "url": "https://conda.example.org/site/linux-64/tool-1.0-0.conda",
        },
    ]
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before


def test_a_copy_of_a_copy_is_the_copy(site: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "somewhere/else", tmp_path / "a/longer/way/round"
    copies = []
    for source, target in ((site, one), (site, two), (two, one)):
        shutil.rmtree(one, ignore_errors=True)
        assert run("--clone", source, target).returncode == 0
        copies.append({path: path.read_bytes() for path in one.rglob("*") if path.is_file()})
    assert len(copies[0]) > 10
    assert copies[0] == copies[2]


def test_a_copy_of_what_is_reached_by_a_link(site: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(site.parent)
    copy = tmp_path / "copy"
    assert run("--clone", tmp_path / "link/conda", copy).returncode == 0
    assert (copy / "bin/tool").read_text() == f"#!{copy}/bin/python\n"


def test_other_environments_and_downloads_are_not_copied(site: Path, tmp_path: Path) -> None:
    for name in ("condabin", "pkgs", "envs/mine", "lib/envs"):
        (site / name).mkdir(parents=True)
        (site / name / "file").write_text("")
    assert run("--clone", site, tmp_path / "copy").returncode == 0
    assert (tmp_path / "copy/condabin/file").exists()
    assert (tmp_path / "copy/lib/envs/file").exists()
    assert not (tmp_path / "copy/pkgs").exists()
    assert not (tmp_path / "copy/envs").exists()


def refused(tmp_path: Path, source: Path, target: Path) -> str:
    done = run("--clone", source, target)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert not target.exists()
    assert not Path(f"{target}.unfinished").exists()
    return done.stdout


def test_copies_that_are_refused(site: Path, tmp_path: Path) -> None:
    assert "is not a conda environment" in refused(tmp_path, tmp_path, tmp_path / "copy")
    assert "is not a conda environment" in refused(tmp_path, tmp_path / "gone", tmp_path / "copy")
    assert "which is to be copied" in refused(tmp_path, site, site / "copy")
    long = tmp_path / ("x" * 200) / ("y" * 100)
    printed = refused(tmp_path, site, long)
    assert f"lib/libtool.so of the environment {site} has room for {len(PLACEHOLDER)}" in printed
    assert "shorter path" in printed


def test_an_environment_that_was_made_elsewhere(site: Path, tmp_path: Path) -> None:
    moved = site.rename(tmp_path / "moved")
    printed = refused(tmp_path, moved, tmp_path / "copy")
    assert "made at another path" in printed


def test_a_record_that_is_damaged(site: Path, tmp_path: Path) -> None:
    (site / "conda-meta/other.json").write_text("{")
    assert "other.json is not JSON" in refused(tmp_path, site, tmp_path / "copy")
