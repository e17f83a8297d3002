"""Wheels that users share: real users, real permissions."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.errors import StepError
from hvdenv.base.places import Places
from hvdenv.building import wheelcache
from hvdenv.building.wheelcache import Cache, key, names, own, store, take
from hvdenv.model.cluster import Wheels
from tests.support.needs import need
from tests.support.waiting import wait_until
from tests.support.wheels import NAME, wheel_in

INPUTS: dict[str, Any] = {"source": "abc"}
# Nobody's: users need no name to own files. The last one is of another group.
ANN, BOB, EVE = 61001, 61002, 61003
GROUP, OTHERS = 61000, 61009


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everyone can get at."""
    folder = Path(tempfile.mkdtemp(prefix="hvdenv-test-"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def wheel(place: Path) -> Path:
    path = wheel_in(place, os.urandom(200_000))
    path.chmod(0o644)
    return path


def start_as(user: int, work: Callable[[], str]) -> tuple[int, int]:
    """Have another user do something in a process of its own: its id, and where it says what came of it."""
    need("root")
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        said = "it did not end"
        try:
            os.setgroups([])
            os.setgid(OTHERS if user == EVE else GROUP)
            os.setuid(user)
            os.umask(0o027)
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    return process, reading


def end_of(process: int, reading: int) -> str:
    with open(reading, encoding="utf-8") as stream:
        said = stream.read()
    os.waitpid(process, 0)
    return said


def as_user(user: int, work: Callable[[], str]) -> str:
    return end_of(*start_as(user, work))


def group_cache(place: Path) -> Path:
    """The cache of ann, which her group may read."""
    need("root")
    folder = place / "wheels"
    folder.mkdir()
    os.chown(folder, ANN, GROUP)
    folder.chmod(0o2750)
    return folder


def shared(folder: Path, **values: Any) -> Cache:
    (cache,) = wheelcache.shared(Wheels(read=(str(folder),), **values), {})
    return cache


def publishing(cache: Cache, wheel: Path) -> Callable[[], str]:
    def work() -> str:
        store(Cache(cache.folder), INPUTS, wheel)
        return "stored"

    return work


def taking(cache: Cache, wheel: Path) -> Callable[[], str]:
    """What a user gets; `the wheel` if it is the right one, with a file of their own."""

    def work() -> str:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / NAME
            taken = take([cache], INPUTS, target.parent)
            if taken.entry is None:
                return "; ".join(taken.notes) or "nothing"
            status = target.stat()
            assert (status.st_uid, status.st_nlink) == (os.geteuid(), 1)
            return "the wheel" if target.read_bytes() == wheel.read_bytes() else "another"

    return work


def test_one_publishes_and_the_group_reads(place: Path, wheel: Path) -> None:
    folder = group_cache(place)
    trusting = shared(folder, trust=(str(ANN),))
    assert as_user(BOB, taking(trusting, wheel)) == "nothing"
    assert as_user(BOB, publishing(trusting, wheel)).startswith("StepError")
    assert as_user(ANN, publishing(trusting, wheel)) == "stored"
    for path in folder.rglob("*"):
        assert path.stat().st_gid == GROUP
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IRWXO)
    assert as_user(BOB, taking(trusting, wheel)) == "the wheel"
    entry = trusting.entry(key(INPUTS))
    assert as_user(BOB, taking(shared(folder), wheel)) == (
        f"cached wheel not used: {entry}/entry.json belongs to uid {ANN}"
    )
    assert as_user(EVE, taking(trusting, wheel)) == (
        f"cached wheel not used: {entry} cannot be read: Permission denied"
    )


def test_many_at_once(place: Path, wheel: Path) -> None:
    """Readers never see half an entry, and of several publishers one stays."""
    folder = group_cache(place)
    trusting = shared(folder, trust=(str(ANN),))

    def reading() -> str:
        deadline, said = time.monotonic() + 120, "nothing"
        while said == "nothing" and time.monotonic() < deadline:
            said = taking(trusting, wheel)()
        return said

    users = [start_as(BOB, reading) for _ in range(3)]
    users += [start_as(ANN, publishing(trusting, wheel)) for _ in range(4)]
    assert [end_of(*user) for user in users] == ["the wheel"] * 3 + ["stored"] * 4
    assert names(trusting) == [key(INPUTS)]
    assert not list(folder.rglob(".*"))


def test_publishers_that_are_killed(place: Path, wheel: Path) -> None:
    folder = group_cache(place)
    trusting = shared(folder, trust=(str(ANN),))
    large = place / "horovod-0-large.whl"
    with large.open("wb") as stream:
        stream.truncate(1000 << 20)
    large.chmod(0o644)
    process, reading = start_as(ANN, publishing(trusting, large))
    wait_until(lambda: any(path.stat().st_size for path in folder.glob(".*/.*")), 60)
    os.kill(process, signal.SIGKILL)
    end_of(process, reading)
    (left,) = folder.glob(".*")
    assert as_user(BOB, taking(trusting, wheel)) == "nothing"
    assert as_user(ANN, publishing(trusting, wheel)) == "stored"
    assert as_user(BOB, taking(trusting, wheel)) == "the wheel"

    os.utime(left, (0, 0))

    def prune() -> str:
        return str(wheelcache.prune(Cache(folder), largest=1e9))

    assert as_user(ANN, prune) == "[]" and not left.exists()


@pytest.mark.needs("root", "mounts")
def test_a_full_file_system(place: Path, wheel: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(place)], check=True)
    try:
        (place / "cache" / "wheels").mkdir(parents=True)
        cache = own(Places(place))
        source = Path(tempfile.gettempdir()) / f"{os.getpid()}.whl"
        source.write_bytes(bytes(200_000))
        with pytest.raises(StepError, match="No space left"):
            store(cache, INPUTS, source)
        assert list(cache.folder.rglob("*.json")) == list(cache.folder.glob(".*")) == []
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(StepError, match="Read-only file system"):
            store(cache, INPUTS, source)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        source.unlink()
