"""Each command of the sites' documents is done by something, or it is said why not."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.schema import parse_toml
from hvdenv.model.layers import load_recipe
from tests.support.commands import Hvdenv
from tests.support.shipped import OFFERED

CASES = Path(__file__).parents[1] / "cases"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def _environment_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is passed on to ranks is not what happens to be set where the tests run."""
    for name in os.environ.keys() - {"PATH", "HOME", "HVDENV_HOME"}:
        monkeypatch.delenv(name)
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, "/site/lib")
    monkeypatch.setenv("SHELL", "/bin/bash")


DOCUMENTS: dict[str, dict[str, Any]] = {
    path.stem: parse_toml(path.read_text(encoding="utf-8"))
    for path in sorted((CASES / "documents").glob("*.toml"))
}
COMMANDS = [
    pytest.param(document["recipe"], command, id=f"{name}-{number}")
    for name, document in DOCUMENTS.items()
    for number, command in enumerate(document["command"])
]
# What commands printed.
PRINTED: dict[tuple[str, ...], str] = {}


def output(recipe: str, command: dict[str, Any], hvdenv: Hvdenv) -> str:
    """What the commands of hvdenv print that a command of a document is done by."""
    called, arguments = command["covered_by"], command.get("arguments", [])
    words = [called, recipe, *(f"--variant={name}" for name in command.get("variants", []))]
    container = load_recipe(recipe).recipe.container
    if called != "show" and not (container and container.image):
        words += ["--prefix", "/scratch/envs/horovod"]
    words += ["--dry-run"] if called in ("run", "shell") else []
    words += ["--facts", str(CASES / "facts.json")] if called == "plan" else arguments
    if tuple(words) not in PRINTED:
        said = hvdenv(*words).out
        said += hvdenv(*words, "--format", "bash").out if called == "plan" else ""
        if called == "shell":  # what the shell reads at its start belongs to it
            files = Path(os.environ["HVDENV_HOME"], "shells").rglob("bashrc")
            said += "".join(file.read_text(encoding="utf-8") for file in files)
        PRINTED[tuple(words)] = said
    return PRINTED[tuple(words)]


@pytest.mark.parametrize(("recipe", "command"), COMMANDS)
def test_a_command_of_a_document_is_covered(
    recipe: str, command: dict[str, Any], hvdenv: Hvdenv
) -> None:
    """By texts that commands of hvdenv print, or a reason."""
    how, covered_by = command["how"], command["covered_by"]
    assert set(command) <= {"line", "variants", "arguments", "covered_by", "how"}
    assert command["line"]
    assert ("arguments" in command) == (covered_by in ("job", "run", "shell"))
    if covered_by in ("plan", "job", "run", "shell", "show"):
        assert isinstance(how, list) and how
        said = output(recipe, command, hvdenv)
        assert [text for text in how if text not in said] == [], said
    elif covered_by == "deviation":
        chosen = load_recipe(recipe, variants=command.get("variants", [])).recipe
        assert how in {each.document for each in chosen.deviations}
    else:
        assert covered_by in ("needless", "reader")
        assert len(how.split()) >= 3


@pytest.mark.parametrize("name", DOCUMENTS)
def test_most_of_a_document_is_done_and_not_explained_away(name: str) -> None:
    """The image of the last one is another today, so its definition is other all over."""
    document = DOCUMENTS[name]
    assert set(document) - {"step"} == {"recipe", "documents", "command"}
    assert set(document["documents"]) <= set(load_recipe(document["recipe"]).recipe.sources)
    covered = [each["covered_by"] for each in document["command"]]
    done = [each for each in document["command"] if isinstance(each["how"], list)]
    assert covered.count("reader") <= len(covered) / 4
    assert len(done) / len(covered) > (0.15 if name == "singularity" else 0.55)


def test_the_documents_are_there() -> None:
    expected = {"neuron", "taurus", "alvis", "theta", "thetagpu", "singularity"}
    assert DOCUMENTS.keys() == expected <= set(OFFERED)
    assert len(OFFERED) >= 13


def test_a_step_of_a_document_is_explained_and_proven() -> None:
    """The how-to has the functions of Horovod that the step calls, and the finding about it."""
    text = (DOCS / "how-to/make-a-program-distributed.md").read_text(encoding="utf-8")
    for step in (step for document in DOCUMENTS.values() for step in document.get("step", ())):
        called = re.findall(r"hvd\.[\w.]+|BroadcastGlobal\w+", step["line"])
        assert called
        assert all(each.removeprefix("hvd.keras.callbacks.") in text for each in called), step
        assert f"`{step['finding']}`" in text, step
