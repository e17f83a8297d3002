from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdenv.environments import prefix_lock
from hvdenv.environments.prefix_lock import hold
from hvdenv.errors import BusyError, StepError

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
store, rounds, suicidal, links = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if links == "no":
    # Stands for a file system without hard links.
    def link(*_):
        raise OSError(95, "Operation not supported")
    os.link = link
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


def write_lock(store: Path, **changes: Any) -> dict[str, Any]:
    """A lock of this process, but for the changes."""
    store.mkdir(exist_ok=True)
    holder = {**prefix_lock._myself()._asdict(), **changes}
    (store / "lock").write_text(json.dumps(holder))
    return holder


def test_free_again_after_use_and_after_an_exception(store: Path) -> None:
    for error in (None, RuntimeError("x")):
        try:
            with hold(store, wait=0) as held:
                assert held.replaced is None
                held.check()
                if error:
                    raise error
        except RuntimeError:
            pass
        assert os.listdir(store) == []


def test_a_living_holder_is_named(store: Path, start: Callable[..., Any]) -> None:
    process = start(HOLDER, store, 0)
    token(process)
    with pytest.raises(BusyError) as caught, hold(store, wait=0.2):
        pass
    assert caught.value.exit_code == 6
    assert f"process {process.pid} of " in caught.value.message
    assert os.uname().nodename in caught.value.message
    assert "wait for it" in caught.value.remedy


def test_the_job_is_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with (
        hold(store, wait=0),
        pytest.raises(BusyError, match="job 4711"),
        hold(store, wait=0),
    ):
        pass


def test_who_waits_gets_it(store: Path, start: Callable[..., Any]) -> None:
    first = start(HOLDER, store, 0)
    token(first)
    second = start(HOLDER, store, 300)
    time.sleep(0.3)
    first.communicate(timeout=60)
    assert first.returncode == 0
    mine = token(second)
    assert json.loads((store / "lock").read_text())["token"] == mine


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_holder_is_replaced_and_its_token_told(
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
        assert held.replaced is not None
        assert held.replaced.token == dead
        assert held.token != dead
    assert os.listdir(store) == []


def test_the_heart_beats(store: Path) -> None:
    with hold(store, wait=0, beat=0.05):
        os.utime(store / "lock", (0, 0))
        deadline = time.monotonic() + 60
        while (store / "lock").stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("changes", "age"),
    [
        ({"started": "1"}, 0),
        ({"pid": 2**31 - 1}, 0),
        ({"boot": "another"}, 100),
        ({"boot": "another", "namespace": "another"}, 100),
    ],
)
def test_taken_from_who_is_surely_gone(store: Path, changes: dict[str, Any], age: float) -> None:
    holder = write_lock(store, **changes)
    moment = time.time() - age
    os.utime(store / "lock", (moment, moment))
    with hold(store, wait=0) as held:
        assert held.replaced is not None
        assert held.replaced.token == holder["token"]


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
def test_never_taken_from_who_may_live_but_by_order(
    store: Path, changes: dict[str, Any], age: float
) -> None:
    write_lock(store, **changes)
    moment = time.time() - age
    os.utime(store / "lock", (moment, moment))
    before = (store / "lock").read_bytes()
    with pytest.raises(BusyError) as caught, hold(store, wait=0):
        pass
    if age:
        assert re.search("last heartbeat 100[0-9]{2} s ago", caught.value.message)
    assert (store / "lock").read_bytes() == before
    if changes and "started" not in changes:
        assert "--break-lock" in caught.value.remedy
    with hold(store, wait=0, break_lock=True) as held:
        held.check()
    assert os.listdir(store) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xff"])
def test_a_lock_that_names_nobody_is_only_broken_by_order(store: Path, content: bytes) -> None:
    store.mkdir()
    (store / "lock").write_bytes(content)
    with pytest.raises(BusyError, match="names no holder"), hold(store, wait=0):
        pass
    with hold(store, wait=0, break_lock=True) as held:
        assert held.replaced is None


def test_who_lost_the_lock_notices_and_leaves_the_new_one(store: Path) -> None:
    with hold(store, wait=0) as old:
        with hold(store, wait=0, break_lock=True) as new:
            with pytest.raises(BusyError, match="removed the lock of this build; process"):
                old.check()
            old._release()
            new.check()
        with pytest.raises(BusyError, match="removed the lock of this build"):
            old.check()
    assert os.listdir(store) == []


def test_the_store_may_go_while_it_is_held(store: Path) -> None:
    with hold(store, wait=0) as held:
        (store / "lock").unlink()
        store.rmdir()
        with pytest.raises(BusyError):
            held.check()
    assert not store.exists()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StepError, match="cannot write"), hold(tmp_path / "file", wait=0):
        pass


