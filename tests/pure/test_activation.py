from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from hvdenv.base.errors import StepError, UsageError
from hvdenv.base.schema import decode, encode, fields
from hvdenv.environments import generations
from hvdenv.environments.activation import (
    KINDS,
    Language,
    Modulefile,
    modulefile_of,
    render_modulefile,
)
from hvdenv.environments.generations import Environment
from hvdenv.environments.installation import inspect_prefix
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.cluster import Modules
from hvdenv.model.dialect import job_variables
from hvdenv.model.recipe import Python, Recipe
from tests.support.commands import Hvdenv
from tests.support.environments import ONE, build_active
from tests.support.files import write

ENVIRONMENT = Path("/g/env")


@pytest.mark.parametrize(
    "scheduler", ["SLURM_JOB_ID", "PBS_JOBID", "COBALT_JOBID", "LSB_JOBID", "JOB_ID"]
)
def test_programs_of_verify_get_them_filled_in(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in job_variables():
        monkeypatch.delenv(name, raising=False)
    record = {"format": generations.FORMAT, "variables": {"A": "/tmp/{user}-{jobid}"}}
    write(tmp_path / generations.RECORD, json.dumps(record))
    write(tmp_path / "venv" / "bin" / "python", "")
    user = pwd.getpwuid(os.geteuid()).pw_name
    for value, job in (("7.pbs", "7.pbs"), ("", os.getpid())):
        monkeypatch.setenv(scheduler, value)
        assert dict(inspect_prefix(str(tmp_path)).env) == {"A": f"/tmp/{user}-{job}"}


MODULES = Modules(
    use=("/apps/ann/a", "/home/ann/b"),
    source=("/apps/setup.sh",),
    unload=("atp", "PrgEnv-intel"),
    load=("PrgEnv-gnu", "gcc/10.2.0"),
    build=("cmake/3.16.9",),
)


@pytest.fixture
def record(recipe: Recipe) -> dict[str, Any]:
    resolved = encode(recipe._replace(modules=MODULES))
    return {
        "recipe": "neuron",
        "variants": ["nccl"],
        "created": "2026-11-21T16:39:24.791939+00:00",
        "plan_digest": "ab12",
        "environment": "venv",
        "variables": {"OPAL_PREFIX": "/g/venv"},
        "resolved": json.loads(json.dumps(resolved)),
        "wheel": {"frameworks": {"torch": {"built_with": "2.13.0+cpu"}}},
    }


def entry_of(record: dict[str, Any], name: str = "") -> Modulefile:
    recorded = decode(GenerationRecord, record, lenient=True)
    return modulefile_of(recorded, Path("/g"), name, user="ann")


@pytest.mark.parametrize(
    ("language", "provider", "environment", "name"),
    [("lua", "venv", "venv", ""), ("tcl", "conda", "/site/conda", "hvd/a/1")],
)
def test_a_modulefile(
    language: Language,
    provider: str,
    environment: str,
    name: str,
    record: dict[str, Any],
    cases: Path,
    golden: Callable[[Path, str], None],
) -> None:
    assert set(KINDS) == set(get_args(fields(Python)["provider"]))
    record["resolved"]["python"]["provider"] = provider
    record["environment"] = environment
    text = render_modulefile(entry_of(record, name), language)
    golden(cases / f"modulefiles/neuron.{language}", text)
    record["resolved"]["python"]["provider"] = "modules"  # which bring everything
    text = render_modulefile(entry_of(record), language)
    assert not re.search("isDir|isdirectory|VIRTUAL_ENV|CONDA_PREFIX|bin", text)
    assert "gcc/10.2.0" in text
    record["resolved"]["modules"]["load"] = ["gcc; touch x"]
    with pytest.raises(StepError, match="a module name such as"):
        entry_of(record)


@pytest.mark.parametrize(
    "name", ["horovod", "/horovod/1", "a b/1", "../x/1", "a/1.eb", "a//1", "a/"]
)
def test_names_that_cannot_be(record: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError):
        entry_of(record, name)


@pytest.mark.parametrize(
    "change",
    [
        {"variables": {"A": "1\ntouch x"}},
        {"variables": {"A": "\0"}},
        {"variables": {"A": "/tmp/{user}-{jobid}"}},
        {"environment": Path("/g\n")},
        {"environment": Path("$CONDA/env")},
    ],
    ids=str,
)
def test_what_no_modulefile_can_say(record: dict[str, Any], change: dict[str, Any]) -> None:
    for language in get_args(Language):
        with pytest.raises(UsageError):
            render_modulefile(entry_of(record)._replace(**change), language)


@pytest.fixture
def built(environment: Environment, record: dict[str, Any]) -> Environment:
    build_active(environment, ONE, **record)
    return environment


def test_a_modulefile_is_written(built: Environment, tmp_path: Path, hvdenv: Hvdenv) -> None:
    words = ["module", "--prefix", str(built.prefix)]
    folder = tmp_path / "module files"
    for form, suffix in (("lua", ".lua"), ("tcl", "")):
        text = hvdenv(*words, "--format", form).out
        assert f'"{built.generation(ONE)}/venv"' in text
        path = folder / f"hvd/2{suffix}"
        said = hvdenv(*words, "--format", form, "--to", str(folder), "--name", "hvd/2")
        assert said.out == f"wrote {path}\nuse it with: module use '{folder}'; module load hvd/2\n"
        assert path.read_text() == text.replace('"horovod"', '"hvd"').replace(
            "avail horovod", "avail hvd"
        )
    assert sorted(os.listdir(folder / "hvd")) == ["2", "2.lua"]
    built.store.chmod(0o700)
    said = hvdenv(*words, "--to", str(folder))
    assert f"note: other users cannot use it: the mode of {built.store} is drwx------\n" in said.err


def test_a_modulefile_of_someone_else_is_left_alone(
    built: Environment, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    other = write(tmp_path / "m" / "hvd" / "2.lua", "-- mine\n")
    words = ["module", "--prefix", str(built.prefix), "--format", "lua", "--name", "hvd/2"]
    said = hvdenv(*words, "--to", str(tmp_path / "m"), code=2).err
    assert f"{other}: this modulefile was not written by hvdenv" in said
    assert other.read_text() == "-- mine\n"
    assert os.listdir(other.parent) == ["2.lua"]


def test_the_format_is_that_of_the_system_here(
    built: Environment, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    words = ("module", "--prefix", str(built.prefix))
    for name in ("LMOD_CMD", "MODULES_CMD"):
        monkeypatch.delenv(name, raising=False)
    assert hvdenv(*words).out.startswith("-- Written")
    monkeypatch.setenv("MODULES_CMD", "x")
    assert hvdenv(*words).out.startswith("#%Module")
    monkeypatch.setenv("LMOD_CMD", "x")
    assert hvdenv(*words).out.startswith("-- Written")
