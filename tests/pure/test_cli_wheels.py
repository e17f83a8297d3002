from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hvdenv.places import find_places
from hvdenv.wheels.wheelcache import Cache, key, names, own, store
from tests.commands import Hvdenv
from tests.wheels import NAME, wheel_in

INPUTS: list[dict[str, Any]] = [
    {"number": number, "stack": {"frameworks": {"torch": {"version": "2.13.0"}}}}
    for number in range(3)
]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """The user's own, with an entry of each day of January 1970."""
    cache = own(find_places())
    wheel = wheel_in(tmp_path, bytes(1_000_000))
    for number, inputs in enumerate(INPUTS):
        store(cache, inputs, wheel)
        os.utime(cache.entry(key(inputs)), (86400 * number,) * 2)
    return cache


@pytest.fixture
def site(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "site.toml"
    monkeypatch.setenv("HVDENV_SITE", str(path))
    return path


def left(cache: Cache) -> list[int]:
    """Which of the entries are still there."""
    return [number for number, inputs in enumerate(INPUTS) if key(inputs) in names(cache)]


def test_list_says_what_there_is(cache: Cache, hvdenv: Hvdenv) -> None:
    said = hvdenv("wheels", "list").out
    assert (
        f"{key(INPUTS[0])[:12]}  horovod 0.28.1, torch 2.13.0, cp311\n    1.0 MB, stored 20" in said
    )
    assert "used 1970-01-02, own" in said


def test_list_finds_damage(cache: Cache, hvdenv: Hvdenv) -> None:
    (cache.entry(key(INPUTS[1])) / NAME).write_bytes(b"1")
    assert hvdenv("wheels", "list", code=1).out.count("not used: ") == 1
    found = json.loads(hvdenv("wheels", "list", "--json", code=1).out)
    assert [each["key"] for each in found if each["problem"]] == [key(INPUTS[1])]


def test_control_sequences_are_not_shown(cache: Cache, tmp_path: Path, hvdenv: Hvdenv) -> None:
    inputs = {"stack": {"mpi": "\x1b]0;evil\x07", "frameworks": {"\x1b[2J": {"version": "1"}}}}
    store(cache, inputs, tmp_path / NAME)
    assert "\x1b" not in hvdenv("wheels", "list").out


@pytest.mark.parametrize(
    ("words", "stay"),
    [
        ((), [0, 1, 2]),
        (("--max-size", "2MB"), [1, 2]),
        (("--max-size", "1.999mb"), [2]),
        (("--max-size", "2.1M"), [1, 2]),
        (("--max-size", "0"), []),
        (("--max-size", "1TB"), [0, 1, 2]),
        (("--older-than", "99999"), [0, 1, 2]),
        (("--older-than", "1000"), []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_prune(cache: Cache, words: tuple[str, ...], stay: list[int], hvdenv: Hvdenv) -> None:
    hvdenv("wheels", "prune", *words)
    assert left(cache) == stay


def test_prune_of_what_cannot_be_used(cache: Cache, hvdenv: Hvdenv) -> None:
    (cache.entry(key(INPUTS[1])) / "entry.json").write_text("{")
    (cache.entry(key(INPUTS[2])) / NAME).chmod(0o666)  # not trusted
    assert hvdenv("wheels", "prune").out.count("removed ") == 2
    assert left(cache) == [0]


def test_the_size_that_a_site_allows(cache: Cache, site: Path, hvdenv: Hvdenv) -> None:
    site.write_text("places.wheels.own_gb = 0.002\n")
    hvdenv("wheels", "prune")
    assert left(cache) == [1, 2]


def test_a_shared_cache_that_cannot_be_read(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    """The others are looked at all the same."""
    monkeypatch.setenv("HVDENV_WHEEL_CACHE", str(tmp_path / "none"))
    said = hvdenv("wheels", "list", code=1)
    assert said.out.count(", own") == 3
    assert f"error: {tmp_path}/none: cannot read: No such file" in said.err


def test_a_wrong_site_file_is_said_with_its_line(
    site: Path, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    site.write_text('job.account = "x"\n[places.wheels]\nraed = ["/a"]\n')
    assert hvdenv("wheels", "list", code=2).err.startswith(
        f'error: {site}:3: places.wheels.raed: unknown key; did you mean "read"?'
    )
    site.write_text('places.wheels.read = ["{home}/wheels"]\n')
    assert str(Path.home() / "wheels") in hvdenv("wheels", "list", code=1).err


@pytest.mark.parametrize(
    "words",
    [
        ("prune", "--max-size", "many"),
        ("prune", "--max-size", "5"),
        ("prune", "--max-size", "-1"),
        ("prune", "--older-than", "nan"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], hvdenv: Hvdenv) -> None:
    hvdenv("wheels", *words, code=2)
