"""verify on a real installation, and on copies of it that are broken in one way each."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.sites.launchers import Launch
from hvdenv.verification import rank_judgement, rank_run
from hvdenv.verification.setup import EXERCISES, Setup
from hvdenv.verification.verify import verify
from tests.real.doctored import (
    TIMEOUT,
    found,
    marked,
    on_rank_1,
    processes_running,
    run_ranks,
)
from tests.support.waiting import wait_until

BOTH = Expectation(("torch", "tensorflow"), ("MPI", "Gloo"), ("MPI", "Gloo"))
TORCH = Expectation(("torch",), ("MPI", "Gloo"))


def test_good_installation(original: Installation, runner: Runner) -> None:
    events: list[tuple[str, ...]] = []
    report = verify(
        Setup(original, runner, BOTH, Launch((), 3), exercises=EXERCISES, seconds=3 * TIMEOUT),
        lambda *event: events.append(event),
    )
    assert report.verdict == "pass", [f for f in report.findings if f.status != "pass"]
    runs = {f"{f} over {c}" for f in ("torch", "tensorflow") for c in ("MPI", "Gloo")}
    assert found(report, "allreduce").keys() == runs
    assert found(report, "collectives").keys() == runs
    assert found(report, "training").keys() == {"torch over MPI", "tensorflow over Gloo"}
    assert {(what, run, "") for what in ("started", "finished") for run in runs} <= set(events)
    assert "failed" not in {what for what, _, _ in events}
    assert runs <= {measurement.name for measurement in report.measurements}
    proven = {(row.section, row.name) for row in report.table if row.proven}
    assert proven == {
        ("Frameworks", "TensorFlow"),
        ("Frameworks", "PyTorch"),
        ("Controllers", "MPI"),
        ("Controllers", "Gloo"),
        ("Tensor Operations", "MPI"),
        ("Tensor Operations", "Gloo"),
    }
    json.dumps(report.to_json())


def test_no_extension_fails_though_the_table_marks_it(
    copy: Callable[..., Installation], runner: Runner
) -> None:
    installation = copy(frameworks=())
    report = verify(Setup(installation, runner, Expectation(("torch",)), seconds=TIMEOUT))
    assert report.verdict == "fail"
    assert found(report, "check-build")["horovodrun --check-build"].status == "pass"
    finding = found(report, "extension")["torch"]
    assert finding.status == "fail"
    assert finding.message.startswith("the extension is missing: ")
    assert "HOROVOD_WITH_PYTORCH=1" in finding.remedy
    anything = verify(Setup(installation, runner, seconds=TIMEOUT))
    assert anything.verdict == "fail"
    assert found(anything, "frameworks")["any framework"].status == "fail"


@pytest.mark.parametrize("controller", ["MPI", "Gloo"])
def test_a_rank_that_prints_garbage_does_no_harm(
    copy: Callable[..., Installation], runner: Runner, controller: str
) -> None:
    noise = (
        "for _ in range(200):\n"
        "    os.write(1, os.urandom(500)); os.write(2, b'\\r\\x1b[31m\\0')\n"
        '    print(\'@hvdenv 0123 00000000 {"event": "result", "size": 1}\', flush=True)\n'
    )
    judgement = rank_judgement.judge_run(run_ranks(copy(noise), runner, controller))
    assert judgement.status == "pass", judgement


def test_a_sum_that_is_less_precise_is_seen(
    copy: Callable[..., Installation], runner: Runner
) -> None:
    """Other wrong answers: wrong_answers.py, wrong.py and wrong_mpi.c."""
    fault = (
        "_real = allreduce_async\n"
        "def allreduce_async(tensor, *args, **kwargs):\n"
        "    if 'float64' in kwargs['name']: tensor = tensor.float().double()\n"
        "    return _real(tensor, *args, **kwargs)\n"
    )
    judgement = rank_judgement.judge_run(run_ranks(copy(fault), runner, "Gloo"))
    assert judgement.status == "fail"
    assert "allreduce gives wrong values on rank 0" in judgement.message
    assert "expected" in judgement.evidence


def test_singletons_are_reported_as_such(
    original: Installation, runner: Runner, tmp_path: Path
) -> None:
    # Stands for the mpirun of an MPI that Horovod was not built with: it starts the
    # processes, and they cannot see that they belong together.
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys\n"
        "if '--version' in sys.argv: sys.exit(print('HYDRA build details:\\n    Version: 4.1.1'))\n"
        "started = [subprocess.Popen(sys.argv[3:]) for _ in range(int(sys.argv[2]))]\n"
        "sys.exit(max(process.wait() for process in started))\n"
    )
    program.chmod(0o755)
    installation = original._replace(path=(str(program.parent), *original.path))
    judgement = rank_judgement.judge_run(run_ranks(installation, runner, "MPI"))
    assert judgement.status == "fail"
    assert (
        "2 processes were started, but each reports that it is alone (size 1)" in judgement.message
    )
    assert f"started by: {program} (Hydra 4.1.1)" in judgement.evidence


@pytest.mark.parametrize(
    ("controller", "victim"), [("MPI", "rank.py"), ("Gloo", "rank.py"), ("MPI", "")]
)
def test_no_rank_outlives_who_watches_over_it(
    copy: Callable[..., Installation],
    runner: Runner,
    tmp_path: Path,
    controller: str,
    victim: str,
) -> None:
    """kill -9 of one rank's supervisor, and of the launcher."""
    flag = tmp_path / "flag"
    installation = copy(on_rank_1(f"open({str(flag)!r}, 'w').close(); time.sleep(1000)"))
    runs: list[rank_run.RankRun] = []
    thread = threading.Thread(
        target=lambda: runs.append(run_ranks(installation, runner, controller, timeout=100))
    )
    thread.start()
    work = processes_running(runner, "rank_work.py", 2)
    wait_until(flag.exists, 90)  # all have joined
    if victim:
        killed = processes_running(runner, victim, 2)[0]
    else:
        killed = next(p for p in marked(runner.token) if p.ppid() == os.getpid())
    killed.kill()
    _, alive = psutil.wait_procs(work, timeout=30)
    assert not alive
    thread.join()
    judgement = rank_judgement.judge_run(runs[0])
    assert judgement.status == "fail"
    assert "disappeared without reporting an exit" in judgement.message or not victim


def test_a_stopped_runner(original: Installation, runner: Runner) -> None:
    threading.Timer(1.0, runner.stop).start()
    report = verify(Setup(original, runner, BOTH))
    assert report.verdict == "error"
    told = found(report, "interrupted")["verify"]
    assert "it was ended before it could judge" in told.message and "allreduce" in told.message
