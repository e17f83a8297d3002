"""What runs on hosts by ssh: the end of what a run has left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hvdenv.base.runner import Runner
from hvdenv.sites import nodes
from tests.support.files import programs
from tests.support.waiting import runs, wait_until

HERE = os.uname().nodename
# What ssh does: the words that it gets are read by a shell.
LAST = 'for last; do :; done; exec sh -c "$last"'


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner({"PATH": f"{tmp_path}:/usr/bin:/bin"})


@pytest.mark.parametrize("branch", ["", ".ab12"])
def test_processes_on_another_host(tmp_path: Path, runner: Runner, branch: str) -> None:
    # The other host is this one, and has its process only when it is asked.
    mark = f"HVDENV_TOKEN={runner.token}{branch}"
    start = f"{mark} sleep 600 & echo $! > {tmp_path}/pid"
    started = f"until grep -qsz '^{mark}$' /proc/$!/environ; do sleep 0.05; done"
    programs(tmp_path, ssh=f"{start}\n{started}\nHVDENV_TOKEN=other\nexport HVDENV_TOKEN\n{LAST}")
    (finding,) = nodes.end_orphans(["n2", HERE], runner, 60)
    assert finding.status == "pass"
    # It may be seen dying when this host is looked at, which is the same.
    assert finding.message.removesuffix(f", 1 on {HERE}") == (
        f"no processes of this run are left on n2, {HERE}; hvdenv ended: 1 on n2"
    )
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not runs(pid))


def test_nothing_is_left(tmp_path: Path, runner: Runner) -> None:
    programs(tmp_path, ssh=f"HVDENV_TOKEN=other\nexport HVDENV_TOKEN\n{LAST}")
    (finding,) = nodes.end_orphans(["n2"], runner, 60)
    assert finding.message == f"no processes of this run are left on n2, {HERE}"


@pytest.mark.parametrize(
    ("text", "seconds", "why"),
    [
        ("echo 'ssh: connect to host n2 port 22: No route'; exit 255", 60, "22: No route"),
        ("exec sleep 600", 1, "no answer within 1 s"),
        ("exit 3", 60, "exit code 3"),
    ],
)
def test_orphans_of_a_host_that_does_not_answer_are_unconfirmed(
    tmp_path: Path, runner: Runner, text: str, seconds: float, why: str
) -> None:
    programs(tmp_path, ssh=text)
    began = time.monotonic()
    unknown, rest = nodes.end_orphans(["n2"], runner, seconds)
    assert time.monotonic() - began < 60
    assert (unknown.subject, unknown.status) == ("n2", "unproven")
    assert unknown.message.startswith("unconfirmed whether ranks still run on n2: ")
    assert why in unknown.message
    assert rest.message == f"no processes of this run are left on {HERE}"


def test_a_runner_that_was_stopped_still_ends_what_it_started(
    tmp_path: Path, runner: Runner
) -> None:
    runner.stop()
    programs(tmp_path, ssh=LAST)
    assert [finding.status for finding in nodes.end_orphans(["n2"], runner, 60)] == ["pass"]
