"""What builds have fetched and unpacked, and keep for the next: the files of each lock, conda
packages, and what uv has unpacked. All of it can be had again."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from hvdenv.command import OWN_PYTHON, Command
from hvdenv.environments import prefix_lock
from hvdenv.environments.storage import Counter
from hvdenv.errors import BusyError
from hvdenv.places import Places
from hvdenv.runner import Runner
from hvdenv.wheels.wheelcache import superfluous

# So much of the files of locks is left by a build.
LARGEST_FILES = 20e9
# uv waits so long for others to end before it empties its cache.
_SECONDS = 60.0


class Kept(NamedTuple):
    """A folder that goes or stays as a whole.

    Attributes:
        path: the folder.
        bytes: of its files.
        used: when a build last took something from it.
    """

    path: Path
    bytes: int
    used: str

    @property
    def created(self) -> str:
        return self.used


def kept(places: Places, counter: Counter) -> list[Kept]:
    """All that is kept, but for wheels of Horovod."""
    folders = [*_files(places), *(places.cache / "conda" / "packages").glob("*"), _uv(places)]
    found = [_looked_at(each, counter) for each in folders if each.is_dir()]
    return [each for each in found if each.bytes]


def touch(places: Places, files: Path) -> None:
    """Note that a build has used the files of a lock, and what uv has of them."""
    for folder in (files, _uv(places)):
        with suppress(OSError):
            os.utime(folder)


def trim(places: Places, spared: Path, runner: Runner) -> None:
    """Remove the files of locks that were not used for longest, where there are too many.

    Args:
        places: where they lie.
        spared: the folder that was used just now.
        runner: as for remove().
    """
    counter = Counter()
    entries = [_looked_at(each, counter) for each in _files(places)]
    own = sum(each.bytes for each in entries if each.path == spared)
    others = [each for each in entries if each.path != spared]
    for entry in superfluous(others, largest=LARGEST_FILES - own):
        remove(places, entry, runner)


def remove(places: Places, entry: Kept, runner: Runner) -> bool:
    """Remove one; False if a build uses it now, or it cannot be removed."""
    if entry.path == _uv(places):
        clean = (OWN_PYTHON, "-m", "uv", "cache", "clean", "--cache-dir", str(entry.path))
        return bool(runner.run(Command(clean, timeout=_SECONDS)))
    if entry.path.parent.name != "files":
        shutil.rmtree(entry.path, ignore_errors=True)
        return not entry.path.exists()
    try:
        with prefix_lock.hold(entry.path, wait=0):
            shutil.rmtree(entry.path, ignore_errors=True)
    except BusyError:
        return False
    return not entry.path.exists()


def forget_unpacked(places: Places, runner: Runner) -> None:
    """Have uv unpack everything again: a power cut may have left empty files in its cache."""
    remove(places, Kept(_uv(places), 0, ""), runner)


def _files(places: Places) -> list[Path]:
    return list((places.cache / "files").glob("*"))


def _uv(places: Places) -> Path:
    return places.cache / "uv"


def _looked_at(folder: Path, counter: Counter) -> Kept:
    used = datetime.fromtimestamp(folder.stat().st_mtime, timezone.utc)
    return Kept(folder, counter.count(folder).bytes, used.isoformat(timespec="seconds"))
