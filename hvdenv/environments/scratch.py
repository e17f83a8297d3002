"""Folders for what is needed only while something is found or fetched.

Each has the lock of its process, so that the next run can tell what a killed one has left.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv.environments import buildlock
from hvdenv.errors import HvdenvError
from hvdenv.places import Places, make_folder
from hvdenv.runner import Runner, end_marked

# What is on another host, or has no lock yet, is left alone for so long.
LEFT_ALONE_SECONDS = 86400.0


class Scratch(NamedTuple):
    """A folder that is deleted in the end, and what runs commands in it."""

    path: Path
    runner: Runner


@contextmanager
def folder(places: Places, purpose: str) -> Iterator[Scratch]:
    """A new folder; those of killed runs are deleted first.

    Args:
        places: it lies in the cache there.
        purpose: begins its name.

    Raises:
        StepError: the cache cannot be written.
    """
    root = make_folder(places.cache / "scratch")
    for left in list(root.iterdir()):
        _delete_if_left(left)
    path = Path(tempfile.mkdtemp(prefix=f"{purpose}-", dir=root))
    try:
        with buildlock.hold(path, wait=0) as held:
            yield Scratch(path, Runner(token=held.token))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _delete_if_left(path: Path) -> None:
    """Delete a folder of a process that is gone, and end what that has left running."""
    lock = path / buildlock.LOCK
    # The file that its holder touches every few seconds.
    living = lock if lock.exists() else path
    with suppress(OSError, HvdenvError):
        old = time.time() - living.stat().st_mtime > LEFT_ALONE_SECONDS
        if not lock.exists() and not old:
            return
        with buildlock.hold(path, wait=0, break_lock=old) as held:
            if held.replaced:
                end_marked(held.replaced.token)
        if held.replaced or old:
            shutil.rmtree(path, ignore_errors=True)
