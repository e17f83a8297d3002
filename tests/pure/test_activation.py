from __future__ import annotations

import json
import os
import pwd
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import generations
from hvdenv.environments.activation import (
    KINDS,
    Kind,
    Language,
    Modulefile,
    activate_script,
    filled_in,
    left_open,
    modulefile_of,
    render_modulefile,
)
from hvdenv.environments.generations import Environment
from hvdenv.environments.installation import inspect_prefix
from hvdenv.errors import StepError, UsageError
from hvdenv.model.cluster import Modules, Swap
from hvdenv.model.dialect import job_id
from hvdenv.model.recipe import Python, Recipe
from hvdenv.schema import decode, encode, fields
from tests.commands import Hvdenv
from tests.environments import ONE, build_active

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


MODULES = Modules(
    use=("/apps/ann/a", "/home/ann/b"),
    source=("/apps/setup.sh",),
    unload=("atp",),
    swap=(Swap("PrgEnv-intel", "PrgEnv-gnu"),),
    load=("gcc/10.2.0",),
    build=("cmake/3.16.9",),
)
LANGUAGES: tuple[Language, ...] = ("lua", "tcl")


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


def test_lua(record: dict[str, Any]) -> None:
    assert render_modulefile(entry_of(record), "lua").splitlines() == [
        "-- Written by hvdenv.",
        'help("Description: Horovod 0.28.1 for tensorflow, torch 2.13.0+cpu\\nRecipe: neuron+nccl\\n'
        "Built: 2026-11-21 by ann\\nPlan: ab12\\n\\n"
        'Your own PYTHONPATH comes before the packages of the environment: unset it.")',
        'whatis("Description: Horovod 0.28.1 for tensorflow, torch 2.13.0+cpu")',
        'whatis("Recipe: neuron+nccl")',
        'whatis("Built: 2026-11-21 by ann")',
        'whatis("Plan: ab12")',
        'conflict("horovod")',
        'if mode() == "load" and not isDir("/g/venv") then',
        '    LmodError("/g/venv is gone, or you may not enter it; '
        '`module avail horovod` lists other versions")',
        "end",
        'prepend_path("MODULEPATH", "/home/ann/b")',
        'prepend_path("MODULEPATH", "/apps/ann/a")',
        'source_sh("bash", "/apps/setup.sh")',
        'unload("atp")',
        'unload("PrgEnv-intel")',
        'depends_on("PrgEnv-gnu")',
        'depends_on("gcc/10.2.0")',
        'setenv("VIRTUAL_ENV", "/g/venv")',
        'prepend_path("PATH", "/g/venv/bin")',
        'setenv("PYTHONNOUSERSITE", "1")',
        'setenv("OPAL_PREFIX", "/g/venv")',
    ]


def test_tcl(record: dict[str, Any]) -> None:
    record["resolved"]["python"]["provider"] = "conda"
    record["environment"] = "/site/conda"
    lines = render_modulefile(entry_of(record, "hvd/a/1"), "tcl").splitlines()
    assert lines[:3] == ["#%Module1.0", "# Written by hvdenv.", "proc ModulesHelp { } {"]
    assert lines[3].endswith(
        'Scripts in etc/conda/activate.d are not run; source activate.sh for that."'
    )
    assert lines[9:] == [
        'conflict "hvd/a"',
        'if {[module-info mode load] && ![file isdirectory "/site/conda"]} {',
        '    error "/site/conda is gone, or you may not enter it; '
        '`module avail hvd/a` lists other versions"',
        "}",
        'module use "/home/ann/b"',
        'module use "/apps/ann/a"',
        'source-sh bash "/apps/setup.sh"',
        'module unload "atp"',
        'module unload "PrgEnv-intel"',
        'module load "PrgEnv-gnu"',
        'module load "gcc/10.2.0"',
        'setenv "CONDA_PREFIX" "/site/conda"',
        'prepend-path PATH "/site/conda/bin"',
        "setenv PYTHONNOUSERSITE 1",
        'setenv "OPAL_PREFIX" "/g/venv"',
    ]


