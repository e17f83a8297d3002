"""The recipe `singularity` for real: Horovod compiled in an image, which runs on two hosts.

Its variant `cpu` on a Debian root file system, built by buildah from the Dockerfile that
hvdenv writes, made a directory and run by Charliecloud's ch-run on a stand-in of a cluster:
the hosts' mpirun, brought by a module, starts ranks that are in the image.

Not part of `make test`, since it takes a quarter of an hour and 15 GB while it builds. As
root on a Debian machine: `python -m pytest tests/optin/test_image.py`. The image (4 GB) is
kept in the directory that HVDENV_TEST_HOME names.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.real.conftest import Cli, cluster, home
from tests.real.test_container import BASE, Store, pip_binds, rootfs, run, store
from tests.real.test_image_hosts import bring_open_mpi
from tests.standin import Cluster
from tests.support.images import equip
from tests.support.needs import need

__all__ = ["cluster", "home", "pip_binds", "rootfs", "store"]

# What the recipe takes from where this machine does not reach: Ubuntu, its Python 3.10,
# and the source of Open MPI.
RECIPE = """\
format = 1
name = "proof"
extends = "singularity"

[python]
version = ">=3.11,<3.12"

[mpi]
package = "openmpi"

[modules]
load = ["hosts/openmpi-4.1.8"]

[container]
runtime = "ch-run"
image = "{image}"
"""
WORDS = ("--variant", "cpu", "--set", f"container.base={BASE}")


@pytest.fixture(scope="module")
def recipe(home: Path, request: pytest.FixtureRequest) -> str:
    """A recipe whose image is built, and lies where all hosts see it."""
    need("charliecloud")
    image = home / "images" / "singularity+cpu"
    image.parent.mkdir(parents=True, exist_ok=True)
    path = image.parent / "proof.toml"
    path.write_text(RECIPE.format(image=image))
    if not image.exists():
        built: Store = request.getfixturevalue("store")
        binds: tuple[str, ...] = request.getfixturevalue("pip_binds")
        began = time.monotonic()
        dockerfile = image.parent / "Dockerfile"
        words = ("container", str(path), *WORDS, "--format", "docker")
        dockerfile.write_text(Cli(home, built.variables)(*words).stdout)
        built.build(dockerfile, "localhost/horovod:1", binds)
        print(f"the image was built in {time.monotonic() - began:.0f} s")
        export(built, "localhost/horovod:1", image)
    return str(path)


def export(built: Store, name: str, image: Path) -> None:
    """Make a directory of an image, with the variables that its definition gives it."""
    found = json.loads(built.buildah("inspect", "--type", "image", name))
    variables = dict(pair.split("=", 1) for pair in found["OCIv1"]["config"]["Env"])
    container = built.buildah("from", "--pull-never", name).strip()
    part = image.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        run("cp", "-a", built.buildah("mount", container).strip(), str(part))
        built.buildah("umount", container)
    finally:
        built.buildah("rm", container)
    # A device that is used as a file would fill the disk; the host's are bound here.
    shutil.rmtree(part / "dev")
    (part / "dev").mkdir()
    equip(part, variables)
    part.rename(image)


@pytest.fixture(scope="module")
def on_hosts(cluster: Cluster, home: Path) -> Cli:
    """The command line on the head of a cluster whose hosts have an Open MPI of their own."""
    bring_open_mpi(cluster, home)
    return Cli(home, {**cluster.environ, "USER": "root"})  # ch-run wants to know it


def test_verify_judges_the_image(recipe: str, on_hosts: Cli) -> None:
    words = ("verify", recipe, "--variant", "cpu", "-n", "4", "--hosts", "gpu32:2,gpu33:2")
    report = on_hosts(*words, "--timeout", "1800", "--json").json
    assert report["verdict"] == "pass"
    proven = {f["subject"]: f for f in report["findings"] if f["check"] == "allreduce"}
    for framework in ("tensorflow", "torch"):
        assert "4 ranks on gpu32, gpu33" in proven[f"{framework} over MPI"]["message"]
        assert "2 ranks on " in proven[f"{framework} over Gloo"]["message"]
