"""What a run has left is ended, on other hosts by ssh; a host that does not answer is named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from hvdenv.launch import leftovers
from hvdenv.runner import Runner

HERE = os.uname().nodename
LAST = 'for last; do :; done; exec sh -c "$last"'


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner({"PATH": f"{tmp_path}:/usr/bin:/bin"})


def write_ssh(folder: Path, text: str) -> None:
    (folder / "ssh").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "ssh").chmod(0o755)


def is_running(pid: int) -> bool:
    """Whether a process is there a moment later; nobody may have waited for it."""
    time.sleep(0.2)
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("branch", ["", ".ab12"])
def test_processes_on_another_host(tmp_path: Path, runner: Runner, branch: str) -> None:
    # The other host is this one, and has its process only when it is asked.
    start = f"HVDENV_TOKEN={runner.token}{branch} sleep 100 & echo $! > {tmp_path}/pid"
    write_ssh(tmp_path, f"{start}\nHVDENV_TOKEN=other\nexport HVDENV_TOKEN\nsleep 0.2\n{LAST}")
    (finding,) = leftovers.end(["n2", HERE], runner, 5)
    assert finding.status == "pass"
    assert finding.message == (
        f"nothing of this run is left on n2, {HERE}; processes that had to be ended: 1 on n2"
    )
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_nothing_is_left(tmp_path: Path, runner: Runner) -> None:
    write_ssh(tmp_path, f"HVDENV_TOKEN=other\nexport HVDENV_TOKEN\n{LAST}")
    (finding,) = leftovers.end(["n2"], runner, 5)
    assert finding.message == f"nothing of this run is left on n2, {HERE}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'ssh: connect to host n2 port 22: No route to host'; exit 255", "No route to host"),
        ("exec sleep 100", "no answer by ssh within 1 s"),
        ("exit 3", "ssh ended with exit code 3"),
    ],
)
def test_a_host_that_does_not_answer(tmp_path: Path, runner: Runner, text: str, why: str) -> None:
    write_ssh(tmp_path, text)
    began = time.monotonic()
    unknown, rest = leftovers.end(["n2"], runner, 1)
    assert time.monotonic() - began < 4
    assert (unknown.subject, unknown.status) == ("n2", "unproven")
    assert unknown.message.startswith("unconfirmed whether ranks still run on n2: ")
    assert why in unknown.message
    assert rest.message == f"nothing of this run is left on {HERE}"


def test_a_runner_that_was_stopped_still_ends_what_it_started(
    tmp_path: Path, runner: Runner
) -> None:
    runner.stop()
    write_ssh(tmp_path, LAST)
    assert [finding.status for finding in leftovers.end(["n2"], runner, 5)] == ["pass"]
