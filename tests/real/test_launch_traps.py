"""Ranks on two hosts: what is right is proven, and the known traps are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation
from hvdenv.model.cluster import LaunchSettings as Settings
from hvdenv.model.cluster import Network
from hvdenv.sites.hosts import Host
from hvdenv.sites.launchers import Launch
from hvdenv.verification import datapath, inspection, rank_judgement, rank_run, rank_start
from hvdenv.verification.setup import Setup
from tests.real.doctored import purelib, run_ranks
from tests.standin import Cluster
from tests.support.files import programs

ON_BOTH = Launch((), 2, hosts=(Host("gpu32", 1), Host("gpu33", 1)), root=True)
SECONDS = 90.0


def told_of(cluster: Cluster) -> Launch:
    """With the interface named, horovodrun does not spend a quarter of a minute to find it."""
    return ON_BOTH._replace(network=Network(use=(cluster.interface,)))


def start(
    installation: Installation,
    runner: Runner,
    launcher: str,
    launch: Launch = ON_BOTH,
    framework: str = "torch",
) -> rank_run.RankRun:
    """Ranks as verify starts them; nothing else is looked at."""
    setup = Setup(installation, runner, launch=launch, launchers=(launcher,))
    controller = "Gloo" if launcher == "horovodrun-gloo" else "MPI"
    mpi = inspection.host_mpi(setup, SECONDS)
    return rank_start.start_ranks(setup, SECONDS, mpi, framework, controller)


@pytest.mark.parametrize(
    ("launcher", "framework", "how"),
    [
        ("mpirun", "torch", "btl self, tcp"),
        ("horovodrun-gloo", "tensorflow", "TCP on {interface}"),
    ],
)
def test_right_ranks_behind_a_proxy_that_nobody_answers_at(
    original: Installation, cluster: Cluster, launcher: str, framework: str, how: str
) -> None:
    """Launchers and ranks see it and do not use it: it is no reason to fail."""
    nowhere = tuple((name, "http://127.0.0.1:9") for name in ("http_proxy", "HTTP_PROXY"))
    launch = told_of(cluster)._replace(variables=nowhere)
    run = start(original, Runner(cluster.environ), launcher, launch, framework)
    judgement = rank_judgement.judge_run(run)
    assert judgement.status == "pass", judgement
    assert "2 ranks on gpu32, gpu33 agree" in judgement.message
    path = datapath.judge_path(run, {})
    assert path.status == "pass", path
    assert how.format(interface=cluster.interface) in path.message


# The memory of the host stands for a GPU, of which rank 1 may have none.
PRETENDED = """
import gpus
nccl_built = lambda: 21805
gpus.devices = lambda: 2
gpus._count = lambda context: 2 if rank() == 0 or {all_have} else 0
gpus._prepare = lambda context, index: "cpu"
"""


@pytest.mark.parametrize("all_have", [True, False])
def test_ranks_that_believe_in_gpus(
    copy: Callable[..., Installation], runner: Runner, all_have: bool
) -> None:
    """The way over GPUs up to the device itself, which no rank takes alone."""
    run = run_ranks(copy(PRETENDED.format(all_have=all_have)), runner, "MPI")
    assert rank_judgement.judge_run(run).status == "pass", rank_judgement.judge_run(run)
    gpus = [rank.path.gpu for rank in run.ranks]
    assert [result.tests for result in run.results] == [60 if all_have else 30] * 2
    if all_have:
        assert [gpu.device for gpu in gpus] == ["cpu", "cpu"]
        status, why = datapath.why_no_nccl(run)
        assert (status, why) == (
            "fail",
            f"tensors were on cpu of {run.ranks[0].name}, but NCCL connected no ranks",
        )
    else:
        assert [gpu.device for gpu in gpus] == ["", ""]
        assert gpus[0].why == "another rank has no GPU"
        assert gpus[1].why == "the host has GPUs, but the framework sees none"


OTHERS = {
    "version": ("__init__.py", "0.28.1", "0.27.0", "Horovod 0.27.0"),
    "edit": ("torch/optimizer.py", "\n\n", "\n\n# edited\n", "Python files "),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_environment_on_one_host(
    copy: Callable[..., Installation], cluster: Cluster, tmp_path: Path, name: str
) -> None:
    installation = copy()
    file, old, new, message = OTHERS[name]
    package = purelib(Path(installation.python)) / "horovod" / file
    other = tmp_path / "other.py"
    other.write_text(package.read_text().replace(old, new))
    cluster.on("gpu33", ["mount", "--bind", str(other), str(package)])
    try:
        judgement = rank_judgement.judge_run(start(installation, Runner(cluster.environ), "mpirun"))
    finally:
        cluster.on("gpu33", ["umount", str(package)])
    assert judgement.status == "fail"
    assert "rank 1 on gpu33 has a different environment" in judgement.message
    assert message in judgement.message


def test_ssh_without_a_key(original: Installation, cluster: Cluster, tmp_path: Path) -> None:
    lines = (cluster.folder / "etc/ssh_config").read_text().splitlines()
    config = tmp_path / "ssh_config"
    config.write_text("\n".join(line for line in lines if "IdentityFile" not in line))
    programs(tmp_path, ssh=f'exec /usr/bin/ssh -F {config} -o BatchMode=yes "$@"')
    path = f"{tmp_path}:{cluster.environ['PATH']}"
    runner = Runner({**cluster.environ, "PATH": path})
    judgement = rank_judgement.judge_run(start(original, runner, "mpirun"))
    assert judgement.status == "fail"
    assert "mpirun started none of 2 ranks" in judgement.message
    assert "is refused without a password" in judgement.message
    assert "Permission denied" in judgement.evidence
    assert "ssh -o BatchMode=yes HOST true" in judgement.remedy


def test_a_host_that_is_down(original: Installation, cluster: Cluster) -> None:
    """Without a limit of its own, the ssh of mpirun waits for it longer than anybody wants."""
    cluster.on("gpu33", ["ip", "link", "set", cluster.interface, "down"])
    try:
        run = start(original, Runner(cluster.environ), "mpirun")
    finally:
        cluster.on("gpu33", ["ip", "link", "set", cluster.interface, "up"])
    judgement = rank_judgement.judge_run(run)
    assert not run.timed_out
    assert judgement.status == "fail"
    assert (
        f"ssh does not reach another host, or its sshd ends the connection: {cluster.addresses['gpu33']}"
        in judgement.message
    )


def test_a_host_that_does_not_know_its_own_name(original: Installation, cluster: Cluster) -> None:
    """Its ranks use the chosen interface; Horovod without our patch would look up the name."""
    cluster.on("gpu33", ["hostname", "nowhere"])
    try:
        run = start(original, Runner(cluster.environ), "horovodrun-gloo", told_of(cluster))
    finally:
        cluster.on("gpu33", ["hostname", "gpu33"])
    judgement = rank_judgement.judge_run(run)
    assert judgement.status == "fail"
    assert judgement.message == "the ranks are on gpu32, nowhere, not gpu32, gpu33"
    assert judgement.remedy.endswith("ssh gpu33 hostname")
    assert [result.wrong for result in run.results] == [0, 0]


def test_the_pmi_of_srun(original: Installation, cluster: Cluster) -> None:
    def under(pmi: Literal["none", "pmix"]) -> rank_judgement.Judgement:
        settings = Settings(srun_mpi=pmi)
        launch = ON_BOTH._replace(settings=settings, placed=True, ranks_per_node=1)
        return rank_judgement.judge_run(start(original, Runner(cluster.environ), "srun", launch))

    wrong = under("none")
    assert wrong.status == "fail"
    assert "no launcher of their MPI" in wrong.message
    assert "srun --mpi=pmix" in wrong.remedy
    right = under("pmix")
    assert right.status == "pass", right
