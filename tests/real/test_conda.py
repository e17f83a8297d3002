"""The conda environment of the recipe `neuron`, from channels with published metadata."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

import pytest

from hvdenv.locks import condalock, lockfile, pypi
from hvdenv.locks.lockfile import BuiltWith, Locked
from tests.real.conftest import Cli, Result
from tests.standin import Cluster
from tests.support.channel import Channel, published_channels
from tests.support.clusters import NEURON, install_software, write_modules
from tests.support.index import package

SITE = """\
[conda]
channels = ["{folder}/pytorch", "{folder}/conda-forge"]

[places]
environments = "{home}/envs"
"""
# What TensorFlow 2.10 requires and conda has, or pip gets in no time; it alone is 578 MB.
REQUIRES = ("numpy>=1.20", "typing-extensions>=3.6.6", "setuptools", "packaging", "six>=1.12.0")
# As the real one, and preferred to it by its build.
TAG = "1-cp310-cp310-manylinux_2_17_x86_64.manylinux2014_x86_64"


@pytest.fixture(scope="module")
def published(home: Path) -> dict[str, Channel]:
    return published_channels(home)


class Neuron(NamedTuple):
    """The recipe as it is shipped, on the cluster's login node.

    Attributes:
        channels: a link to the channels, so that these can be out of reach.
        built: the result of `hvdenv build neuron`.
        lock: made then; nothing was built from it.
    """

    cli: Cli
    channels: Path
    built: Result
    lock: Locked

    @property
    def locks(self) -> tuple[str, str]:
        return "--lockfiles", str(self.cli.home / "locks")

    @property
    def environment(self) -> Path:
        """That of the last build, which stopped."""
        (found,) = self.cli.home.glob("envs/.neuron.hvdenv/*/conda")
        return found

    @property
    def packages(self) -> list[dict[str, str]]:
        """What the last build has installed."""
        report = self.environment.parent / "build/environment.json"
        found: list[dict[str, str]] = json.loads(report.read_text())
        return found


@pytest.fixture(scope="module")
def neuron(
    cluster: Cluster,
    home: Path,
    published: dict[str, Channel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Neuron:
    """Python 3.10, pip, setuptools and wheel are real, the contents of all else are empty."""
    own = tmp_path_factory.mktemp("home")
    (own / "envs").mkdir()
    (own / "channels").symlink_to(published["pytorch"].folder.parent)
    channels = (own / "channels").as_uri()
    (own / "site.toml").write_text(SITE.format(folder=channels, home=own))
    package(own / "wheels", "tensorflow_gpu", "2.10.0", requires=REQUIRES, tag=TAG)
    links = f"{own}/wheels {os.environ.get('PIP_FIND_LINKS', '')}"
    write_modules(cluster.modulefiles, install_software(home), NEURON)
    site = {"HVDENV_SITE": str(own / "site.toml"), "PIP_FIND_LINKS": links}
    cli = Cli(own, {**cluster.environ, **site})
    built = cli("build", "neuron", code=5)
    locked = cli("lock", "neuron", "--lockfiles", str(own / "locks"), "--json").json
    return Neuron(cli, own / "channels", built, lockfile.read_lock(Path(locked["directory"])))


def test_the_recipe_builds_up_to_the_compile(neuron: Neuron) -> None:
    """The compile needs CUDA's toolkit, which the cluster's module has and this machine has not."""
    said = neuron.built.stderr
    for step in (
        "modules",
        "environment",
        "resolution",
        "packages",
        "requirements",
        "stack",
        "source",
    ):
        assert f"] {step}: " in said
    assert "step wheel failed" in said
    assert "the build does not find the CUDA toolkit (CUDAToolkit)" in said


def test_the_lock_has_builds_for_gpus_that_fit(neuron: Neuron) -> None:
    """Newest packages that fit: ffmpeg's zlib excludes Python 3.10.15, CUDA 11.4 newer cuDNN."""
    found = condalock.packages(neuron.lock).packages
    versions = {each.name: f"{each.version} {each.build}" for each in found}
    expected = {
        "python": "3.10.14 hd12c33a_0_cpython",
        "pytorch": "1.12.0 py3.10_cuda11.3_cudnn8.3.2_0",
        "torchvision": "0.13.0 py310_cu113",
        "cudatoolkit": "11.3.1 hb98b00a_13",
        "cudnn": "8.3.2.44 hed8a83a_1",
        "nccl": "2.14.3.1 h0800d71_0",
        "mkl": "2022.1.0 h84fe81f_915",
        "blas": "2.116 mkl",
        "numpy": "1.23.5 py310h53a5b5f_0",
    }
    assert {name: versions[name] for name in expected} == expected
    # pip locks what conda does not provide, also where other Python packages require that.
    assert {each.name for each in pypi.packages(neuron.lock)} == {
        "cloudpickle",
        "ninja",
        "packaging",
        "psutil",
        "pyyaml",
        "six",
        "tensorflow-gpu",
    }
    words = ("lock", "neuron", *neuron.locks)
    assert neuron.cli(*words, "--check").stdout.splitlines() == [
        "recipe since the lock: unchanged",
        "lock: satisfies the recipe",
    ]
    assert not neuron.cli(*words, "--json").json["changed"]
    newer = neuron.cli(*words, "--check", "--set", "conda.virtual.__cuda='12.4'", code=4)
    assert "conda.virtual.__cuda: 11.4 in the lock, 12.4 here" in newer.stdout


