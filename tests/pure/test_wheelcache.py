from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.errors import StepError
from hvdenv.model.cluster import Wheels
from hvdenv.places import Places, find_places
from hvdenv.wheels import downloads, wheelcache
from hvdenv.wheels.wheelcache import (
    Cache,
    Kept,
    Listed,
    Taken,
    carry,
    describe,
    key,
    least_recently_used,
    names,
    own,
    prune,
    shared,
    store,
    take,
)
from tests.commands import Hvdenv
from tests.standalone import load
from tests.wheels import NAME, umask, wheel_in

INPUTS: dict[str, Any] = {"source": "abc", "patches": ["one", "two"], "flags": {"arch": "-mavx"}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """The user's own."""
    return own(Places(tmp_path / "home"))


@pytest.fixture
def group(tmp_path: Path) -> Cache:
    """One that is shared."""
    folder = tmp_path / "group"
    folder.mkdir()
    folder.chmod(0o750)
    return Cache(folder, shared=True)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return wheel_in(tmp_path)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where a build has its wheel."""
    (tmp_path / "build").mkdir()
    return tmp_path / "build" / NAME


def keep(cache: Cache, wheel: Path, inputs: dict[str, Any] = INPUTS) -> Path:
    """The entry of a wheel that was stored; in a shared cache, as its owner does."""
    store(Cache(cache.folder), inputs, wheel)
    return cache.entry(key(inputs))


@given(st.dictionaries(st.text(), JSON), st.dictionaries(st.text(), JSON))
def test_other_inputs_have_another_key(one: dict[str, object], other: dict[str, object]) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (key(one) == key(other)) == same
    assert key(one) == key(dict(reversed(one.items())))


def test_a_wheel_is_found_again(cache: Cache, wheel: Path, target: Path) -> None:
    assert take([cache], INPUTS, target.parent) == Taken(None)
    entry = keep(cache, wheel)
    assert take([cache], dict(reversed(INPUTS.items())), target.parent) == Taken(entry)
    assert target.read_bytes() == wheel.read_bytes()
    assert target.stat().st_nlink == (entry / NAME).stat().st_nlink == 1
    assert take([cache], {**INPUTS, "source": "abd"}, target.parent) == Taken(None)


def test_nothing_is_left_of_a_wheel_that_cannot_be_copied(
    cache: Cache, wheel: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""

    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path: Path, mode: str) -> Full:
        path.write_bytes(b"begun")
        return Full()

    keep(cache, wheel)
    monkeypatch.setattr(wheelcache, "open", opened, raising=False)
    (note,) = take([cache], INPUTS, target.parent).notes
    assert "cannot be copied: No space left on device" in note
    assert not target.exists()


def test_the_first_of_two_stays(cache: Cache, wheel: Path, tmp_path: Path) -> None:
    entry = keep(cache, wheel)
    other = tmp_path / "other.whl"
    other.write_bytes(b"other")
    assert keep(cache, other) == entry
    assert sorted(os.listdir(entry)) == ["entry.json", NAME]
    assert os.listdir(entry.parent) == [key(INPUTS)]


def flip(entry: Path) -> None:
    content = bytearray((entry / NAME).read_bytes())
    content[17] ^= 1
    (entry / NAME).write_bytes(content)


def rewrite(**changes: object) -> Callable[[Path], None]:
    """Change keys of the record; None removes one."""

    def damage(entry: Path) -> None:
        record = json.loads((entry / "entry.json").read_text()) | changes
        kept = {name: value for name, value in record.items() if value is not None}
        (entry / "entry.json").write_text(json.dumps(kept))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda entry: os.truncate(entry / NAME, 10),
        lambda entry: (entry / NAME).unlink(),
        lambda entry: (entry / "entry.json").unlink(),
        lambda entry: (entry / "entry.json").write_text("{"),
        lambda entry: (entry / "entry.json").write_text("[" * 100_000),
        lambda entry: (entry / "entry.json").write_text('{"inputs": NaN}'),
        lambda entry: os.truncate(entry / "entry.json", 2 << 20),
        rewrite(format=2),
        rewrite(inputs={**INPUTS, "source": "abd"}),
        rewrite(file="../../x.whl"),
        rewrite(sha256=None),
    ],
)
def test_a_damaged_entry_is_noticed_taken_away_and_made_anew(
    cache: Cache, wheel: Path, target: Path, damage: Callable[[Path], object]
) -> None:
    entry = keep(cache, wheel)
    damage(entry)
    assert describe(cache, entry.name).problem

    taken = take([cache], INPUTS, target.parent)

    assert taken.entry is None
    (note,) = taken.notes
    assert "cached wheel not used" in note
    assert str(entry) in note
    assert not target.exists()
    keep(cache, wheel)
    assert take([cache], INPUTS, target.parent) == Taken(entry)


def test_an_entry_under_the_name_of_another_is_damaged(
    cache: Cache, wheel: Path, target: Path
) -> None:
    """What is trusted is one wheel for its own inputs, not for others."""
    entry = keep(cache, wheel)
    other = {**INPUTS, "source": "abd"}
    cache.entry(key(other)).parent.mkdir(exist_ok=True)
    shutil.copytree(entry, cache.entry(key(other)))
    taken = take([cache], other, target.parent)
    assert taken.entry is None
    assert "does not describe this wheel" in taken.notes[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.chmod(0o777),
        lambda entry: (entry / NAME).chmod(0o666),
        lambda entry: (entry / "entry.json").chmod(0o646),
    ],
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_others_could_have_written_is_not_used_and_replaced_in_the_own_cache(
    cache: Cache,
    group: Cache,
    wheel: Path,
    target: Path,
    change: Callable[[Path], object],
    is_shared: bool,
) -> None:
    cache = group if is_shared else cache
    entry = keep(cache, wheel)
    change(entry)
    for _ in range(2):
        taken = take([cache], INPUTS, target.parent)
        assert taken.entry is None
        assert "can be written by everybody" in taken.notes[0]
        assert not target.exists()
    assert entry.exists()
    if not is_shared:
        store(cache, INPUTS, wheel)
        assert take([cache], INPUTS, target.parent) == Taken(entry)
    assert not list(cache.folder.glob(".*"))


def test_a_pipe_is_not_waited_for(cache: Cache, wheel: Path, target: Path) -> None:
    entry = keep(cache, wheel)
    (entry / NAME).unlink()
    os.mkfifo(entry / NAME)
    assert "it is a pipe, not a regular file" in take([cache], INPUTS, target.parent).notes[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", ["entry", "entry.json", NAME])
def test_what_belongs_to_another_user_in_a_shared_folder_is_not_used(
    group: Cache, wheel: Path, target: Path, part: str
) -> None:
    entry = keep(group, wheel)
    path = entry if part == "entry" else entry / part
    os.chown(path, 12345, -1)
    taken = take([group], INPUTS, target.parent)
    assert taken == Taken(None, (f"cached wheel not used: {path} belongs to uid 12345",))
    assert not target.exists()
    (trusting,) = shared(Wheels(read=(str(group.folder),), trust=("12345",)), {})
    assert take([trusting], INPUTS, target.parent) == Taken(entry)


@pytest.mark.parametrize("value", [0o002, 0o022, 0o077, 0o000])
def test_our_own_entries_are_trusted_under_any_umask(
    cache: Cache, group: Cache, wheel: Path, target: Path, value: int
) -> None:
    for each in (cache, group):
        with umask(value):
            entry = keep(each, wheel)
        assert take([each], INPUTS, target.parent) == Taken(entry)


def test_a_shared_folder_that_is_not_there_is_said_and_not_made(
    group: Cache, wheel: Path, target: Path
) -> None:
    missing = group._replace(folder=group.folder / "none")
    (note,) = take([missing], INPUTS, target.parent).notes
    assert (
        note == f"cached wheel not used: {missing.folder} cannot be read: No such file or directory"
    )
    assert not missing.folder.exists()


def test_the_next_cache_is_asked(
    cache: Cache, group: Cache, wheel: Path, target: Path, tmp_path: Path
) -> None:
    """A damaged entry of a shared cache is left where it is."""
    damaged, good = keep(group, wheel), keep(cache, wheel)
    flip(damaged)
    taken = take([group, cache], INPUTS, target.parent)
    assert taken.entry == good
    assert "is damaged: its hash is" in taken.notes[0]
    assert damaged.exists()
    assert target.read_bytes() == wheel.read_bytes()


def test_a_killed_store_leaves_nothing_that_is_found(
    cache: Cache, wheel: Path, target: Path
) -> None:
    entry = keep(cache, wheel)
    shutil.move(entry, cache.folder / ".0123")
    assert take([cache], INPUTS, target.parent) == Taken(None)
    assert names(cache) == []
    prune(cache)
    os.utime(cache.folder / ".0123", (0, 0))
    prune(cache)
    assert not list(cache.folder.glob(".*"))


def test_a_cache_that_cannot_be_written_is_an_error(cache: Cache, wheel: Path) -> None:
    cache.folder.parents[1].write_text("")
    with pytest.raises(StepError, match="cannot write"):
        store(cache, INPUTS, wheel)


def test_a_wheel_that_is_not_there_is_an_error(cache: Cache, tmp_path: Path, target: Path) -> None:
    with pytest.raises(StepError, match="No such file"):
        store(cache, INPUTS, tmp_path / "no.whl")
    assert take([cache], INPUTS, target.parent) == Taken(None)
    assert not list(cache.folder.glob("*"))


def test_what_a_site_names(tmp_path: Path) -> None:
    wheels = Wheels(
        read=("/a", "/b/"),
        trust=("root", "4711", "nobody-of-this-name"),
    )
    caches = shared(wheels, {"HVDENV_WHEEL_CACHE": "/c::/a"})
    assert [str(each.folder) for each in caches] == ["/c", "/a", "/b"]
    assert {each[1:] for each in caches} == {(True, wheels.trust)}
    assert shared(Wheels(), {}) == ()


def test_what_is_listed(cache: Cache, group: Cache, wheel: Path) -> None:
    inputs = {
        "stack": {
            "compiler": "g++ 12.2.0 Copyright (C) 2022",
            "mpi": "mpirun (Open MPI) 4.1.8 Report bugs",
            "frameworks": {"torch": {"package": "torch", "version": "2.13.0+cpu"}, "odd": 1},
        }
    }
    entry = keep(cache, wheel, inputs)
    os.utime(entry, (1000, 1000))
    listed = describe(cache, entry.name, thorough=False)
    created = json.loads((entry / "entry.json").read_text())["created"]
    assert listed == Listed(
        entry.name,
        str(cache.folder),
        False,
        "",
        NAME,
        {"torch": "2.13.0+cpu", "odd": ""},
        "mpirun (Open MPI) 4.1.8",
        "g++ 12.2.0",
        5000,
        created,
        "1970-01-01T00:16:40+00:00",
    )
    assert describe(group, keep(group, wheel).name, thorough=False).used is None
    assert describe(cache, key({}), thorough=False).problem == "it is gone"
    assert names(own(Places(Path("/none")))) == []


@pytest.mark.parametrize(
    "inputs", [{"stack": []}, {"stack": {"frameworks": "x", "mpi": {}, "compiler": None}}]
)
def test_odd_inputs_are_listed_all_the_same(
    cache: Cache, wheel: Path, inputs: dict[str, Any]
) -> None:
    entry = keep(cache, wheel, inputs)
    assert describe(cache, entry.name).problem == ""


def kept(letter: str, day: int, size: int) -> Kept:
    return Kept(Path(letter), size, f"2026-01-{day:02}T00:00:00+00:00")


ENTRIES = (kept("a", 9, 5), kept("b", 2, 3), kept("c", 3, 4), kept("d", 4, 1))


@pytest.mark.parametrize(
    ("largest", "oldest", "going"),
    [
        (None, "", ""),
        (13, "", ""),
        (12, "", "b"),
        (10, "", "b"),
        (9, "", "bc"),
        (5, "", "bcd"),
        (0, "", "abcd"),
        (None, "2026-01-04", "bc"),
        (9, "2026-01-03", "bc"),
    ],
)
def test_what_was_not_used_for_longest_goes(largest: float | None, oldest: str, going: str) -> None:
    found = least_recently_used(ENTRIES, largest=largest, oldest=oldest)
    assert sorted(each.path.name for each in found) == list(going)


def test_a_cache_is_kept_small(cache: Cache, wheel: Path, target: Path) -> None:
    entries = [keep(cache, wheel, {"number": number}) for number in range(3)]
    for number, entry in enumerate(entries):
        os.utime(entry, (number, number))
    assert take([cache], {"number": 0}, target.parent).entry == entries[0]
    gone = prune(cache, largest=12_000, spared=entries[1].name)
    assert [(each.path, is_removed) for each, is_removed in gone] == [(entries[2], True)]
    assert names(cache) == sorted(entry.name for entry in entries[:2])


MACHINE = {"machine": "x86_64", "compiler": "g++ 12"}


@pytest.mark.parametrize(
    ("changed", "count"), [({}, 1), ({"stack": {"compiler": "clang"}}, 1), ({"source": "b"}, 0)]
)
def test_wheels_of_other_machines_go_along_with_what_is_fetched(
    cache: Cache, wheel: Path, tmp_path: Path, changed: dict[str, Any], count: int
) -> None:
    inputs = {**INPUTS, "stack": MACHINE, **changed}
    keep(cache, wheel, inputs)
    assert carry([cache], INPUTS, tmp_path) == (count, ())
    there = Cache(tmp_path / "wheels", shared=True)
    (tmp_path / "build").mkdir()
    assert bool(count) == bool(take([there], inputs, tmp_path / "build").entry)


def test_what_is_damaged_stays_behind_and_is_said(
    cache: Cache, wheel: Path, tmp_path: Path
) -> None:
    flip(keep(cache, wheel))
    missing = Cache(tmp_path / "none", shared=True)
    count, notes = carry([missing, cache], INPUTS, tmp_path)
    assert count == 0
    assert [note.partition(": ")[0] for note in notes] == [
        "cached wheels not used",
        "cached wheel not used",
    ]


DAY = 86400
NAMES = ["conda/packages/aaa", "conda/packages/bbb", "conda/packages/ccc", "uv"]


@pytest.fixture
def places() -> Places:
    """With 1 MB in each place, used on the first four days of January 1970."""
    found = find_places()
    for day, name in enumerate(NAMES):
        folder = found.cache / name
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(1_000_000))
        os.utime(folder, (day * DAY, day * DAY))
    return found


def left(places: Places) -> list[str]:
    return [name for name in NAMES if (places.cache / name / "file").exists()]


@pytest.mark.parametrize(
    ("words", "stay"),
    [
        ((), NAMES),
        (("--max-size", "3MB"), NAMES[1:]),
        (("--max-size", "1MB"), NAMES[3:]),
        (("--max-size", "0"), []),
        (("--older-than", "99999"), NAMES),
        (("--older-than", "1"), []),
    ],
)
def test_prune(places: Places, words: tuple[str, ...], stay: list[str], hvdenv: Hvdenv) -> None:
    hvdenv("wheels", "prune", "--downloads", *words)
    assert left(places) == stay


def test_a_use_is_noted(places: Places, hvdenv: Hvdenv) -> None:
    downloads.touch(places)
    sha256 = load("digest").sha256_of(str(places.cache / "conda/packages/ccc/file"))
    assert load("conda_files").is_intact(
        {"sha256": sha256}, str(places.cache / "conda/packages/ccc/file")
    )
    hvdenv("wheels", "prune", "--downloads", "--older-than", "1")
    assert left(places) == ["conda/packages/ccc", "uv"]
