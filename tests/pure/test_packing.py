"""Which image fits an environment, and what the keeper does at odd moments."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from hvdenv.base.errors import HvdenvError, UsageError
from hvdenv.base.places import write_json
from hvdenv.base.schema import encode
from hvdenv.environments import generations, image
from hvdenv.environments.generations import Environment
from hvdenv.environments.image import ImageManifest, Packed
from tests.support.environments import ONE, TWO, build_active
from tests.support.standalone import load

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
    manifest = ImageManifest(
        generation=ONE,
        built=record.created,
        mounts=mounts,
        outside=outside,
        sha256="0" * 64,
        bytes=5,
    )
    write_json(packed.path, encode(manifest._replace(**changes)))


@pytest.mark.parametrize("name", ["image", "program"])
def test_which_image_fits(environment: Environment, packed: Packed, name: str) -> None:
    assert image.fitting(packed, environment, ONE).generation == ONE
    build_active(environment, TWO, environment="")
    with pytest.raises(UsageError, match=f"generation of this image is {ONE}, expected {TWO}"):
        image.fitting(packed, environment, TWO)
    # pack was killed, or only two of the files were copied.
    getattr(packed, name).unlink()
    with pytest.raises(UsageError, match="is 0, expected 5"):
        image.fitting(packed, environment, ONE)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "[" * 100_000])
def test_a_malformed_manifest(environment: Environment, packed: Packed, text: str) -> None:
    packed.path.write_text(text)
    with pytest.raises(HvdenvError, match="manifest of an image is malformed"):
        image.fitting(packed, environment, ONE)
    packed.path.unlink()
    with pytest.raises(HvdenvError, match=r"cannot be read: No such(?s:.*)hvdenv pack"):
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


def test_a_name_that_another_user_holds_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other user never answers."""
    name, user = f"\0hvdenv-test-{os.getpid()}", os.geteuid()
    monkeypatch.setattr(enter, "READ_SECONDS", 0.5)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        monkeypatch.setattr(enter.os, "geteuid", lambda: user + 1)
        with pytest.raises(enter.CannotMount, match="another user"):
            enter.ask_keeper(name, [])
