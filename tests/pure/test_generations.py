from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv.environments import generations, prune
from hvdenv.environments.generations import UNFIT_IN_BASH, UNFIT_IN_PREFIX, Environment, at
from hvdenv.errors import StepError, UsageError
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import make_plan, render_bash, steps_of
from tests.environments import ONE, TWO, build, build_active


def test_the_store_lies_beside_the_prefix(tmp_path: Path) -> None:
    assert at(tmp_path / "x/../env/").prefix == tmp_path / "env"
    assert at(tmp_path / "env").store == tmp_path / ".env.hvdenv"
    with pytest.raises(UsageError, match="cannot be a prefix"):
        at(Path("/"))


def test_the_prefix_points_to_what_was_switched_to(environment: Environment) -> None:
    build(environment, ONE)
    build(environment, TWO)
    for identity in (ONE, TWO):
        generations.switch(environment, identity)
        assert environment.active() == identity
        assert (environment.prefix / "bin/python").exists()
    assert os.readlink(environment.prefix) == f".env.hvdenv/{TWO}"
    assert list(environment.records()) == [TWO, ONE]
    assert set(os.listdir(environment.store)) == {ONE, TWO}


def test_an_environment_may_be_moved_as_a_whole(environment: Environment, tmp_path: Path) -> None:
    build_active(environment, ONE)
    (tmp_path / "new").mkdir()
    environment.prefix.rename(tmp_path / "new/env")
    environment.store.rename(tmp_path / "new/.env.hvdenv")
    assert at(tmp_path / "new/env").active() == ONE


def test_an_absolute_link_through_another_path_is_understood(
    environment: Environment, tmp_path: Path
) -> None:
    build(environment, ONE)
    (tmp_path / "alias").symlink_to(tmp_path)
    environment.prefix.symlink_to(tmp_path / "alias/.env.hvdenv" / ONE)
    assert environment.active() == at(tmp_path / "alias/env").active() == ONE


def test_never_switched_to_what_is_incomplete(environment: Environment) -> None:
    build_active(environment, ONE)
    generations.create(environment, TWO)
    with pytest.raises(StepError, match="never finished"):
        generations.switch(environment, TWO)
    assert environment.active() == ONE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the record is damaged"),
        (b'{"format": 1, "created": "20', "the record is damaged"),
        (b"\xff\xff", "the record is damaged"),
        (b"[" * 100_000, "the record is damaged"),
        (b"[1]", "has format None"),
        (b"{}", "has format None"),
        (b'{"format": 2}', "has format 2; this hvdenv knows format 1"),
        (b'{"format": "1"}', "has format '1'"),
        (b'{"format": 1, "created": 5}', "created: expected a string, found 5"),
        (b'{"format": 1, "variants": "x"}', "variants: expected a list, found 'x'"),
    ],
)
def test_a_damaged_record_is_no_complete_generation(
    environment: Environment, content: bytes, message: str
) -> None:
    build_active(environment, ONE)
    environment.record(ONE).write_bytes(content)
    assert environment.active() == ""
    assert environment.pointed() == ONE
    assert environment.records() == {}
    with pytest.raises(StepError, match=message) as caught:
        generations.read_record(environment.record(ONE))
    assert caught.value.where == str(environment.record(ONE))
    assert caught.value.remedy


def test_unknown_keys_of_a_record_are_ignored(environment: Environment) -> None:
    build(environment, ONE, recipe="local")
    path = environment.record(ONE)
    document = json.loads(path.read_text())
    assert document["format"] == 1
    path.write_text(json.dumps({**document, "future": {"x": [1]}}))
    assert generations.read_record(path).recipe == "local"
    assert list(environment.records()) == [ONE]


def test_what_a_build_left_is_removed_and_what_is_complete_is_not(
    environment: Environment,
) -> None:
    digest = "1" * 64
    assert generations.new_identity(environment, digest) == ONE
    folder = generations.create(environment, ONE)
    (folder / "venv").mkdir()
    assert environment.begun(ONE)
    assert generations.delete_unfinished(environment) == []
    assert not folder.exists()
    build(environment, ONE)
    assert not environment.begun(ONE)
    assert generations.delete_unfinished(environment) == []
    assert generations.new_identity(environment, digest) == f"{ONE}-2"


def damaged(environment: Environment) -> None:
    build(environment, ONE)
    environment.record(ONE).write_text("{")


def active_without_record(environment: Environment) -> None:
    build_active(environment, ONE)
    environment.record(ONE).unlink()


def without_marker(environment: Environment) -> None:
    environment.generation(ONE).mkdir()
    (environment.generation(ONE) / "data").touch()


def linked(environment: Environment) -> None:
    environment.generation(ONE).symlink_to(generations.create(environment, TWO))


@pytest.mark.parametrize("make", [damaged, active_without_record, without_marker, linked])
def test_what_may_be_in_use_or_is_not_ours_is_left_alone(
    environment: Environment, make: Callable[[Environment], None]
) -> None:
    make(environment)
    environment.generation(f"{ONE}-2").mkdir()  # without a marker: not hvdenv's
    assert not environment.begun(ONE)
    generations.delete_unfinished(environment)
    assert os.path.lexists(environment.generation(ONE))
    assert environment.generation(f"{ONE}-2").exists()
    assert generations.new_identity(environment, "1" * 64) == f"{ONE}-3"


@pytest.mark.parametrize("inside", ["env/x", f".env.hvdenv/{ONE}/bin/x", ".env.hvdenv/x"])
def test_no_environment_inside_another(environment: Environment, inside: str) -> None:
    build_active(environment, ONE)
    with pytest.raises(UsageError, match="inside another environment"):
        generations.claim(at(environment.prefix.parent / inside))


def test_a_missing_parent_and_a_file_as_parent_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for parent in ("no", "file"):
        with pytest.raises(UsageError, match="directory for the prefix does not exist"):
            generations.claim(at(tmp_path / parent / "env"))


def test_a_place_that_nobody_may_write_to_is_said_before_any_work() -> None:
    with pytest.raises(StepError, match="cannot write") as caught:
        generations.claim(at(Path("/proc/env")))
    assert caught.value.exit_code == 5
    assert "--prefix" in caught.value.remedy


def test_a_marker_is_there_from_the_first_moment(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Stands for a kill -9."""

    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(generations, "write_json", killed)
    with pytest.raises(Killed):
        generations.create(environment, ONE)
    monkeypatch.undo()
    assert environment.identities() == []
    assert generations.new_identity(environment, "1" * 64) == ONE
    prune.prune(environment, keep=0)
    assert os.listdir(environment.store) == []


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
