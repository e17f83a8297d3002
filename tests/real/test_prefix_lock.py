from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from hvdenv.base.errors import BusyError, StepError
from hvdenv.base.places import LEFT_ALONE_SECONDS
from hvdenv.environments import prefix_lock
from hvdenv.environments.prefix_lock import PREFIX, hold, scratch_folder
from tests.real.conftest import Process, Start
from tests.support.waiting import runs, wait_until

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
store, suicidal = Path(sys.argv[1]), sys.argv[2:]
witness = store.parent / "witness"
for _ in range(12):
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
        if suicidal and random.random() < 0.3:
            os.kill(os.getpid(), signal.SIGKILL)
        witness.unlink()
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / ".env.hvdenv"


def token(process: Process) -> str:
    """What a holder prints when it has the lock."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write_lock(store: Path, age: float = 0, content: bytes = b"", **changes: Any) -> Path:
    """The lock of another process: of this one, but for the changes; or with any other content."""
    store.mkdir(exist_ok=True)
    path = store / f"{PREFIX}{'0' * 32}"
    holder = {**prefix_lock._myself()._asdict(), "token": "0" * 32, **changes}
    path.write_bytes(json.dumps(holder).encode() if changes or not content else content)
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
    store: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    process = start(sys.executable, "-c", HOLDER, store, 0)
    token(process)
    with pytest.raises(BusyError) as caught, hold(store, wait=0.2):
        pass
    assert caught.value.exit_code == 6
    assert f"process {process.pid} of " in caught.value.message
    assert f"on {os.uname().nodename}, job 4711" in caught.value.message
    assert "wait for it" in caught.value.remedy


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


def test_a_waiting_process_gets_it(store: Path, start: Start) -> None:
    first = start(sys.executable, "-c", HOLDER, store, 0)
    token(first)
    second = start(sys.executable, "-c", HOLDER, store, 300)
    time.sleep(0.3)
    first.communicate(timeout=60)
    assert first.returncode == 0
    mine = token(second)
    assert os.listdir(store) == [f"{PREFIX}{mine}"]


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_holder_is_replaced_and_its_token_known(
    store: Path, start: Start, reaped: bool
) -> None:
    process = start(sys.executable, "-c", HOLDER, store, 0)
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
    ("age", "changes"),
    [
        (0, {"started": "1"}),
        (0, {"pid": 2**31 - 1}),
        (100, {"boot": "another"}),
        (100, {"boot": "another", "namespace": "another"}),
        (2000, {"host": "elsewhere"}),
    ],
)
def test_taken_over_from_a_holder_that_is_certainly_gone(
    store: Path, age: float, changes: dict[str, Any]
) -> None:
    """Of a holder on another host, only a caller may say that silence means that."""
    write_lock(store, age, **changes)
    with hold(store, wait=0, stale=1000) as held:
        assert held.replaced == ("0" * 32,)


@pytest.mark.parametrize(
    ("age", "changes"),
    [
        (10_000, {}),
        (10_000, {"started": ""}),
        (10_000, {"host": "elsewhere"}),
        (10_000, {"host": "elsewhere", "boot": "another", "pid": 2**31 - 1}),
        (0, {"boot": "another"}),
        (10_000, {"namespace": "another", "pid": 2**31 - 1}),
        (10_000, {"pid": "x"}),
        (10_000, {"pid": -1}),
        (10_000, {"token": None}),
        (10_000, {"unknown": ""}),
        (10_000, {"content": b"{"}),
        (10_000, {"content": b"[]"}),
        (10_000, {"content": b"\xff\xff"}),
    ],
)
def test_only_broken_on_request_if_the_holder_may_run(
    store: Path, age: float, changes: dict[str, Any]
) -> None:
    lock = write_lock(store, age, **changes)
    before = lock.read_bytes()
    with pytest.raises(BusyError) as caught, hold(store, wait=0):
        pass
    if age:
        assert re.search("last heartbeat 100[0-9]{2} s ago", caught.value.message)
    assert "content" not in changes or "names no holder" in caught.value.message
    assert os.listdir(store) == [lock.name] and lock.read_bytes() == before
    if changes and "started" not in changes:
        assert "--take-over" in caught.value.remedy
    with hold(store, wait=0, break_lock=True) as held:
        held.check()
    assert os.listdir(store) == []


def test_a_lock_that_a_power_cut_has_emptied_is_taken_over(store: Path) -> None:
    lock = write_lock(store)
    lock.write_bytes(b"")  # about to be filled
    with pytest.raises(BusyError, match="names no holder"), hold(store, wait=0):
        pass
    os.utime(lock, (0, 0))
    with hold(store, wait=0) as held:
        held.check()
    assert os.listdir(store) == []


def test_a_build_whose_lock_was_broken_notices_and_leaves_the_new_one(store: Path) -> None:
    with hold(store, wait=0, beat=0.05) as old, hold(store, wait=0, break_lock=True) as new:
        assert new.replaced == (old.token,)
        with pytest.raises(BusyError, match="removed the lock of this build"):
            old.check()
        new.check()
    assert os.listdir(store) == []


def test_of_builds_that_take_over_at_the_same_time_one_goes_on(store: Path) -> None:
    def take_over(start: threading.Barrier) -> bool:
        start.wait()
        try:
            with hold(store, wait=0.5, break_lock=True) as held:
                time.sleep(1.5)  # all others have taken over, or given up
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


def test_a_takeover_that_meets_another_leaves_the_lock_of_the_holder_to_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a lock names the processes of its holder, which the one that takes it over ends."""
    lock, announce = write_lock(store), prefix_lock._announce
    other = lock.with_name(f"{PREFIX}{'1' * 32}")

    def announce_together(path: Path, mine: Any) -> Any:
        other.write_text(json.dumps({**mine._asdict(), "token": "1" * 32}))
        return announce(path, mine)

    monkeypatch.setattr(prefix_lock, "_announce", announce_together)
    with pytest.raises(BusyError), hold(store, wait=0, break_lock=True):
        pass
    assert {*os.listdir(store)} == {lock.name, other.name}


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


