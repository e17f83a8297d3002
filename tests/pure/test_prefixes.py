from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv.environments import generations, prune
from hvdenv.environments.generations import UNFIT_IN_BASH, UNFIT_IN_PREFIX, at
from hvdenv.errors import UsageError
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import make_plan, render_bash, steps_of
from tests.environments import ONE, build, build_active

UNFIT = " \t\n\r\v\f\x01\x1b\x7f'\"`$\\;&|<>(){}[]*?!#%:,"


def elsewhere(prefix: Path) -> None:
    prefix.symlink_to("/usr")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.mkdir, "is a directory"),
        (lambda prefix: (prefix / "pyvenv.cfg").mkdir(parents=True), "is a Python environment"),
        (lambda prefix: (prefix / "conda-meta").mkdir(parents=True), "is a conda prefix"),
        (Path.touch, "is a file"),
        (lambda prefix: prefix.symlink_to("nowhere"), "is a symbolic link to nowhere"),
        (elsewhere, "is a symbolic link to /usr"),
    ],
)
def test_what_is_not_ours_is_refused_and_left(
    tmp_path: Path, make: Callable[[Path], None], what: str
) -> None:
    environment = at(tmp_path / "env")
    make(environment.prefix)
    with pytest.raises(UsageError, match=f"{what}.* that hvdenv did not make") as caught:
        generations.claim(environment)
    assert "--prefix" in caught.value.remedy
    assert not environment.store.exists()

    environment.store.mkdir()
    build(environment, ONE)
    with pytest.raises(UsageError, match=what):
        generations.switch(environment, ONE)
    cleared = prune.remove(environment)
    assert cleared.removed == (ONE,)
    assert [path for path, _ in cleared.kept] == [str(environment.prefix)]
    assert os.path.lexists(environment.prefix)


@pytest.mark.parametrize("make", [Path.touch, elsewhere])
def test_a_store_that_is_not_ours_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    environment = at(tmp_path / "env")
    make(environment.store)
    with pytest.raises(UsageError, match="that hvdenv did not make"):
        generations.claim(environment)
    with pytest.raises(UsageError, match="no environment"):
        prune.remove(environment)


@pytest.mark.parametrize("character", [*UNFIT, "\x85", "\u2003", "\udcff"])
def test_a_path_that_tools_stumble_over_is_refused(tmp_path: Path, character: str) -> None:
    for prefix in (tmp_path / f"a{character}b", tmp_path / f"a{character}b" / "env"):
        with pytest.raises(UsageError, match="in its path would break") as caught:
            generations.claim(at(prefix))
        assert repr(character) in caught.value.message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["local+torch", "A_b-1.0", "u@site", "run=1~2^3", "jürgen", "山田"]
)
def test_letters_of_every_language_are_no_hindrance(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    environment = at(tmp_path / name / name)
    generations.claim(environment)
    build_active(environment, ONE)
    assert environment.active() == ONE


ASK = """
for text in "${@:2}"; do
    if [[ $text =~ $1 ]]; then echo unfit; else echo fit; fi
done
"""


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bash_and_python_agree_on_such_paths(locale: str) -> None:
    texts = [f"a{chr(code)}b" for code in range(1, 128)] + ["jürgen", "à", "山田"]
    said = subprocess.run(
        ["bash", "-c", ASK, "bash", UNFIT_IN_BASH, *texts],
        capture_output=True,
        text=True,
        check=True,
        env={"LC_ALL": locale},
    ).stdout.split()
    unfit = [text for text, word in zip(texts, said, strict=True) if word == "unfit"]
    assert unfit == [text for text in texts if re.search(UNFIT_IN_PREFIX, text)]
    assert "".join(sorted(text[1] for text in unfit)) == "".join(
        sorted({*UNFIT, *map(chr, range(1, 33))})
    )


@pytest.mark.parametrize(
    ("name", "code"), [("jürgen", 0), ("a+b=c", 0), ("a b", 2), ("a:b", 2), ("a]b", 2), ("a\\b", 2)]
)
def test_the_script_of_a_plan_refuses_such_paths(
    recipe: Recipe, facts: Facts, python: Interpreter, tmp_path: Path, name: str, code: int
) -> None:
    plan = make_plan(steps_of(recipe, facts, python)).at(tmp_path)
    before_any_work = render_bash(plan, tmp_path).partition("\nmkdir ")[0]
    found = subprocess.run(
        ["bash", "-c", before_any_work, "bash", str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == code, found.stderr
    assert ("name a directory without" in found.stderr) == (code == 2)
