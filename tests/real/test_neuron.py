"""KISTI Neuron on a stand-in: its modules, conda, two hosts.

The recipe's variant ``cpu``, with PyTorch in the version of `local`, whose wheel fits: ranks compute
on both hosts under mpirun and horovodrun. `make optin` compiles Horovod 0.26.1 for TensorFlow 2.10
and PyTorch 1.12, the versions of the site's document. srun and jobs: test_tutorial.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvdenv.locks import condalock, lockfile, pypi
from hvdenv.locks.lockfile import CONDA, MAIN, PYPI
from tests.real.conftest import Cli, Result
from tests.standin import Cluster
from tests.support.channel import python_channel
from tests.support.clusters import NEURON, install_software, write_modules
from tests.support.wheels import store_for

pytestmark = pytest.mark.needs("python3-dev")

SITE = """\
[conda]
channels = ["{channel}"]

[places]
environments = "{home}/envs"
"""
# The table of the site's document, without TensorFlow and what needs a GPU.
TABLE = {
    "PyTorch": True,
    "MXNet": False,
    "NCCL": False,
    "DDL": False,
    "CCL": False,
    "MPI": True,
    "Gloo": True,
}


ON_BOTH = ("--hosts", "gpu32:1,gpu33:1")


class Versions(NamedTuple):
    """Which Python the channel has, and what the recipe says otherwise than the shipped one."""

    python: str
    frameworks: tuple[str, ...] = ("tensorflow", "torch")
    overrides: tuple[str, ...] = ()


@pytest.fixture(scope="module", params=["local", pytest.param("document", marks=pytest.mark.optin)])
def versions(request: pytest.FixtureRequest, local_prefix: Path) -> Versions:
    if request.param == "document":
        return Versions("3.10")
    record = json.loads((local_prefix / "hvdenv.json").read_text())
    horovod, frameworks = record["resolved"]["horovod"], record["stack"]["stack"]["frameworks"]
    (python,) = (local_prefix / "venv/lib").glob("python3.*")
    minor = python.name.removeprefix("python")
    overrides = {
        "python.version": f"=={minor}.*",
        "frameworks.torch.version": frameworks["torch"]["version"].partition("+")[0],
        "packages.numpy": ">=1.26",
        # Wheels of the site's torch 1.12 are for an older C library.
        "conda.virtual.__glibc": "2.28",
        "partitions.amd_a100nv_8.glibc": "2.28",
        "horovod.version": horovod["version"],
        "horovod.sha256": horovod["sha256"],
    }
    sets = [f"{name}='{value}'" for name, value in overrides.items()]
    return Versions(minor, ("torch",), (*sets, "horovod.frameworks=['torch']"))


class Neuron(NamedTuple):
    """The command line on the cluster's login node, with the environment built from a lock.

    Attributes:
        cli: as on the login node.
        words: the recipe, and where its locks are.
        locks: options of commands that use the lock.
        lock: its directory.
        frameworks: that it has.
    """

    cli: Cli
    words: tuple[str, ...]
    locks: tuple[str, str]
    lock: Path
    frameworks: tuple[str, ...]

    def __call__(self, command: str, *words: str, code: int | None = 0) -> Result:
        return self.cli(command, *self.words, *words, code=code)

    @property
    def prefix(self) -> Path:
        return self.cli.home / "envs/neuron+cpu"

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.prefix / "hvdenv.json").read_text())
        return found


@pytest.fixture(scope="module")
def hvdenv(
    cluster: Cluster,
    home: Path,
    versions: Versions,
    local_prefix: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Neuron:
    write_modules(cluster.modulefiles, install_software(home), NEURON)
    # A home of its own: other tests ask for what was built last.
    own, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("neuron")
    (own / "envs").mkdir()
    (home / "cache").mkdir(parents=True, exist_ok=True)
    (own / "cache").symlink_to(home / "cache")
    channel = python_channel(home, versions.python).url
    (folder / "site.toml").write_text(SITE.format(channel=channel, home=own))
    cli = Cli(own, {**cluster.environ, "HVDENV_SITE": str(folder / "site.toml")})
    sets = (word for each in versions.overrides for word in ("--set", each))
    words = ("neuron", "--variant", "cpu", *sets)
    locks = ("--lockfiles", str(folder / "locks"))
    if versions.overrides:
        inputs = cli("plan", *words, "--json").json["wheel_inputs"]
        store_for(home / "cache/wheels", inputs, local_prefix, without="tensorflow")
    lock = Path(cli("lock", *words, *locks, "--json").json["directory"])
    cli("build", *words, *locks, "--locked")
    return Neuron(cli, words, locks, lock, versions.frameworks)


def report(result: Result) -> dict[str, dict[str, str]]:
    """Findings of a report: by check, the status of each subject."""
    found: dict[str, dict[str, str]] = {}
    for finding in result.json["findings"]:
        found.setdefault(finding["check"], {})[finding["subject"]] = finding["status"]
    found["verdict"] = {"": result.json["verdict"]}
    return found


def test_frameworks_on_two_hosts(hvdenv: Neuron) -> None:
    """mpirun and horovodrun start a rank on each host, over ssh."""
    launchers = ("--launcher", "mpirun", "--launcher", "horovodrun-gloo")
    result = hvdenv("verify", *ON_BOTH, *launchers, "--quick", "--json")
    found = report(result)
    assert found["verdict"] == {"": "pass"}, result.stdout
    assert found["allreduce"] == {
        f"{framework} over {controller}": "pass"
        for framework in hvdenv.frameworks
        for controller in ("MPI", "Gloo")
    }
    rows = {row["name"]: row["built"] for row in result.json["table"]}
    assert rows == {"TensorFlow": "tensorflow" in hvdenv.frameworks, **TABLE}
    assert f"Horovod {hvdenv.record['resolved']['horovod']['version']}" in result.stdout
    assert "2 ranks on gpu32, gpu33 agree" in result.stdout


def test_horovodrun_over_mpi(hvdenv: Neuron) -> None:
    words = "--framework torch --controller MPI --operation MPI --launcher horovodrun-mpi"
    result = hvdenv("verify", *ON_BOTH, *words.split(), "--quick", "--json")
    assert report(result)["allreduce"]["torch over MPI"] == "pass", result.stdout
    assert "(horovodrun-mpi)" in result.stdout


def test_the_environment_is_that_of_the_lock(hvdenv: Neuron) -> None:
    """conda's packages, pip's and the modules; Horovod's wheel is in the cache."""
    lock, record = hvdenv.lock, hvdenv.record
    assert {each.name for each in lock.iterdir()} == {MAIN, PYPI, CONDA}
    locked = lockfile.read_lock(lock)
    conda = {each.name for each in condalock.packages(locked).packages}
    python = {each.name for each in pypi.packages(locked)}
    assert "python" in conda
    of_frameworks = record["resolved"]["frameworks"]
    assert {of_frameworks[each]["package"] for each in hvdenv.frameworks} < python
    assert str(lock.parents[2]) not in (lock / MAIN).read_text() + (lock / PYPI).read_text()
    assert "cudampi/openmpi-4.1.1" in locked.lock.inputs.modules

    assert record["lock"]["digest"] == locked.digest
    assert {each["name"] for each in record["packages"]} >= conda | python
    fill = (*hvdenv.locks, "--prefix", str(hvdenv.prefix))
    assert hvdenv("lock", *fill, "--json").json["changed"]
    made = lockfile.read_lock(lock).lock.built
    assert made
    # What only the build loads is not there when what it has come to is observed.
    unknown = {name for name, sha256 in made.modules.items() if not sha256}
    assert unknown == {"cmake/3.16.9"}
    assert len(made.modules) == 4
    check = hvdenv("lock", *hvdenv.locks, "--check").stdout
    assert check.splitlines()[0].endswith(": unchanged")
