"""activate.sh in the shells that users have, with the module systems that clusters have."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdenv.environments.activation import Kind, activate_script, filled_in
from hvdenv.model.cluster import Modules
from hvdenv.sites.modules import shell_lines
from tests.support.files import programs
from tests.support.modulesystems import KINDS, Installed, install, write_module
from tests.support.shells import PATH, shell

SHELLS = ("dash", "bash", "zsh")
HOSTILE = "a  b'\"$(touch HIT)`touch HIT`;&|<>*{}[]\\!~#%\nc\u00e9"


def write(
    folder: Path, kind: Kind, variables: dict[str, str] | None = None, lines: Sequence[str] = ()
) -> Path:
    """An environment with a program in it; returns its activate.sh."""
    environment = folder / "env"
    programs(environment / "bin", train="echo trained")
    file = folder / "activate.sh"
    text = activate_script(environment, kind=kind, variables=variables or {}, module_lines=lines)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("name", SHELLS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "a 'directory' $(x)"
    file = shlex.quote(str(write(folder, "venv", {"A": HOSTILE, "B": "", "OLD": "new"})))
    said = shell(
        name,
        ["set -eu", "show before", f". {file}", "train", "show once", f". {file}", "show twice",
         "hvdenv_deactivate", "show after", "case $- in *e*u*|*u*e*) echo strict ;; esac"],
        tmp_path, PYTHONPATH="/mine", PYTHONHOME="/home", OLD="old", VIRTUAL_ENV="/other",
    )  # fmt: skip
    assert (said.code, said.err) == (0, "")
    assert "trained" in said.out
    assert "strict" in said.out
    env = f"{folder}/env"
    expected = {
        **said.at("before"),
        "A": HOSTILE,
        "B": "",
        "OLD": "new",
        "VIRTUAL_ENV": env,
        "PATH": f"{env}/bin:{PATH}",
        "PYTHONNOUSERSITE": "1",
    }
    del expected["PYTHONPATH"], expected["PYTHONHOME"]
    assert said.at("once") == said.at("twice") == expected
    assert said.at("after") == said.at("before")
    assert not list(tmp_path.rglob("HIT"))


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.parametrize("job", ["SLURM_JOB_ID", "PBS_JOBID", "COBALT_JOBID", "LSB_JOBID", ""])
def test_variables_of_who_activates_it(name: str, job: str, tmp_path: Path) -> None:
    values = {"CACHE": "/tmp/{user}/{jobid} $(touch HIT)", "PLAIN": "{other}"}
    file = write(tmp_path, "venv", values)
    told = {job: "7[1].pbs $(touch HIT)"} if job else {}
    said = shell(name, ["set -eu", f". {file}", "show active", "echo pid:$$"], tmp_path, **told)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    pid = said.out.split("pid:")[1].strip()
    expected = filled_in(values, user, told.get(job, pid))
    assert expected["CACHE"].startswith(f"/tmp/{user}/{told.get(job, pid)} ")
    assert {key: said.at("active")[key] for key in values} == expected
    assert not list(tmp_path.rglob("HIT"))


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_inside_of_one_that_is_active(name: str, tmp_path: Path) -> None:
    """A batch job has the variables of the shell that submitted it, not its functions."""
    file = shlex.quote(str(write(tmp_path, "venv")))
    env = f"{tmp_path}/env"
    for path in (f"{env}/bin:{PATH}", f"/x:{env}/bin:{env}/bin:{PATH}:{env}/bin"):
        said = shell(name, [f". {file}", "show active"], tmp_path, PATH=path, VIRTUAL_ENV=env)
        assert said.at("active")["PATH"] == f"{env}/bin:" + ("/x:" if "/x" in path else "") + PATH


@pytest.mark.parametrize("name", SHELLS)
def test_one_environment_takes_the_place_of_another(name: str, tmp_path: Path) -> None:
    first = write(tmp_path / "1", "venv", {"A": "1", "B": "1"})
    second = write(tmp_path / "2", "conda", {"A": "2"})
    lines = (
        f"set -eu; show before; . {first}; . {second}; show active; hvdenv_deactivate; show after"
    )
    said = shell(name, [lines], tmp_path)
    active = said.at("active")
    assert active["PATH"] == f"{tmp_path}/2/env/bin:{PATH}"
    assert active["A"] == "2"
    assert not {"B", "VIRTUAL_ENV"} & set(active)
    assert said.at("after") == said.at("before")


@pytest.mark.parametrize("name", SHELLS)
def test_executed_instead_of_sourced(name: str, tmp_path: Path) -> None:
    write(tmp_path, "venv")
    said = shell(name, [f"{name} ./activate.sh"], tmp_path)
    assert said.code == 2
    assert (
        said.err == "activate.sh changes the shell that it is sourced in; type:  . ./activate.sh\n"
    )


@pytest.mark.parametrize("name", SHELLS)
def test_an_environment_that_was_moved_is_not_active(name: str, tmp_path: Path) -> None:
    """Its programs would be those of the system, or of another environment."""
    file = write(tmp_path, "venv", {"B": "1"})
    (tmp_path / "env").rename(tmp_path / "moved")
    lines = ["show before", f". {file} || echo refused $?", "show after"]
    said = shell(name, lines, tmp_path, PYTHONPATH="/somewhere")
    assert said.at("after") == said.at("before")
    assert "refused 1" in said.out
    assert f"activate.sh: {tmp_path}/env/bin does not exist" in said.err


def test_sourced_by_a_script_of_the_same_name(tmp_path: Path) -> None:
    file = write(tmp_path, "venv")
    own = tmp_path / "own" / "activate.sh"
    own.parent.mkdir()
    own.write_text(f". {file}\ntrain\n")
    for name in ("bash", "zsh"):
        assert shell(name, [f"{name} {own}"], tmp_path).out == "trained\n"


def test_csh_is_told_what_to_do(tmp_path: Path) -> None:
    file = write(tmp_path, "venv", {"A": "1"})
    said = shell("tcsh", [f"source {file}", 'echo "status $status $PATH $?A"'], tmp_path)
    assert said.out == f"status 1 {PATH} 0\n"
    assert said.err == (
        "activate.sh is for sh, bash, dash and zsh, this is csh. Type bash and source it there,"
        " or load a module of the environment. Nothing was changed.\n"
    )


@pytest.mark.parametrize("name", SHELLS)
def test_scripts_of_conda_packages(name: str, tmp_path: Path) -> None:
    """They are not made for `set -eu`: they look at what is not set, and end with a failure."""
    file = write(tmp_path, "conda")
    etc = tmp_path / "env" / "etc" / "conda"
    for folder in ("activate.d", "deactivate.d"):
        (etc / folder).mkdir(parents=True)
        for script in ("a", "b"):
            (etc / folder / f"{script}.sh").write_text(
                f'ORDER="$ORDER {folder}/{script}"\nexport ORDER NOT_SET_{script}="$NOT_SET"\n'
                '[ "$CONDA_PREFIX" = nowhere ]\n'
            )
        (etc / folder / "c.fish").write_text("exit 1\n")
    said = shell(
        name,
        [
            f"set -eu; show before; . {file}; show active; hvdenv_deactivate; show after",
            "case $- in *e*u*|*u*e*) echo strict ;; esac",
        ],
        tmp_path,
        CONDA_PREFIX="/base",
    )
    assert (said.code, said.err) == (0, "")
    assert "strict" in said.out
    assert said.at("active")["ORDER"] == " activate.d/a activate.d/b"
    assert said.at("active")["CONDA_PREFIX"] == f"{tmp_path}/env"
    after = said.at("after")
    assert after.pop("ORDER") == " activate.d/a activate.d/b deactivate.d/b deactivate.d/a"
    assert {k: v for k, v in after.items() if "NOT_SET" not in k} == said.at("before")


@pytest.fixture(scope="session", params=KINDS)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A module system with two modules: one brings packages by PYTHONPATH."""
    installed = install(request.param, tmp_path_factory.mktemp("system"))
    files = installed.root / "files"
    write_module(files, "gcc/10.2.0", setenv={"GCC": "10"}, prepend_path={"PATH": "/apps/gcc"})
    write_module(files, "numpy/1.0", prepend_path={"PYTHONPATH": "/apps/numpy"})
    return installed


