"""Modulefiles as Lmod and Environment Modules take them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvdenv.environments.activation import Language, Modulefile, render_modulefile
from hvdenv.model.cluster import Modules
from tests.support.modulesystems import KINDS, Installed, install, write_module

HOSTILE = "a  b'\"$(touch HIT)`touch HIT`;&|<>*{}}{[exit][]\\!~#%"
SHOW = "import json, os; print('@' + json.dumps(dict(os.environ)))"
DUMP = f"{shlex.quote(sys.executable)} -IS -c {shlex.quote(SHOW)}"


@pytest.fixture(scope="module", params=KINDS)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(request.param, tmp_path_factory.mktemp("system"))


def bash(
    system: Installed, folder: Path, *lines: str, locale: str = "C.UTF-8"
) -> tuple[str, list[dict[str, str]]]:
    """Run lines with the module system; what was said, and each environment that was shown."""
    script = "\n".join([f". {system.init}", f"module use {folder}", *lines])
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "LC_ALL": locale,
        "LMOD_ALLOW_ROOT_USE": "yes",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environ,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    shown = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
    said = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("@"))
    return said, shown


def publish(system: Installed, folder: Path, entry: Modulefile) -> None:
    language: Language = "lua" if system.kind == "lmod" else "tcl"
    path = folder / (f"{entry.name}.lua" if language == "lua" else entry.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_modulefile(entry, language), encoding="utf-8")


def entry_in(folder: Path, name: str, modules: Modules = Modules(), **variables: str) -> Modulefile:  # noqa: B008
    environment = folder / f"e n'v{{{name[-1]}"
    (environment / "bin").mkdir(parents=True)
    return Modulefile(
        name, environment, "venv", {"Recipe": "neuron", "Note": HOSTILE}, modules, variables
    )


# In the locale C, Environment Modules 5.2 gives characters that are not ASCII other bytes.
@pytest.mark.parametrize(("locale", "more"), [("C.UTF-8", "\u00e9"), ("C", "")])
def test_loaded_and_unloaded(system: Installed, tmp_path: Path, locale: str, more: str) -> None:
    hostile = HOSTILE + more
    entry = entry_in(tmp_path, "hvd/1", A=hostile, B="-x", C="--x y")
    publish(system, tmp_path, entry)
    said, shown = bash(
        system,
        tmp_path,
        DUMP,
        "module load hvd/1",
        DUMP,
        "module unload hvd/1",
        DUMP,
        "module whatis hvd/1; module help hvd/1",
        locale=locale,
    )
    before, loaded, after = shown
    assert {name: loaded[name] for name in ("A", "B", "C", "VIRTUAL_ENV", "PYTHONNOUSERSITE")} == {
        "A": hostile,
        "B": "-x",
        "C": "--x y",
        "VIRTUAL_ENV": str(entry.environment),
        "PYTHONNOUSERSITE": "1",
    }, said
    assert loaded["PATH"] == f"{entry.environment}/bin:{before['PATH']}"
    ours = {"A", "B", "C", "VIRTUAL_ENV", "PYTHONNOUSERSITE"}
    assert after["PATH"] == before["PATH"]
    assert not ours & set(after)
    assert said.count(f"Note: {HOSTILE}") == 2
    assert "Your own PYTHONPATH comes before" in said
    assert not list(tmp_path.rglob("HIT"))


def test_what_it_needs_is_loaded_with_it(system: Installed, tmp_path: Path) -> None:
    base, site = tmp_path / "base", tmp_path / "site"
    write_module(base, "PrgEnv-intel/1", setenv={"PRG": "intel"})
    write_module(base, "atp/1", setenv={"ATP": "1"})
    write_module(base, "gcc/10.2.0", conflict=["gcc"], prepend_path={"PATH": "/base/gcc"})
    write_module(base, "gcc/12", conflict=["gcc"], prepend_path={"PATH": "/base/gcc12"})
    write_module(site, "gcc/10.2.0", conflict=["gcc"], prepend_path={"PATH": "/site/gcc"})
    write_module(site, "PrgEnv-gnu/1", setenv={"PRG": "gnu"}, prepend_path={"PYTHONPATH": "/p"})
    (tmp_path / "setup.sh").write_text("export SETUP=done\n")
    modules = Modules(
        use=(str(site), str(base)),
        source=(str(tmp_path / "setup.sh"),),
        unload=("atp", "PrgEnv-intel"),
        load=("PrgEnv-gnu", "gcc/10.2.0"),
        build=("cmake/3",),
    )
    publish(system, tmp_path / "own", entry_in(tmp_path, "hvd/1", modules))
    said, shown = bash(
        system,
        tmp_path / "own",
        f"module use {base}",
        "module load atp PrgEnv-intel",
        "module load hvd/1",
        DUMP,
        "module unload hvd/1",
        DUMP,
    )
    loaded, after = shown
    assert loaded["PATH"] == f"{tmp_path}/e n'v{{1/bin:/site/gcc:/usr/bin:/bin", said
    assert (loaded["PRG"], loaded["PYTHONPATH"], loaded["SETUP"]) == ("gnu", "/p", "done")
    assert "ATP" not in loaded
    assert after["PATH"] == "/usr/bin:/bin"
    assert not {"PRG", "PYTHONPATH", "SETUP", "VIRTUAL_ENV"} & set(after)


def test_two_versions_exclude_each_other(system: Installed, tmp_path: Path) -> None:
    for name in ("hvd/1", "hvd/2"):
        publish(system, tmp_path, entry_in(tmp_path, name))
    said, (shown,) = bash(
        system, tmp_path, "module load hvd/1", "module load hvd/2", DUMP, "module list"
    )
    # Lmod takes one in the place of the other, Environment Modules keeps the first.
    kept = "2" if system.kind == "lmod" else "1"
    assert shown["VIRTUAL_ENV"].endswith(f"v{{{kept}"), said
    assert shown["PATH"].count("e n'v{") == 1


@pytest.mark.parametrize("missing", ["environment", "module"])
def test_what_it_needs_is_not_there(system: Installed, tmp_path: Path, missing: str) -> None:
    needed = Modules(load=("gcc/99",)) if missing == "module" else Modules()
    entry = entry_in(tmp_path, "hvd/1", needed)
    publish(system, tmp_path, entry)
    if missing == "environment":
        (entry.environment / "bin").rmdir()
        entry.environment.rmdir()
    said, (shown,) = bash(system, tmp_path, "module load hvd/1 && echo loaded", DUMP)
    assert "VIRTUAL_ENV" not in shown
    assert "PYTHONNOUSERSITE" not in shown
    assert "loaded" not in said.splitlines()
    plain = " ".join(said.split())
    assert ("gcc/99" if missing == "module" else "is gone, or you may not enter it") in plain
