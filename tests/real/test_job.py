"""Jobs for real: Slurm across two hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdenv.environments import generations
from hvdenv.locks.record import GenerationRecord
from tests.real.conftest import Cli, hear_interrupts
from tests.standin import Cluster
from tests.support.waiting import wait_until

RECIPE = Path(__file__).parents[2] / "recipes" / "local.toml"
SITE = """
[job]
nodes = 2
time = "00:10:00"
output = "%x-%j.out"

[launch]
launcher = "srun"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user is: nobody chose its name with scripts in mind."""
    folder = tmp_path / "it's; a $(directory) #SBATCH"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def make_environment(prefix: Path) -> None:
    """A complete generation that contains nothing but its script."""
    environment, identity = generations.at(prefix), "0" * 12
    environment.store.mkdir()  # claim() would refuse this path
    generations.create(environment, identity).joinpath("activate.sh").write_text(
        "export WHO=environment\n"
    )
    generations.write_record(environment.record(identity), GenerationRecord())
    generations.switch(environment, identity)


@pytest.fixture
def site(cluster: Cluster, folder: Path) -> Iterator[Cluster]:
    """The cluster, a recipe for it, and an environment that says who it is."""
    text = RECIPE.read_text().replace("format = 1\n", 'format = 1\nscheduler = "slurm"\n', 1)
    (folder / "site.toml").write_text(text + SITE)
    make_environment(folder / "env")
    yield cluster
    cluster.run(["scancel", "--user=root"])
    wait_until(lambda: not queue(cluster), 120)


@pytest.fixture
def hvdenv(site: Cluster, tmp_path: Path) -> Cli:
    return Cli(tmp_path / "home", site.environ)


JOB = ("job", "./site.toml", "--prefix", "env")
# Words of a job that waits for its test.
UNTIL_GO = "until test -e go; do sleep 0.1; done"


def queue(cluster: Cluster) -> list[str]:
    """The ids of all jobs that have not ended."""
    return cluster.run(["squeue", "-h", "-o", "%i"]).stdout.split()


def facts(cluster: Cluster, job: str) -> str:
    return cluster.run(["scontrol", "show", "job", job]).stdout


def submit(hvdenv: Cli, *words: str) -> subprocess.Popen[str]:
    """Start a call that submits a job and follows it."""
    return hvdenv.start(*JOB, "--submit", *words)


def line(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Wait for a line on standard error, three minutes at most; end the process without it."""
    assert process.stderr
    seen = ""
    timer = threading.Timer(180, process.kill)
    timer.start()
    try:
        for text in process.stderr:
            seen += text
            if found := re.search(pattern, text):
                return found
    finally:
        timer.cancel()
    process.kill()
    process.communicate()
    raise AssertionError(f"no {pattern} in:\n{seen}")


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def test_a_job_is_followed_with_its_output(hvdenv: Cli, folder: Path, site: Cluster) -> None:
    script = f"echo $WHO on $(hostname)$HVDENV_TOKEN; {UNTIL_GO}; echo done; exit 0"
    process = submit(hvdenv, "--", "sh", "-c", script)
    assert process.stdout
    first = {process.stdout.readline(), process.stdout.readline()}
    assert first == {f"environment on {host}\n" for host in site.hosts}
    assert process.poll() is None
    (folder / "go").touch()
    code, out, err = finished(process)
    assert (code, out.splitlines()[:2]) == (0, ["done", "done"])
    assert "hvdenv: 2 nodes for 00:10:00, up to 0.3333 node-hours\n" in err
    number = re.search(r"submitted job ([0-9]+)", err)
    assert number
    assert out.endswith(f"hvdenv: job {number[1]} ended with exit code 0\n")
    assert f"job {number[1]}: running on gpu[32-33]\n" in err
    assert f"job {number[1]} succeeded; output: " in err


def test_slurm_gets_what_was_asked_for(hvdenv: Cli, site: Cluster) -> None:
    number = hvdenv(
        *JOB, "--submit", "--detach", "--name", "proof", "--comment", "pytorch", "--time", "90",
        "--nodes", "2", "--ranks-per-node", "2", "--cpus-per-rank", "2", "--gpus-per-node", "3",
        "--partition", site.partition, "--output", "%x_%j.txt", "--", "sleep", "600",
    ).stdout.strip()  # fmt: skip
    wait_until(lambda: "JobState=RUNNING" in facts(site, number), 120)
    shown = facts(site, number)
    for expected in (
        "JobName=proof",
        "Comment=pytorch",
        "TimeLimit=01:30:00",
        "NumNodes=2",
        "NumTasks=4",
        "CPUs/Task=2",
        f"Partition={site.partition}",
        "gres:gpu:3",
        f"proof_{number}.txt",
    ):
        assert expected in shown


