"""Commands on ranks of a real environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.conftest import Cli

LAUNCHERS = ("mpirun", "horovodrun-gloo")

# Reduces a tensor and says who it is.
PROGRAM = """\
import os
import torch
import horovod.torch as hvd

hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).item()
print(f"rank {hvd.rank()} of {hvd.size()} total {total} {os.environ.get('GREETING')}", flush=True)
hvd.barrier()
"""
WAITS = "import sys, time; print('waiting', flush=True); time.sleep(600)"


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "ranks of mine.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks(cli: Cli, local_prefix: Path, program: str, launcher: str) -> None:
    words = ("run", "local", "-n", "2", "--launcher", launcher, "-x", "GREETING=good day")
    done = cli(*words, "--", "python", program)
    lines = (f"rank {rank} of 2 total 3.0 good day\n" for rank in (0, 1))
    # Launchers mix what ranks write, even within a line, and put a rank in front of it; they
    # lose nothing.
    assert not Counter("".join(lines)) - Counter(done.stdout)


def test_one_rank_by_default_and_a_prefix_is_enough(
    cli: Cli, local_prefix: Path, program: str
) -> None:
    done = cli("run", "--prefix", str(local_prefix), "--", "python", program)
    assert "rank 0 of 1 total 1.0 None" in done.stdout


# One rank fails; horovodrun has a code of its own for it.
FAILS = 'test "${OMPI_COMM_WORLD_RANK-$HOROVOD_RANK}" = 0 || exit 7'


@pytest.mark.parametrize(
    ("launcher", "code", "script"),
    [("mpirun", 7, FAILS), ("mpirun", 0, "exit 0"), ("horovodrun-gloo", 1, FAILS)],
    ids=["a rank fails", "no rank fails", "a rank fails under horovodrun"],
)
def test_exit_codes_go_through(
    cli: Cli, local_prefix: Path, launcher: str, code: int, script: str
) -> None:
    cli("run", "local", "-n", "2", "--launcher", launcher, "--", "sh", "-c", script, code=code)


def test_standard_input_reaches_the_first_rank(cli: Cli, local_prefix: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdenv", "run", "local", "--", "cat"],
        env=cli.variables,
        input="through\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout == "through\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_an_interrupt_leaves_nothing(
    cli: Cli,
    local_prefix: Path,
    tmp_path: Path,
    launcher: str,
    number: int,
    no_processes_left: Callable[[Path], None],
) -> None:
    waits = tmp_path / "waits.py"
    waits.write_text(WAITS)
    words = ("run", "local", "-n", "2", "--launcher", launcher, "--", "python", str(waits))
    with cli.start(*words) as process:
        assert process.stdout
        seen = ""
        while seen.count("waiting") < 2:
            seen += (line := process.stdout.readline())
            assert line, seen
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(120) != 0
    no_processes_left(tmp_path)


def test_the_line_can_be_pasted(cli: Cli, local_prefix: Path, program: str) -> None:
    """Lines of all launchers are quoted in one way."""
    words = ("run", "local", "-n", "2", "--launcher", "mpirun", "-x", "GREETING=it's me")
    line = cli(*words, "--dry-run", "--", "python", program).stdout
    done = subprocess.run(
        ["bash", "-c", f"{line}echo code $? ${{VIRTUAL_ENV-none}}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "MY_TOKEN": "hunter2"},
    )
    for rank in (0, 1):
        assert f"rank {rank} of 2 total 3.0 it's me" in done.stdout
    assert "code 0 none" in done.stdout


def test_a_shell(cli: Cli, local_prefix: Path, program: str) -> None:
    """What is typed there runs in the environment."""
    done = subprocess.run(
        [sys.executable, "-m", "hvdenv", "shell", "local"],
        env={**cli.variables, "SHELL": "/bin/bash"},
        start_new_session=True,
        input="echo $VIRTUAL_ENV; mpirun --version; cat /proc/$$/environ; exit 5\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 5, done.stderr
    assert str(local_prefix.resolve()) in done.stdout
    assert "Open MPI" in done.stdout
    # So that `envs prune` sees that the shell uses it.
    assert f"HVDENV_SHELL={local_prefix.resolve()}\0" in done.stdout
