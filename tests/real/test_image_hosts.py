"""Programs in an image on two hosts, started by the hosts' mpirun.

The image is a Debian root file system as a directory, which Charliecloud's ch-run takes. No
Horovod is compiled in it: it sees this machine's Python and the environment `local`, and has
nothing else of the host. tests/optin/test_image.py has one with its own Horovod.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.real.conftest import Cli
from tests.real.test_container import rootfs
from tests.standin import Cluster
from tests.support.clusters import install_software
from tests.support.images import equip, unpack
from tests.support.modulesystems import write_module
from tests.support.needs import need

__all__ = ["rootfs"]

MODULE = "hosts/openmpi-4.1.8"
HOSTS = ("--hosts", "gpu32:2,gpu33:2")
RECIPE = """\
format = 1
name = "imaged"
extends = "local"
scheduler = "slurm"

[modules]
load = ["{module}"]

[container]
runtime = "ch-run"
image = "{image}"
binds = {binds}

[job]
nodes = 2
ranks_per_node = 2
time = "00:10:00"
output = "imaged-%j.out"
"""
PROGRAM = """\
import os, socket, sys
import torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((4,), float(hvd.rank() + 1)), op=hvd.Sum)[0].item()
print("rank", hvd.rank(), "of", hvd.size(), "total", total, "on", socket.gethostname(),
      "in", os.environ.get("IMAGE"), os.path.exists("/srv/here"), os.environ.get("HOROVOD_MARK"))
"""


@pytest.fixture(scope="module")
def image(
    rootfs: Path, home: Path, local_prefix: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A directory that programs of the environment run in; a mark tells that they do."""
    need("charliecloud")
    folder = tmp_path_factory.mktemp("image") / "debian"
    unpack(rootfs, folder)
    record = json.loads((local_prefix / "hvdenv.json").read_text(encoding="utf-8"))
    venv = (local_prefix / "venv").resolve()
    # A path that only the image has.
    (folder / "opt/env").symlink_to(venv)
    path = "/opt/env/bin:/usr/local/bin:/usr/bin:/bin"
    variables = {
        "PATH": path,
        "VIRTUAL_ENV": str(venv),
        **record["variables"],
        "IMAGE": "debian",
        # As definitions have it: each rank is in a user namespace of its own.
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    }
    equip(folder, variables, bound(home))
    (folder / "srv/here").touch()
    return folder


def bound(home: Path) -> list[Path]:
    """What programs in the image have to see of the host; they see /tmp anyway."""
    folders = {Path(sys.base_prefix).resolve(), home.resolve()}
    return sorted(each for each in folders if not each.is_relative_to("/tmp"))


def bring_open_mpi(cluster: Cluster, home: Path) -> None:
    """A module with an Open MPI of the hosts."""
    software = install_software(home)
    write_module(
        cluster.modulefiles,
        MODULE,
        setenv={"OPAL_PREFIX": str(software.packages)},
        prepend_path={"PATH": software.mpi, "LD_LIBRARY_PATH": software.packages / "lib"},
    )


@pytest.fixture(scope="module")
def recipe(
    image: Path, home: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A recipe whose programs run there."""
    bring_open_mpi(cluster, home)
    path = tmp_path_factory.mktemp("recipe") / "imaged.toml"
    binds = [str(each) for each in bound(home)]
    path.write_text(RECIPE.format(module=MODULE, image=image, binds=json.dumps(binds)))
    return str(path)


@pytest.fixture
def hvdenv(cluster: Cluster, home: Path) -> Cli:
    """The command line on the head; ch-run wants to know who runs it."""
    return Cli(home, {**cluster.environ, "USER": "root"})


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program in the current directory."""
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def test_ranks_of_two_hosts_compute_in_the_image(hvdenv: Cli, recipe: str, program: str) -> None:
    """What is meant for ranks reaches them on both hosts."""
    marked = Cli(hvdenv.home, {**hvdenv.variables, "HOROVOD_MARK": "mine"})
    said = marked("run", recipe, "-n", "4", *HOSTS, "--", "python", program).stdout
    for rank, host in enumerate(("gpu32", "gpu32", "gpu33", "gpu33")):
        assert f"rank {rank} of 4 total 10.0 on {host} in debian True mine" in said


def test_a_job_runs_in_the_image(hvdenv: Cli, recipe: str, program: str) -> None:
    said = hvdenv("job", recipe, "--submit", "--", "sh", "-c", "echo $(hostname) in $IMAGE").stdout
    assert {said.count(f"{host} in debian\n") for host in ("gpu32", "gpu33")} == {2}


def test_verify_judges_the_image_on_both_hosts(hvdenv: Cli, recipe: str) -> None:
    """Gloo's ranks are started by a program of the image, so they are on one host."""
    words = ("verify", recipe, "--variant", "torch", *HOSTS, "--quick", "--json")
    report = hvdenv(*words).json
    findings = {(f["check"], f["subject"]): f for f in report["findings"]}
    assert report["verdict"] == "pass", findings
    assert "4 ranks on gpu32, gpu33" in findings["allreduce", "torch over MPI"]["message"]
    over_gloo = findings["allreduce", "torch over Gloo"]["message"]
    assert over_gloo.startswith(f"2 ranks on {socket.gethostname()} ")
    assert findings["mpi", "MPI of the image"]["status"] == "pass"
    assert "python: /opt/env/bin/python" in findings["extension", "torch"]["evidence"]
    assert report["prefix"].endswith("/debian")
