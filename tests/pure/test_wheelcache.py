from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.errors import StepError
from hvdenv.places import Places
from hvdenv.wheelcache import find, key, store

INPUTS = {"source": "abc", "patches": ["one", "two"], "flags": {"arch": "-mavx"}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "home")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(b"wheel" * 1000)
    return path


@given(st.dictionaries(st.text(), JSON), st.randoms(use_true_random=False))
def test_order_of_inputs_does_not_matter(inputs: dict[str, object], random: Random) -> None:
    items = list(inputs.items())
    random.shuffle(items)
    assert key(inputs) == key(dict(items))


@given(st.dictionaries(st.text(), JSON), st.dictionaries(st.text(), JSON))
def test_other_inputs_have_another_key(one: dict[str, object], other: dict[str, object]) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (key(one) == key(other)) == same


def test_a_wheel_is_found_again(places: Places, wheel: Path) -> None:
    assert find(places, INPUTS) == (None, "")
    stored = store(places, INPUTS, wheel)
    found = find(places, dict(reversed(INPUTS.items())))
    assert found == (stored, "")
    assert stored.name == wheel.name
    assert stored.read_bytes() == wheel.read_bytes()
    assert stored.stat().st_nlink == wheel.stat().st_nlink == 1
    assert find(places, {**INPUTS, "source": "abd"}) == (None, "")


def test_the_first_of_two_stays(places: Places, wheel: Path, tmp_path: Path) -> None:
    first = store(places, INPUTS, wheel)
    other = tmp_path / "other.whl"
    other.write_bytes(b"other")
    assert store(places, INPUTS, other) == first
    assert find(places, INPUTS).wheel == first
    assert os.listdir(first.parent.parent) == [key(INPUTS)]


def flip(entry: Path) -> None:
    (wheel,) = entry.glob("*.whl")
    content = bytearray(wheel.read_bytes())
    content[17] ^= 1
    wheel.write_bytes(content)


def cut(entry: Path) -> None:
    (wheel,) = entry.glob("*.whl")
    os.truncate(wheel, 10)


def lose(entry: Path) -> None:
    (wheel,) = entry.glob("*.whl")
    wheel.unlink()


def rewrite(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        record = json.loads((entry / "entry.json").read_text())
        change(record)
        (entry / "entry.json").write_text(json.dumps(record))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        cut,
        lose,
        lambda entry: (entry / "entry.json").unlink(),
        lambda entry: (entry / "entry.json").write_text("{"),
        lambda entry: (entry / "entry.json").write_text("[]"),
        rewrite(lambda record: record.update(format=2)),
        rewrite(lambda record: record.update(inputs={**INPUTS, "source": "abd"})),
        rewrite(lambda record: record.update(file="../../x.whl")),
        rewrite(lambda record: record.update(file=1)),
        rewrite(lambda record: record.pop("sha256")),
    ],
)
def test_a_damaged_entry_is_noticed_taken_away_and_made_anew(
    places: Places, wheel: Path, damage: Callable[[Path], object]
) -> None:
    entry = store(places, INPUTS, wheel).parent
    damage(entry)

    found = find(places, INPUTS)

    assert found.wheel is None
    assert "cached wheel not used" in found.note
    assert str(entry) in found.note
    assert os.listdir(entry.parent) == []
    damaged_again = store(places, INPUTS, wheel)
    damage(entry)
    assert store(places, INPUTS, wheel) == damaged_again
    assert find(places, INPUTS) == (damaged_again, "")


def share(entry: Path) -> None:
    entry.chmod(0o775)


def share_wheel(entry: Path) -> None:
    next(entry.glob("*.whl")).chmod(0o666)


def link(entry: Path) -> None:
    entry.rename(entry.with_name("elsewhere"))
    entry.symlink_to("elsewhere")


def link_wheel(entry: Path) -> None:
    (wheel,) = entry.glob("*.whl")
    moved = wheel.rename(entry.parent / "moved.whl")
    wheel.symlink_to(moved)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (share, "can be written by others"),
        (share_wheel, "can be written by others"),
        (link, "symbolic link"),
        (link_wheel, "symbolic link"),
    ],
)
def test_what_others_could_have_written_is_left_alone_and_not_used(
    places: Places, wheel: Path, change: Callable[[Path], object], reason: str
) -> None:
    entry = store(places, INPUTS, wheel).parent
    change(entry)
    for _ in range(2):
        found = find(places, INPUTS)
        assert found.wheel is None
        assert reason in found.note
        assert store(places, INPUTS, wheel) == wheel
    assert os.path.lexists(entry)
    assert not list(entry.parent.glob(".*"))


def test_what_another_user_wrote_is_not_used(
    places: Places, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = store(places, INPUTS, wheel).parent
    if os.geteuid() == 0:
        os.chown(entry / "entry.json", 12345, -1)
    else:
        # Only root can give files away; this stands for somebody else looking.
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    found = find(places, INPUTS)
    assert found.wheel is None
    assert "belongs to user" in found.note


def test_our_own_entries_are_trusted_under_any_umask(places: Places, wheel: Path) -> None:
    before = os.umask(0o002)
    try:
        stored = store(places, INPUTS, wheel)
    finally:
        os.umask(before)
    assert find(places, INPUTS) == (stored, "")


def test_a_killed_store_leaves_nothing_that_is_found(places: Places, wheel: Path) -> None:
    entry = store(places, INPUTS, wheel).parent
    shutil.move(entry, entry.with_name(".0123"))
    assert find(places, INPUTS) == (None, "")


def test_a_cache_that_cannot_be_written_is_an_error(places: Places, wheel: Path) -> None:
    places.home.write_text("")
    with pytest.raises(StepError, match="cannot write"):
        store(places, INPUTS, wheel)


def test_a_wheel_that_is_not_there_is_an_error(places: Places, tmp_path: Path) -> None:
    with pytest.raises(StepError, match="No such file"):
        store(places, INPUTS, tmp_path / "no.whl")
    assert find(places, INPUTS) == (None, "")
