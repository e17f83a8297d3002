"""Each command of the sites' documents is done by something, or it is said why not."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hvdenv.cli.main import main
from hvdenv.model.layers import load_recipe
from hvdenv.schema import parse_toml

CASES = Path(__file__).parents[1] / "cases"
SAYS_WHY = ("deviation", "needless", "reader")


@pytest.fixture(autouse=True)
def _environment_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is passed on to ranks is not what happens to be set where the tests run."""
    for name in os.environ.keys() - {"PATH", "HOME", "HVDENV_HOME"}:
        monkeypatch.delenv(name)
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, "/site/lib")
    monkeypatch.setenv("SHELL", "/bin/bash")


@cache
def documents() -> dict[str, dict[str, Any]]:
    paths = sorted((CASES / "documents").glob("*.toml"))
    return {path.stem: parse_toml(path.read_text(encoding="utf-8")) for path in paths}


COMMANDS = [
    pytest.param(document["recipe"], command, id=f"{name}-{number}")
    for name, document in documents().items()
    for number, command in enumerate(document["command"])
]


def output(recipe: str, command: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What the commands of hvdenv print that a command of a document is done by."""
    variants = [word for name in command.get("variants", []) for word in ("--variant", name)]
    called, arguments = command["covered_by"], command.get("arguments", [])
    words = [called, recipe, *variants]
    container = load_recipe(recipe).recipe.container
    prefix = [] if container and container.image else ["--prefix", "/scratch/envs/horovod"]
    if called == "show":
        calls = [words]
    elif called == "plan":
        words += [*prefix, "--facts", str(CASES / "facts.json")]
        calls = [words, [*words, "--format", "bash"]]
    elif called == "job":
        calls = [[*words, *prefix, *arguments]]
    else:
        calls = [[*words, *prefix, "--dry-run", *arguments]]
    for call in calls:
        assert main(call) == 0, call
    said = capsys.readouterr().out
    if called == "shell":  # what the shell reads at its start belongs to it
        files = Path(os.environ["HVDENV_HOME"], "shells").rglob("bashrc")
        said += "".join(file.read_text(encoding="utf-8") for file in files)
    return said


@pytest.mark.parametrize(("recipe", "command"), COMMANDS)
def test_a_command_of_a_document_is_covered(
    recipe: str, command: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    how = command["how"]
    if command["covered_by"] == "deviation":
        deviations = {each.document: each for each in load_recipe(recipe).recipe.deviations}
        assert deviations[how].reason
    elif command["covered_by"] in SAYS_WHY:
        assert isinstance(how, str)
        assert len(how.split()) >= 3
    else:
        said = output(recipe, command, capsys)
        assert [text for text in how if text not in said] == [], said


def test_what_is_left_to_the_reader_is_the_smaller_part() -> None:
    for name, document in documents().items():
        left = [each for each in document["command"] if each["covered_by"] == "reader"]
        assert len(left) <= len(document["command"]) / 4, name
