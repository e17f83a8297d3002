from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.base.errors import StepError
from hvdenv.base.places import find_places
from hvdenv.building.wheelcache import (
    Cache,
    Taken,
    describe,
    key,
    names,
    own,
    prune,
    shared,
    store,
    take,
)
from hvdenv.model.cluster import Wheels
from tests.support.commands import Hvdenv
from tests.support.wheels import NAME, umask, wheel_in

INPUTS: dict[str, Any] = {"source": "abc", "patches": ["one", "two"], "flags": {"arch": "-mavx"}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Shelf(NamedTuple):
    """A wheel, and where a build looks for it.

    Attributes:
        own: the user's own cache; ``group``: a shared one.
        target: where a build has its wheel.
    """

    own: Cache
    group: Cache
    wheel: Path
    target: Path

    def keep(self, cache: Cache, inputs: dict[str, Any] = INPUTS) -> Path:
        """The entry of the wheel once it is stored; in a shared cache, as its owner does."""
        store(Cache(cache.folder), inputs, self.wheel)
        return cache.entry(key(inputs))

    def take(self, *caches: Cache, inputs: dict[str, Any] = INPUTS) -> Taken:
        taken = take(caches, inputs, self.target.parent)
        assert self.target.exists() == bool(taken.entry)
        if taken.entry:
            assert self.target.read_bytes() == self.wheel.read_bytes()
            assert self.target.stat().st_nlink == (taken.entry / NAME).stat().st_nlink == 1
            self.target.unlink()
        return taken


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    group, build = tmp_path / "group", tmp_path / "build"
    group.mkdir()
    group.chmod(0o750)
    build.mkdir()
    shared = Cache(group, shared=True)
    return Shelf(own(find_places()), shared, wheel_in(tmp_path), build / NAME)


@given(st.dictionaries(st.text(), JSON), st.dictionaries(st.text(), JSON))
def test_other_inputs_have_another_key(one: dict[str, object], other: dict[str, object]) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (key(one) == key(other)) == same
    assert key(one) == key(dict(reversed(one.items())))


def test_a_wheel_is_found_again(shelf: Shelf) -> None:
    assert shelf.take(shelf.own) == Taken(None)
    entry = shelf.keep(shelf.own)
    # The first of two stays.
    other = shelf._replace(wheel=shelf.wheel.rename(shelf.wheel.with_name("other.whl")))
    assert other.keep(shelf.own) == entry
    assert sorted(os.listdir(entry)) == ["entry.json", NAME]
    assert os.listdir(entry.parent) == [key(INPUTS)]
    assert other.take(shelf.own, inputs=dict(reversed(INPUTS.items()))) == Taken(entry)
    assert other.take(shelf.own, inputs={**INPUTS, "source": "abd"}) == Taken(None)


def flip(entry: Path) -> None:
    content = bytearray((entry / NAME).read_bytes())
    content[17] ^= 1
    (entry / NAME).write_bytes(content)


def pipe(entry: Path) -> None:
    (entry / NAME).unlink()
    os.mkfifo(entry / NAME)


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
        pipe,
        lambda entry: os.truncate(entry / NAME, 10),
        lambda entry: (entry / NAME).unlink(),
        lambda entry: (entry / "entry.json").unlink(),
        lambda entry: (entry / "entry.json").write_text("{"),
        lambda entry: (entry / "entry.json").write_text("[" * 100_000),
        lambda entry: (entry / "entry.json").write_text('{"inputs": NaN}'),
        lambda entry: os.truncate(entry / "entry.json", 2 << 20),
        rewrite(format=2),
        rewrite(inputs={**INPUTS, "source": "abd"}),
        rewrite(key="0" * 64),
        rewrite(file="../../x.whl"),
        rewrite(sha256=None),
    ],
)
def test_a_damaged_entry_is_said_and_made_anew(
    shelf: Shelf, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    entry = shelf.keep(shelf.own)
    damage(entry)
    assert describe(shelf.own, entry.name).problem
    (note,) = shelf.take(shelf.own).notes
    assert note.startswith("cached wheel not used") and str(entry) in note
    shelf.keep(shelf.own)
    assert shelf.take(shelf.own) == Taken(entry)


@pytest.mark.parametrize(("part", "mode"), [("", 0o777), (NAME, 0o666), ("entry.json", 0o646)])
def test_what_others_could_have_written_is_not_used_and_replaced_in_the_own_cache(
    shelf: Shelf, part: str, mode: int
) -> None:
    for cache in (shelf.own, shelf.group):
        entry = shelf.keep(cache)
        (entry / part).chmod(mode)
        for _ in range(2):
            taken = shelf.take(cache)
            assert taken.entry is None
            assert "can be written by everybody" in taken.notes[0]
        assert entry.exists()
    store(shelf.own, INPUTS, shelf.wheel)
    assert shelf.take(shelf.own).entry
    assert not list(shelf.own.folder.glob(".*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", ["", "entry.json", NAME])
def test_what_belongs_to_another_user_in_a_shared_folder_is_not_used(
    shelf: Shelf, part: str
) -> None:
    entry = shelf.keep(shelf.group)
    os.chown(entry / part, 12345, -1)
    why = f"cached wheel not used: {entry / part} belongs to uid 12345"
    assert shelf.take(shelf.group) == Taken(None, (why,))
    (trusting,) = shared(Wheels(read=(str(shelf.group.folder),), trust=("12345",)), {})
    assert shelf.take(trusting) == Taken(entry)


@pytest.mark.parametrize("value", [0o002, 0o022, 0o077, 0o000])
def test_our_own_entries_are_trusted_under_any_umask(shelf: Shelf, value: int) -> None:
    for cache in (shelf.own, shelf.group):
        with umask(value):
            entry = shelf.keep(cache)
        assert shelf.take(cache) == Taken(entry)


def test_the_next_cache_is_asked(shelf: Shelf) -> None:
    """A damaged entry of a shared cache is left where it is, and a missing cache is not made."""
    damaged, good = shelf.keep(shelf.group), shelf.keep(shelf.own)
    missing = shelf.group._replace(folder=shelf.group.folder / "none")
    flip(damaged)
    taken = shelf.take(missing, shelf.group, shelf.own)
    assert taken.entry == good
    assert taken.notes[0] == (
        f"cached wheel not used: {missing.folder} cannot be read: No such file or directory"
    )
    assert "is damaged: its hash is" in taken.notes[1]
    assert damaged.exists() and not missing.folder.exists()


def test_what_cannot_be_stored_is_an_error(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(StepError, match="No such file"):
        store(shelf.own, INPUTS, tmp_path / "no.whl")
    assert not list(shelf.own.folder.glob("*"))
    with pytest.raises(StepError, match="cannot write"):
        store(Cache(shelf.wheel), INPUTS, shelf.wheel)


def test_what_a_site_names() -> None:
    wheels = Wheels(read=("/a", "/b/"), trust=("root", "4711", "nobody-of-this-name"))
    caches = shared(wheels, {"HVDENV_WHEEL_CACHE": "/c::/a"})
    assert [str(each.folder) for each in caches] == ["/c", "/a", "/b"]
    assert {each[1:] for each in caches} == {(True, wheels.trust)}
    assert shared(Wheels(), {}) == ()


def test_a_cache_is_kept_small(shelf: Shelf) -> None:
    entries = [shelf.keep(shelf.own, {"number": number}) for number in range(3)]
    for number, entry in enumerate(entries):
        os.utime(entry, (number, number))
    assert shelf.take(shelf.own, inputs={"number": 0}).entry == entries[0]
    gone = prune(shelf.own, largest=12_000, spared=entries[1].name)
    assert [(each.key, is_removed) for each, is_removed in gone] == [(entries[2].name, True)]
    assert names(shelf.own) == sorted(entry.name for entry in entries[:2])


ENTRIES: list[dict[str, Any]] = [
    {
        "number": number,
        "stack": {
            "compiler": "g++ 12.2.0 Copyright (C) 2022",
            "mpi": "mpirun (Open MPI) 4.1.8 Report bugs",
            "frameworks": {"torch": {"version": "2.13.0"}, "\x1b[2J": 1},
        },
    }
    for number in range(3)
]
DAY = 86400


@pytest.fixture
def used(shelf: Shelf) -> Cache:
    """Three wheels of 1 MB each, used on the first days of January 1970."""
    shelf.wheel.write_bytes(bytes(1_000_000))
    for day, inputs in enumerate(ENTRIES):
        os.utime(shelf.keep(shelf.own, inputs), (day * DAY, day * DAY))
    return shelf.own


def left(cache: Cache) -> list[int]:
    """Which of the wheels are still there."""
    return [number for number, inputs in enumerate(ENTRIES) if key(inputs) in names(cache)]


def test_list(used: Cache, shelf: Shelf, hvdenv: Hvdenv) -> None:
    said = hvdenv("wheels", "list").out
    assert f"{key(ENTRIES[1])[:12]}  horovod 0.28.1, " in said
    assert "torch 2.13.0, cp311\n" in said and "\x1b" not in said
    assert "    mpirun (Open MPI) 4.1.8; g++ 12.2.0\n    1.0 MB, stored 20" in said
    assert "used 1970-01-02, own" in said
    (used.entry(key(ENTRIES[1])) / NAME).write_bytes(b"1")
    found = json.loads(hvdenv("wheels", "list", "--json", code=1).out)
    assert [each["key"] for each in found if each["problem"]] == [key(ENTRIES[1])]
    odd: dict[str, Any] = {"stack": {"frameworks": "x", "mpi": {}, "compiler": None}}
    listed = describe(shelf.group, shelf.keep(shelf.group, odd).name)
    assert (listed.used, listed.frameworks, listed.problem) == (None, {}, "")
    assert describe(used, key({})).problem == "it is gone"


def test_prune_of_what_cannot_be_used(used: Cache, hvdenv: Hvdenv) -> None:
    hvdenv("wheels", "prune")
    assert left(used) == [0, 1, 2]
    (used.entry(key(ENTRIES[1])) / "entry.json").write_text("{")
    (used.entry(key(ENTRIES[2])) / NAME).chmod(0o666)  # not trusted
    assert hvdenv("wheels", "prune").out.count("removed ") == 2
    assert left(used) == [0]


def test_the_caches_that_a_site_names(
    used: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    site = tmp_path / "site.toml"
    monkeypatch.setenv("HVDENV_SITE", str(site))
    site.write_text('places.wheels.read = ["$HOME/wheels"]\nplaces.wheels.own_gb = 0.002\n')
    said = hvdenv("wheels", "list", code=1)
    assert said.out.count(", own") == 3  # those are listed all the same
    assert f"error: {Path.home()}/wheels: cannot read: No such file" in said.err
    assert "what to do: correct $HVDENV_WHEEL_CACHE or places.wheels in the site file" in said.err
    hvdenv("wheels", "prune")
    assert left(used) == [1, 2]
    site.write_text('job.account = "x"\n[places.wheels]\nraed = ["/a"]\n')
    assert hvdenv("wheels", "list", code=2).err.startswith(
        f'error: {site}:3: places.wheels.raed: unknown key; did you mean "read"?'
    )
