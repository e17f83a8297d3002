"""Clocks are set, by hours and either way. No duration and no deadline depends on one."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from hvdenv.environments import prefix_lock
from hvdenv.environments.prefix_lock import boot_id
from hvdenv.standalone.ranks import events as wire
from tests.support.standalone import load

PACKAGE = Path(__file__).parents[2] / "hvdenv"
JUMPS = [-1e6, 0.0, 1e6]
# What is compared with the times of files, which the same clock gave, or what is printed; and the
# deadline for ranks of other hosts, whose steady clocks are others.
BY_THE_CLOCK = {
    "base/places.py": 1,
    "building/wheelcache.py": 1,
    "environments/prefix_lock.py": 1,
    "standalone/ranks/rank.py": 1,
    "verification/rank_start.py": 1,
    "verification/verify.py": 1,
}

rank = load("rank")


def test_durations_are_measured_with_the_steady_clock() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if asks := re.findall(r"\btime\.time\b", path.read_text(encoding="utf-8")):
            found[str(path.relative_to(PACKAGE))] = len(asks)
    assert found == BY_THE_CLOCK


@pytest.mark.parametrize("jump", JUMPS)
def test_ranks_of_this_host_have_their_time(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, steady = time.time() + 60, time.monotonic() + 60
    monkeypatch.setattr(rank.time, "time", lambda: wall - 60 + jump)
    here = rank.seconds_left(f"60@{wall}@{boot_id()}@{steady}")
    assert 59 < here <= 60
    late = rank.seconds_left(f"60@{wall}@{boot_id()}@{steady - 20}")
    assert 39 < late <= 40
    elsewhere = rank.seconds_left(f"60@{wall}@another@{steady}")
    assert 59 < elsewhere <= 60
    assert rank.seconds_left("60") == 60


class Waiting(rank.Supervisor):  # type: ignore[misc, name-defined]
    """A supervisor whose rank does nothing."""

    def _start(self, *_words: object) -> object:
        read, write = os.pipe()
        os.close(write)
        self.reports = read
        return rank.subprocess.Popen(["sleep", "60"], stdout=rank.subprocess.PIPE)


@pytest.mark.parametrize("jump", JUMPS)
def test_a_supervisor_does_not_end_its_rank_early(
    jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Waiting(wire.EventWriter("t"), 60.0, ("torch", "MPI", "host"))
    now = time.time()
    monkeypatch.setattr(rank.time, "time", lambda: now + jump)
    try:
        supervisor._look_at_the_clock()
        assert supervisor.child.poll() is None and not supervisor.ended_by
        assert 0 <= supervisor.seconds() < 30
    finally:
        supervisor.child.kill()
        supervisor.child.communicate()
        os.close(supervisor.reports)


@pytest.mark.parametrize("jump", JUMPS)
def test_a_folder_in_use_is_left_alone(jump: float, tmp_path: Path) -> None:
    """The heartbeats of its process look old until the next one."""
    with prefix_lock.scratch_folder(tmp_path, "test") as used:
        (lock,) = used.path.glob(f"{prefix_lock.PREFIX}*")
        then = time.time() - jump
        os.utime(lock, (then, then))
        with prefix_lock.scratch_folder(tmp_path, "other"):
            assert used.path.is_dir()
