"""How the parts of verify share cores and time, and what becomes of those that fail."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from hvdenv.base.errors import InterruptedRunError, StepError
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation
from hvdenv.sites.launchers import Launch
from hvdenv.verification.setup import Parts, Setup

SETUP = Setup(Installation("/env", "python", ()), Runner(), cores=4)


def parts_of(setup: Setup = SETUP, told: list[tuple[str, str, str]] | None = None) -> Parts:
    return Parts(setup, lambda *event: told.append(event) if told is not None else None)


def test_nothing_is_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """horovodrun starts Pythons with -c (multiprocessing)."""
    (tmp_path / "pathlib.py").write_text("print('of the directory')")
    monkeypatch.chdir(tmp_path)
    horovodrun = f"{sys.executable} -s -c 'import pathlib; print(pathlib.__file__)'"
    assert "of the directory" not in SETUP.run(("sh", "-c", horovodrun), 60).output


def test_a_part_is_told_and_measured() -> None:
    told: list[tuple[str, str, str]] = []

    with parts_of(told=told) as parts:
        assert parts.start("kernel", lambda setup, timeout: timeout).result() > 590
    assert told == [("started", "kernel", ""), ("finished", "kernel", "")]
    assert [each.name for each in parts.measurements] == ["kernel"]


@pytest.mark.parametrize(("ranks", "together"), [(4, 2), (64, 2), (2, 4)])
def test_as_many_run_at_a_time_as_there_are_cores_for_their_ranks(
    ranks: int, together: int
) -> None:
    all_there, running, most = threading.Barrier(together), set[int](), [0]

    def part(setup: Setup, timeout: float) -> None:
        running.add(threading.get_ident())
        most[0] = max(most[0], len(running))
        all_there.wait(20)
        running.discard(threading.get_ident())
        all_there.wait(20)

    with parts_of(SETUP._replace(launch=Launch((), ranks))) as parts:
        for number in range(together * 2):
            parts.start(str(number), part)
    assert most == [together]


def shared_fairly(shares: list[float]) -> bool:
    """Of 300 seconds for three: the first gets its part, and each other one more than that."""
    first, *others = shares
    return 75 < first < 90 and all(share > first for share in others)


def test_runs_of_ranks_share_the_time() -> None:
    shares: list[float] = []
    with parts_of(SETUP._replace(cores=1, seconds=300.0)) as parts:
        hold = threading.Event()
        parts.start("hold", lambda setup, timeout: hold.wait(20))
        for label, runs in zip("abc", (3, 2, 1), strict=True):
            parts.start(label, lambda setup, timeout: shares.append(timeout), runs=runs)
        facts = parts.start("facts", lambda setup, timeout: timeout)
        hold.set()
    assert shared_fairly(shares) and facts.result() > 250


def test_where_no_time_is_left_ranks_are_not_started_and_facts_are_still_found() -> None:
    with parts_of(SETUP._replace(seconds=0.5)) as parts:
        run = parts.start("run", lambda setup, timeout: None, runs=1)
        facts = parts.start("facts", lambda setup, timeout: timeout)
    assert isinstance(run.exception(), StepError)
    assert facts.result() == 2.0


def test_after_the_runner_is_stopped_nothing_starts() -> None:
    runner = Runner()

    def part(setup: Setup, timeout: float) -> None:
        runner.stop()
        raise InterruptedRunError

    with parts_of(SETUP._replace(runner=runner, cores=1)) as parts:
        first = parts.start("torch over MPI", part)
        second = parts.start("second", lambda setup, timeout: None)
    assert isinstance(first.exception(), InterruptedRunError)
    assert isinstance(second.exception(), InterruptedRunError)
