"""hvdenv init on a stand-in with Slurm and Lmod: what the page says, and what the cluster shows."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest

from hvdenv import PACKAGE
from hvdenv.model.layers import load_recipe
from tests.real.conftest import Cli
from tests.standin import Cluster
from tests.support.clusters import NEURON, install_software, write_modules
from tests.support.modulesystems import write_module

PAGE = """\
[you@login ~]$ module load gcc/10.2.0 cuda/11.4 nccl/2.14 cudampi/openmpi-4.1.1 cmake/3.16.9
(hvd) [you@login ~]$ pip install torch==2.13.0
(hvd) [you@login ~]$ HOROVOD_WITH_MPI=1 HOROVOD_GPU_OPERATIONS=NCCL pip install horovod==0.28.1
#SBATCH -p amd_a100nv_8 --gres=gpu:4
"""


@pytest.fixture(scope="module")
def site(cluster: Cluster, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    nccl = tmp_path_factory.mktemp("nccl")
    (nccl / "include").mkdir()
    (nccl / "include" / "nccl.h").touch()
    write_modules(cluster.modulefiles, install_software(home), NEURON)
    write_module(cluster.modulefiles, "nccl/2.14", setenv={"NCCL_ROOT": str(nccl)})
    for python in ("python/3.10.4", "python/3.11.5"):
        write_module(cluster.modulefiles, python)
    return cluster


def test_a_page_and_the_cluster(
    site: Cluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("horovod.txt").write_text(PAGE)
    hvdenv = Cli(home, site.environ)
    told = hvdenv("init", "heath", "--from", "horovod.txt", "--here")
    assert "looking at modules" in told.stderr
    # The choice of a Python is left to the user, and nothing else.
    assert "modules.load.Python" in told.stdout
    assert "missing:\n  python.version: " in told.stdout and "\nto choose" in told.stdout
    assert not any(f"modules.load.{each}" in told.stdout for each in ("MPI", "CUDA", "compiler"))
    with Path("heath.toml").open("a") as file:
        file.write('\n[python]\nversion = ">=3.10"\n')
    recipe = load_recipe("./heath.toml").recipe
    nodes = recipe.partitions["amd_a100nv_8"]
    assert (nodes.nodes, nodes.cores, nodes.gpus) == (2, 4, 4)
    assert recipe.horovod.gpu and recipe.horovod.gpu.nccl_home == "$NCCL_ROOT"
    assert recipe.mpi and (recipe.mpi.kind, recipe.mpi.version) == ("openmpi", "4.1.8")
    assert recipe.job.gpus_per_node == 4


def test_what_a_compute_node_shows(site: Cluster, home: Path, tmp_path: Path) -> None:
    """A job shows its node, which is another host than this one."""
    path = tmp_path / "moor.toml"
    words = [sys.executable, "-m", "hvdenv", "init", "moor", "--here", "-o", str(path)]
    environ = {"HVDENV_HOME": str(home), "PYTHONPATH": str(PACKAGE.parent)}
    site.run(["srun", "-p", "amd_a100nv_8", "--gres=gpu:1", *words], env=environ)
    text = path.read_text()
    assert re.search(rf'glibc = "{platform.libc_ver()[1]}"  # compute node gpu3[23]', text)