def test_any_other_failure_to_link_is_an_error(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        """Stands for a broken disk."""
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StepError, match="Input/output error"), hold(store, wait=0):
        pass
    assert os.listdir(store) == []


def test_a_full_disk_leaves_no_empty_files(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        """Stands for a full disk."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StepError, match="No space left"), hold(store, wait=0):
        pass
    assert os.listdir(store) == []


def test_the_next_holder_clears_what_killed_ones_left(store: Path) -> None:
    dead = write_lock(store, pid=2**31 - 1)
    (store / ".lock-claim-other").write_text(json.dumps(dead))
    (store / ".lock-draft-1").touch()
    os.utime(store / ".lock-draft-1", (0, 0))
    with hold(store, wait=0):
        assert os.listdir(store) == ["lock"]


def test_a_lock_that_has_long_named_nobody_is_taken_over(store: Path) -> None:
    """A power cut empties it; a living holder would have noticed."""
    store.mkdir()
    (store / "lock").touch()
    os.utime(store / "lock", (0, 0))
    with hold(store, wait=0) as held:
        held.check()
    assert os.listdir(store) == []


def test_sweeping_spares_the_lock_and_claims_in_use(store: Path) -> None:
    alive = prefix_lock._myself()
    with hold(store, wait=0) as held:
        for name in (".lock-draft-1", ".lock-claim-old", ".lock-claim-new", "other"):
            (store / name).touch()
        for name in (".lock-draft-1", ".lock-claim-old"):
            os.utime(store / name, (0, 0))
        (store / ".lock-claim-alive").write_text(json.dumps(alive._asdict()))
        dead = alive._replace(pid=2**31 - 1)
        (store / ".lock-claim-dead").write_text(json.dumps(dead._asdict()))
        prefix_lock.sweep(store)
        held.check()
        assert set(os.listdir(store)) == {"lock", ".lock-claim-new", ".lock-claim-alive", "other"}


def test_a_claim_left_by_a_killed_process_stands_in_nobodys_way(store: Path) -> None:
    dead = write_lock(store, pid=2**31 - 1, token="dead")
    claim = {**dead, "token": "claimant"}
    (store / ".lock-claim-dead").write_text(json.dumps(claim))
    second = {**dead, "token": "second"}
    (store / ".lock-claim-claimant").write_text(json.dumps(second))
    with hold(store, wait=0) as held:
        assert held.replaced is not None
        assert held.replaced.token == "dead"
    assert os.listdir(store) == []


def test_a_dead_lock_that_somebody_else_takes_is_waited_for(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_lock, "_HANDOVER_SECONDS", 60.0)
    dead = write_lock(store, pid=2**31 - 1, token="dead")
    alive = {**prefix_lock._myself()._asdict(), "token": "claimant"}
    (store / ".lock-claim-dead").write_text(json.dumps(alive))
    timer = threading.Timer(0.5, (store / ".lock-claim-dead").unlink)
    timer.start()
    with hold(store, wait=0) as held:
        assert held.replaced is not None
        assert held.replaced.token == dead["token"]
    timer.join()


@pytest.mark.parametrize("links", ["yes", "no"])
def test_one_holder_at_a_time_among_eight(
    store: Path, start: Callable[..., Any], links: str
) -> None:
    store.mkdir()
    workers = [start(WORKER, store, 12, "no", links) for _ in range(8)]
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        assert (worker.returncode, errors) == (0, "")
    assert os.listdir(store) == []


def test_one_holder_at_a_time_when_holders_and_takers_are_killed(
    store: Path, start: Callable[..., Any]
) -> None:
    store.mkdir()
    write_lock(store, pid=2**31 - 1)
    chance = random.Random(7)
    running = [start(WORKER, store, 12, "no" if n < 3 else "yes", "yes") for n in range(8)]
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        time.sleep(chance.random() * 0.1)
        victim = chance.randrange(3, 8)
        if chance.random() < 0.5:
            running[victim].send_signal(signal.SIGKILL)
        if running[victim].poll() is not None:
            _, errors = running[victim].communicate()
            assert errors == ""
            running[victim] = start(WORKER, store, 12, "yes", "yes")
    for worker in running[:3]:
        _, errors = worker.communicate(timeout=300)
        assert (worker.returncode, errors) == (0, "")


def test_a_lock_that_changed_hands_since_it_was_judged_is_left_alone(store: Path) -> None:
    write_lock(store, pid=2**31 - 1, token="dead")
    with hold(store, wait=0) as held:
        late = prefix_lock._myself()
        assert not prefix_lock._take(store, "lock", "dead", late, break_lock=False)
        held.check()
    assert os.listdir(store) == []
