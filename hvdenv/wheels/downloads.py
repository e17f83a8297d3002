"""What builds have fetched and unpacked, and keep for later builds: the files of each lock, conda
packages, and uv's cache. All of it can be fetched again.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv.command import OWN_PYTHON, Command
from hvdenv.environments import prefix_lock
from hvdenv.environments.generations import timestamp
from hvdenv.environments.storage import Counter
from hvdenv.errors import BusyError
from hvdenv.places import Places
from hvdenv.runner import Runner
from hvdenv.wheels.wheelcache import least_recently_used

# Size of the files of locks that a build keeps, in bytes.
LARGEST_FILES = 20e9
# How long uv waits for other processes before it empties its cache.
_SECONDS = 60.0


class Download(NamedTuple):
    """A folder that is kept or deleted as a whole; ``since``: its last use by a build, in UTC."""

    path: Path
    bytes: int
    since: str


def kept(places: Places, counter: Counter) -> list[Download]:
    """All that is kept, except wheels of Horovod."""
    folders = [*_files(places), *(places.cache / "conda" / "packages").glob("*"), _uv(places)]
    found = [_measure(each, counter) for each in folders if each.is_dir()]
    return [each for each in found if each.bytes]


def touch(places: Places, files: Path) -> None:
    """Note that a build has used the files of a lock, and uv's cache."""
    for folder in (files, _uv(places)):
        with suppress(OSError):
            os.utime(folder)


def trim(places: Places, spared: Path, runner: Runner) -> None:
    """Remove the least recently used files of locks above the limit, but not the spared folder."""
    counter = Counter()
    entries = [_measure(each, counter) for each in _files(places)]
    own = sum(each.bytes for each in entries if each.path == spared)
    others = [each for each in entries if each.path != spared]
    for entry in least_recently_used(others, largest=LARGEST_FILES - own):
        remove(places, entry, runner)


def remove(places: Places, entry: Download, runner: Runner) -> bool:
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
    """Empty the cache of uv: a power cut may have left empty files in it."""
    remove(places, Download(_uv(places), 0, ""), runner)


def _files(places: Places) -> list[Path]:
    return list((places.cache / "files").glob("*"))


def _uv(places: Places) -> Path:
    return places.cache / "uv"


def _measure(folder: Path, counter: Counter) -> Download:
    used = timestamp(folder.stat().st_mtime, "seconds")
    return Download(folder, counter.count(folder).bytes, used)
