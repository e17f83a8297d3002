"""Which environment a command is for, and what programs that run there see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv.base.schema import encode
from hvdenv.environments import generations
from hvdenv.environments.installation import horovod_in, inspect_prefix, uses_mpi
from hvdenv.model.layers import load_recipe
from hvdenv.sites.placement import influences
from tests.support.commands import Hvdenv
from tests.support.environments import ONE, TWO, build
from tests.support.files import write

PROGRAM = Path(sys.executable).with_name("hvdenv")
BASE = getattr(sys, "_base_executable", sys.executable)
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
PACKAGES = f"lib/{VERSION}/site-packages"
# Prints the variables instead of starting ranks.
LAUNCHER = "#!/bin/sh\nexec env\n"


@pytest.fixture(scope="session")
def first_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment without packages, which tests copy."""
    folder = tmp_path_factory.mktemp("venvs") / "first"
    subprocess.run([BASE, "-m", "venv", "--without-pip", folder], check=True)
    return folder


@pytest.fixture
def venv(first_venv: Path, tmp_path: Path) -> Path:
    return shutil.copytree(first_venv, tmp_path / "venv", symlinks=True)


def put_horovod(folder: Path) -> Path:
    write(folder / "horovod/__init__.py", "")
    return folder


def add_finder(venv: Path, elsewhere: Path) -> None:
    """An editable installation, as setuptools makes it."""
    (venv / PACKAGES / "_of.pth").write_text(
        "import __editable___horovod_1_finder as f; f.install()\n"
    )
    (venv / PACKAGES / "__editable___horovod_1_finder.py").write_text(
        f"import sys\nMAPPING = {{'horovod': '{elsewhere}/horovod'}}\n"
        f"def install(): sys.path.append('{elsewhere}')\n"
    )


SEEN: dict[str, Callable[[Path, Path], object]] = {
    "installed": lambda venv, _: put_horovod(venv / PACKAGES),
    "a path": lambda venv, other: write(venv / PACKAGES / "x.pth", f"# mine\n{other}\n"),
    "a relative path": lambda venv, other: write(
        venv / PACKAGES / "x.pth", os.path.relpath(other, venv / PACKAGES)
    ),
    "an editable installation": add_finder,
}
UNSEEN: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda venv, _: None,
    "a comment": lambda venv, other: write(venv / PACKAGES / "x.pth", f"# {other}\n"),
    "another file": lambda venv, other: write(venv / PACKAGES / "x.path", f"{other}\n"),
    "another Python": lambda venv, _: put_horovod(venv / "lib/site-packages"),
    "a directory without it": lambda venv, other: write(venv / PACKAGES / "x.pth", f"{other}/no\n"),
}


@pytest.mark.parametrize("way", [*SEEN, *UNSEEN])
def test_files_show_what_python_imports(way: str, venv: Path, tmp_path: Path) -> None:
    other = put_horovod(tmp_path / "elsewhere")
    {**SEEN, **UNSEEN}[way](venv, other)
    ask = "import importlib.util as u; print(bool(u.find_spec('horovod')))"
    asked = subprocess.check_output([venv / "bin/python", "-s", "-c", ask], env={}, cwd="/")
    assert (asked == b"True\n", bool(horovod_in(venv))) == (way in SEEN, way in SEEN)
    assert horovod_in(venv, f"relative:{other}") == other / "horovod"


def test_a_shared_environment_sees_packages_of_its_own_python_only(tmp_path: Path) -> None:
    for name in ("lib/python3.9/site-packages", "local/lib/python3.8/dist-packages"):
        put_horovod(tmp_path / "usr" / name)
    settings = f"home = {tmp_path}/usr/bin\ninclude-system-site-packages = true\n"
    venv = tmp_path / "venv"
    write(venv / "pyvenv.cfg", settings)
    for version, seen in (("python3.9", True), ("python3.8", True), ("python3.7", False)):
        (venv / "lib" / version / "site-packages").mkdir(parents=True)
        assert bool(horovod_in(venv)) == seen
        (venv / "lib" / version / "site-packages").rmdir()
        (venv / "lib" / version).rmdir()


