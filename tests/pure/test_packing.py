"""Which image fits an environment, and what the keeper does at odd moments."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvdenv import IMAGE_PROGRAMS
from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.errors import UsageError
from hvdenv.packing import use
from hvdenv.packing.manifest import (
    FORMAT,
    Manifest,
    Mounted,
    contents,
    default_image,
    manifest_of,
    program_of,
    record_digest,
)
from hvdenv.places import write_json
from hvdenv.schema import encode
from tests.environments import ONE, TWO, build_active
from tests.standalone import load

enter = load("enter")


@pytest.fixture
def image(environment: Environment) -> Path:
    build_active(environment, ONE, environment="")
    image = default_image(environment, ONE)
    image.write_bytes(b"image")
    program_of(image).write_text("")
    record = generations.read_record(environment.record(ONE))
    mounts, outside = contents(environment.generation(ONE), record)
    write_manifest(image, environment, mounts, outside)
    return image


def write_manifest(
    image: Path, environment: Environment, mounts: tuple[Mounted, ...], outside: tuple[str, ...]
) -> None:
    manifest = Manifest(
        recipe="local", variants=(), generation=ONE, record_sha256=record_digest(environment, ONE),
        mounts=mounts, outside=outside, sha256="0" * 64, bytes=5, files=1, unpacked_bytes=1,
        copy_to="", made_by="", program_sha256=hashlib.sha256(b"").hexdigest(),
    )  # fmt: skip
    write_json(manifest_of(image), {"format": FORMAT, **encode(manifest)})


def test_the_image_beside_the_environment_fits(environment: Environment, image: Path) -> None:
    packed, why = use.find(environment, ONE, None)
    assert (packed and packed.image, why) == (image, "")


def test_an_image_of_an_older_generation_is_not_used_silently(
    environment: Environment, image: Path
) -> None:
    build_active(environment, TWO)
    packed, why = use.find(environment, TWO, None)
    assert packed is None
    assert why.startswith(f"it holds generation {ONE}, and the active one is {TWO}")
    assert "hvdenv pack" in why


def test_an_image_without_its_program_is_not_used(environment: Environment, image: Path) -> None:
    """pack was killed, or only two of the files were copied."""
    program_of(image).unlink()
    assert "enter.py cannot be read: No such file" in use.find(environment, ONE, None)[1]
    with pytest.raises(UsageError, match=r"enter\.py cannot be read: No such file"):
        use.find(environment, ONE, image)


def test_an_image_with_another_program_is_not_used(environment: Environment, image: Path) -> None:
    program_of(image).write_text("another")
    assert "enter.py differs from the one" in use.find(environment, ONE, None)[1]


@pytest.mark.parametrize("also", ["/usr", "/root"])
def test_a_manifest_that_covers_other_folders_is_not_used(
    environment: Environment, image: Path, also: str
) -> None:
    own = Mounted(ONE, str(environment.generation(ONE).resolve()))
    write_manifest(image, environment, (own, Mounted("x", also)), ())
    assert f"{own.at} and {also}" in use.find(environment, ONE, None)[1]
    write_manifest(image, environment, (), ())
    assert "no folder" in use.find(environment, ONE, None)[1]


def listening(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    return listener


def connected(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(name)
    return connection


NAME = f"\0hvdenv-test-{os.getpid()}"


def test_the_keeper_outlives_a_rank_that_ends_before_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enter, "began", lambda pid: "")
    with listening(f"{NAME}-serve") as listener:
        connected(f"{NAME}-serve").close()
        with connected(f"{NAME}-serve") as rank:
            keeper = threading.Thread(target=enter.serve, args=(listener, b"answer"), daemon=True)
            keeper.start()
            assert rank.recv(100) == b"answer"
        keeper.join(timeout=20)
        assert not keeper.is_alive()


def test_the_keeper_ends_though_another_process_has_the_number_of_its_last_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = itertools.count(1)
    monkeypatch.setattr(enter, "began", lambda pid: str(next(times)))
    with listening(f"{NAME}-reuse") as listener:
        connected(f"{NAME}-reuse").close()
        keeper = threading.Thread(target=enter.serve, args=(listener, b"answer"), daemon=True)
        keeper.start()
        keeper.join(timeout=20)
        assert not keeper.is_alive()


def test_a_rank_does_not_join_a_process_that_has_the_number_of_the_keeper() -> None:
    rank, keeper = socket.socketpair()
    keeper.close()
    with rank, pytest.raises(OSError, match="has ended"):
        enter.join(enter.Answer(os.getpid()), rank.fileno())


def test_a_name_that_another_user_holds_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other user never answers."""
    image = enter.Image("/image", "0" * 64, "", [])
    monkeypatch.setattr(enter, "READ_SECONDS", 0.5)
    with listening(f"{NAME}-held"):
        user = os.geteuid()
        monkeypatch.setattr(enter.os, "geteuid", lambda: user + 1)
        with pytest.raises(enter.CannotMount, match="another user"):
            enter.ask_keeper(f"{NAME}-held", image)


def test_signals_that_warn_a_job_do_not_end_the_keeper() -> None:
    """Slurm sends those of --signal to all processes of a step."""
    program = (
        "import enter, os, signal\n"
        "enter.let_go(set())\n"
        "for name in ('INT', 'TERM', 'HUP', 'QUIT', 'USR1', 'USR2', 'ALRM', 'XCPU', 'TSTP'):\n"
        "    os.kill(os.getpid(), getattr(signal, 'SIG' + name))\n"
        "os._exit(7)\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(IMAGE_PROGRAMS)}
    )
    assert done.wait(timeout=20) == 7, signal.Signals(-done.returncode).name


def test_no_part_of_a_copy_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fill /dev/shm, which the ranks need, until the job ends."""
    (tmp_path / "image").write_bytes(b"image")
    image = enter.Image(str(tmp_path / "image"), "0" * 64, str(tmp_path), [])

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(enter.os, "write", full)
        with pytest.raises(enter.CannotMount, match="No space left"):
            enter.checked_file(image)
    with pytest.raises(enter.WrongImage):
        enter.checked_file(image)
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(tmp_path) == ["image"]
