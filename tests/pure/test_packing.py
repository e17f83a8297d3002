"""Which image fits an environment, and what the keeper does at odd moments."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.errors import HvdenvError, UsageError
from hvdenv.packing import image
from hvdenv.packing.image import Manifest, Packed
from hvdenv.places import write_json
from hvdenv.schema import encode
from tests.environments import ONE, TWO, build_active
from tests.standalone import load

enter = load("enter")


@pytest.fixture
def packed(environment: Environment) -> Packed:
    build_active(environment, ONE, environment="")
    packed = image.default(environment, ONE)
    packed.image.write_bytes(b"image")
    packed.program.write_text("")
    write_manifest(packed, environment)
    return packed


def write_manifest(packed: Packed, environment: Environment, **changes: Any) -> None:
    record = generations.read_record(environment.record(ONE))
    mounts, outside = image.contents(environment, record)
    manifest = Manifest(
        generation=ONE, built=record.created, mounts=mounts, outside=outside, sha256="0" * 64,
        bytes=5, copy_to="",
    )  # fmt: skip
    write_json(packed.path, encode(manifest._replace(**changes)))


def test_the_image_beside_the_environment_fits(environment: Environment, packed: Packed) -> None:
    assert image.fitting(packed, environment, ONE).generation == ONE


def test_an_image_of_an_older_generation_does_not_fit(
    environment: Environment, packed: Packed
) -> None:
    build_active(environment, TWO, environment="")
    with pytest.raises(UsageError, match=f"generation of this image is {ONE}, expected {TWO}"):
        image.fitting(packed, environment, TWO)


@pytest.mark.parametrize("name", ["image", "program"])
def test_an_image_without_one_of_its_files_does_not_fit(
    environment: Environment, packed: Packed, name: str
) -> None:
    """pack was killed, or only two of the files were copied."""
    getattr(packed, name).unlink()
    with pytest.raises(UsageError, match="is 0, expected 5"):
        image.fitting(packed, environment, ONE)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "[" * 100_000])
def test_a_malformed_manifest(environment: Environment, packed: Packed, text: str) -> None:
    packed.path.write_text(text)
    with pytest.raises(HvdenvError, match="manifest of an image is malformed"):
        image.fitting(packed, environment, ONE)


@pytest.mark.parametrize("also", ["/usr", "/root"])
def test_a_manifest_that_covers_other_folders_is_not_used(
    environment: Environment, packed: Packed, also: str
) -> None:
    own = str(environment.generation(ONE).resolve())
    for mounts in ((own, also), ()):
        write_manifest(packed, environment, mounts=mounts)
        with pytest.raises(UsageError, match="mount points"):
            image.fitting(packed, environment, ONE)


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


@pytest.mark.parametrize("used", [True, False])
def test_the_keeper_outlives_ranks_that_end_or_close_their_descriptors(
    used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [True] if used else []
    monkeypatch.setattr(enter, "is_used", lambda space: bool(left and left.pop()))
    name = f"{NAME}-serve-{used}"
    with listening(name) as listener, open("/proc/self/ns/mnt") as space:
        connected(name).close()
        with connected(name) as rank:
            words = (listener, b"answer", [space.fileno()])
            keeper = threading.Thread(target=enter.serve, args=words, daemon=True)
            keeper.start()
            answer, rights, _, _ = rank.recvmsg(100, socket.CMSG_SPACE(4))
            assert (answer, len(rights)) == (b"answer", 1)
            os.close(int.from_bytes(rights[0][2], "little"))
        keeper.join(timeout=20)
        assert not keeper.is_alive()
        assert not left


def test_a_name_that_another_user_holds_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other user never answers."""
    monkeypatch.setattr(enter, "READ_SECONDS", 0.5)
    with listening(f"{NAME}-held"):
        user = os.geteuid()
        monkeypatch.setattr(enter.os, "geteuid", lambda: user + 1)
        with pytest.raises(enter.CannotMount, match="another user"):
            enter.ask_keeper(f"{NAME}-held", [])


def test_no_part_of_a_copy_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fill /dev/shm, which the ranks need, until the job ends."""
    (tmp_path / "image").write_bytes(b"image")
    words = (str(tmp_path / "image"), "0" * 64, str(tmp_path))
    made = tempfile.TemporaryFile

    class Full:
        def __init__(self, **words: Any) -> None:
            self.file = made(**words)
            self.fileno = self.file.fileno

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(enter.tempfile, "TemporaryFile", Full)
        with pytest.raises(enter.CannotMount, match="No space left"):
            enter.checked_file(*words)
    with pytest.raises(enter.WrongImage):
        enter.checked_file(*words)
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(tmp_path) == ["image"]