def test_an_extension_tells_whether_it_uses_mpi(tmp_path: Path) -> None:
    file = write(tmp_path / "torch/mpi_lib_v2.cpython-311.so", "x" * ((1 << 20) - 3))
    assert not uses_mpi(tmp_path)
    with file.open("a") as stream:
        stream.write("libmpi.so.40")  # across two blocks
    assert uses_mpi(tmp_path)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables of a shell in which nothing is active."""
    for name in (*influences(os.environ), "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """An environment under HVDENV_HOME, of which the first generation is not active any more."""
    prefix = Path(os.environ["HVDENV_HOME"]) / "envs" / "local"
    prefix.parent.mkdir(parents=True)
    environment = generations.at(prefix)
    generations.claim(environment)
    resolved = encode(load_recipe("local").recipe)
    for identity in (ONE, TWO):
        build(environment, identity, recipe="local", variants=[], resolved=resolved)
        folder = environment.generation(identity)
        write(folder / "activate.sh", f"export MINE={identity}\n")
        write(folder / "venv/bin/python", "", 0o755)
        put_horovod(folder / "venv" / PACKAGES)
        generations.switch(environment, identity)
    return prefix


def foreign(venv: Path) -> Path:
    put_horovod(venv / PACKAGES)
    write(venv / "bin/horovodrun", LAUNCHER, 0o755)
    return venv


def shown(hvdenv: Hvdenv, *words: str) -> tuple[str, str]:
    """The first line on standard error of a dry run, and what it prints."""
    said = hvdenv("run", *words, "--dry-run", "--", "true")
    return said.err.partition("\n")[0], said.out


def test_the_active_environment_is_used(
    venv: Path, built: Path, shell: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    assert shown(hvdenv)[0] == f"environment: {built} (the one built last)"
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        with shell.context() as active:
            active.setenv(name, str(venv))
            assert "built last" in shown(hvdenv)[0]  # it has no Horovod
    foreign(venv)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        with shell.context() as active:
            active.setenv(name, str(venv))
            line, printed = shown(hvdenv)
            assert line == f"environment: {venv} (active: {name})"
            assert "/activate.sh && exec " in printed and " horovodrun -np 1 " in printed
            assert shown(hvdenv, "local")[0] == ""
    # The one that was activated last is first in PATH.
    other = venv.parent / "conda"
    foreign(other)
    write(other / "bin/python", "", 0o755)
    shell.setenv("VIRTUAL_ENV", str(venv))
    shell.setenv("CONDA_PREFIX", str(other))
    for first, second in ((venv, other), (other, venv)):
        shell.setenv("PATH", f"{first}/bin:{second}/bin:{os.environ['PATH']}")
        assert str(first) in shown(hvdenv)[0]


def test_an_active_environment_of_hvdenv_is_known_by_its_prefix(
    built: Path, shell: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    environment = generations.at(built)
    for identity, expected in ((TWO, built), (ONE, environment.generation(ONE))):
        shell.setenv("VIRTUAL_ENV", str(environment.generation(identity) / "venv"))
        line, printed = shown(hvdenv)
        assert line == f"environment: {expected} (active: VIRTUAL_ENV)"
        assert f"{expected}/activate.sh" in printed


def test_without_any_environment(shell: pytest.MonkeyPatch, hvdenv: Hvdenv) -> None:
    said = hvdenv("verify", code=2).err
    assert "no environment is named, none with Horovod is active" in said
    assert "hvdenv build local" in said


def variables_in(venv: Path, *words: str) -> dict[str, str]:
    given = {"PYTHONPATH": "/modules", "PYTHONHOME": "/nowhere", "OPAL_PREFIX": "/mpi"}
    shown = subprocess.check_output(
        [PROGRAM, *words], env={**os.environ, **given}, text=True, input="env\n"
    )
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


def test_an_unfinished_environment_at_a_prefix(tmp_path: Path, hvdenv: Hvdenv) -> None:
    unfinished = generations.at(tmp_path / "env")
    generations.claim(unfinished)
    generations.create(unfinished, ONE)
    said = hvdenv("verify", "--prefix", str(unfinished.prefix), code=2).err
    assert f"what to do: hvdenv build RECIPE --prefix {unfinished.prefix}" in said


@pytest.mark.parametrize("command", ["run", "shell"])
@pytest.mark.parametrize("kind", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_programs_run_in_an_environment_that_hvdenv_did_not_build(
    kind: str, command: str, venv: Path, shell: pytest.MonkeyPatch
) -> None:
    shell.setenv("SHELL", "/bin/bash")
    given = ("--prefix", str(foreign(venv)), *(("--", "true") if command == "run" else ()))
    if kind == "CONDA_PREFIX":
        (venv / "conda-meta").mkdir()
        write(venv / "etc/conda/activate.d/own.sh", "export OF_PACKAGE=1\n")
    seen = variables_in(venv, command, *given)
    assert seen[kind] == str(venv)
    assert seen["PATH"].split(":")[0] == f"{venv}/bin"
    assert (seen["PYTHONNOUSERSITE"], seen["PYTHONPATH"]) == ("1", "/modules")
    assert "PYTHONHOME" not in seen
    assert ("OF_PACKAGE" in seen) == (kind == "CONDA_PREFIX")
    clean = variables_in(venv, command, "--clean", *given)
    assert not {"PYTHONPATH", "OPAL_PREFIX"} & clean.keys()


def test_programs_of_horovod_may_be_those_of_another_environment(
    venv: Path, tmp_path: Path, shell: pytest.MonkeyPatch
) -> None:
    other = foreign(tmp_path / "other")
    write(other / "bin/python", "", 0o755)
    write(venv / PACKAGES / "x.pth", str(other / PACKAGES))
    seen = variables_in(venv, "run", "--prefix", str(venv), "--", "true")
    first, *_, last = seen["PATH"].split(":")
    assert (first, last) == (f"{venv}/bin", f"{other}/bin")
    assert inspect_prefix(str(venv)).program("horovodrun") == f"{other}/bin/horovodrun"


def test_a_folder_without_python_or_horovod_is_refused(
    venv: Path, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, said in ((empty, "not a Python environment"), (venv, "Horovod is not installed")):
        assert said in hvdenv("verify", "--prefix", str(folder), code=2).err
        assert said in hvdenv("run", "--prefix", str(folder), "--", "true", code=125).err
