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

from tests.modulesystems import cache_folder, install, write_module
from tests.real.conftest import processes_of
from tests.standin import Cluster, Partition, StandinError
from tests.standin.machine import BASE, PREFIX, check_machine, started
from tests.support.needs import Missing
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# Of namespaces, as /proc calls them.
KINDS = ("net", "pid", "mnt")
ALLREDUCE = r"""
import faulthandler
import os
import pathlib
import socket
import sys
own = f"{socket.gethostname()}-{os.getpid()}"
stacks = pathlib.Path(sys.argv[1], f"stacks-{own}").open("w")
faulthandler.dump_traceback_later(60, file=stacks)
import horovod.torch as hvd
import torch
hvd.init()
total = hvd.allreduce(torch.full((1 << 18,), float(hvd.rank() + 1)), op=hvd.Sum)
assert (total == total[0]).all()
# UCX loads its transports, libuct_cma among them, only once Open MPI starts it.
assert "libuct_cma" not in pathlib.Path("/proc/self/maps").read_text(), "UCX was started"
where = socket.gethostname()
# Not printed: launchers mix the output of ranks, even within a line.
said = pathlib.Path(sys.argv[1], f"rank-{hvd.rank()}")
said.write_text(f"of {hvd.size()} on {where}: {total[0]:g}")
"""
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


def traces_of(cluster: Cluster) -> Traces:
    spaces = [f"/proc/self/ns/{kind}" for kind in KINDS]
    seen = [cluster.on(host, ["readlink", *spaces]).stdout for host in cluster.hosts]
    return Traces(cluster.folder, cluster.interface, " ".join(seen).split())


def hung(cluster: Cluster, program: Path, folder: Path) -> list[str]:
    """What a program does that does not end, on each host; it is gone afterwards."""
    seen = [f"{path.name}: {path.read_text()}" for path in sorted(folder.glob("*-*"))]
    for host in cluster.hosts:
        shown = cluster.on(host, ["ps", "-eo", "pid,ppid,stat,time,wchan:20,args"]).stdout
        seen.append(f"{host}: {shown}")
        cluster.on(host, ["pkill", "-KILL", "-f", str(program)], check=False)
    return seen


def in_environment(prefix: Path, *argv: str) -> list[str]:
    return ["sh", "-c", '. "$1" && shift && exec "$@"', "sh", f"{prefix}/activate.sh", *argv]


def test_ssh_goes_from_the_head_to_each_host_and_between_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    one, two = cluster.hosts
    for host in cluster.hosts:
        assert cluster.run(["ssh", host, "hostname"]).stdout == f"{host}\n"
    assert cluster.on(one, ["/usr/bin/ssh", two, "hostname"]).stdout == f"{two}\n"
    assert cluster.on(two, ["/usr/bin/ssh", one, "hostname"]).stdout == f"{one}\n"
    (tmp_path / "copied").write_text("as it was")
    cluster.run(["scp", str(tmp_path / "copied"), f"{two}:/tmp/copy"])
    assert cluster.on(two, ["cat", "/tmp/copy"]).stdout == "as it was"
    assert cluster.on(one, ["test", "-e", "/tmp/copy"], check=False).returncode == 1


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


def test_slurm_gives_the_gpus_that_it_is_asked_for(cluster: Cluster) -> None:
    shown = ["bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert cluster.run(["srun", "-N2", "--gres=gpu:4", *shown]).stdout == "0,1,2,3\n" * 2
    assert cluster.run(["srun", "-N1", "--gpus-per-node=2", *shown]).stdout == "0,1\n"
    refused = cluster.run(["srun", "--gres=gpu:5", "true"], check=False)
    assert "Requested node configuration is not available" in refused.stderr


def test_four_ranks_on_two_hosts_reduce(
    cluster: Cluster, local_prefix: Path, tmp_path: Path
) -> None:
    """By srun. Tests of `run` and `verify` start ranks there by all other launchers."""
    program = tmp_path / "allreduce.py"
    program.write_text(ALLREDUCE)
    argv = ["srun", "--mpi=pmix", "-N2", "--ntasks-per-node=2"]
    argv = in_environment(local_prefix, *argv, "python", str(program), str(tmp_path))
    try:
        cluster.run(argv, timeout=240)
    except subprocess.TimeoutExpired as error:
        printed = f"{error.stdout!r} {error.stderr!r}"
        pytest.fail("\n".join([printed, *hung(cluster, program, tmp_path)]), pytrace=False)
    said = {path.name: path.read_text() for path in tmp_path.glob("rank-*")}
    assert said == {
        "rank-0": "of 4 on gpu32: 10",
        "rank-1": "of 4 on gpu32: 10",
        "rank-2": "of 4 on gpu33: 10",
        "rank-3": "of 4 on gpu33: 10",
    }


def test_modules_load_on_the_head_and_on_hosts(cluster: Cluster) -> None:
    write_module(cluster.modulefiles, "standin/1.0", setenv={"STANDIN_MODULE": "loaded"})
    commands = "module load standin/1.0 && echo $STANDIN_MODULE"
    assert cluster.run(["bash", "-c", commands]).stdout == "loaded\n"
    assert cluster.on(cluster.hosts[0], ["bash", "-lc", commands]).stdout == "loaded\n"
    two = cluster.hosts[1]
    assert cluster.run(["ssh", two, f"bash -lc '{commands}'"]).stdout == "loaded\n"
    assert cluster.run(["srun", "bash", "-c", commands]).stdout == "loaded\n"
    shown = cluster.on(two, ["bash", "-lc", "module -t avail 2>&1"]).stdout
    assert "standin/1.0" in shown.split()


def test_a_second_one_beside_it_is_another_cluster_and_leaves_nothing(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tcl = install("tcl", cache_folder(tmp_path_factory))
    partitions = [Partition("single", max_time="00:05:00"), Partition("ml", ("taurusml2",))]
    with Cluster(
        hosts=["taurusml1", "taurusml2", "taurusml3"], partitions=partitions,
        cpus=2, gpus="gpu:V100:6", modules=tcl,
    ) as other:  # fmt: skip
        traces = traces_of(other)
        assert len(traces.spaces) == 9
        assert traces.found()
        shown = other.run(["sinfo", "--noheader", "--format=%P %N %l %c %G"]).stdout
        assert shown.splitlines() == [
            "single* taurusml[1-3] 5:00 2 gpu:V100:6",
            "ml taurusml2 infinite 2 gpu:V100:6",
        ]
        ran = other.run(["srun", "-p", "ml", "--gres=gpu:V100:6", "hostname"])
        assert ran.stdout == "taurusml2\n"
        write_module(other.modulefiles, "modenv/ml", setenv={"MODENV": "ml"})
        loaded = other.on("taurusml3", ["bash", "-lc", "module load modenv/ml && echo $MODENV"])
        assert loaded.stdout == "ml\n"
        assert sorted(cluster.run(["srun", "-N2", "hostname"]).stdout.split()) == ["gpu32", "gpu33"]
        other.run(["sbatch", "-N3", "-o", "/dev/null", "--wrap=srun sleep 600"])
    wait_until(lambda: not traces.found(), 60)
    # Not Path.rglob, which fails where a group of others goes meanwhile.
    assert not [folder for folder, *_ in os.walk("/sys/fs/cgroup") if "slurm" in Path(folder).name]


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
    # Another worker may begin a stand-in now, which removes the folder too.
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
