"""Grid Engine for real, across two hosts: what the recipe `local` does there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.conftest import Cli
from tests.real.training.mistakes_torch import WRONG
from tests.real.training.variants import plant
from tests.standin import Cluster
from tests.support.terminal import Terminal

RECIPE = Path(__file__).parents[2] / "recipes" / "local.toml"
SITE = """
[job]
partition = "gpu.q"
parallel_environment = "mpi"
nodes = 2
time = "00:10:00"
directives = ["-V"] # the same plan as on the head, where the environment was built

[partitions."gpu.q"]
cores = 4
"""
RANK = "echo rank ${OMPI_COMM_WORLD_RANK-} on $(hostname)"


@pytest.fixture(scope="module")
def variables(cluster: Cluster) -> dict[str, str]:
    return cluster.start_grid_engine()


@pytest.fixture
def hvdenv(
    cluster: Cluster,
    variables: dict[str, str],
    home: Path,
    local_prefix: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cli]:
    """The command line on the head, with a recipe for Grid Engine beside it."""
    text = RECIPE.read_text().replace("format = 1\n", 'format = 1\nscheduler = "gridengine"\n', 1)
    (tmp_path / "local.toml").write_text(text + SITE)
    monkeypatch.chdir(tmp_path)
    yield Cli(home, {**cluster.environ, **variables})
    cluster.run(["qdel", "-f", "-u", "root"], env=variables, check=False)


def test_a_job_across_hosts(hvdenv: Cli) -> None:
    result = hvdenv("job", "./local.toml", "--submit", "--", "sh", "-c", f"{RANK}; exit 0")
    ranks = dict(re.findall(r"rank (\d) on (\w+)", result.stdout))
    assert sorted(ranks) == ["0", "1"]
    assert sorted(ranks.values()) == ["gpu32", "gpu33"]  # Grid Engine chooses the first
    number = re.search(r"submitted job ([0-9]+)", result.stderr)
    assert number
    assert re.search(rf"job {number[1]}: running on gpu3[23]\+gpu3[23]\n", result.stderr)
    assert f"/hvdenv.o{number[1]}" in result.stderr
    assert f"job {number[1]} ended with exit code 0" in result.stdout


def test_how_jobs_end(hvdenv: Cli) -> None:
    one = ("job", "./local.toml", "--nodes", "1", "--submit")
    ends = (
        ("--", "sh", "-c", "exit 3"),
        ("--time", "00:00:03", "--", "sleep", "60"),
        ("--output", "/nonexistent/x", "--", "true"),
    )
    jobs = [hvdenv.start(*one, *words) for words in ends]
    failed, late, stuck = (job.communicate(timeout=300)[1] for job in jobs)
    assert [job.returncode for job in jobs] == [3, 5, 5]
    assert "failed with exit code 3" in failed
    assert "reached its time limit" in late
    assert "an attempt to start it failed" in stuck
    assert "hvdenv cancelled it" in stuck


def test_run_and_shell_in_a_job(hvdenv: Cli) -> None:
    """The shell of qrsh starts ranks on both hosts of its job."""
    command = [sys.executable, "-m", "hvdenv"]
    words = [*command, "shell", "./local.toml", "--nodes", "2", "--time", "00:05:00"]
    with Terminal(words, hvdenv.variables) as shell:
        shell.wait_for("(local)")
        run = f"{' '.join(command)} run ./local.toml -- sh -c 'echo rank on $(hostname)'"
        shell.type(f"cd {Path.cwd()}; HVDENV_HOME={hvdenv.home} {run}; exit 4\n")
        shell.wait_for("rank on gpu32", "rank on gpu33")
        assert shell.end() == 4


def test_build_there(hvdenv: Cli) -> None:
    built = hvdenv("build", "./local.toml", "--where", "compute")
    assert "succeeded" in built.stderr


@pytest.mark.optin  # a job across hosts, and a training program's verify
def test_verify_there(hvdenv: Cli) -> None:
    """mpirun starts its daemon on the other host by qrsh, which knows no option of ssh."""
    words = ("--where", "compute", "--quick", "--framework", "torch", "--controller", "MPI")
    verified = hvdenv("verify", "./local.toml", *words)
    assert "verdict: pass" in verified.stdout
    assert re.search(r"^ +MPI +\[X\] +\[X\] +\[X\]$", verified.stdout, re.MULTILINE)


def test_a_training_program_there(hvdenv: Cli, tmp_path: Path) -> None:
    """Rank 0 of each host saves, which one host alone would not show."""
    (saves,) = (each for each in WRONG if each.name == "local rank 0 saves")
    script = str(plant([saves], tmp_path))
    words = ("--where", "compute", "--program-only", "--", "python", script, str(tmp_path))
    proven = hvdenv("verify", "./local.toml", *words, code=1)
    said = " ".join(proven.stdout.split())
    assert re.search("written by rank 0 on gpu3[23], rank 1 on gpu3[23] .*: hvd.local_rank()", said)
    assert "program-gradients: all ranks apply the same gradients of SGD" in said