def test_a_build_from_the_lock_without_channels_stops_at_another_mpi(neuron: Neuron) -> None:
    solved, lock = neuron.packages, neuron.lock.lock
    modules = dict.fromkeys(lock.inputs.modules, "")
    built = BuiltWith("1.0", "3.10.14", mpi="Open MPI 4.0.5", modules=modules)
    lockfile.write_lock(neuron.lock._replace(lock=lock._replace(built=built)))
    published = neuron.channels.readlink()
    neuron.channels.unlink()
    for name in ("pytorch", "conda-forge"):
        (neuron.channels / name).mkdir(parents=True)
    try:
        result = neuron.cli("build", "neuron", *neuron.locks, "--locked", code=4)
    finally:
        shutil.rmtree(neuron.channels)
        neuron.channels.symlink_to(published)
    assert "exactly the conda packages of the lock" in result.stderr
    assert "mpi: Open MPI 4.0.5 in the lock, Open MPI 4.1.8 here" in result.stderr
    assert neuron.packages == solved


def test_what_check_looks_up(neuron: Neuron) -> None:
    words, count = ("check", "neuron", "--json"), len(condalock.packages(neuron.lock).packages)
    looked_up = "\n".join(neuron.cli(*words).json["looked_up"])
    assert f"conda packages: the channels have {count} that agree" in looked_up
    assert "Python packages: 7 agree" in looked_up
    bad = neuron.cli(*words, "--set", "conda.packages.nccl='>=2.18'", code=3).json["findings"]
    (message,) = (each["message"] for each in bad if each["id"] == "conda-packages-not-available")
    assert "No candidates were found for nccl >=2.18" in message


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        ({"conda.virtual.__cuda": "10.2"}, "cudatoolkit 11.3.1 would constrain"),
        ({"conda.virtual.__glibc": "2.12"}, "asks more of the machine"),
        # No build for CPUs in its place.
        ({"conda.packages.cudatoolkit": "11.7.*"}, "pytorch ==1.12.0 *cuda* cannot be installed"),
    ],
)
def test_what_does_not_fit(neuron: Neuron, changed: dict[str, str], printed: str) -> None:
    ((key, value),) = changed.items()
    words = ("--upgrade", "--set", f"{key}='{value}'")
    result = neuron.cli("lock", "neuron", *neuron.locks, *words, code=5)
    assert printed in result.stderr


def test_it_is_an_environment_to_conda_and_to_a_group(neuron: Neuron) -> None:
    """conda activates what has conda-meta, and takes it for its own with a history there."""
    environment = neuron.environment
    assert (environment / "conda-meta/history").is_file()
    for path in (environment / "conda-meta").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644, path
    files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 500
    assert {path.stat().st_nlink for path in files} == {1}, "shared with the cache"
