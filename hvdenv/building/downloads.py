"""What builds have fetched and unpacked, and keep for later builds: conda packages, and uv's cache.
All of it can be fetched again.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from hvdenv.base.command import OWN_PYTHON, Command
from hvdenv.base.places import Places
from hvdenv.base.runner import Runner
from hvdenv.building.wheelcache import Kept, least_recently_used
from hvdenv.environments.generations import timestamp
from hvdenv.environments.registry import measure

# What `wheels prune --downloads` keeps by default, in bytes.
LARGEST = 20e9
# How long uv waits for other processes before it empties its cache.
_SECONDS = 60.0


def touch(places: Places) -> None:
    """Note that a build has used uv's cache."""
    with suppress(OSError):
        os.utime(places.cache / "uv")


def prune(
    places: Places, runner: Runner, *, largest: float | None = None, oldest: str = ""
) -> list[tuple[Kept, bool]]:
    """Remove what was least recently used.

    Args:
        largest: bytes to keep.
        oldest: remove what was not used since this time.

    Returns:
        what was to go, and whether it is gone: a build may use it, or it cannot be removed.
    """
    found = []
    for kind in ("conda/packages/*", "uv"):
        for folder in filter(Path.is_dir, places.cache.glob(kind)):
            used = timestamp(folder.stat().st_mtime, "seconds")
            found.append(Kept(folder, measure(folder).bytes, used))
    filled = [each for each in found if each.bytes]
    going = least_recently_used(filled, largest=largest, oldest=oldest)
    return [(each, _remove(each.path, runner)) for each in going]


def forget_unpacked(places: Places, runner: Runner) -> None:
    """Empty the cache of uv: a power cut may have left empty files in it."""
    _remove(places.cache / "uv", runner)


def _remove(folder: Path, runner: Runner) -> bool:
    if folder.name == "uv":
        clean = (OWN_PYTHON, "-m", "uv", "cache", "clean", "--cache-dir", str(folder))
        return bool(runner.run(Command(clean, timeout=_SECONDS)))
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
