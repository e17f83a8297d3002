from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.layers import load_recipe
from hvdenv.model.observe import declared
from hvdenv.model.recipe import Recipe
from hvdenv.plans.resolution import Availability
from hvdenv.reports.report import Report
from tests.support.commands import Hvdenv

CASES = Path(__file__).parents[1] / "cases"
_HOMES = count()


@pytest.fixture
def cases() -> Path:
    """The directory of the cases that are data."""
    return CASES


@pytest.fixture(scope="session")
def everything() -> Report:
    """A report that verify kept, with every kind of finding."""
    text = (CASES / "reports" / "everything.json").read_text(encoding="utf-8")
    return Report.from_json(json.loads(text))


@pytest.fixture
def facts() -> Facts:
    """Facts of a machine that is not this one."""
    return declared(CASES / "facts.json")


@pytest.fixture
def hvdenv(capsys: pytest.CaptureFixture[str]) -> Hvdenv:
    return Hvdenv(capsys)


@pytest.fixture
def python(facts: Facts) -> Interpreter:
    return facts.interpreters[0]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment without generations."""
    one = generations.at(tmp_path / "env")
    generations.claim(one)
    return one


@pytest.fixture
def recipe() -> Recipe:
    """The shipped recipe `local`."""
    return load_recipe("local").recipe


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Callable[[Path, str], None]:
    """Compares a text with the expected one. `pytest tests/pure --regenerate` writes that anew."""

    def compare(path: Path, text: str) -> None:
        if pytestconfig.getoption("--regenerate"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees, or leaves anything in, the environments of who runs it."""
    # mktemp() looks at all directories that it has made, which takes seconds for 5,000 tests.
    home = tmp_path_factory.getbasetemp() / "homes" / str(next(_HOMES))
    home.mkdir(parents=True)
    monkeypatch.setenv("HVDENV_HOME", str(home))
    for name in ("HVDENV_SITE", "HVDENV_WHEEL_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hvdenv check` asks no package index."""
    monkeypatch.setattr("hvdenv.building.lookup.look_up", lambda questions: Availability())
