"""The stand-in of a cluster is one: other tests rely on what is seen here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.real.conftest import processes_of
from tests.standin import Cluster, Partition, StandinError
from tests.standin.machine import BASE, PREFIX, check_machine, started
from tests.support.needs import Missing
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# Of namespaces, as /proc calls them.
KINDS = ("net", "pid", "mnt")
OWNER = """
import time
from tests.standin import Cluster
with Cluster(hosts=["lone1"]) as cluster:
    spaces = cluster.on("lone1", ["readlink", "/proc/self/ns/net", "/proc/self/ns/pid"]).stdout
    print(cluster.folder, cluster.interface, *spaces.split(), flush=True)
    time.sleep(600)
"""


class Traces:
    """What a stand-in could leave behind."""

    def __init__(self, folder: Path, interface: str, spaces: Sequence[str]) -> None:
        self.folder = folder
        self.interface = interface
        self.spaces = set(spaces)

    def found(self) -> list[str]:
        found = [*processes_of(self.folder), *self._members()]
        found += [str(self.folder)] if self.folder.exists() else []
        found += [self.interface] if Path("/sys/class/net", self.interface).exists() else []
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return found + [line for line in mounts if str(self.folder) in line]

    def _members(self) -> list[str]:
        """Processes in the namespaces of its hosts."""
        members = []
        for pid in psutil.pids():
            for kind in KINDS:
                with suppress(OSError):  # it has ended meanwhile
                    if os.readlink(link := f"/proc/{pid}/ns/{kind}") in self.spaces:
                        members.append(link)
        return members


def test_a_host_is_a_machine_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    one, two = cluster.hosts
    for host in cluster.hosts:
        assert cluster.on(host, ["hostname"]).stdout == f"{host}\n"
        assert cluster.on(host, ["ls", "/sys/class/net"]).stdout.split() == sorted(
            [cluster.interface, "lo"]
        )
        found = cluster.on(host, ["getent", "ahostsv4", two]).stdout
        assert found.startswith(cluster.addresses[two] + " ")
        processes = cluster.on(host, ["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout.split()
        assert {"sshd", "slurmd"} < set(processes)
        assert "slurmctld" not in processes
    for folder in ("/tmp", "/dev/shm", "/run"):
        cluster.on(one, ["touch", f"{folder}/only-here"])
        assert cluster.on(two, ["ls", folder]).stdout.count("only-here") == 0
        assert not Path(folder, "only-here").exists()
    (tmp_path / "everywhere").touch()
    assert cluster.on(two, ["test", "-e", str(tmp_path / "everywhere")]).returncode == 0


def test_slurm_spans_the_hosts(cluster: Cluster) -> None:
    names = cluster.run(["srun", "-N2", "hostname"]).stdout
    assert sorted(names.split()) == sorted(cluster.hosts)
    inside = cluster.on(cluster.hosts[0], ["srun", "-N2", "hostname"]).stdout
    assert sorted(inside.split()) == sorted(cluster.hosts)
    kinds = cluster.run(["srun", "--mpi=list"])
    assert {"pmix", "pmi2"} < set((kinds.stdout + kinds.stderr).split())
    # With the default, ranks crash in MPI_Init now and then (docs/how-to/try-a-cluster.md).
    settings = cluster.run(["scontrol", "show", "config"]).stdout
    assert re.search(r"^PMIxCollFence +=\s+ring$", settings, re.MULTILINE), settings


def start_owner() -> tuple[subprocess.Popen[str], Traces]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    folder, interface, *spaces = owner.stdout.readline().split()
    return owner, Traces(Path(folder), interface, spaces)


@pytest.mark.usefixtures("cluster")
def test_nothing_is_left_when_its_owner_is_killed() -> None:
    owner, traces = start_owner()
    with owner:
        assert traces.found()
        owner.kill()
    wait_until(lambda: not traces.found(), 60)


@pytest.mark.usefixtures("cluster")
def test_the_next_one_removes_what_is_left_when_all_were_killed() -> None:
    owner, traces = start_owner()
    with owner:
        os.kill(keeper_of(traces.folder), signal.SIGKILL)
        owner.kill()
    # Another worker may begin a stand-in now, which removes the directory too.
    wait_until(lambda: {*traces.found()} <= {str(traces.folder)}, 60)
    with Cluster(hosts=["lone1"]):
        assert not traces.folder.exists()


def keeper_of(folder: Path) -> int:
    words = ["sh", str(ROOT / "tests/standin/keeper.sh"), str(folder)]
    (keeper,) = (
        each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == words
    )
    return keeper


def test_one_that_does_not_come_up_says_why_and_leaves_nothing(cluster: Cluster) -> None:
    failed = Cluster(hosts=["lone1"], partitions=[Partition("two words")])
    with pytest.raises(StandinError, match="slurmctld") as caught:
        failed.__enter__()
    assert "words" in str(caught.value)
    mine = f"{PREFIX}{os.getpid()}-{started(os.getpid())}-*"
    assert list(BASE.glob(mine)) == [cluster.folder]
    traces = Traces(failed.folder, failed.interface, [])
    wait_until(lambda: not traces.found(), 60)


def refusal(*prefix: str) -> str:
    program = (
        "from tests.standin.machine import check_machine\n"
        "from tests.support.needs import Missing\n"
        "try: check_machine()\n"
        "except Missing as missing: print(missing)\n"
    )
    argv = [*prefix, sys.executable, "-c", program]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (["unshare", "--user"], "needs root\n"),
        (
            ["setpriv", "--bounding-set=-sys_admin"],
            "needs namespaces\n",
        ),
    ],
    ids=["user", "capability"],
)
def test_a_machine_that_cannot_have_one_says_so(prefix: list[str], message: str) -> None:
    assert refusal(*prefix) == message


@pytest.mark.usefixtures("cluster")
def test_a_machine_without_the_programs_is_told_the_packages(tmp_path: Path) -> None:
    with pytest.raises(Missing) as caught:
        check_machine("tcl", path=str(tmp_path))
    text = str(caught.value)
    for package in ("iproute2", "munge", "openssh-server", "slurmctld", "slurmd", "tcl"):
        assert package in text.split()
