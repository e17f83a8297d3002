"""Which compiled wheels go along with what is fetched for a lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdenv.locks.lockfile import PYPI, Horovod, Inputs, Locked, bind
from hvdenv.locks.pypi import Package, render
from hvdenv.places import Places
from hvdenv.wheels import compiled
from hvdenv.wheels.wheelcache import Cache, key, names, own, store, take
from tests.wheels import wheel_in

HASH = "0123456789abcdef" * 4
WANTED: dict[str, Any] = {"source": HASH, "patches": {}, "variables": {"HOROVOD_WITH_MPI": "1"}}
STACK: dict[str, Any] = {
    "soabi": ".cpython-311-x86_64-linux-gnu.so", "machine": "x86_64", "compiler": "g++ 12",
    "frameworks": {"torch": {"package": "torch", "version": "2.13.0+cpu", "files": "a"}},
}  # fmt: skip
INPUTS = {**WANTED, "stack": STACK}


@pytest.fixture
def lock(tmp_path: Path) -> Locked:
    torch = Package("torch", "2.13.0+cpu", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", HASH)
    inputs = Inputs("local", (), "3.11", "linux-x86_64", Horovod("0.28.1", HASH))
    return bind(tmp_path, inputs, {PYPI: render([torch], "3.11", "x86_64")})


def kept(tmp_path: Path, inputs: dict[str, Any]) -> Cache:
    cache = own(Places(tmp_path / "home"))
    store(cache, inputs, wheel_in(tmp_path))
    return cache


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"source": "b" * 64}, False),
        ({"patches": {"any-folder": HASH}}, False),
        ({"stack": {**STACK, "compiler": "clang 16", "mpi": "mpirun (Open MPI) 5.0.1"}}, True),
        ({"stack": {**STACK, "soabi": ".cpython-312-x86_64-linux-gnu.so"}}, False),
        ({"stack": {**STACK, "machine": "ppc64le"}}, False),
        ({"stack": {**STACK, "frameworks": {"torch": {**STACK["frameworks"]["torch"], "version": "2.13.0"}}}}, False),
        ({"stack": {}}, False),
    ],
)  # fmt: skip
def test_what_fits_as_far_as_the_lock_can_tell(
    tmp_path: Path, lock: Locked, changed: dict[str, Any], fits: bool
) -> None:
    inputs = {**INPUTS, **changed}
    cache = kept(tmp_path, inputs)
    assert compiled.carry([cache], WANTED, lock, tmp_path) == (int(fits), ())


def test_wheels_go_along_and_are_found_there(tmp_path: Path, lock: Locked) -> None:
    cache, to = kept(tmp_path, INPUTS), tmp_path / "fetched"
    to.mkdir()
    assert compiled.cache_in(to) == compiled.cache_in(None) == ()
    compiled.carry([cache], WANTED, lock, to)
    (folder,) = compiled.cache_in(to)
    there = Cache(Path(folder), shared=True)
    assert take([there], INPUTS, tmp_path).entry == there.entry(key(INPUTS))


def test_what_is_damaged_stays_behind_and_is_said(tmp_path: Path, lock: Locked) -> None:
    cache = kept(tmp_path, INPUTS)
    next(cache.entry(key(INPUTS)).glob("*.whl")).write_bytes(b"other")
    missing = Cache(tmp_path / "none", shared=True)
    count, notes = compiled.carry([missing, cache], WANTED, lock, tmp_path / "fetched")
    assert (count, names(Cache(tmp_path / "fetched/wheels"))) == (0, [])
    assert [note.partition(": ")[0] for note in notes] == [
        "cached wheels not used", "cached wheel not used",
    ]  # fmt: skip
