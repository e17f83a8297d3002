from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.errors import StepError
from hvdenv.model.cluster import Wheels
from hvdenv.places import Places
from hvdenv.wheels import wheelcache
from hvdenv.wheels.cache_entry import Cache, check, key, make_folder_alike, read_record
from hvdenv.wheels.wheelcache import (
    Listed,
    Taken,
    copy,
    describe,
    least_recently_used,
    names,
    own,
    shared,
    store,
    sweep,
    take,
    trim,
)
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
    folder.chmod(0o2750)
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
    """The entry of a wheel that was stored."""
    store(cache, inputs, wheel)
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
        lambda entry: (entry / "entry.json").write_text("[]"),
        lambda entry: (entry / "entry.json").write_text("[" * 100_000),
        lambda entry: (entry / "entry.json").write_text('{"inputs": NaN}'),
        lambda entry: os.truncate(entry / "entry.json", 2 << 20),
        rewrite(format=2),
        rewrite(inputs=[]),
        rewrite(extra=1),
        rewrite(inputs={**INPUTS, "source": "abd"}),
        rewrite(file="../../x.whl"),
        rewrite(file=1),
        rewrite(sha256=None),
    ],
)
def test_a_damaged_entry_is_noticed_taken_away_and_made_anew(
    cache: Cache, wheel: Path, target: Path, damage: Callable[[Path], object]
) -> None:
    entry = keep(cache, wheel)
    damage(entry)
    assert describe(cache, entry.name, thorough=True).damaged

    taken = take([cache], INPUTS, target.parent)

    assert taken.entry is None
    (note,) = taken.notes
    assert "cached wheel not used" in note
    assert str(entry) in note
    assert os.listdir(entry.parent) == []
    assert not target.exists()
    keep(cache, wheel)
    damage(entry)
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


def link(path: Path) -> None:
    """Move what is there, and leave a link to it."""
    path.symlink_to(path.rename(path.with_name("elsewhere")))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda entry: entry.chmod(0o775), "can be written by others"),
        (lambda entry: (entry / NAME).chmod(0o666), "can be written by others"),
        (lambda entry: (entry / "entry.json").chmod(0o662), "can be written by others"),
        (link, "symbolic link"),
        (lambda entry: link(entry / NAME), "symbolic link"),
        (lambda entry: link(entry / "entry.json"), "symbolic link"),
        (lambda entry: link(entry.parent), "symbolic link"),
    ],
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_others_could_have_written_is_left_alone_and_not_used(
    cache: Cache, group: Cache, wheel: Path, target: Path,
    change: Callable[[Path], object], reason: str, is_shared: bool,
) -> None:  # fmt: skip
    cache = group if is_shared else cache
    entry = keep(cache, wheel)
    change(entry)
    for _ in range(2):
        taken = take([cache], INPUTS, target.parent)
        assert taken.entry is None
        assert reason in taken.notes[0]
        with pytest.raises(StepError, match=reason):
            store(cache, INPUTS, wheel)
        assert not target.exists()
    assert os.path.lexists(entry)
    assert not list(cache.folder.glob(".*"))


