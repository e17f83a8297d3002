"""`hvdenv job` with every scheduler, of which small fake programs are on PATH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvdenv.environments import generations
from hvdenv.sites import jobs
from tests.real.conftest import hear_interrupts
from tests.support.commands import Hvdenv
from tests.support.environments import ONE, build
from tests.support.files import programs
from tests.support.schedulers import SCHEDULERS, Scheduler, install
from tests.support.terminal import Terminal
from tests.support.waiting import wait_until

RECIPE = """\
format = 1
name = "site"
extends = "local"
scheduler = "{}"

[job]
nodes = 1

[launch]
launcher = "one"
launchers.one.command = "env {{program}}"
"""
ROOT = Path(__file__).resolve().parents[2]
JOB = ("job", "./site.toml", "--prefix", "../env")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory, of which nobody chose the name with scripts in mind."""
    folder = tmp_path / "it's; a $(directory) #SBATCH"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HVDENV_HOME", str(tmp_path / "home"))
    environment = generations.at(tmp_path / "env")
    generations.claim(environment)
    build(environment, ONE, recipe="site")
    (environment.generation(ONE) / "activate.sh").write_text("export WHO=environment\n")
    generations.switch(environment, ONE)
    for name, value in (("_TICK", 0.02), ("FIRST_POLL", 0.05), ("OUTPUT_SECONDS", 0.2)):
        monkeypatch.setattr(jobs, name, value)
    return folder


def install_for(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    (folder / "site.toml").write_text(RECIPE.format(name))
    (folder / "site.toml").chmod(0o644)
    scheduler = install(name, folder.parent / "fake")
    monkeypatch.setenv("PATH", f"{scheduler.programs}:{os.environ['PATH']}")
    return scheduler


@pytest.fixture(params=SCHEDULERS)
def scheduler(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Scheduler:
    return install_for(folder, request.param, monkeypatch)


@pytest.fixture
def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    return install_for(folder, "slurm", monkeypatch)


def test_a_job_is_followed_to_its_end(scheduler: Scheduler, hvdenv: Hvdenv) -> None:
    words = "\n#SBATCH --nodes=9\n'\"$(touch made)`touch made`; touch made"
    said = hvdenv(*JOB, "--submit", "--", "sh", "-c", 'echo "$WHO $0"; exit 3', words, code=3)
    assert said.out.startswith(f"environment {words}\n")
    assert not Path("made").exists()
    assert "hvdenv: 1 node for 01:00:00, up to 1 node-hour\n" in said.err
    assert "job 18" in said.err and "failed with exit code 3; output: " in said.err


def test_a_job_is_left_and_taken_up_again(scheduler: Scheduler, hvdenv: Hvdenv) -> None:
    said = hvdenv(*JOB, "--submit", "--detach", "--", "echo", "done")
    number = said.out.strip()
    assert number.startswith("18") and f"hvdenv job --follow {number}" in said.err
    followed = hvdenv("job", "--follow", "18")
    assert followed.out.startswith("done\n")
    assert f"job {number}: running on n1\n" in followed.err
    assert hvdenv("job", "--follow", number, "--quiet").out == followed.out


def test_a_job_that_is_cancelled(scheduler: Scheduler, hvdenv: Hvdenv) -> None:
    def cancel() -> None:
        wait_until((scheduler.state / "pid").exists)
        subprocess.run([scheduler.cancel, "18"], check=True)

    thread = threading.Thread(target=cancel)
    thread.start()
    code, text = {
        "cobalt": (5, "is not known to the scheduler"),  # which has no record of it
        "gridengine": (137, "exit code 137"),
    }.get(scheduler.name, (5, "it was cancelled"))
    said = hvdenv(*JOB, "--submit", "--", "sleep", "600", code=code)
    thread.join()
    assert text in said.err


def test_a_job_that_the_scheduler_has_forgotten(slurm: Scheduler, hvdenv: Hvdenv) -> None:
    """Its output says how it ended, once the scheduler has named the file."""
    hvdenv(*JOB, "--submit", "--detach", "--", "sh", "-c", "exit 4")
    hvdenv("job", "--follow", "18", code=4)
    (record,) = (slurm.state.parents[1] / "home/jobs").glob("*.json")
    noted = {**json.loads(record.read_text()), "state": None}
    record.write_text(json.dumps(noted))
    slurm.forget()
    assert hvdenv("job", "--follow", "18", code=4).out.endswith("ended with exit code 4\n")
    record.write_text(json.dumps({**noted, "outputs": []}))
    said = hvdenv("job", "--follow", "18", code=5)
    assert "is not known to the scheduler, and its output does not say" in said.err


def test_json(slurm: Scheduler, hvdenv: Hvdenv) -> None:
    said = hvdenv(*JOB, "--submit", "--json", "--", "sh", "-c", "echo x; exit 3", code=3)
    assert '"state": "failed"' in said.out and '"exit_code": 3' in said.out
    assert "x\n" in said.err
    assert '"node_hours": 1.0' in hvdenv(*JOB, "--json", "--", "true").out


@pytest.mark.parametrize("answer", ["y", "n", ""], ids=["cancel", "leave", "no terminal"])
def test_ctrl_c_leaves_the_job_or_cancels_it(slurm: Scheduler, answer: str) -> None:
    words = [sys.executable, "-m", "hvdenv", *JOB, "--submit", "--", "sleep", "600"]
    if answer:
        with Terminal(words, {**os.environ, "PYTHONPATH": str(ROOT)}) as terminal:
            terminal.wait_for(": running on")
            os.kill(terminal.pid, signal.SIGINT)
            terminal.wait_for("? [y/N]")
            terminal.type(f"{answer}\n")
            terminal.wait_for("cancelled job 18" if answer == "y" else "follow it with")
            assert terminal.end() == 130
    else:
        with subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
        ) as process:
            assert process.stderr
            for line in process.stderr:
                if "running on" in line:
                    process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
    assert (slurm.state / "cancelled").exists() == (answer == "y")
    if answer != "y":
        subprocess.run([slurm.cancel, "18"], check=True)


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("sbatch: error: Invalid partition name specified", "rejected the job", "partition"),
        (
            "sbatch: fatal: Could not establish a configuration source",
            "cannot be reached",
            "login node",
        ),
    ],
)
def test_what_is_not_submitted(
    text: str, message: str, remedy: str, slurm: Scheduler, hvdenv: Hvdenv, tmp_path: Path
) -> None:
    programs(slurm.programs, sbatch=f"echo '{text}' >&2\nexit 1")
    said = hvdenv(*JOB, "--submit", "--", "true", code=5).err
    assert f"the scheduler {message}" in said or message in said
    assert text in said and remedy in said
    assert list((tmp_path / "home/jobs").iterdir()) == []


def test_a_host_without_the_scheduler(
    slurm: Scheduler, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message does not blame partition and account."""
    fakes = {each: f'exec /usr/bin/{each} "$@"' for each in ("env", "sh")}
    monkeypatch.setenv("PATH", str(programs(slurm.state / "bin", **fakes)))
    said = hvdenv(*JOB, "--submit", "--", "true", code=5).err
    assert "on PATH" in said and "login node" in said
