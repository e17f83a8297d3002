"""Space used by environments and caches, and space left on their file systems.

The size of a complete generation is in its record; only unfinished ones and caches are walked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.environments import generations, registry
from hvdenv.environments.generations import Environment
from hvdenv.model.observe import quota, space
from hvdenv.places import Places
from hvdenv.runner import Runner
from hvdenv.sites import workspace

State = Literal["active", "complete", "unfinished", "damaged"]


class Size(NamedTuple):
    """Bytes of files, and the number of files and links."""

    bytes: int
    files: int


class Generation(NamedTuple):
    """One generation of an environment.

    Attributes:
        state: ``damaged`` has no readable record.
        created: when it was finished, or last worked on; in UTC.
        used_by: how that is known; see last_used.LastUsed.
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
        """Time since when it is unused."""
        return max(self.created, self.used)


class Cache(NamedTuple):
    name: str
    path: str
    bytes: int
    files: int


class Room(NamedTuple):
    """Space left on the file system of a directory, in bytes and inodes; None if unknown."""

    path: str
    disk_free: int | None
    inodes_free: int | None
    quota_free: int | None


def measure(folder: Path) -> Size:
    """Size of what is in a directory; links are not followed, and unreadable directories are left out."""
    size = files = 0
    for where, folders, names in os.walk(folder):
        paths = [os.path.join(where, name) for name in (*folders, *names)]
        for path in paths:
            with suppress(OSError):
                found = os.lstat(path)
                files += not stat.S_ISDIR(found.st_mode)
                size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return Size(size, files)


def list_generations(environment: Environment, places: Places) -> tuple[Generation, ...]:
    records, active = environment.records(), environment.active()
    found = []
    for identity in environment.identities():
        folder = environment.generation(identity)
        used, added = registry.last_use(places, folder), ()
        if record := records.get(identity):
            state: State = "active" if identity == active else "complete"
            created, size = record.created, Size(record.bytes, record.files)
            added = tuple(record.additions.get("requirements", ()))
        else:
            state = "unfinished" if environment.begun(identity) else "damaged"
            created, size = _last_change(folder), measure(folder)
        found.append(Generation(identity, state, created, *size, used.when, used.how, added))
    return tuple(sorted(found, key=lambda one: (one.created, one.generation), reverse=True))


def _last_change(folder: Path) -> str:
    """When a build last changed something in the directory of a generation."""
    try:
        latest = max(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder))
    except (OSError, ValueError):
        return ""
    return generations.timestamp(latest)


def list_caches(places: Places) -> tuple[Cache, ...]:
    """The caches under HVDENV_HOME, not those of pip and other programs."""
    folders = sorted(each for each in places.cache.glob("*") if each.is_dir())
    return tuple(Cache(each.name, str(each), *measure(each)) for each in folders)


def room(folders: Iterable[Path], runner: Runner) -> tuple[Room, ...]:
    """Space left on the file systems of some directories, each once."""
    devices: dict[int, Path] = {}
    for folder in folders:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        devices.setdefault(folder.stat().st_dev, folder)
    left = quota(runner) if devices else None
    return tuple(Room(str(each), *space(each), left) for each in devices.values())


def warnings(environment: Environment, runner: Runner) -> tuple[str, ...]:
    """Policies that will delete files of an environment without the user."""
    active = environment.active()
    if not active:
        return ()
    resolved = generations.read_record(environment.record(active)).resolved
    stated, folder = resolved.get("places", {}), environment.prefix.parent
    found = []
    elsewhere = stated.get("environments") not in (None, str(folder))
    if stated.get("expires_days") and not elsewhere:
        found.append(
            f"each file here is deleted {stated['expires_days']} days after its last use;"
            " `hvdenv verify` reports missing files"
        )
    if stated.get("workspace"):
        left = workspace.remaining(folder, runner)
        found += [f"its workspace is deleted in {left}; extend it with ws_extend"] if left else []
    return tuple(found)
