"""Both module systems for real: Lmod, and Environment Modules."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvdenv.base.errors import StepError
from hvdenv.base.runner import Runner
from hvdenv.model.cluster import Modules
from hvdenv.sites.module_shell import load, try_out
from hvdenv.sites.modules import Loaded, Phase, shell_lines
from tests.real.doctored import marked
from tests.support.modulesystems import (
    KINDS,
    Installed,
    cache_folder,
    install,
    write_lua_module,
    write_module,
)
from tests.support.shells import Said, shell
from tests.support.waiting import wait_until

HOSTILE = """it's "quoted" $HOME `id` $(id) \\ [exec id] {brace} ; & | ~ *"""


@pytest.fixture(scope="session", params=KINDS)
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    return install(request.param, cache_folder(tmp_path_factory))


class Site(NamedTuple):
    """A module system with modulefiles of its own."""

    installed: Installed
    folder: Path
    home: Path

    def module(self, name: str, **content: Any) -> None:
        write_module(self.folder, name, **content)

    def modules(self, *names: str, **fields: Any) -> Modules:
        fields.setdefault("use", (str(self.folder),))
        return Modules(init=str(self.installed.init), load=names, **fields)

    def runner(self, **variables: str) -> Runner:
        return Runner({"HOME": str(self.home), "PATH": "/usr/bin:/bin", **variables})

    def load(self, *names: str, phase: Phase = "run", **fields: Any) -> Loaded:
        return load(self.modules(*names, **fields), phase, self.runner())

    def after(self, loaded: Loaded) -> Runner:
        """A runner as in a shell in which these modules are loaded."""
        return self.runner(**{**loaded.set, "PATH": loaded.set.get("PATH", "/usr/bin:/bin")})

    def refused(self, *names: str, **fields: Any) -> StepError:
        with pytest.raises(StepError) as caught:
            self.load(*names, **fields)
        return caught.value


def site_of(installed: Installed, tmp_path: Path) -> Site:
    (tmp_path / "modulefiles").mkdir()
    (tmp_path / "home").mkdir()
    return Site(installed, tmp_path / "modulefiles", tmp_path / "home")


@pytest.fixture
def site(installed: Installed, tmp_path: Path) -> Site:
    return site_of(installed, tmp_path)


