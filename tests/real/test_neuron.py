"""KISTI Neuron on a stand-in: its modules, conda, TensorFlow 2.10 and PyTorch 1.12, two hosts.

The recipe's variant ``cpu``, with the versions of the site's document: Horovod 0.26.1 is
compiled against both frameworks, and its ranks compute on both hosts under mpirun and horovodrun.
srun and jobs: test_tutorial.py.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdenv.locks import condalock, folders, pypi
from hvdenv.locks.lockfile import CONDA, MAIN, PYPI
from tests.channel import python_channel
from tests.clusters import NEURON, install_software, write_modules
from tests.modulesystems import cache_folder, install
from tests.real.conftest import Cli, Result
from tests.standin import Cluster

pytestmark = [pytest.mark.compile, pytest.mark.needs("python3-dev")]

SITE = """\
[conda]
channels = ["{channel}"]

[places]
environments = "{home}/envs"
"""
# The table of the site's document, without what needs a GPU.
TABLE = {
    "TensorFlow": True, "PyTorch": True, "MXNet": False,
    "NCCL": False, "DDL": False, "CCL": False, "MPI": True, "Gloo": True,
}  # fmt: skip
TRAIN = """\
import socket
import torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum)
print("rank", hvd.rank(), "of", hvd.size(), "on", socket.gethostname(), total.tolist())
"""


@pytest.fixture(scope="module")
def neuron(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    software = install_software(home)
    modules = install("lmod", cache_folder(tmp_path_factory))
    shared = [home, tmp_path_factory.getbasetemp(), Path(sys.prefix), Path(__file__).parents[2]]
    with Cluster(modules=modules, shared=shared) as cluster:
        write_modules(cluster.modulefiles, software, NEURON)
        yield cluster


@pytest.fixture(scope="module")
def hvdenv(neuron: Cluster, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command line on the cluster's login node, with the environment built."""
    # A home of its own: other tests ask for what was built last.
    own = home / "neuron"
    # Jobs of another stand-in have the same numbers.
    shutil.rmtree(own / "jobs", ignore_errors=True)
    (own / "envs").mkdir(parents=True, exist_ok=True)
    site = tmp_path_factory.mktemp("neuron") / "site.toml"
    site.write_text(SITE.format(channel=python_channel(home, "3.10").url, home=own))
    cli = Cli(own, {**neuron.environ, "HVDENV_SITE": str(site)})
    cli("build", "neuron", "--variant", "cpu", timeout=1500)
    return cli


def report(result: Result) -> dict[str, dict[str, str]]:
    """Findings of a report: by check, the status of each subject."""
    found: dict[str, dict[str, str]] = {}
    document = json.loads(result.stdout)
    for finding in document["findings"]:
        found.setdefault(finding["check"], {})[finding["subject"]] = finding["status"]
    found["verdict"] = {"": document["verdict"]}
    return found


def test_both_frameworks_on_two_hosts(hvdenv: Cli) -> None:
    """mpirun and horovodrun start two ranks on each host, over ssh."""
    result = hvdenv(
        "verify", "neuron", "--variant", "cpu", "--hosts", "gpu32:2,gpu33:2",
        "--launcher", "mpirun", "--launcher", "horovodrun-gloo", "--json",
    )  # fmt: skip
    found = report(result)
    assert found["verdict"] == {"": "pass"}, result.stdout
    assert found["allreduce"] == {
        f"{framework} over {controller}": "pass"
        for framework in ("torch", "tensorflow")
        for controller in ("MPI", "Gloo")
    }
    rows = {row["name"]: row["built"] for row in json.loads(result.stdout)["table"]}
    assert rows == TABLE
    assert "Horovod 0.26.1" in result.stdout
    assert "4 ranks on gpu32, gpu33 agree" in result.stdout


def test_horovodrun_over_mpi(hvdenv: Cli) -> None:
    result = hvdenv(
        "verify", "neuron", "--variant", "cpu", "--hosts", "gpu32:2,gpu33:2", "--framework",
        "torch", "--controller", "MPI", "--operation", "MPI", "--launcher", "horovodrun-mpi",
        "--quick", "--json",
    )  # fmt: skip
    assert report(result)["allreduce"]["torch over MPI"] == "pass", result.stdout
    assert "(horovodrun-mpi)" in result.stdout


def test_a_command_runs_on_two_hosts(hvdenv: Cli, tmp_path: Path) -> None:
    train = tmp_path / "train_hvd.py"
    train.write_text(TRAIN)
    result = hvdenv(
        "run", "neuron", "--variant", "cpu", "--launcher", "mpirun",
        "--hosts", "gpu32:2,gpu33:2", "--", "python", str(train),
    )  # fmt: skip
    assert result.stdout.count("of 4 on gpu33 [6.0, 6.0, 6.0]") == 2


def test_a_second_build_does_nothing(hvdenv: Cli) -> None:
    assert "nothing to do" in hvdenv("build", "neuron", "--variant", "cpu").stdout


def test_the_environment_is_had_again_from_a_lock(hvdenv: Cli, tmp_path: Path) -> None:
    """conda's packages, pip's and the modules; Horovod's wheel is in the cache."""
    this = ("neuron", "--variant", "cpu", "--lockfiles", str(tmp_path / "locks"))
    lock = Path(hvdenv("lock", *this, "--json").json["folder"])
    assert {each.name for each in lock.iterdir()} == {MAIN, PYPI, CONDA}
    locked = folders.read(lock)
    conda = {each.name for each in condalock.packages(locked).packages}
    python = {each.name for each in pypi.packages(locked)}
    assert "python" in conda
    assert {"torch", "tensorflow-gpu"} < python
    assert str(tmp_path) not in (lock / MAIN).read_text() + (lock / PYPI).read_text()
    assert "cudampi/openmpi-4.1.1" in locked.lock.inputs.modules

    prefix = tmp_path / "env"
    hvdenv("build", *this, "--locked", "--prefix", str(prefix))
    record = json.loads((prefix / "hvdenv.json").read_text())
    assert record["lock"]["digest"] == locked.digest
    assert {each["name"] for each in record["packages"]} >= conda | python
    assert hvdenv("lock", *this, "--prefix", str(prefix), "--json").json["changed"]
    made = folders.read(lock).lock.built
    assert made
    # What only the build loads is not there when what it has come to is observed.
    unknown = {name for name, sha256 in made.modules.items() if not sha256}
    assert unknown == {"cmake/3.16.9"}
    assert len(made.modules) == 4
    assert hvdenv("lock", *this, "--check").stdout.splitlines()[0].endswith(": unchanged")


def test_a_module_that_was_renamed(hvdenv: Cli, neuron: Cluster) -> None:
    """After a maintenance: verify says what is gone, and what is like it."""
    old = neuron.modulefiles / "cudampi/openmpi-4.1.1"
    new = old.with_name("openmpi-4.1.5")
    old.rename(new)
    try:
        result = hvdenv("verify", "neuron", "--variant", "cpu", code=None)
    finally:
        new.rename(old)
    assert result.returncode == 5
    assert "cudampi/openmpi-4.1.5" in result.stderr