def loading(system: Installed, *modules: str, **others: Any) -> tuple[str, ...]:
    """What a build writes into activate.sh."""
    wanted = Modules(init=str(system.init), use=(f"{system.root}/files",), load=modules, **others)
    return shell_lines(wanted, "run", cleaned=True)


ROOT = {"LMOD_ALLOW_ROOT_USE": "yes"}


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.parametrize("kind", ["venv", "none"])
def test_modules_are_loaded_and_what_they_set_is_kept(
    name: str, kind: Kind, system: Installed, tmp_path: Path
) -> None:
    file = write(tmp_path, kind, {"A": "1"}, loading(system, "gcc/10.2.0", "numpy/1.0"))
    said = shell(
        name,
        [
            f"set -eu; . {file}; show once; . {file}; show twice",
            f"hvdenv_deactivate; show after; . {file}; hvdenv_deactivate; show again",
            "module list",
        ],
        tmp_path,
        PYTHONPATH="/mine",
        **ROOT,
    )
    assert said.code == 0, said.err
    own = "" if kind == "none" else f"{tmp_path}/env/bin:"
    for stage in ("once", "twice"):
        seen = said.at(stage)
        assert seen["PATH"].startswith(f"{own}/apps/gcc:")
        assert (seen["GCC"], seen["PYTHONPATH"], seen["A"]) == ("10", "/apps/numpy", "1")
    for stage in ("after", "again"):
        left = said.at(stage)
        assert left["PATH"].startswith("/apps/gcc:")
        assert (left["GCC"], left["PYTHONPATH"]) == ("10", "/apps/numpy:/mine")
        assert not {"A", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONNOUSERSITE"} & set(left)
    assert said.err.count("the modules of the environment are still loaded (module list)\n") == 2
    assert "gcc/10.2.0" in said.out + said.err


@pytest.mark.parametrize("name", SHELLS)
def test_a_module_that_is_not_there(name: str, system: Installed, tmp_path: Path) -> None:
    file = write(tmp_path, "venv", {"A": "1"}, loading(system, "gcc/99", "numpy/1.0"))
    said = shell(
        name,
        [
            f'. {file} || echo "failed $?"; show after',
            f"set -u; . {file} || true; case $- in *u*) echo strict ;; esac",
            f"set -e; . {file}; echo unreached",
        ],
        tmp_path,
        PYTHONPATH="/mine",
        **ROOT,
    )
    assert "failed 1" in said.out
    assert "strict" in said.out
    assert "unreached" not in said.out
    assert said.code == 1
    after = said.at("after")
    assert not {"A", "VIRTUAL_ENV", "PYTHONNOUSERSITE"} & set(after)
    assert after["PYTHONPATH"] == "/mine"
    assert str(tmp_path / "env") not in after["PATH"]
    assert "gcc/99" in said.err
    assert "cannot load the module gcc/99" in said.err
    assert "activate.sh: the modules of this environment could not be loaded" in said.err


@pytest.mark.parametrize("name", SHELLS)
def test_modules_that_were_loaded_before_are_used(
    name: str, system: Installed, tmp_path: Path
) -> None:
    """Their PYTHONPATH is cleaned away with the user's own, and comes again."""
    lines = loading(system, "numpy/1.0", purge="no")
    file = write(tmp_path, "venv", lines=lines)
    said = shell(
        name,
        [
            f". {system.init}; module use {system.root}/files; module load numpy/1.0 gcc",
            f"set -eu; . {file}; show once; . {file}; show twice",
        ],
        tmp_path,
        PYTHONPATH="/mine",
        **ROOT,
    )
    for stage in ("once", "twice"):
        seen = said.at(stage)
        assert (seen["PYTHONPATH"], seen["GCC"]) == ("/apps/numpy", "10"), said.err


def test_an_environment_below_a_variable_of_the_modules(system: Installed, tmp_path: Path) -> None:
    site = tmp_path / "si te"
    write(site, "conda")
    write_module(system.root / "files", "conda/1", setenv={"CONDA_HOME": str(site)})
    text = activate_script(
        Path("$CONDA_HOME/env"),
        kind="conda",
        variables={},
        module_lines=loading(system, "conda/1"),
    )
    (tmp_path / "activate.sh").write_text(text)
    for name in SHELLS:
        said = shell(name, ["set -eu", ". ./activate.sh", "train", "show active"], tmp_path, **ROOT)
        assert "trained\n" in said.out, said.err
        assert said.at("active")["CONDA_PREFIX"] == f"{site}/env"
