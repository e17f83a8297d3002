from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.errors import BusyError, StepError
from hvdenv.environments import prefix_lock
from hvdenv.environments.prefix_lock import PREFIX, hold
from tests.support.waiting import wait_until

REAL = os.listdir
# Prints its token when it has the lock, and keeps it until standard input ends.
HOLDER = """
import sys
from pathlib import Path
from hvdenv.environments.prefix_lock import hold
with hold(Path(sys.argv[1]), wait=float(sys.argv[2]), beat=0.05) as held:
    print(held.token, flush=True)
    sys.stdin.read()
"""

# Takes the lock again and again. The witness tells whether anybody else has it too: it
# names a process, and that process must have ended if its witness is still there.
WORKER = """
import os, random, signal, sys, time
from pathlib import Path
from hvdenv.environments import prefix_lock
store, rounds, suicidal = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
witness = store.parent / "witness"
for _ in range(rounds):
    with prefix_lock.hold(store, wait=240, beat=0.01) as held:
        me = f"{os.getpid()} {prefix_lock._started(os.getpid())}"
        if witness.exists():
            pid, started = witness.read_text().split()
            if prefix_lock._started(int(pid)) == started:
                sys.exit(f"{me} holds the lock, and so does {pid}")
        draft = store.parent / f"witness-{os.getpid()}"
        draft.write_text(me)
        draft.rename(witness)
        time.sleep(random.random() * 0.01)
        held.check()
        if witness.read_text() != me:
            sys.exit(f"{me} holds the lock, and so does {witness.read_text()}")
        if suicidal == "yes" and random.random() < 0.3:
            os.kill(os.getpid(), signal.SIGKILL)
        witness.unlink()
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / ".env.hvdenv"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python processes; ends those that still run."""
    processes: list[subprocess.Popen[str]] = []

    def run(script: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def token(process: subprocess.Popen[str]) -> str:
    """What a holder prints when it has the lock."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write_lock(store: Path, age: float = 0, **changes: Any) -> Path:
    """The lock of another process: of this one, but for the changes."""
    store.mkdir(exist_ok=True)
    path = store / f"{PREFIX}{'0' * 32}"
    holder = {**prefix_lock._myself()._asdict(), "token": "0" * 32, **changes}
    path.write_text(json.dumps(holder))
    moment = time.time() - age
    os.utime(path, (moment, moment))
    return path


def test_free_again_after_use_and_after_an_exception(store: Path) -> None:
    for error in (None, RuntimeError("x")):
        try:
            with hold(store, wait=0) as held:
                assert held.replaced == ()
                held.check()
                if error:
                    raise error
        except RuntimeError:
            pass
        assert os.listdir(store) == []


def test_a_running_holder_is_named(
    store: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    process = start(HOLDER, store, 0)
    token(process)
    with pytest.raises(BusyError) as caught, hold(store, wait=0.2):
        pass
    assert caught.value.exit_code == 6
    assert f"process {process.pid} of " in caught.value.message
    assert f"on {os.uname().nodename}, job 4711" in caught.value.message
    assert "wait for it" in caught.value.remedy


def test_of_two_that_collide_both_get_it_in_turn(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    look, meeting = prefix_lock._look, threading.local()

    def look_together(*arguments: Any) -> Any:
        if not hasattr(meeting, "over"):
            meeting.over = True
            both.wait(30)
        return look(*arguments)

    def take_turns(_: int) -> bool:
        with hold(store, wait=0):
            return True

    monkeypatch.setattr(prefix_lock, "_look", look_together)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(take_turns, range(2))] == [True, True]


def test_a_listing_without_ones_own_file_says_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the cache of a file server's client, which may lack a holder's file too."""
    write_lock(store, age=60)
    listings: list[list[str]] = [[], []]
    monkeypatch.setattr(os, "listdir", lambda path: listings.pop() if listings else REAL(path))
    with pytest.raises(BusyError), hold(store, wait=0):
        pass


def test_a_store_that_cannot_be_listed_is_not_free(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(StepError, match="cannot"), hold(store, wait=0):
        pass


def test_a_waiting_process_gets_it(store: Path, start: Callable[..., Any]) -> None:
    first = start(HOLDER, store, 0)
    token(first)
    second = start(HOLDER, store, 300)
    time.sleep(0.3)
    first.communicate(timeout=60)
    assert first.returncode == 0
    mine = token(second)
    assert os.listdir(store) == [f"{PREFIX}{mine}"]


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_holder_is_replaced_and_its_token_known(
    store: Path, start: Callable[..., Any], reaped: bool
) -> None:
    process = start(HOLDER, store, 0)
    dead = token(process)
    process.kill()
    if reaped:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with hold(store, wait=0) as held:
        assert held.replaced == (dead,)
        assert held.token != dead
    assert os.listdir(store) == []


def test_the_heart_beats(store: Path) -> None:
    with hold(store, wait=0, beat=0.05):
        (lock,) = store.iterdir()
        os.utime(lock, (0, 0))
        wait_until(lambda: lock.stat().st_mtime > 0, 60)


@pytest.mark.parametrize(
    ("changes", "age"),
    [
        ({"started": "1"}, 0),
        ({"pid": 2**31 - 1}, 0),
        ({"boot": "another"}, 100),
        ({"boot": "another", "namespace": "another"}, 100),
    ],
)
def test_taken_over_from_a_holder_that_is_certainly_gone(
    store: Path, changes: dict[str, Any], age: float
) -> None:
    write_lock(store, age, **changes)
    with hold(store, wait=0) as held:
        assert held.replaced == ("0" * 32,)


@pytest.mark.parametrize(
    ("changes", "age"),
    [
        ({}, 10_000),
        ({"started": ""}, 10_000),
        ({"host": "elsewhere"}, 10_000),
        ({"host": "elsewhere", "boot": "another", "pid": 2**31 - 1}, 10_000),
        ({"boot": "another"}, 0),
        ({"namespace": "another", "pid": 2**31 - 1}, 10_000),
        ({"pid": "x"}, 10_000),
        ({"pid": -1}, 10_000),
        ({"token": None}, 10_000),
        ({"unknown": ""}, 10_000),
    ],
)
def test_only_broken_on_request_if_the_holder_may_run(
    store: Path, changes: dict[str, Any], age: float
) -> None:
    lock = write_lock(store, age, **changes)
    before = lock.read_bytes()
    with pytest.raises(BusyError) as caught, hold(store, wait=0):
        pass
    if age:
        assert re.search("last heartbeat 100[0-9]{2} s ago", caught.value.message)
    assert os.listdir(store) == [lock.name] and lock.read_bytes() == before
    if changes and "started" not in changes:
        assert "--take-over" in caught.value.remedy
    with hold(store, wait=0, break_lock=True) as held:
        held.check()
    assert os.listdir(store) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xff"])
def test_a_lock_without_a_holder_is_broken_on_request(store: Path, content: bytes) -> None:
    write_lock(store).write_bytes(content)
    with pytest.raises(BusyError, match="names no holder"), hold(store, wait=0):
        pass
    with hold(store, wait=0, break_lock=True) as held:
        assert held.replaced == ()


def test_a_lock_that_a_power_cut_has_emptied_is_taken_over(store: Path) -> None:
    lock = write_lock(store)
    lock.write_bytes(b"")
    os.utime(lock, (0, 0))
    with hold(store, wait=0) as held:
        held.check()
    assert os.listdir(store) == []


def test_a_stale_lock_of_another_host_is_taken_over_where_that_is_allowed(store: Path) -> None:
    write_lock(store, 100, host="elsewhere")
    with pytest.raises(BusyError), hold(store, wait=0, stale=1000):
        pass
    with hold(store, wait=0, stale=10) as held:
        assert held.replaced == ("0" * 32,)


def test_a_build_whose_lock_was_broken_notices_and_leaves_the_new_one(store: Path) -> None:
    with hold(store, wait=0, beat=0.05) as old:
        with hold(store, wait=0, break_lock=True) as new:
            with pytest.raises(BusyError, match="removed the lock of this build; process"):
                old.check()
            new.check()
        with pytest.raises(BusyError, match="removed the lock of this build"):
            old.check()
    assert os.listdir(store) == []


def test_a_heartbeat_during_a_takeover_does_not_prevent_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, look = write_lock(store), prefix_lock._look

    def look_after_a_heartbeat(*words: Any) -> Any:
        if lock.exists():
            os.utime(lock, (time.time() + 1, time.time() + 1))
        return look(*words)

    monkeypatch.setattr(prefix_lock, "_look", look_after_a_heartbeat)
    with hold(store, wait=0, break_lock=True) as held:
        held.check()
    assert os.listdir(store) == []


def test_of_builds_that_take_over_at_the_same_time_one_goes_on(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_lock, "_CONTEST_SECONDS", 0.1)

    def take_over(start: threading.Barrier) -> bool:
        start.wait()
        try:
            with hold(store, wait=0, break_lock=True) as held:
                time.sleep(1)  # all others have taken over, or given up
                held.check()
                return True
        except BusyError:
            return False

    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            write_lock(store)
            start = threading.Barrier(3)
            going = [pool.submit(take_over, start) for _ in range(3)]
            assert [each.result() for each in going].count(True) == 1


def test_the_store_may_go_while_it_is_held(store: Path) -> None:
    with hold(store, wait=0) as held:
        shutil.rmtree(store)
        with pytest.raises(BusyError):
            held.check()
    assert not store.exists()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StepError, match="cannot write"), hold(tmp_path / "file", wait=0):
        pass


def test_a_full_disk_leaves_no_empty_files(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        """Stands for a full disk."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StepError, match="No space left"), hold(store, wait=0):
        pass
    assert os.listdir(store) == []


def test_one_holder_at_a_time_among_eight(store: Path, start: Callable[..., Any]) -> None:
    workers = [start(WORKER, store, 12, "no") for _ in range(8)]
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        assert (worker.returncode, errors) == (0, "")
    assert os.listdir(store) == []


def test_one_holder_at_a_time_when_holders_and_takers_are_killed(
    store: Path, start: Callable[..., Any]
) -> None:
    write_lock(store, pid=2**31 - 1)
    chance = random.Random(7)
    running = [start(WORKER, store, 12, "no" if n < 3 else "yes") for n in range(8)]
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        time.sleep(chance.random() * 0.1)
        victim = chance.randrange(3, 8)
        if chance.random() < 0.5:
            running[victim].send_signal(signal.SIGKILL)
        if running[victim].poll() is not None:
            _, errors = running[victim].communicate()
            assert errors == ""
            running[victim] = start(WORKER, store, 12, "yes")
    for worker in running[:3]:
        _, errors = worker.communicate(timeout=300)
        assert (worker.returncode, errors) == (0, "")