def test_a_pipe_is_not_waited_for(cache: Cache, wheel: Path, target: Path) -> None:
    entry = keep(cache, wheel)
    (entry / NAME).unlink()
    os.mkfifo(entry / NAME)
    assert "is not a regular file" in take([cache], INPUTS, target.parent).notes[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_wrote_is_not_used(cache: Cache, wheel: Path, target: Path) -> None:
    entry = keep(cache, wheel)
    os.chown(entry / "entry.json", 12345, -1)
    taken = take([cache], INPUTS, target.parent)
    assert taken.entry is None
    assert "belongs to user" in taken.notes[0]
    trusting = cache._replace(trusted=frozenset({12345, os.stat(entry).st_uid}))
    assert take([trusting], INPUTS, target.parent).entry == entry


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", ["", "shard", "entry", "entry.json", NAME])
def test_what_belongs_to_another_user_in_a_shared_folder_is_not_used(
    group: Cache, wheel: Path, target: Path, part: str
) -> None:
    entry = keep(group, wheel)
    path = {"": group.folder, "shard": entry.parent, "entry": entry}.get(part, entry / part)
    os.chown(path, 12345, -1)
    taken = take([group], INPUTS, target.parent)
    assert taken == Taken(None, (f"cached wheel not used: {path} belongs to user 12345",))
    assert not target.exists()
    (trusting,) = shared(Wheels(read=(str(group.folder),), trust=("12345",)), {})
    assert take([trusting], INPUTS, target.parent) == Taken(entry)


def test_a_wheel_that_changes_after_it_was_hashed_is_not_stored(
    cache: Cache, group: Cache, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = iter([False, True])  # of all entries before the first is copied, and once more

    def change_and_tell_the_time(**_: object) -> str:
        wheel.write_bytes(b"other")
        return "2026-11-22T00:29:40+00:00"

    def check_and_change(*arguments: Any) -> None:
        check(*arguments)
        if next(checks):
            flip(entry)

    entry = keep(cache, wheel)
    with monkeypatch.context() as patched:
        patched.setattr(wheelcache, "timestamp", change_and_tell_the_time)
        with pytest.raises(StepError, match="was changed while"):
            store(group, INPUTS, wheel)
    monkeypatch.setattr(wheelcache, "check", check_and_change)
    with pytest.raises(StepError, match="was changed while"):
        copy({key(INPUTS): cache}, group)
    assert os.listdir(group.folder) == []


@pytest.mark.parametrize("value", [0o002, 0o022, 0o077, 0o000])
def test_our_own_entries_are_trusted_under_any_umask(
    cache: Cache, group: Cache, wheel: Path, target: Path, value: int
) -> None:
    for each in (cache, group):
        with umask(value):
            entry = keep(each, wheel)
        assert take([each], INPUTS, target.parent) == Taken(entry)


@pytest.mark.parametrize(
    ("mode", "folder_mode", "file_mode"),
    [(0o2750, 0o2750, 0o640), (0o755, 0o755, 0o644), (0o700, 0o700, 0o600)],
)
def test_who_may_read_a_shared_cache_may_read_what_is_put_there(
    group: Cache, wheel: Path, mode: int, folder_mode: int, file_mode: int
) -> None:
    group.folder.chmod(mode)
    with umask(0o077):
        entry = keep(group, wheel)
    assert stat.S_IMODE(entry.stat().st_mode) == folder_mode
    assert stat.S_IMODE(entry.parent.stat().st_mode) == mode
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.iterdir()} == {file_mode}


@pytest.mark.parametrize("mode", [0o2770, 0o777, 0o1777])
def test_a_shared_folder_that_others_write_is_neither_read_nor_written(
    group: Cache, wheel: Path, target: Path, mode: int
) -> None:
    keep(group, wheel)
    group.folder.chmod(mode)
    taken = take([group], INPUTS, target.parent)
    assert taken == Taken(
        None, (f"cached wheel not used: {group.folder} can be written by others",)
    )
    with pytest.raises(StepError, match="can be written by others"):
        store(group, {"other": 1}, wheel)
    assert names(group) == [key(INPUTS)]


def test_a_folder_within_a_shared_one_that_others_write(
    cache: Cache, group: Cache, wheel: Path, target: Path
) -> None:
    for each in (cache, group):
        keep(each, wheel).parent.chmod(0o775)
    assert "can be written by others" in take([group], INPUTS, target.parent).notes[0]
    # The user's own may be in a folder of a group.
    assert take([cache], INPUTS, target.parent).notes == ()


def test_a_shared_folder_that_is_not_there_is_said_and_not_made(
    group: Cache, wheel: Path, target: Path
) -> None:
    missing = group._replace(folder=group.folder / "none")
    (note,) = take([missing], INPUTS, target.parent).notes
    assert (
        note == f"cached wheel not used: {missing.folder} cannot be read: No such file or directory"
    )
    with pytest.raises(StepError, match="No such file"):
        store(missing, INPUTS, wheel)
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


def test_whoever_owns_a_damaged_entry_replaces_it(group: Cache, wheel: Path, target: Path) -> None:
    entry = keep(group, wheel)
    flip(entry)
    keep(group, wheel)
    assert take([group], INPUTS, target.parent) == Taken(entry)


def test_a_killed_store_leaves_nothing_that_is_found(
    cache: Cache, wheel: Path, target: Path
) -> None:
    entry = keep(cache, wheel)
    shutil.move(entry, cache.folder / ".0123")
    assert take([cache], INPUTS, target.parent) == Taken(None)
    assert names(cache) == []
    sweep(cache)
    os.utime(cache.folder / ".0123", (0, 0))
    sweep(cache)
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


def test_a_target_that_cannot_be_written_is_an_error(cache: Cache, wheel: Path) -> None:
    keep(cache, wheel)
    with pytest.raises(StepError, match="cannot write"):
        take([cache], INPUTS, Path("/dev/full"))


def test_what_a_site_names(tmp_path: Path) -> None:
    wheels = Wheels(
        read=("/a", "/b/"), publish="/b", trust=("root", "4711", "nobody-of-this-name"),
    )  # fmt: skip
    caches = shared(wheels, {"HVDENV_WHEEL_CACHE": "/c::/a"})
    assert [str(each.folder) for each in caches] == ["/b", "/c", "/a"]
    assert {each[1:] for each in caches} == {(True, frozenset({0, 4711}))}
    assert shared(Wheels(), {}) == ()


def test_what_is_listed(cache: Cache, group: Cache, wheel: Path) -> None:
    inputs = {
        "stack": {
            "compiler": "g++ 12.2.0 Copyright (C) 2022", "mpi": "mpirun (Open MPI) 4.1.8 Report bugs",
            "frameworks": {"torch": {"package": "torch", "version": "2.13.0+cpu"}, "odd": 1},
        }
    }  # fmt: skip
    entry = keep(cache, wheel, inputs)
    os.utime(entry, (1000, 1000))
    listed = describe(cache, entry.name, thorough=False)
    created = read_record((entry / "entry.json").read_bytes())[0].created
    assert listed == Listed(
        entry.name, str(cache.folder), False, "", False, NAME, {"torch": "2.13.0+cpu", "odd": ""},
        "mpirun (Open MPI) 4.1.8", "g++ 12.2.0", 5000, created, "1970-01-01T00:16:40+00:00",
    )  # fmt: skip
    assert (listed.horovod, listed.python) == ("0.28.1", "cp311")
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
    assert describe(cache, entry.name, thorough=True).problem == ""


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_record_is_read_or_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        read_record(raw)


def listed(letter: str, created: int, size: int, used: int | None = None) -> Listed:
    last = None if used is None else f"2026-01-{used:02}T00:00:00+00:00"
    return Listed(
        letter, "/c", False, bytes=size, created=f"2026-01-{created:02}T00:00:00+00:00", used=last
    )


ENTRIES = (listed("a", 1, 5, used=9), listed("b", 2, 3), listed("c", 3, 4), listed("d", 4, 1))


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
    assert sorted(each.key for each in found) == list(going)


@given(st.lists(st.tuples(st.integers(1, 28), st.integers(0, 50)), max_size=8), st.integers(0, 200))
def test_what_stays_is_newer_than_what_goes_and_not_too_much(
    entries: list[tuple[int, int]], largest: int
) -> None:
    all_entries = [listed(str(number), *entry) for number, entry in enumerate(entries)]
    going = least_recently_used(all_entries, largest=largest)
    staying = [each for each in all_entries if each not in going]
    assert sum(each.bytes for each in staying) <= largest
    if going and staying:
        assert max(each.created for each in going) <= min(each.created for each in staying)


def test_a_cache_is_kept_small(cache: Cache, wheel: Path, target: Path) -> None:
    entries = [keep(cache, wheel, {"number": number}) for number in range(3)]
    for number, entry in enumerate(entries):
        os.utime(entry, (number, number))
    assert take([cache], {"number": 0}, target.parent).entry == entries[0]
    gone = trim(cache, 12_000, entries[1].name)
    assert [each.key for each in gone] == [entries[2].name]
    assert names(cache) == sorted(entry.name for entry in entries[:2])


def test_a_shared_folder_has_its_permissions_before_its_name(
    group: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = group.folder / "ab"
    before: list[bool] = []
    set_mode = os.fchmod

    def observe(descriptor: int, mode: int) -> None:
        before.append(folder.exists())
        set_mode(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", observe)
    with umask(0o077):
        make_folder_alike(folder)
        make_folder_alike(folder)
    assert before == [False]
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(group.folder.stat().st_mode)
    assert os.listdir(group.folder) == ["ab"]