@pytest.mark.parametrize("language", LANGUAGES)
def test_where_modules_bring_everything_there_is_no_folder(
    record: dict[str, Any], language: Language
) -> None:
    record["resolved"]["python"]["provider"] = "modules"
    text = render_modulefile(entry_of(record), language)
    assert not re.search("isDir|isdirectory|VIRTUAL_ENV|CONDA_PREFIX|bin", text)
    assert "gcc/10.2.0" in text


def test_a_record_with_a_hostile_module(record: dict[str, Any]) -> None:
    record["resolved"]["modules"]["load"] = ["gcc; touch x"]
    with pytest.raises(StepError, match="a module name such as"):
        entry_of(record)


@pytest.mark.parametrize(
    "name", ["horovod", "/horovod/1", "a b/1", "../x/1", "a/1.eb", "a//1", "a/"]
)
def test_names_that_cannot_be(record: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError):
        entry_of(record, name)


@pytest.mark.parametrize("language", LANGUAGES)
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
def test_what_no_modulefile_can_say(
    record: dict[str, Any], language: Language, change: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        render_modulefile(entry_of(record)._replace(**change), language)


def fact_in(text: str, pattern: str, escape: str, base: int) -> str:
    """The one fact of a modulefile, unescaped as its language does it."""
    found = re.search(pattern, text, re.DOTALL)
    assert found

    def unescaped(escaped: re.Match[str]) -> str:
        code = escaped[1]
        return chr(int(code, base)) if code.isdigit() else {"n": "\n"}.get(code, code)

    return re.sub(escape, unescaped, found[1])


@given(fact=st.text(st.characters(exclude_categories=["Cs"])))
def test_texts_are_quoted(fact: str) -> None:
    entry = Modulefile("hvd/1", Path("/g/venv"), "venv", {"F": fact})
    said = fact_in(
        render_modulefile(entry, "lua"), r'\nwhatis\("F: (.*?)"\)\nconflict', r"\\(\d{3}|.)", 10
    )
    assert said == fact
    text = render_modulefile(entry, "tcl")
    assert fact_in(text, r'\nmodule-whatis "F: (.*?)"\nconflict', r"\\([0-7]{3}|.)", 8) == fact
    assert not re.search(r"(?<!\\)(\\\\)*[$\[]", text.split("F: ")[2].split("\nconflict")[0])


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
        said = hvdenv(*words, "--format", form, "--to", str(folder), "--name", "hvd/2").out
        assert said == f"wrote {path}\nuse it with: module use '{folder}'; module load hvd/2\n"
        assert path.read_text() == text.replace('"horovod"', '"hvd"').replace(
            "avail horovod", "avail hvd"
        )
    assert sorted(os.listdir(folder / "hvd")) == ["2", "2.lua"]


def test_a_modulefile_of_someone_else_is_left_alone(
    built: Environment, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    other = tmp_path / "m" / "hvd" / "2.lua"
    other.parent.mkdir(parents=True)
    other.write_text("-- mine\n")
    words = ["module", "--prefix", str(built.prefix), "--format", "lua", "--name", "hvd/2"]
    said = hvdenv(*words, "--to", str(tmp_path / "m"), code=2).err
    assert f"{other}: this modulefile was not written by hvdenv" in said
    assert other.read_text() == "-- mine\n"
    assert os.listdir(other.parent) == ["2.lua"]


@pytest.mark.parametrize(
    ("variables", "form"),
    [
        ({"LMOD_CMD": "x"}, "lua"),
        ({"MODULES_CMD": "x"}, "tcl"),
        ({"LMOD_CMD": "x", "MODULES_CMD": "x"}, "lua"),
        ({}, "lua"),
    ],
)
def test_the_format_is_that_of_the_system_here(
    built: Environment,
    variables: dict[str, str],
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    hvdenv: Hvdenv,
) -> None:
    for name in ("LMOD_CMD", "MODULES_CMD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = hvdenv("module", "--prefix", str(built.prefix)).out
    assert said.startswith({"lua": "-- Written", "tcl": "#%Module"}[form])


def test_what_keeps_others_out_is_said(built: Environment, tmp_path: Path, hvdenv: Hvdenv) -> None:
    built.store.chmod(0o700)
    words = ["module", "--prefix", str(built.prefix), "--to", str(tmp_path / "m")]
    said = hvdenv(*words).err
    assert f"note: other users cannot use it: the mode of {built.store} is drwx------\n" in said
