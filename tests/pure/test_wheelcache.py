from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.errors import StepError
from hvdenv.model.cluster import Wheels
from hvdenv.places import find_places
from hvdenv.wheels import downloads
from hvdenv.wheels.wheelcache import (
    Cache,
    Taken,
    carry,
    describe,
    key,
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
def cache() -> Cache:
    """The user's own."""
    return own(find_places())


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


def test_a_wheel_is_found_again(cache: Cache, wheel: Path, target: Path, tmp_path: Path) -> None:
    assert take([cache], INPUTS, target.parent) == Taken(None)
    entry = keep(cache, wheel)
    # The first of two stays.
    other = tmp_path / "other.whl"
    other.write_bytes(b"other")
    assert keep(cache, other) == entry
    assert sorted(os.listdir(entry)) == ["entry.json", NAME]
    assert os.listdir(entry.parent) == [key(INPUTS)]
    assert take([cache], dict(reversed(INPUTS.items())), target.parent) == Taken(entry)
    assert target.read_bytes() == wheel.read_bytes()
    assert target.stat().st_nlink == (entry / NAME).stat().st_nlink == 1
    assert take([cache], {**INPUTS, "source": "abd"}, target.parent) == Taken(None)


def test_nothing_is_left_of_a_wheel_that_cannot_be_copied(
    cache: Cache, wheel: Path, target: Path
) -> None:
    keep(cache, wheel)
    with largest_file(1000):  # as on a full disk
        (note,) = take([cache], INPUTS, target.parent).notes
    assert "cannot be copied: File too large" in note
    assert not target.exists()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
    cache: Cache, wheel: Path, target: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    entry = keep(cache, wheel)
    damage(entry)
    assert describe(cache, entry.name).problem
    (note,) = take([cache], INPUTS, target.parent).notes
    assert note.startswith("cached wheel not used") and str(entry) in note
    assert not target.exists()
    assert carry([cache], INPUTS, tmp_path) == (0, (note.replace("copied", "read"),))
    keep(cache, wheel)
    assert take([cache], INPUTS, target.parent) == Taken(entry)


@pytest.mark.parametrize(("part", "mode"), [("", 0o777), (NAME, 0o666), ("entry.json", 0o646)])
def test_what_others_could_have_written_is_not_used_and_replaced_in_the_own_cache(
    cache: Cache, group: Cache, wheel: Path, target: Path, part: str, mode: int
) -> None:
    for each in (cache, group):
        entry = keep(each, wheel)
        (entry / part).chmod(mode)
        for _ in range(2):
            taken = take([each], INPUTS, target.parent)
            assert taken.entry is None
            assert "can be written by everybody" in taken.notes[0]
            assert not target.exists()
        assert entry.exists()
    store(cache, INPUTS, wheel)
    assert take([cache], INPUTS, target.parent).entry
    assert not list(cache.folder.glob(".*"))


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


def test_the_next_cache_is_asked(cache: Cache, group: Cache, wheel: Path, target: Path) -> None:
    """A damaged entry of a shared cache is left where it is, and a missing cache is not made."""
    damaged, good = keep(group, wheel), keep(cache, wheel)
    missing = group._replace(folder=group.folder / "none")
    flip(damaged)
    taken = take([missing, group, cache], INPUTS, target.parent)
    assert taken.entry == good
    assert taken.notes[0] == (
        f"cached wheel not used: {missing.folder} cannot be read: No such file or directory"
    )
    assert "is damaged: its hash is" in taken.notes[1]
    assert damaged.exists() and not missing.folder.exists()
    assert target.read_bytes() == wheel.read_bytes()


def test_what_cannot_be_stored_is_an_error(cache: Cache, wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(StepError, match="No such file"):
        store(cache, INPUTS, tmp_path / "no.whl")
    assert not list(cache.folder.glob("*"))
    with pytest.raises(StepError, match="cannot write"):
        store(Cache(wheel), INPUTS, wheel)


def test_what_a_site_names(tmp_path: Path) -> None:
    wheels = Wheels(
        read=("/a", "/b/"),
        trust=("root", "4711", "nobody-of-this-name"),
    )
    caches = shared(wheels, {"HVDENV_WHEEL_CACHE": "/c::/a"})
    assert [str(each.folder) for each in caches] == ["/c", "/a", "/b"]
    assert {each[1:] for each in caches} == {(True, wheels.trust)}
    assert shared(Wheels(), {}) == ()


def test_a_cache_is_kept_small(cache: Cache, wheel: Path, target: Path) -> None:
    entries = [keep(cache, wheel, {"number": number}) for number in range(3)]
    for number, entry in enumerate(entries):
        os.utime(entry, (number, number))
    assert take([cache], {"number": 0}, target.parent).entry == entries[0]
    gone = prune(cache, largest=12_000, spared=entries[1].name)
    assert [(each.path, is_removed) for each, is_removed in gone] == [(entries[2], True)]
    assert names(cache) == sorted(entry.name for entry in entries[:2])


@pytest.mark.parametrize(
    ("changed", "count"), [({}, 1), ({"stack": {"compiler": "clang"}}, 1), ({"source": "b"}, 0)]
)
def test_wheels_of_other_machines_go_along_with_what_is_fetched(
    cache: Cache, wheel: Path, tmp_path: Path, changed: dict[str, Any], count: int
) -> None:
    inputs = {**INPUTS, "stack": {"machine": "x86_64", "compiler": "g++ 12"}, **changed}
    keep(cache, wheel, inputs)
    missing = Cache(tmp_path / "none", shared=True)
    carried, (note,) = carry([missing, cache], INPUTS, tmp_path)
    assert carried == count
    assert note.startswith("cached wheels not used: ")
    there = Cache(tmp_path / "wheels", shared=True)
    (tmp_path / "build").mkdir()
    assert bool(count) == bool(take([there], inputs, tmp_path / "build").entry)


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
DOWNLOADS = ["conda/packages/aaa", "conda/packages/bbb", "uv"]
DAY = 86400


@pytest.fixture
def used(cache: Cache, tmp_path: Path) -> Cache:
    """Three wheels and three downloads of 1 MB each, used on the first days of January 1970."""
    wheel = wheel_in(tmp_path, bytes(1_000_000))
    for day, (inputs, name) in enumerate(zip(ENTRIES, DOWNLOADS, strict=True)):
        os.utime(keep(cache, wheel, inputs), (day * DAY, day * DAY))
        folder = find_places().cache / name
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(1_000_000))
        os.utime(folder, (day * DAY, day * DAY))
    return cache


def left(cache: Cache) -> list[int]:
    """Which of the wheels are still there."""
    return [number for number, inputs in enumerate(ENTRIES) if key(inputs) in names(cache)]


def left_downloads() -> list[int]:
    found = [(find_places().cache / name / "file").exists() for name in DOWNLOADS]
    return [number for number, exists in enumerate(found) if exists]


def test_list(used: Cache, group: Cache, tmp_path: Path, hvdenv: Hvdenv) -> None:
    said = hvdenv("wheels", "list").out
    assert f"{key(ENTRIES[1])[:12]}  horovod 0.28.1, " in said
    assert "torch 2.13.0, cp311\n" in said and "\x1b" not in said
    assert "    mpirun (Open MPI) 4.1.8; g++ 12.2.0\n    1.0 MB, stored 20" in said
    assert "used 1970-01-02, own" in said
    (used.entry(key(ENTRIES[1])) / NAME).write_bytes(b"1")
    found = json.loads(hvdenv("wheels", "list", "--json", code=1).out)
    assert [each["key"] for each in found if each["problem"]] == [key(ENTRIES[1])]
    odd = keep(group, tmp_path / NAME, {"stack": {"frameworks": "x", "mpi": {}, "compiler": None}})
    listed = describe(group, odd.name)
    assert (listed.used, listed.frameworks, listed.problem) == (None, {}, "")
    assert describe(used, key({})).problem == "it is gone"


@pytest.mark.parametrize(
    ("words", "stay"),
    [
        ((), [0, 1, 2]),
        (("--max-size", "3MB"), [0, 1, 2]),
        (("--max-size", "2.1M"), [1, 2]),
        (("--max-size", "1.999mb"), [2]),
        (("--max-size", "0"), []),
        (("--max-size", "1TB"), [0, 1, 2]),
        (("--older-than", "99999"), [0, 1, 2]),
        (("--older-than", "1000"), []),
    ],
)
def test_prune(used: Cache, words: tuple[str, ...], stay: list[int], hvdenv: Hvdenv) -> None:
    hvdenv("wheels", "prune", "--downloads", *words)
    assert (left(used), left_downloads()) == ([0, 1, 2], stay)
    hvdenv("wheels", "prune", *words)
    assert (left(used), left_downloads()) == (stay, stay)


@pytest.mark.parametrize(
    "words",
    [
        ("--max-size", "many"),
        ("--max-size", "5"),
        ("--max-size", "-1"),
        ("--older-than", "nan"),
    ],
)
def test_sizes_and_ages_that_are_none(words: tuple[str, ...], hvdenv: Hvdenv) -> None:
    hvdenv("wheels", "prune", *words, code=2)


def test_prune_of_what_cannot_be_used(used: Cache, hvdenv: Hvdenv) -> None:
    (used.entry(key(ENTRIES[1])) / "entry.json").write_text("{")
    (used.entry(key(ENTRIES[2])) / NAME).chmod(0o666)  # not trusted
    assert hvdenv("wheels", "prune").out.count("removed ") == 2
    assert left(used) == [0]


def test_the_caches_that_a_site_names(
    used: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    site = tmp_path / "site.toml"
    monkeypatch.setenv("HVDENV_SITE", str(site))
    site.write_text('places.wheels.read = ["{home}/wheels"]\nplaces.wheels.own_gb = 0.002\n')
    said = hvdenv("wheels", "list", code=1)
    assert said.out.count(", own") == 3  # those are listed all the same
    assert f"error: {Path.home()}/wheels: cannot read: No such file" in said.err
    hvdenv("wheels", "prune")
    assert left(used) == [1, 2]
    site.write_text('job.account = "x"\n[places.wheels]\nraed = ["/a"]\n')
    assert hvdenv("wheels", "list", code=2).err.startswith(
        f'error: {site}:3: places.wheels.raed: unknown key; did you mean "read"?'
    )


def test_a_use_of_downloads_is_noted(used: Cache, hvdenv: Hvdenv) -> None:
    downloads.touch(find_places())
    path = str(find_places().cache / DOWNLOADS[1] / "file")
    assert load("conda_files").is_intact({"sha256": load("digest").sha256_of(path)}, path)
    hvdenv("wheels", "prune", "--downloads", "--older-than", "1")
    assert left_downloads() == [1, 2]
