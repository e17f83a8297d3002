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
from hvdenv.environments.activation import KINDS, Kind, activate_script, filled_in, left_open
from hvdenv.environments.installation import inspect_prefix
from hvdenv.model.dialect import job_id
from hvdenv.model.recipe import Python
from hvdenv.schema import fields

ENVIRONMENT = Path("/g/env")


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


def test_each_provider_has_its_kind() -> None:
    assert set(KINDS) == set(get_args(fields(Python)["provider"]))
    assert set(KINDS.values()) == set(get_args(Kind))
