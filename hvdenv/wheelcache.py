"""Wheels that were compiled on this machine, found again by what went into them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv.places import Places, blocked, make_folder, sync_folder, write_json

FORMAT = 1
_ENTRY = "entry.json"


class Found(NamedTuple):
    """What the cache has for some inputs.

    Attributes:
        wheel: the wheel, to copy from; None if there is none to use.
        note: why an entry that is there was not used; empty if all is well.
    """

    wheel: Path | None
    note: str = ""


def key(inputs: Mapping[str, Any]) -> str:
    """The name of an entry: all that goes into a wheel, in any order."""
    return hashlib.sha256(_canonical(inputs).encode()).hexdigest()


def find(places: Places, inputs: Mapping[str, Any]) -> Found:
    """Look for a wheel; its hash is compared before it is given out.

    A damaged entry is deleted. One that somebody else could have written is left
    alone and not used. Copy the wheel; never link to it.

    Args:
        places: where the cache lies.
        inputs: all that goes into the wheel, as JSON values.
    """
    entry = _folder(places, inputs)
    if not os.path.lexists(entry):
        return Found(None)
    distrust = _distrust(entry)
    if distrust:
        return Found(None, f"cached wheel not used: {distrust}")
    wheel, damage = _check(entry, inputs)
    if wheel is None:
        _discard(entry)
        return Found(None, f"cached wheel not used: {damage}")
    return Found(wheel)


def store(places: Places, inputs: Mapping[str, Any], wheel: Path) -> Path:
    """Put a copy of a wheel into the cache.

    Where another build has put one there in the meantime, that one stays.

    Args:
        places: where the cache lies.
        inputs: all that went into the wheel, as JSON values.
        wheel: the file.

    Returns:
        The cached wheel, or ``wheel`` where the place is taken by an entry that
        can be neither used nor removed.

    Raises:
        StepError: the cache cannot be written.
    """
    entry = _folder(places, inputs)
    make_folder(entry.parent)
    temporary = entry.with_name(f".{uuid.uuid4().hex}")
    try:
        # Never writable for a group, whatever the umask: find() would distrust it.
        os.mkdir(temporary, 0o755)
        _fill(temporary, inputs, wheel)
        while not _settle(temporary, entry):
            found = find(places, inputs)
            if found.wheel is not None:
                return found.wheel
            if os.path.lexists(entry):
                return wheel
        return entry / wheel.name
    except OSError as error:
        raise blocked(entry, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _canonical(inputs: Mapping[str, Any]) -> str:
    return json.dumps(inputs, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _folder(places: Places, inputs: Mapping[str, Any]) -> Path:
    name = key(inputs)
    return places.wheels / name[:2] / name


def _distrust(entry: Path) -> str:
    """Why an entry could be somebody else's work; empty if it could not."""
    for path in (entry, *sorted(entry.iterdir())) if entry.is_dir() else (entry,):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            return f"{path} is a symbolic link"
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to user {status.st_uid}"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{path} can be written by others"
    return ""


def _check(entry: Path, inputs: Mapping[str, Any]) -> tuple[Path | None, str]:
    """The wheel of an entry, or what is wrong with it."""
    try:
        record = json.loads((entry / _ENTRY).read_bytes())
        same = record["format"] == FORMAT and _canonical(record["inputs"]) == _canonical(inputs)
        wheel = entry / os.path.basename(record["file"])
        expected = record["sha256"]
        actual = _digest(wheel)
    except (OSError, ValueError, TypeError, KeyError) as error:
        return None, f"{entry} is damaged ({error})"
    if not same:
        return None, f"{entry / _ENTRY} does not describe this wheel"
    if actual != expected:
        return None, f"{wheel} is damaged: its hash is {actual}, recorded was {expected}"
    return wheel, ""


def _discard(entry: Path) -> None:
    """Take an entry away: first its name, so that nobody finds it half deleted."""
    condemned = entry.with_name(f"{entry.name}.damaged-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(entry, condemned)
    except OSError:
        return
    if condemned.is_dir() and not condemned.is_symlink():
        shutil.rmtree(condemned, ignore_errors=True)
    else:
        condemned.unlink()


def _fill(folder: Path, inputs: Mapping[str, Any], wheel: Path) -> None:
    digest = hashlib.sha256()
    descriptor = os.open(folder / wheel.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with open(descriptor, "wb") as target, wheel.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    record = {
        "format": FORMAT,
        "key": key(inputs),
        "inputs": inputs,
        "file": wheel.name,
        "sha256": digest.hexdigest(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    write_json(folder / _ENTRY, record, mode=0o644)


def _settle(temporary: Path, entry: Path) -> bool:
    """Give a finished entry its name; False if the name is taken."""
    try:
        os.rename(temporary, entry)
    except OSError:
        if os.path.lexists(entry):
            return False
        raise
    sync_folder(entry.parent)
    return True


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