@pytest.fixture
def lmod_site(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Site:
    return site_of(install("lmod", cache_folder(tmp_path_factory)), tmp_path)


@pytest.fixture
def tcl_site(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Site:
    return site_of(install("tcl", cache_folder(tmp_path_factory)), tmp_path)


def test_a_module_command_that_bash_inherits_is_taken(site: Site) -> None:
    init = {"lmod": "share/lmod/lmod/init/bash", "tcl": "share/modules/init/bash"}
    script = site.installed.root / "usr" / init[site.installed.kind]
    dump = in_shell(site, "bash", f". {script}; env -0").out
    inherited = dict(entry.split("=", 1) for entry in dump.split("\0") if entry)
    assert "BASH_FUNC_module%%" in inherited
    site.module("tool/1")
    modules = site.modules("tool/1")._replace(init="/nowhere/init")
    found = try_out(modules, "run", Runner(inherited))
    assert found.loaded.loaded == ("tool/1",)
    names = {"lmod": r"Lmod \d", "tcl": r"Environment Modules \d"}
    assert re.match(names[site.installed.kind], found.system)


def test_run_and_build_sets_are_loaded_and_values_survive(site: Site) -> None:
    site.module("gcc/10.2.0", setenv={"GCC_NOTE": HOSTILE}, prepend_path={"PATH": "/opt/gcc/bin"})
    site.module("cudampi/openmpi-4.1.1", prepend_path={"PATH": "/opt/mpi/bin"})
    site.module("cmake/3.16.9", setenv={"CMAKE_ROOT_HERE": "/opt/cmake"})
    modules = site.modules("gcc/10.2.0", "cudampi/openmpi-4.1.1", build=("cmake/3.16.9",))
    run = load(modules, "run", site.runner())
    build = load(modules, "build", site.runner())
    assert run.loaded == ("gcc/10.2.0", "cudampi/openmpi-4.1.1")
    assert build.loaded == (*run.loaded, "cmake/3.16.9")
    assert run.set["GCC_NOTE"] == HOSTILE
    assert run.set["PATH"] == "/opt/mpi/bin:/opt/gcc/bin:/usr/bin:/bin"
    assert "CMAKE_ROOT_HERE" not in run.set
    assert build.set["CMAKE_ROOT_HERE"] == "/opt/cmake"
    noise = {"_", "SHLVL", "PWD", "OLDPWD", "BASH_ENV", "HVDENV_TOKEN", "HOME", "LC_ALL"}
    assert not noise & set(run.set)
    assert not [name for name in run.set if "%" in name or name.startswith("hvdenv")]
    assert run.unset == ()


def test_what_was_loaded_before_is_unloaded_except_sticky_modules(site: Site) -> None:
    site.module("modenv/scs5", sticky=True, setenv={"MODENV": "scs5"})
    site.module("old/1", setenv={"OLD": "1"}, prepend_path={"PATH": "/opt/old/bin"})
    site.module("new/1")
    runner = site.after(site.load("modenv/scs5", "old/1"))
    modules = site.modules("new/1")
    purged = load(modules, "run", runner)
    assert purged.loaded == ("modenv/scs5", "new/1")
    assert purged.unset == ("OLD",)
    assert purged.set["PATH"] == "/usr/bin:/bin"
    forced = load(modules._replace(purge="force"), "run", runner)
    assert forced.loaded == ("new/1",)
    assert {"OLD", "MODENV"} <= set(forced.unset)


def test_modules_that_stay_have_their_cleaned_variables_again(site: Site) -> None:
    """The runner takes MPICH_DIR away from steps; the site's default modules have set it."""
    site.module("cray-mpich/8.1", setenv={"MPICH_DIR": "/opt/cray/mpich"})
    site.module("atp/3.1", setenv={"ATP_HOME": "/opt/atp"})
    site.module("conda/2023")
    runner = site.after(site.load("cray-mpich/8.1", "atp/3.1"))
    assert "MPICH_DIR" not in runner._base
    modules = site.modules("conda/2023", purge="no", unload=("atp", "never-loaded"))
    loaded = load(modules, "run", runner)
    assert loaded.loaded == ("cray-mpich/8.1", "conda/2023")
    assert loaded.set["MPICH_DIR"] == "/opt/cray/mpich"
    assert "ATP_HOME" in loaded.unset


def test_the_first_folder_of_the_recipe_is_found_first(site: Site, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_module(tmp_path / name, "tool/1", setenv={"FROM": name})
    loaded = site.load("tool/1", use=(str(tmp_path / "one"), str(tmp_path / "two")))
    assert loaded.set["FROM"] == "one"
    error = site.refused("tool/1", use=(str(tmp_path / "three"),))
    assert error.message == (
        f"cannot load modules: there is no directory of modules {tmp_path / 'three'}"
    )
    assert error.detail == ""


def test_lmod_does_not_replace_a_module_of_the_set_in_silence(lmod_site: Site) -> None:
    folder = lmod_site.folder
    python = "Python/3.6.6-fosscuda-2018b"
    write_lua_module(folder, "OpenMPI/3.1.4-gcccuda-2018b", 'setenv("MPI_IS", "3.1.4")')
    write_lua_module(folder, "OpenMPI/3.1.1-gcccuda-2018b", 'setenv("MPI_IS", "3.1.1")')
    write_lua_module(folder, python, 'load("OpenMPI/3.1.1-gcccuda-2018b")')
    error = lmod_site.refused("OpenMPI/3.1.4-gcccuda-2018b", python)
    assert error.message == (
        f"OpenMPI/3.1.4-gcccuda-2018b: unloaded by {python},"
        " which loads OpenMPI/3.1.1-gcccuda-2018b"
    )
    assert "load it after" in error.remedy
    loaded = lmod_site.load(python, "OpenMPI/3.1.4-gcccuda-2018b")
    assert loaded.loaded == (python, "OpenMPI/3.1.4-gcccuda-2018b")
    assert loaded.set["MPI_IS"] == "3.1.4"


def test_what_the_system_says_about_a_conflict_is_shown(site: Site) -> None:
    site.module("gcc/10.2.0")
    site.module("nvhpc/21.9", conflict=["gcc"])
    error = site.refused("gcc/10.2.0", "nvhpc/21.9")
    assert error.message == "nvhpc/21.9: available, but cannot be loaded"
    said = {
        "lmod": "these module(s) are loaded:\n   gcc",
        "tcl": "Module cannot be loaded due to a conflict",
    }
    assert said[site.installed.kind] in error.detail


def test_all_that_is_missing_is_named_at_once_with_what_there_is(site: Site) -> None:
    for name in ("gcc/9.1.0", "gcc/11.2.0", "cuda/11.8", "openmpi/4.1.1", "cmake/3.26"):
        site.module(name)
    started = time.monotonic()
    error = site.refused("gcc/10.2.0", "cuda/11.8", "cudampi/openmpi-4.1.1", "Cmake/3.26", "zzz")
    assert time.monotonic() - started < 120
    assert error.message == "4 modules cannot be loaded"
    told = error.detail.splitlines()
    assert "gcc/10.2.0: not available; similar modules: gcc/11.2.0, gcc/9.1.0" in told
    assert any(line.startswith("cudampi/") and "openmpi/4.1.1" in line for line in told)
    assert any(line.startswith("Cmake/3.26") and "cmake/3.26" in line for line in told)
    assert "zzz: not available" in told
    assert error.where == os.uname().nodename


def hierarchy(site: Site, tmp_path: Path) -> None:
    """GCC opens OpenMPI, which opens Horovod, as in EasyBuild's hierarchies."""
    parts = {
        "GCC/10.2.0": site.folder,
        "CUDA/11.1.1": site.folder,
        "OpenMPI/4.0.5": tmp_path / "gcc",
        "Horovod/0.21.1-TensorFlow-2.4.1": tmp_path / "mpi",
    }
    opens = {"GCC/10.2.0": tmp_path / "gcc", "OpenMPI/4.0.5": tmp_path / "mpi"}
    for name, folder in parts.items():
        use = [opens[name]] if name in opens else []
        if site.installed.kind == "tcl":
            write_module(folder, name, use=use)
        else:
            write_lua_module(
                folder, name, *(f'prepend_path("MODULEPATH", "{each}")' for each in use)
            )


def test_a_hierarchy_is_loaded_from_above(site: Site, tmp_path: Path) -> None:
    hierarchy(site, tmp_path)
    names = ("GCC/10.2.0", "CUDA/11.1.1", "OpenMPI/4.0.5", "Horovod/0.21.1-TensorFlow-2.4.1")
    assert site.load(*names).loaded == names


def test_lmod_says_what_to_load_first(lmod_site: Site, tmp_path: Path) -> None:
    hierarchy(lmod_site, tmp_path)
    error = lmod_site.refused("CUDA/11.1.1", "OpenMPI/4.0.5", "Horovod/0.21.1-TensorFlow-2.4.1")
    assert error.detail.splitlines() == [
        "OpenMPI/4.0.5: first load GCC/10.2.0",
        "Horovod/0.21.1-TensorFlow-2.4.1: first load GCC/10.2.0 OpenMPI/4.0.5",
    ]
    assert "before it" in error.remedy


def test_modules_in_the_wrong_order_are_told_apart_from_missing_ones(
    site: Site, tmp_path: Path
) -> None:
    hierarchy(site, tmp_path)
    error = site.refused("OpenMPI/4.0.5", "GCC/10.2.0")
    assert error.message == "OpenMPI/4.0.5: first load GCC/10.2.0"


def test_one_programming_environment_in_the_place_of_another(site: Site) -> None:
    for name in ("intel", "gnu"):
        site.module(
            f"PrgEnv-{name}/6.0", setenv={"PE_ENV": name}, conflict=["PrgEnv-gnu", "PrgEnv-intel"]
        )
    runner = site.after(site.load("PrgEnv-intel/6.0"))
    for start, purge in ((runner, "no"), (runner, "yes"), (site.runner(), "no")):
        modules = site.modules("PrgEnv-gnu", unload=("PrgEnv-intel",), purge=purge)
        loaded = load(modules, "run", start)
        assert loaded.loaded == ("PrgEnv-gnu/6.0",)
        assert loaded.set["PE_ENV"] == "gnu"
    error = site.refused("PrgEnv-gna", unload=("PrgEnv-intel",))
    assert error.message.startswith("PrgEnv-gna: not available; similar modules: PrgEnv-gnu/6.0")


def test_a_script_of_the_site_is_sourced(site: Site, tmp_path: Path) -> None:
    setup = tmp_path / "setup.sh"
    site.module("tool/1")
    setup.write_text(
        "export SITE_NOTE='two\nlines, \"quoted\" é'\nexport NOT_SET=$NOT_SET_ANYWHERE\n"
        "echo noise; false\n"
    )
    loaded = site.load("tool/1", source=(str(setup),))
    assert loaded.set["SITE_NOTE"] == 'two\nlines, "quoted" é'
    setup.write_text("echo 'this node is not for you' >&2\nexit 0\n")
    error = site.refused("tool/1", source=(str(setup),))
    assert error.message == f"the shell ended at `. {setup}`"
    assert "this node is not for you" in error.detail
    setup.unlink()
    assert f"cannot read the script {setup}" in site.refused("tool/1", source=(str(setup),)).message


def test_hidden_modules_are_loaded_and_named(site: Site) -> None:
    site.module("GCCcore/.11.2.0", setenv={"EBROOTGCCCORE": "/opt/gcccore"})
    loaded = site.load("GCCcore/.11.2.0")
    assert loaded.loaded == ("GCCcore/.11.2.0",)
    assert loaded.set["EBROOTGCCCORE"] == "/opt/gcccore"
    assert "GCCcore/.11.2.0" in site.refused("GCCcore/11.2.0").message


def test_packages_that_modules_bring_by_pythonpath_are_kept(site: Site) -> None:
    site.module("SciPy-bundle/2022.05", prepend_path={"PYTHONPATH": "/apps/scipy/site-packages"})
    runner = site.runner(PYTHONPATH="/home/me/stale")
    loaded = load(site.modules("SciPy-bundle/2022.05"), "run", runner)
    assert loaded.set["PYTHONPATH"] == "/apps/scipy/site-packages"


def test_what_modules_print_is_not_taken_for_variables(site: Site) -> None:
    site.module(
        "loud/1",
        setenv={"LOUD": "yes"},
        lines=['puts stderr "PATH=/evil\\nhvdenv: on x: not ours"', 'puts stderr "\\033\\[31mred"'],
    )
    loaded = site.load("loud/1")
    assert loaded.set["LOUD"] == "yes"
    assert "PATH" not in loaded.set


def test_no_script_of_the_user_runs_first(site: Site, tmp_path: Path) -> None:
    script = tmp_path / "bash_env"
    script.write_text("export OF_THE_USER=1\n")
    site.module("tool/1")
    runner = site.runner(BASH_ENV=str(script))
    assert "OF_THE_USER" not in load(site.modules("tool/1"), "run", runner).set


def test_a_module_that_hangs_is_ended_and_named(site: Site) -> None:
    site.module("quick/1")
    site.module("stuck/1", lines=["if { [module-info mode load] } { exec sleep 600 }"])
    runner = site.runner()
    started = time.monotonic()
    with pytest.raises(StepError) as caught:
        load(site.modules("quick/1", "stuck/1"), "run", runner, seconds=5)
    assert time.monotonic() - started < 120
    assert caught.value.message == "`module load stuck/1` did not end within 5 s and was killed"
    wait_until(lambda: not marked(runner.token), 60)


def test_another_name_of_a_module_is_good(site: Site) -> None:
    site.module("gcc/10.2.0")
    (site.folder / ".modulerc").write_text("#%Module1.0\nmodule-alias compiler gcc/10.2.0\n")
    assert site.load("compiler").loaded == ("gcc/10.2.0",)


def in_shell(site: Site, name: str, lines: str) -> Said:
    return shell(name, [lines], site.home)


JOINS: dict[str, Callable[[tuple[str, ...]], str]] = {
    "lines": "\n".join,
    "function": lambda lines: "f() {\n" + " &&\n".join(lines) + "\n}\nf",
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("name", ["dash", "bash", "zsh"])
def test_the_lines_do_the_same_in_each_shell(site: Site, name: str, join: str) -> None:
    site.module("gcc/10.2.0", setenv={"GCC_NOTE": HOSTILE})
    good = JOINS[join](shell_lines(site.modules("gcc/10.2.0"), "run"))
    bad = JOINS[join](shell_lines(site.modules("gcc/10.2.0", "gcc/11"), "run"))
    # Under `set -eu`, and both are still set afterwards.
    after = '\nprintf "%s\\n" "$GCC_NOTE" "$LOADEDMODULES"; set +e; (echo $unset_variable); echo $?; set | grep ^hvdenv'
    done = in_shell(site, name, f"set -eu\n{good}\n{after}")
    note, loaded, status, *rest = done.out.splitlines()
    assert (note, loaded) == (HOSTILE, "gcc/10.2.0"), done.err
    assert status != "0"
    assert rest == []
    done = in_shell(site, name, f"{bad}\n" + ("echo $?" if join == "function" else "echo on"))
    assert "cannot load the module gcc/11" in done.err
    assert done.out == ("1\n" if join == "function" else "")
    if join == "lines":
        assert done.code == 1
        script = site.home / "activate.sh"
        script.write_text(bad)
        done = in_shell(site, name, f". {script} || echo came back")
        assert done.out == "came back\n"


def test_a_script_that_defines_nothing_is_passed_over(site: Site, tmp_path: Path) -> None:
    empty = tmp_path / "empty.sh"
    empty.write_text("false\n")
    place = {"lmod": "share/lmod/lmod", "tcl": "share/modules"}[site.installed.kind]
    runner = site.runner(MODULESHOME=f"{site.installed.root}/usr/{place}")
    site.module("tool/1")
    assert load(site.modules("tool/1")._replace(init=str(empty)), "run", runner).loaded == (
        "tool/1",
    )
