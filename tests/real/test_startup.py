"""verify --startup, also through a file system that stands for Lustre (slow_files.c)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdenv.environments.installation import Expectation, Installation, inspect_prefix
from hvdenv.launch.launchers import Launch
from hvdenv.model.cluster import Network
from hvdenv.runner import Runner
from hvdenv.sites.hosts import Host
from hvdenv.verification import collectors, startup
from hvdenv.verification.collection import Setup
from hvdenv.verification.startup import Start
from tests.real.doctored import TIMEOUT
from tests.standin import Cluster

DELAY = 0.0003
# Mounts the file system over the environment, in a namespace of its own, and starts a rank there.
# The file system would keep the namespace, and itself, if it were not unmounted.
BEHIND = '"$1" "$2" 300 "$3" && at=$2 && shift 3 && "$@"; code=$?; umount -l "$at"; exit $code'


ONE = Launch((), 1, root=os.geteuid() == 0)


def starts_of(
    installation: Installation, runner: Runner, launch: Launch = ONE
) -> tuple[Start, ...]:
    setup = Setup(
        installation, runner, Expectation(("torch",), ("MPI",)), launchers=("mpirun",),
        launch=launch,
    )  # fmt: skip
    mpi, found = collectors.mpi(setup, TIMEOUT), collectors.libraries(setup, TIMEOUT)
    return collectors.starts(setup, True, found, mpi, TIMEOUT, "torch")


def first_rank(starts: tuple[Start, ...]) -> Any:
    """The record of the only rank of the first start, as JSON has it."""
    assert startup.judge(starts).status == "pass", startup.judge(starts)
    assert [start.again for start in starts] == [False, True]
    return next(startup.records("torch", starts))._asdict()


@pytest.fixture(scope="module")
def slow_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("slow") / "slow_files"
    source = Path(__file__).with_name("slow_files.c")
    words = ("-D_FILE_OFFSET_BITS=64", "-I/usr/include/fuse3", str(source), "-lfuse3")
    subprocess.run(["gcc", "-Wall", "-o", str(program), *words], check=True)
    return program


@pytest.mark.needs("root", "mounts", "/dev/fuse", "libfuse3-dev")
def test_a_slow_file_system_shows_in_the_imports(
    original: Installation, runner: Runner, slow_files: Path, tmp_path: Path
) -> None:
    fast = first_rank(starts_of(original, runner))
    counter, program = tmp_path / "counter", (sys.executable, "-m", "tests.real.test_startup")
    words = (slow_files, os.path.realpath(original.prefix), counter, *program, original.prefix)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", BEHIND, "sh", *words],
        check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    slow = json.loads(done.stdout)
    seen = int.from_bytes(counter.read_bytes(), sys.byteorder)

    # What is counted in the interpreter is what the file system sees, in each of two starts.
    inside = slow["inside"]
    assert inside == fast["inside"] > 1000
    assert 2 * inside <= seen <= 4 * inside
    imports = slow["framework"] + slow["horovod"]
    # Operations that are waited for one after the other: other load makes this longer only.
    assert imports > inside * DELAY
    assert imports > 0.7 * slow["total"]
    parts = ("launcher", "interpreter", "framework", "horovod", "init")
    assert slow["total"] == pytest.approx(sum(slow[part] for part in parts), abs=0.01)
    assert len(slow["slowest"]) == 10 and sum(slow["slowest"].values()) <= imports
    assert "torch._C" in slow["slowest"]
    assert 0 < slow["failed"] < slow["lookups"]
    assert slow["opens"] > 0 and slow["modules"] > 100


def test_on_two_hosts(original: Installation, cluster: Cluster) -> None:
    hosts, network = (
        tuple(Host(name, 1) for name in cluster.hosts),
        Network(use=(cluster.interface,)),
    )
    launch = ONE._replace(ranks=2, hosts=hosts, network=network)
    starts = starts_of(original, Runner(cluster.environ), launch)
    assert startup.judge(starts).status == "pass", startup.judge(starts)
    assert [(start.nodes, start.again) for start in starts] == [(2, False), (1, True), (2, True)]
    ranks = [(each.rank, each.host) for each in startup.records("torch", starts)]
    one, other = cluster.hosts
    assert ranks == [(0, one), (1, other), (0, one), (0, one), (1, other)]
    assert all((each.launcher or 0) > 0 for each in startup.records("torch", starts))


if __name__ == "__main__":
    print(json.dumps(first_rank(starts_of(inspect_prefix(sys.argv[1]), Runner()))))
