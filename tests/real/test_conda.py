"""conda environments: of the recipe `neuron`, from channels with published metadata, and others."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvdenv import STEP_PROGRAMS
from hvdenv.locks import condalock, lockfile, pypi
from hvdenv.locks.lockfile import BuiltWith, Locked
from tests.real.conftest import Cli, Result, hear_interrupts
from tests.standin import Cluster
from tests.support.channel import Channel, File, published_channels
from tests.support.clusters import NEURON, install_software, write_modules
from tests.support.index import package
from tests.support.modulesystems import cache_folder, install

CONDA_ENV = STEP_PROGRAMS / "conda_env.py"
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
    home: Path, published: dict[str, Channel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Neuron]:
    """Python 3.10, pip, setuptools and wheel are real, the contents of all else are empty."""
    own = tmp_path_factory.mktemp("home")
    (own / "envs").mkdir()
    (own / "channels").symlink_to(published["pytorch"].folder.parent)
    channels = (own / "channels").as_uri()
    (own / "site.toml").write_text(SITE.format(folder=channels, home=own))
    package(own / "wheels", "tensorflow_gpu", "2.10.0", requires=REQUIRES, tag=TAG)
    links = f"{own}/wheels {os.environ.get('PIP_FIND_LINKS', '')}"
    modules = install("lmod", cache_folder(tmp_path_factory))
    shared = [home, tmp_path_factory.getbasetemp(), Path(sys.prefix), Path(__file__).parents[2]]
    with Cluster(modules=modules, shared=shared) as cluster:
        write_modules(cluster.modulefiles, install_software(home), NEURON)
        site = {"HVDENV_SITE": str(own / "site.toml"), "PIP_FIND_LINKS": links}
        cli = Cli(own, {**cluster.environ, **site})
        built = cli("build", "neuron", code=5)
        folder = cli("lock", "neuron", "--lockfiles", str(own / "locks"), "--json").json[
            "directory"
        ]
        yield Neuron(cli, own / "channels", built, lockfile.read_lock(Path(folder)))


# The recipe neuron


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


# Its environment


@pytest.fixture(scope="module")
def environment(neuron: Neuron) -> Path:
    return neuron.environment


def output(*words: str | Path) -> str:
    """Of a program of an environment, without anything of the tests' own environment."""
    return subprocess.run(
        [str(word) for word in words],
        env={"PATH": "/usr/bin:/bin"},
        text=True,
        check=True,
        stdout=subprocess.PIPE,
        timeout=120,
    ).stdout.strip()


def test_it_is_an_environment_to_conda_and_to_a_group(environment: Path) -> None:
    """conda activates what has conda-meta, and takes it for its own with a history there."""
    assert (environment / "conda-meta/history").is_file()
    for path in (environment / "conda-meta").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644, path


def test_nothing_is_shared_with_the_cache(environment: Path) -> None:
    files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 500
    assert {path.stat().st_nlink for path in files} == {1}


# Others


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Channel:
    """With a small package, one of many files, and one that would run a script."""
    channel = Channel(tmp_path_factory.mktemp("tools") / "channel")
    channel.add("large", "1.0", {f"share/large/{number}": File(b"x") for number in range(2000)})
    channel.add("greeter", "1.0", {"share/greeter": File(b"hello")}, packed=".tar.bz2")
    script = File(b"#!/bin/sh\ntouch $PREFIX/ran\n", executable=True)
    channel.add("scripted", "1.0", {"bin/.scripted-post-link.sh": script}, noarch="generic")
    return channel.index()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def variables(cache: Path | None) -> dict[str, str]:
    kept = {"RATTLER_CACHE_DIR": str(cache)} if cache else {}
    return {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), **kept}


def start(*words: str | Path, cache: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CONDA_ENV), *map(str, words)],
        env=variables(cache),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        preexec_fn=hear_interrupts,
    )