def test_words_and_folders_are_not_read_by_slurm(hvdenv: Cli, folder: Path, site: Cluster) -> None:
    hostile = "\n#SBATCH --nodes=9\n'\"$(touch made)`touch made`; touch made"
    result = hvdenv(*JOB, "--submit", "--nodes", "1", "--", "printf", "<%s>\n", hostile)
    assert result.stdout.startswith(f"<{hostile}>\n")
    assert not (folder / "made").exists()
    hvdenv(*JOB, "--to", "job script.sh", "--", "printf", hostile)
    os.mkfifo(folder / "device")
    refused = hvdenv(*JOB, "--to", "device", "--", "true", code=5)
    assert "device: this is not a regular file" in refused.stderr
    judged = site.run(["sbatch", "--test-only", "job script.sh"])
    assert "2 processors on nodes gpu[32-33]" in judged.stderr


def test_a_job_that_runs_out_of_time(hvdenv: Cli, site: Cluster) -> None:
    process = submit(hvdenv, "--time", "1", "--", "sh", "-c", "echo begun; exec sleep 600")
    number = line(process, r"job ([0-9]+): running")[1]
    # Slurm starts no step in a job that is beyond its end: then srun would fail by itself.
    assert process.stdout
    assert {process.stdout.readline() for _ in range(2)} == {"begun\n"}
    # Slurm's limits are minutes; it looks for jobs beyond theirs twice a minute.
    site.run(["scontrol", "update", f"JobId={number}", "EndTime=now+1"])
    code, _, err = finished(process)
    assert f"job {number}: it reached its time limit" in err
    assert "--time" in err
    assert code == 5


def test_a_job_that_can_never_start_is_said_at_once(hvdenv: Cli, site: Cluster) -> None:
    started = time.monotonic()
    result = hvdenv(*JOB, "--submit", "--nodes", "3", "--", "true", code=5)
    assert time.monotonic() - started < 120
    # Slurm has one reason for it at first, and soon another.
    assert re.search("it cannot start: (it requests more nodes|.*: look at nodes)", result.stderr)
    assert "hvdenv cancelled it" in result.stderr
    assert queue(site) == []


def test_a_job_that_waits_says_why(hvdenv: Cli, site: Cluster) -> None:
    for host in site.hosts:
        site.drain(host)
    try:
        process = submit(hvdenv, "--", "true")
        # It may have had no time to look for hosts at first.
        line(process, r"job [0-9]+: waiting \(.*nodes.*\)")
    finally:
        for host in site.hosts:
            site.resume(host)
    code, _, _ = finished(process)
    assert code == 0


def test_a_scheduler_that_is_down(hvdenv: Cli, folder: Path, site: Cluster) -> None:
    process = submit(hvdenv, "--", "sh", "-c", f"touch here.$SLURM_PROCID; {UNTIL_GO}")
    line(process, r"job [0-9]+: running")
    # srun needs the scheduler to start the ranks.
    wait_until(lambda: len(list(folder.glob("here.*"))) == 2)
    site.stop_scheduler()
    try:
        other = submit(hvdenv, "--", "true")
        line(process, "the scheduler does not answer; this does not affect the job")
        code, _, err = finished(other)
        assert code == 5
        assert "Unable to contact slurm controller" in err
        assert "try again in a few minutes" in err
    finally:
        site.start_scheduler()
    line(process, "the scheduler answers again")
    (folder / "go").touch()
    assert finished(process)[0] == 0


# What a command does with `--where compute`.
IN_JOB = """
import sys
from hvdenv.session.job import run_there
from hvdenv.session.request import Request
from hvdenv.session.request import Gate
request = Request(
    Gate(), "./site.toml", overrides=("job.verify={nodes = 1, time = '00:05:00'}",)
)
sys.exit(run_there(request, "verify", sys.argv[1:], dry_run=False))
"""


def in_job(hvdenv: Cli, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", IN_JOB, *words],
        env=hvdenv.variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    )


def test_hvdenv_itself_in_a_job(hvdenv: Cli, folder: Path) -> None:
    code, out, err = finished(in_job(hvdenv, "show", "./site.toml"))
    assert code == 0, err
    assert 'scheduler = "slurm"' in out
    assert re.search("job [0-9]+ succeeded; output: .*/jobs/hvdenv-verify-.*log", err)
    code, out, err = finished(in_job(hvdenv, "show", "./none.toml"))
    assert code == 2
    assert "cannot read this file" in out
    assert not list(folder.glob("slurm-*"))


def test_a_second_call_takes_the_job_up(hvdenv: Cli, site: Cluster) -> None:
    for host in site.hosts:
        site.drain(host)
    try:
        process = in_job(hvdenv, "recipes")
        number = line(process, r"job ([0-9]+): waiting")[1]
        process.kill()
        process.communicate()
        process = in_job(hvdenv, "recipes")
        line(process, f"job {number} was submitted for this before; following it")
    finally:
        for host in site.hosts:
            site.resume(host)
    code, out, _ = finished(process)
    assert code == 0
    assert "\nlocal  " in f"\n{out}"
    process = in_job(hvdenv, "recipes")
    assert line(process, r"submitted job ([0-9]+)$")[1] != number
    assert finished(process)[0] == 0
