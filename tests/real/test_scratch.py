"""Directories for a while: what killed processes left is gone with the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from hvdenv.base.places import LEFT_ALONE_SECONDS
from hvdenv.environments import prefix_lock
from tests.support.waiting import runs, wait_until

HOLDER = """
import sys
from pathlib import Path
from hvdenv.environments import prefix_lock
from hvdenv.base.command import Command
with prefix_lock.scratch_folder(Path(sys.argv[1]), "fetching") as work:
    print(work.path, flush=True)
    work.runner.run(Command(("sleep", "600.5")))
"""


def sleepers(parent: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(parent).children(True) if each.name() == "sleep"]


def test_what_a_killed_run_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        left = Path(holder.stdout.readline().strip())
        wait_until(lambda: bool(sleepers(holder.pid)), 60)
        (sleeper,) = sleepers(holder.pid)
        with prefix_lock.scratch_folder(tmp_path, "resolving") as work:
            assert sorted(left.parent.iterdir()) == [left, work.path]
        assert left.exists()
        holder.kill()
    assert left.is_dir() and runs(sleeper.pid)
    with prefix_lock.scratch_folder(tmp_path, "resolving") as work:
        assert list(left.parent.iterdir()) == [work.path]
        wait_until(lambda: not runs(sleeper.pid), 60)
    assert list(left.parent.iterdir()) == []


@pytest.mark.needs("root")
def test_what_another_user_has_in_the_same_folder_stops_nobody() -> None:
    """Nobody may even look into it."""
    with TemporaryDirectory() as shared:
        os.chmod(shared, 0o1777)
        with prefix_lock.scratch_folder(Path(shared), "building") as theirs:
            os.setresuid(65534, 65534, 0)
            try:
                with prefix_lock.scratch_folder(Path(shared), "building") as mine:
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
    with prefix_lock.hold(away, wait=0):
        (lock,) = away.iterdir()
        text = lock.read_text().replace(os.uname().nodename, "elsewhere")
    lock.write_text(text)
    when = time.time() - age
    for path in (fresh, lock):
        os.utime(path, (when, when))
    with monkeypatch.context() as another:
        another.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        with prefix_lock.scratch_folder(tmp_path, "resolving"):
            assert fresh.exists() and away.exists(), "of another user"
    with prefix_lock.scratch_folder(tmp_path, "resolving"):
        assert (fresh.exists(), away.exists()) == (stays, stays)