def run(*words: str | Path, cache: Path | None = None) -> tuple[int, str]:
    with start(*words, cache=cache) as process:
        printed, _ = process.communicate(timeout=300)
    return process.returncode, printed


def document(folder: Path, channels: list[str], specs: list[str], **changed: Any) -> Path:
    path = folder / "conda.json"
    virtual = {"__cuda": "11.4", "__glibc": "2.17"}
    spec = {"channels": channels, "specs": specs, "platform": "linux-64", "virtual": virtual}
    path.write_text(json.dumps({**spec, **changed}))
    return path


def refused(folder: Path, cache: Path, *document_words: Any, **changed: Any) -> str:
    """What is printed when it fails; then nothing is left of it."""
    target = folder / "env"
    status, printed = run(document(folder, *document_words, **changed), target, cache=cache)
    assert status == 1, printed
    assert "Traceback" not in printed
    assert not target.exists()
    return printed


@pytest.mark.parametrize("spec", ["", "greeter ===", "gr\u00fcss $(id)"])
def test_what_is_no_package(tools: Channel, cache: Path, tmp_path: Path, spec: str) -> None:
    assert f"conda_env: {spec}: " in refused(tmp_path, cache, [tools.url], [spec])


def test_a_channel_that_is_not_there(cache: Path, tmp_path: Path) -> None:
    gone = tmp_path.as_uri() + "/gone"
    printed = refused(tmp_path, cache, [gone], ["python"])
    assert "a channel cannot be read" in printed
    assert gone in printed
    printed = refused(tmp_path, cache, ["http://127.0.0.1:9/site"], ["python"])
    assert "a channel cannot be read" in printed
    assert "http://127.0.0.1:9/site" in printed


def test_scripts_of_packages_are_not_run(tools: Channel, cache: Path, tmp_path: Path) -> None:
    spec = document(tmp_path, [tools.url], ["scripted"])
    status, printed = run(spec, tmp_path / "env", cache=cache)
    assert status == 0, printed
    assert "bin/.scripted-post-link.sh" in printed
    assert not (tmp_path / "env/ran").exists()


# On a busy machine a program may get to its end before its test gets to end it.
TRIES = 10


def wait_for(path: Path) -> None:
    """Until it is there, and not a moment longer."""
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come to be"


def test_killed_in_the_middle_and_run_again(tools: Channel, tmp_path: Path) -> None:
    target, report = tmp_path / "env", tmp_path / "report.json"
    words = (document(tmp_path, [tools.url], ["large"]), target, "--report", report)
    for _ in range(TRIES):
        with start(*words, cache=tmp_path / "cache") as process:
            wait_for(target / "share")
            process.kill()
            printed, _ = process.communicate(timeout=300)
        if process.returncode:
            break
        shutil.rmtree(target)
        report.unlink()
    assert process.returncode == -9, printed
    assert not report.exists()
    assert "exists already" in run(*words, cache=tmp_path / "cache")[1]
    shutil.rmtree(target)
    status, printed = run(*words, cache=tmp_path / "cache")
    assert status == 0, printed
    assert len(list(target.glob("share/large/*"))) == 2000
    assert len(json.loads(report.read_text())) == 1
    assert not Path(f"{target}.unfinished").exists()


def test_the_interpreter_is_not_let_to_its_end(tools: Channel, cache: Path, tmp_path: Path) -> None:
    """It dies there in one of four runs that installed something."""
    (tmp_path / "sitecustomize.py").write_text("import atexit; atexit.register(print, 'the end')")
    words = (document(tmp_path, [tools.url], ["greeter"]), tmp_path / "env")
    for program, reaches_it in ((["-c", ""], True), ([str(CONDA_ENV), *map(str, words)], False)):
        printed = subprocess.run(
            [sys.executable, *program],
            env={**variables(cache), "PYTHONPATH": str(tmp_path)},
            text=True,
            check=True,
            stdout=subprocess.PIPE,
            timeout=300,
        ).stdout
        assert ("the end" in printed) is reaches_it
