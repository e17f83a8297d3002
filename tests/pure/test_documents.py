"""Each command of the sites' documents is done by something, or it is said why not."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hvdenv.cli.main import main
from hvdenv.model.layers import load_recipe
from hvdenv.schema import parse_toml
from tests.shipped import OFFERED

CASES = Path(__file__).parents[1] / "cases"
DOCS = Path(__file__).parents[2] / "docs"
# By what a command of a document is covered: texts that commands of hvdenv print, or a reason.
HOW = {
    "plan": list,
    "job": list,
    "run": list,
    "shell": list,
    "show": list,
    "deviation": str,
    "needless": str,
    "reader": str,
}


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
    how, covered_by = command["how"], command["covered_by"]
    assert set(command) <= {"line", "variants", "arguments", "covered_by", "how"}
    assert command["line"]
    assert isinstance(how, HOW[covered_by])
    assert ("arguments" in command) == (covered_by in ("job", "run", "shell"))
    if covered_by == "deviation":
        chosen = load_recipe(recipe, variants=command.get("variants", [])).recipe
        assert how in {each.document for each in chosen.deviations}
    elif isinstance(how, str):
        assert len(how.split()) >= 3
    else:
        assert how
        said = output(recipe, command, capsys)
        assert [text for text in how if text not in said] == [], said


@pytest.mark.parametrize("name", documents())
def test_most_of_a_document_is_done_and_not_explained_away(name: str) -> None:
    """The image of the last one is another today, so its definition is other all over."""
    document = documents()[name]
    assert set(document) - {"step"} == {"recipe", "documents", "command"}
    assert set(document["documents"]) <= set(load_recipe(document["recipe"]).recipe.sources)
    covered = [each["covered_by"] for each in document["command"]]
    done = [each for each in document["command"] if isinstance(each["how"], list)]
    assert covered.count("reader") <= len(covered) / 4
    assert len(done) / len(covered) > (0.15 if name == "singularity" else 0.55)


def test_the_documents_are_there() -> None:
    expected = {"neuron", "taurus", "alvis", "theta", "thetagpu", "singularity"}
    assert documents().keys() == expected <= set(OFFERED)
    assert len(OFFERED) >= 13


STEPS = [
    pytest.param(step, id=f"{name}-{number}")
    for name, document in documents().items()
    for number, step in enumerate(document.get("step", ()))
]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_a_document_is_explained_and_proven(step: dict[str, str]) -> None:
    """The how-to has the functions of Horovod that the step calls, and the finding about it."""
    text = (DOCS / "how-to/make-a-program-distributed.md").read_text(encoding="utf-8")
    called = re.findall(r"hvd\.[\w.]+|BroadcastGlobal\w+", step["line"])
    assert called
    assert [each for each in called if each.removeprefix("hvd.keras.callbacks.") not in text] == []
    assert f"`{step['finding']}`" in text
