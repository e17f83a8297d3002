from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.errors import StepError, UsageError
from hvdenv.places import Places, blocked, environment_name, find_places, make_folder, write_json
from tests.wheels import umask

VARIANTS = st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True), max_size=5)


def test_home_is_where_the_variable_says(tmp_path: Path) -> None:
    places = find_places({"HVDENV_HOME": f"{tmp_path}/x/../home"})
    assert places == Places(tmp_path / "home")
    assert places.prefix("local", ["torch"]) == tmp_path / "home/envs/local+torch"
    assert places.wheels == tmp_path / "home/cache/wheels"
    assert places.reports.parent == places.registry.parent == places.home


def test_home_may_name_the_users_folder() -> None:
    assert find_places({"HVDENV_HOME": "~/h"}).home == Path(os.path.expanduser("~/h"))


@pytest.mark.parametrize("environ", [{}, {"HVDENV_HOME": ""}])
def test_home_is_the_data_folder_otherwise(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert find_places(environ).home == tmp_path / "hvdenv"


@given(VARIANTS, st.randoms(use_true_random=False))
def test_order_and_repetition_of_variants_do_not_matter(
    variants: list[str], random: Random
) -> None:
    shuffled = variants + variants[:1]
    random.shuffle(shuffled)
    assert environment_name("local", variants) == environment_name("local", shuffled)


@given(VARIANTS, VARIANTS)
def test_different_variants_have_different_names(one: list[str], other: list[str]) -> None:
    same = environment_name("local", one) == environment_name("local", other)
    assert same == (set(one) == set(other))


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a+b", "a b", "a\n", "-x", "$(id)", "é", "x" * 65]
)
def test_names_that_are_no_folder_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name") as caught:
        environment_name("local", [name])
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError):
        environment_name(name, [])


def test_json_is_replaced_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    write_json(path, {"name": "\udcff\n"})
    assert json.loads(path.read_bytes()) == {"name": "\udcff\n"}
    assert os.listdir(tmp_path) == ["record.json"]


def test_json_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="float"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_bytes()) == {"a": 1}
    assert os.listdir(tmp_path) == ["record.json"]


def test_umask_is_honoured(tmp_path: Path) -> None:
    with umask(0o027):
        write_json(tmp_path / "one", {})
        write_json(tmp_path / "two", {}, mode=0o604)
        make_folder(tmp_path / "folder")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("one", "two", "folder")]
    assert modes == [0o640, 0o600, 0o750]


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StepError, match="HVDENV_HOME or --prefix") as caught:
        make_folder(tmp_path / "file/folder")
    assert str(tmp_path / "file/folder") in str(caught.value)


def test_json_into_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="No such file"):
        write_json(tmp_path / "no/record.json", {})


def test_blocked_says_what_was_tried(tmp_path: Path) -> None:
    assert "cannot read: Input/output error" in str(
        blocked(tmp_path, OSError(5, os.strerror(5)), "read")
    )
