"""What builds have fetched and unpacked, and keep for later builds: the files of each lock, conda
packages, and uv's cache. All of it can be fetched again.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

from hvdenv.command import OWN_PYTHON, Command
from hvdenv.environments import prefix_lock
from hvdenv.environments.generations import timestamp
from hvdenv.environments.storage import measure
from hvdenv.errors import BusyError
from hvdenv.places import Places
from hvdenv.runner import Runner
from hvdenv.wheels.wheelcache import Kept, least_recently_used

# Size of the files of locks that a build keeps, in bytes.
LARGEST_FILES = 20e9
# How long uv waits for other processes before it empties its cache.
_SECONDS = 60.0


def touch(places: Places, files: Path) -> None:
    """Note that a build has used the files of a lock, and uv's cache."""
    for folder in (files, places.cache / "uv"):
        with suppress(OSError):
            os.utime(folder)


def prune(
    places: Places, runner: Runner, *, largest: float | None = None, oldest: str = "",
    spared: Path | None = None,
) -> list[tuple[Kept, bool]]:  # fmt: skip
    """Remove what was least recently used.

    Args:
        largest: bytes to keep.
        oldest: remove what was not used since this time.
        spared: files of a lock, to which others of their kind only give way.

    Returns:
        what was to go, and whether it is gone: a build may use it, or it cannot be removed.
    """
    found = []
    for kind in ["files/*"] if spared else ["files/*", "conda/packages/*", "uv"]:
        for folder in filter(Path.is_dir, places.cache.glob(kind)):
            used = timestamp(folder.stat().st_mtime, "seconds")
            found.append(Kept(folder, measure(folder).bytes, used))
    largest = largest and largest - sum(each.bytes for each in found if each.path == spared)
    others = [each for each in found if each.bytes and each.path != spared]
    going = least_recently_used(others, largest=largest, oldest=oldest)
    return [(each, _remove(each.path, runner)) for each in going]


def forget_unpacked(places: Places, runner: Runner) -> None:
    """Empty the cache of uv: a power cut may have left empty files in it."""
    _remove(places.cache / "uv", runner)


def _remove(folder: Path, runner: Runner) -> bool:
    if folder.name == "uv":
        clean = (OWN_PYTHON, "-m", "uv", "cache", "clean", "--cache-dir", str(folder))
        return bool(runner.run(Command(clean, timeout=_SECONDS)))
    is_locked = folder.parent.name == "files"
    try:
        with prefix_lock.hold(folder, wait=0) if is_locked else nullcontext():
            shutil.rmtree(folder, ignore_errors=True)
    except BusyError:
        return False
    return not folder.exists()
