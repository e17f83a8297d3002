"""conda_env.py: its request, and the conda programs that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdenv import STEP_PROGRAMS
from tests.support.files import programs, write
from tests.support.standalone import load

PROGRAM = STEP_PROGRAMS / "conda_env.py"
SPEC: dict[str, Any] = {
    "channels": ["https://conda.example.org/site", "conda-forge"],
    "specs": ["python 3.10.*", "pytorch 1.12.0", "cudatoolkit 11.3.*", "numpy >=1.21,<2"],
    "platform": "linux-64",
    "virtual": {"__cuda": "11.4", "__glibc": "2.17"},
}


conda_env, conda_spec = map(load, ("conda_env", "conda_spec"))


def run(
    *words: str | Path, path: str = "/nowhere", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it without py-rattler and, unless PATH has one, without a conda program."""
    return subprocess.run(
        [sys.executable, "-E", "-S", str(PROGRAM), *map(str, words)],
        env={"PATH": path, **variables},
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
    assert conda_env.variables_of(SPEC, "/work/unpacked") == {
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
    without = conda_env.variables_of({**SPEC, "virtual": {}}, "")
    assert without["CONDA_OVERRIDE_CUDA"] == ""


def test_which_conda_program(tmp_path: Path) -> None:
    programs(tmp_path / "one", conda="", micromamba="")
    programs(tmp_path / "two", mamba="")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")

    def find(path: str, **variables: str) -> object:
        return conda_env.find_program({"PATH": path, **variables})

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


def test_a_program_that_is_no_conda(tmp_path: Path) -> None:
    for text, said in (("", "create does not print what it chose"), ("exit 1", "exit status 1")):
        folder = programs(tmp_path / "bin", conda=text)
        done = run(written(tmp_path), tmp_path / "env", path=f"{folder}:/usr/bin:/bin")
        assert done.returncode == 1 and said in done.stdout


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


# A copy of an environment

TOOL = {
    "name": "tool",
    "version": "1.0",
    "build": "0",
    "sha256": "ab",
    "url": "https://conda.example.org/site/linux-64/tool-1.0-0.conda",
}


def test_conda_copies_an_environment(tmp_path: Path) -> None:
    """With the program that a module names, or the one on PATH."""
    write(tmp_path / "site/conda-meta/tool-1.0-0.json", json.dumps(TOOL))
    report, copy = tmp_path / "report.json", tmp_path / "copy"
    line = f"create --yes --clone {tmp_path}/site --prefix {copy}"
    folder = programs(tmp_path / "bin", conda=f'echo "$*"; test "$*" = "{line}" && cp -r "$4" "$6"')
    words = ("--clone", "$SITE/site", copy, "--report", report)
    done = run(*words, path=f"{folder}:/usr/bin:/bin", SITE=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert f"{line}\n1 packages in {copy}\n" in done.stdout
    assert json.loads(report.read_text()) == [TOOL]

    other = programs(tmp_path / "other", conda='mkdir "$6" && exit 3')
    named = {"CONDA_EXE": f"{other}/conda"}
    for path, variables, said in (
        (f"{folder}:/usr/bin:/bin", named, "/conda create --clone failed with exit status 3"),
        ("/nowhere", {}, "needs conda, and there is none on PATH"),
    ):
        done = run("--clone", tmp_path / "site", tmp_path / "second", path=path, **variables)
        assert done.returncode == 1 and said in done.stdout
        assert not (tmp_path / "second").exists()
