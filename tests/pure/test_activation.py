from __future__ import annotations

import json
import os
import pwd
import shlex
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.environments import generations
from hvdenv.environments.activation import (
    KINDS,
    Kind,
    activate_script,
    filled_in,
    left_open,
)
from hvdenv.environments.installation import inspect_prefix
from hvdenv.model.dialect import job_id
from hvdenv.model.recipe import Python
from hvdenv.schema import fields

ENVIRONMENT = Path("/g/env")


def script(kind: Kind, *module_lines: str, environment: Path = ENVIRONMENT) -> str:
    return activate_script(
        environment, kind=kind, variables={"OPAL_PREFIX": "/g/env"}, module_lines=module_lines
    )


def value_of(name: str, text: str) -> str | None:
    """What a shell would take the value of the first `export NAME=` for."""
    rest = text.split(f"\nexport {name}=", 1)[1]
    words = shlex.shlex(rest, posix=True)
    words.whitespace_split, words.commenters = True, ""
    return words.get_token()


@given(value=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_values_are_quoted(value: str) -> None:
    text = activate_script(ENVIRONMENT, kind="venv", variables={"A": value})
    assert value_of("A", text) == value


def test_what_is_left_open_is_left_to_the_shell() -> None:
    text = activate_script(
        ENVIRONMENT, kind="venv", variables={"A": "/tmp/{user}'s $(x)/{jobid}", "B": "{users}"}
    )
    pid = "${SLURM_JOB_ID:-${COBALT_JOBID:-${PBS_JOBID:-${LSB_JOBID:-${JOB_ID:-$$}}}}}"
    assert f"""\nexport A=/tmp/"$(id -un)"''"'"'s $(x)/'"{pid}"\n""" in text
    assert value_of("B", text) == "{users}"


def test_the_same_for_programs_that_no_shell_starts() -> None:
    variables = {"A": "/tmp/{user}/{jobid}/{user}", "B": "{other} {{user}}", "C": "1"}
    filled = {"A": "/tmp/{jobid}/7/{jobid}", "B": "{other} {{jobid}}", "C": "1"}
    assert filled_in(variables, "{jobid}", "7") == filled
    assert left_open(variables) == ["A", "B"]
    assert left_open(filled_in(variables, "ann", "7")) == []


@pytest.mark.parametrize(
    "name", ["SLURM_JOB_ID", "PBS_JOBID", "COBALT_JOBID", "LSB_JOBID", "JOB_ID"]
)
def test_the_job_of_any_scheduler(name: str) -> None:
    assert job_id({"HOME": "/", name: "7"}) == "7"
    assert job_id({"HOME": "/", name: ""}) == ""


def test_programs_of_verify_get_them_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "COBALT_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PBS_JOBID", "7.pbs")
    record = {"format": generations.FORMAT, "variables": {"A": "/tmp/{user}-{jobid}"}}
    (tmp_path / generations.RECORD).write_text(json.dumps(record))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert dict(inspect_prefix(str(tmp_path)).env) == {"A": f"/tmp/{user}-7.pbs"}
    monkeypatch.delenv("PBS_JOBID")
    assert dict(inspect_prefix(str(tmp_path)).env) == {"A": f"/tmp/{user}-{os.getpid()}"}


@pytest.mark.parametrize("folder", ["/with space/e", "/a'b\"c/e", "/$(touch x)/`id`;&|"])
@pytest.mark.parametrize(("kind", "name"), [("venv", "VIRTUAL_ENV"), ("conda", "CONDA_PREFIX")])
def test_folders_are_quoted(folder: str, kind: Kind, name: str) -> None:
    text = script(kind, environment=Path(folder))
    assert value_of(name, text) == folder
    assert f"\n_hvdenv_bin={shlex.quote(folder)}/bin\n" in text


def test_an_environment_below_a_variable_of_the_modules() -> None:
    text = script("conda", "module load conda", environment=Path("$CONDA/envs/a;b"))
    assert "\nexport CONDA_PREFIX=\"${CONDA-}\"/envs/'a;b'\n" in text


def test_the_order_is_clean_load_activate_set() -> None:
    text = script("conda", "module load gcc/10.2.0", "module load py/1")
    parts = [
        'test "$?shell" = 1 && ', "\nunset PYTHONHOME PYTHONPATH\n",
        "\nmodule load gcc/10.2.0 &&\nmodule load py/1\n}\n", "\nif ! _hvdenv_load; then\n",
        "\nexport CONDA_PREFIX=", "\nexport PYTHONNOUSERSITE=1\n", "\nexport OPAL_PREFIX=",
        '\nexport PATH="$_hvdenv_bin', "\n_hvdenv_scripts activate.d\n", "\nhvdenv_deactivate() {\n",
    ]  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert places[0] == 0


def test_what_is_not_needed_is_not_there() -> None:
    assert "CONDA_PREFIX" not in script("venv")
    assert "_hvdenv_load" not in script("venv")
    assert "_hvdenv_strict" not in script("venv")
    modules_only = script("none", "module load Horovod/0.28.1")
    assert "VIRTUAL_ENV" not in modules_only
    assert "CONDA_PREFIX" not in modules_only
    assert "PATH=" not in modules_only.replace("PYTHONPATH=", "")


def test_each_provider_has_its_kind() -> None:
    assert set(KINDS) == set(get_args(fields(Python)["provider"]))
    assert set(KINDS.values()) == set(get_args(Kind))
