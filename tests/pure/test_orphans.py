"""What a run has left is ended, on other hosts by ssh; a host that does not answer is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdenv.launch import orphans
from hvdenv.launch.orphans import Suspects
from hvdenv.runner import TOKEN_VARIABLE, Runner
from tests.files import programs
from tests.waiting import runs, wait_until

HERE = os.uname().nodename
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
    (finding,) = orphans.end(["n2", HERE], runner, 60)
    assert finding.status == "pass"
    # It may be seen dying when this host is looked at, which is the same.
    assert finding.message.removesuffix(f", 1 on {HERE}") == (
        f"no processes of this run are left on n2, {HERE}; hvdenv ended: 1 on n2"
    )
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not runs(pid))


def test_nothing_is_left(tmp_path: Path, runner: Runner) -> None:
    programs(tmp_path, ssh=f"HVDENV_TOKEN=other\nexport HVDENV_TOKEN\n{LAST}")
    (finding,) = orphans.end(["n2"], runner, 60)
    assert finding.message == f"no processes of this run are left on n2, {HERE}"


@pytest.mark.parametrize(
    ("text", "seconds", "why"),
    [
        ("echo 'ssh: connect to host n2 port 22: No route'; exit 255", 60, "22: No route"),
        ("exec sleep 600", 1, "no answer within 1 s"),
        ("exit 3", 60, "exit code 3"),
    ],
)
def test_a_host_that_does_not_answer(
    tmp_path: Path, runner: Runner, text: str, seconds: float, why: str
) -> None:
    programs(tmp_path, ssh=text)
    began = time.monotonic()
    unknown, rest = orphans.end(["n2"], runner, seconds)
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
    assert [finding.status for finding in orphans.end(["n2"], runner, 60)] == ["pass"]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of an environment."""
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return python


def abandoned(before: str, python: Path, **variables: str) -> int:
    """A process of that Python whose parent is gone."""
    start = f"{before} '{python}' -c 'import time; time.sleep(600)' >/dev/null & echo $!"
    environ = {**os.environ, **variables}
    pid = int(subprocess.check_output(["sh", "-c", start], text=True, env=environ))
    # Before that it is `env`, whose arguments name the same program.
    wait_until(lambda: Path(f"/proc/{pid}/cmdline").read_text().startswith(str(python)))
    return pid


def test_an_orphan_that_has_dropped_the_token_is_reported_and_not_ended(python: Path) -> None:
    env, since = str(python.parents[1]), orphans.since_boot()
    # It has a parent, and is not meant.
    child = subprocess.Popen([python, "-c", "import time; time.sleep(600)"])
    pid = abandoned("env -i", python)
    try:
        (finding,) = orphans.orphans(Suspects((env,), since))
        assert (finding.subject, finding.status) == (HERE, "unproven")
        assert f"still run on {HERE}: {pid};" in finding.message
        assert finding.remedy.endswith(f": kill {pid}")
        assert "time.sleep(600)" in finding.evidence
        assert runs(pid)
        for other in (Suspects((env[:-1],), since), Suspects((), since)):
            assert not list(orphans.orphans(other))
        assert not list(orphans.orphans(Suspects((env,), orphans.since_boot() + 60)))
    finally:
        os.kill(pid, signal.SIGKILL)
        child.kill()
        child.wait()


def test_what_verify_is_ending_is_no_orphan(python: Path, runner: Runner) -> None:
    """On a busy host, a process that was killed lives on for a while."""
    suspects = Suspects((str(python.parents[1]),), orphans.since_boot(), runner.token)
    pid = abandoned("", python, **{TOKEN_VARIABLE: f"{runner.token}.1"})
    try:
        assert not list(orphans.orphans(suspects))
        assert list(orphans.orphans(suspects._replace(token="another")))
    finally:
        os.kill(pid, signal.SIGKILL)


def test_orphans_on_another_host(tmp_path: Path, runner: Runner) -> None:
    lines = [
        "77 1 3 /env/bin/python3 -c x", "78 1 9999 /env/bin/python3 before",
        "79 70 3 /env/bin/python3 child", "80 1 3 /usr/bin/python3 other", "81 1 3 /env/bin/mpirun",
    ]  # fmt: skip
    text = "".join(f"echo '@hvdenv-process {line}'\n" for line in lines)
    programs(tmp_path, ssh=f"{text}echo @hvdenv-ended")
    suspects = Suspects(("/env",), orphans.since_boot() - 60)
    found, rest = orphans.end(["n2"], runner, 60, suspects)
    assert (found.subject, found.status) == ("n2", "unproven")
    assert "still run on n2: 77;" in found.message
    assert found.remedy.endswith(": ssh n2 kill 77")
    assert rest.message == f"no processes of this run are left on n2, {HERE}"


@pytest.mark.needs("procps")
def test_what_hosts_are_asked_for_is_what_ps_says(tmp_path: Path, runner: Runner) -> None:
    programs(tmp_path, ssh=f"HVDENV_TOKEN=other\nexport HVDENV_TOKEN\n{LAST}")
    answer = runner.run(orphans._query("n2", runner.token, 60)).output.splitlines()
    processes = [line.split(None, 4) for line in answer if line.startswith("@hvdenv-process ")]
    assert [str(os.getpid()), str(os.getppid())] in [words[1:3] for words in processes]
