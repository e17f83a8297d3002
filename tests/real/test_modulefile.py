"""Modulefiles as Lmod and Environment Modules take them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdenv.environments.activation import Language, Modulefile, render_modulefile
from hvdenv.model.cluster import Modules
from tests.support.modulesystems import KINDS, Installed, install, write_module
from tests.support.shells import PATH, Said, shell

HOSTILE = "a  b'\"$(touch HIT)`touch HIT`;&|<>*{}}{[exit][]\\!~#%"


@pytest.fixture(scope="module", params=KINDS)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(request.param, tmp_path_factory.mktemp("system"))


def bash(system: Installed, folder: Path, *lines: str, locale: str = "C.UTF-8") -> Said:
    """Run lines with the module system, whose messages are printed as well."""
    lines = (f". {system.init}", f"module use {folder}", "exec 2>&1", *lines)
    return shell("bash", lines, folder, LC_ALL=locale, LMOD_ALLOW_ROOT_USE="yes")


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
    said = bash(
        system,
        tmp_path,
        "show before; module load hvd/1; show loaded; module unload hvd/1; show after",
        "module whatis hvd/1; module help hvd/1",
        locale=locale,
    )
    before, loaded, after = map(said.at, ("before", "loaded", "after"))
    assert {name: loaded[name] for name in ("A", "B", "C", "VIRTUAL_ENV", "PYTHONNOUSERSITE")} == {
        "A": hostile,
        "B": "-x",
        "C": "--x y",
        "VIRTUAL_ENV": str(entry.environment),
        "PYTHONNOUSERSITE": "1",
    }, said.out
    assert loaded["PATH"] == f"{entry.environment}/bin:{before['PATH']}"
    ours = {"A", "B", "C", "VIRTUAL_ENV", "PYTHONNOUSERSITE"}
    assert after["PATH"] == before["PATH"]
    assert not ours & set(after)
    assert said.out.count(f"Note: {HOSTILE}") == 2
    assert "Your own PYTHONPATH comes before" in said.out
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
    said = bash(
        system,
        tmp_path / "own",
        f"module use {base}; module load atp PrgEnv-intel",
        "module load hvd/1; show loaded; module unload hvd/1; show after",
    )
    loaded, after = said.at("loaded"), said.at("after")
    assert loaded["PATH"] == f"{tmp_path}/e n'v{{1/bin:/site/gcc:{PATH}", said.out
    assert (loaded["PRG"], loaded["PYTHONPATH"], loaded["SETUP"]) == ("gnu", "/p", "done")
    assert "ATP" not in loaded
    assert after["PATH"] == PATH
    assert not {"PRG", "PYTHONPATH", "SETUP", "VIRTUAL_ENV"} & set(after)


def test_two_versions_exclude_each_other(system: Installed, tmp_path: Path) -> None:
    for name in ("hvd/1", "hvd/2"):
        publish(system, tmp_path, entry_in(tmp_path, name))
    lines = ("module load hvd/1", "module load hvd/2", "show both", "module list")
    said = bash(system, tmp_path, *lines)
    shown = said.at("both")
    # Lmod takes one in the place of the other, Environment Modules keeps the first.
    kept = "2" if system.kind == "lmod" else "1"
    assert shown["VIRTUAL_ENV"].endswith(f"v{{{kept}"), said.out
    assert shown["PATH"].count("e n'v{") == 1


@pytest.mark.parametrize("missing", ["environment", "module"])
def test_what_it_needs_is_not_there(system: Installed, tmp_path: Path, missing: str) -> None:
    needed = Modules(load=("gcc/99",)) if missing == "module" else Modules()
    entry = entry_in(tmp_path, "hvd/1", needed)
    publish(system, tmp_path, entry)
    if missing == "environment":
        (entry.environment / "bin").rmdir()
        entry.environment.rmdir()
    said = bash(system, tmp_path, "module load hvd/1 && echo loaded", "show tried")
    shown = said.at("tried")
    assert "VIRTUAL_ENV" not in shown
    assert "PYTHONNOUSERSITE" not in shown
    assert "loaded" not in said.out.splitlines()
    plain = " ".join(said.out.split())
    assert ("gcc/99" if missing == "module" else "is gone, or you may not enter it") in plain
