"""How much room environments and caches take, and what is left where they lie.

What a complete generation takes stands in its record; only unfinished ones and caches
are walked through.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hvdenv.environments import generations, last_used
from hvdenv.environments.generations import Environment
from hvdenv.model.observe import quota, space
from hvdenv.places import Places
from hvdenv.runner import Runner
from hvdenv.sites import workspace

State = Literal["active", "complete", "unfinished", "damaged"]
# What walks far says so after this long, and then again and again.
QUIET_SECONDS = 2.0
# Is told a folder and how many files were counted in it so far.
Tell = Callable[[Path, int], None]


class Size(NamedTuple):
    """Bytes of files, and the number of files and links."""

    bytes: int
    files: int


class Generation(NamedTuple):
    """One generation of an environment.

    Attributes:
        generation: its identity.
        state: ``damaged`` is one without a record that can be read.
        created: when it was finished, or last worked at; in UTC.
        bytes, files: what it takes.
        used: when it was last used, as far as that was seen; or empty.
        used_by: how that was seen; see last_used.LastUsed.
        added: packages that the user has added with `install`.
    """

    generation: str
    state: State
    created: str
    bytes: int
    files: int
    used: str
    used_by: str
    added: tuple[str, ...] = ()

    @property
    def since(self) -> str:
        """Since when it is not used."""
        return max(self.created, self.used)


class Cache(NamedTuple):
    """A cache under HVDENV_HOME."""

    name: str
    path: str
    bytes: int
    files: int


class Room(NamedTuple):
    """What is left on a file system; None where nobody says it.

    Attributes:
        path: a folder on it.
        disk_free, inodes_free, quota_free: bytes, inodes and bytes.
    """

    path: str
    disk_free: int | None
    inodes_free: int | None
    quota_free: int | None


class Counter:
    """Walks through folders and tells how far it is.

    Args:
        tell: is called once the walk takes long.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._next = time.monotonic() + QUIET_SECONDS

    def count(self, folder: Path) -> Size:
        """What lies in a folder; links are not followed, and what cannot be read is left out."""
        size = files = 0
        waiting = [str(folder)]
        while waiting:
            try:
                entries = list(os.scandir(waiting.pop()))
            except OSError:
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                    continue
                files += 1
                size += _size(entry)
            if time.monotonic() > self._next:
                self._next = time.monotonic() + QUIET_SECONDS
                self._tell(folder, files)
        return Size(size, files)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return 0 if entry.is_symlink() else entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


def list_generations(
    environment: Environment, places: Places, counter: Counter
) -> tuple[Generation, ...]:
    """All generations of an environment, the newest first."""
    records, active = environment.records(), environment.active()
    found = [
        _generation(environment, each, records.get(each), each == active, places, counter)
        for each in environment.identities()
    ]
    return tuple(sorted(found, key=lambda one: (one.created, one.generation), reverse=True))


def _generation(
    environment: Environment,
    identity: str,
    record: Mapping[str, Any] | None,
    active: bool,
    places: Places,
    counter: Counter,
) -> Generation:
    folder = environment.generation(identity)
    used = last_used.find(places, folder)
    if record is not None:
        state: State = "active" if active else "complete"
        created = record.get("created", "")
        size = Size(record.get("bytes", 0), record.get("files", 0))
    else:
        state = "unfinished" if environment.begun(identity) else "damaged"
        created, size = _worked_at(folder), counter.count(folder)
    added = tuple((record or {}).get("additions", {}).get("requirements", ()))
    return Generation(identity, state, created, *size, used.when, used.how, added)


def _worked_at(folder: Path) -> str:
    """When a build last did something in a generation: its journal lies there."""
    try:
        latest = max(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder))
    except (OSError, ValueError):
        return ""
    return datetime.fromtimestamp(latest, timezone.utc).isoformat(timespec="microseconds")


def list_caches(places: Places, counter: Counter) -> tuple[Cache, ...]:
    """The caches under HVDENV_HOME; those of pip and others are their own matter."""
    try:
        names = sorted(os.listdir(places.cache))
    except OSError:
        return ()
    folders = [places.cache / name for name in names if (places.cache / name).is_dir()]
    return tuple(Cache(each.name, str(each), *counter.count(each)) for each in folders)


def room(folders: Iterable[Path], runner: Runner) -> tuple[Room, ...]:
    """What is left on the file systems of some folders, each once."""
    devices: dict[int, Path] = {}
    for folder in folders:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        devices.setdefault(folder.stat().st_dev, folder)
    left = quota(runner) if devices else None
    return tuple(Room(str(each), *space(each), left) for each in devices.values())


def warnings(environment: Environment, runner: Runner) -> tuple[str, ...]:
    """What will take an environment away although nobody removes it."""
    active = environment.active()
    if not active:
        return ()
    resolved = generations.read_record(environment.record(active)).get("resolved", {})
    stated, folder = resolved.get("places", {}), environment.prefix.parent
    found = []
    elsewhere = stated.get("environments") not in (None, str(folder))
    if stated.get("expires_days") and not elsewhere:
        found.append(
            f"files here are deleted {stated['expires_days']} days after their last use, each by"
            " itself; `hvdenv verify` says what is missing"
        )
    if stated.get("workspace"):
        left = workspace.remaining(folder, runner)
        found += [f"its workspace is deleted in {left}; ws_extend puts that off"] if left else []
    return tuple(found)