def test_one_holder_at_a_time_when_holders_and_takers_are_killed(store: Path, start: Start) -> None:
    write_lock(store, pid=2**31 - 1)
    chance = random.Random(7)
    running = [
        start(sys.executable, "-c", WORKER, store, *(["suicidal"] if n > 2 else []))
        for n in range(8)
    ]
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        time.sleep(chance.random() * 0.1)
        victim = chance.randrange(3, 8)
        if chance.random() < 0.5:
            running[victim].kill()
        if running[victim].poll() is not None:
            said, _ = running[victim].communicate()
            assert said == ""
            running[victim] = start(sys.executable, "-c", WORKER, store, "suicidal")
    for worker in running[:3]:
        said, _ = worker.communicate(timeout=300)
        assert (worker.returncode, said) == (0, "")


# ---------------------------------------------------------------- directories for a while

SCRATCH = """
import sys
from pathlib import Path
from hvdenv.environments.prefix_lock import scratch_folder
from hvdenv.base.command import Command
with scratch_folder(Path(sys.argv[1]), "fetching") as work:
    print(work.path, flush=True)
    work.runner.run(Command(("sleep", "600.5")))
"""


def sleepers(parent: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(parent).children(True) if each.name() == "sleep"]


def test_what_a_killed_run_left_is_deleted_by_the_next(tmp_path: Path, start: Start) -> None:
    holder = start(sys.executable, "-c", SCRATCH, tmp_path)
    left = Path(token(holder))
    wait_until(lambda: bool(sleepers(holder.pid)), 60)
    (sleeper,) = sleepers(holder.pid)
    with scratch_folder(tmp_path, "resolving") as work:
        assert sorted(tmp_path.iterdir()) == [left, work.path]
    assert left.exists()
    holder.kill()
    holder.wait()
    assert left.is_dir() and runs(sleeper.pid)
    with scratch_folder(tmp_path, "resolving") as work:
        assert list(tmp_path.iterdir()) == [work.path]
        wait_until(lambda: not runs(sleeper.pid), 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("root")
def test_what_another_user_has_in_the_same_folder_stops_nobody() -> None:
    """Nobody may even look into it."""
    with TemporaryDirectory() as shared:
        os.chmod(shared, 0o1777)
        with scratch_folder(Path(shared), "building") as theirs:
            os.setresuid(65534, 65534, 0)
            try:
                with scratch_folder(Path(shared), "building") as mine:
                    assert {*Path(shared).iterdir()} == {theirs.path, mine.path}
            finally:
                os.setresuid(0, 0, 0)
            assert [*Path(shared).iterdir()] == [theirs.path]


@pytest.mark.parametrize(("age", "stays"), [(0, True), (2 * LEFT_ALONE_SECONDS, False)])
def test_what_nobody_is_known_to_hold_goes_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, stays: bool
) -> None:
    """One that was just made, and one of another host, where nobody can look."""
    fresh, away = (tmp_path / f"hvdenv-scratch-{name}" for name in ("fetching-1", "fetching-2"))
    fresh.mkdir()
    with hold(away, wait=0):
        (lock,) = away.iterdir()
        text = lock.read_text().replace(os.uname().nodename, "elsewhere")
    lock.write_text(text)
    when = time.time() - age
    for path in (fresh, lock):
        os.utime(path, (when, when))
    with monkeypatch.context() as another:
        another.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        with scratch_folder(tmp_path, "resolving"):
            assert fresh.exists() and away.exists(), "of another user"
    with scratch_folder(tmp_path, "resolving"):
        assert (fresh.exists(), away.exists()) == (stays, stays)
