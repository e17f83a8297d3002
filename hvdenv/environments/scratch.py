"""Temporary folders of one command: to resolve, fetch or build in.

Each holds the lock of its process, so that the next command can tell which ones a killed
process has left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv.environments import prefix_lock
from hvdenv.errors import HvdenvError
from hvdenv.places import LEFT_ALONE_SECONDS, make_folder, reporting
from hvdenv.runner import Runner, end_marked

# The folders may be in /tmp, which other programs use as well.
_PREFIX = "hvdenv-scratch-"


class Scratch(NamedTuple):
    """A folder that is deleted in the end, and a runner whose commands have it as TMPDIR."""

    path: Path
    runner: Runner


@contextmanager
def folder(root: Path, purpose: str) -> Iterator[Scratch]:
    """Create a folder below ``root``; those of killed runs are deleted first.

    Raises:
        StepError: ``root`` cannot be written.
    """
    for left in list(make_folder(root).glob(f"{_PREFIX}*")):
        _delete_if_left(left)
    with reporting(root):
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=root))
    try:
        with prefix_lock.hold(path, wait=0) as held:
            yield Scratch(path, Runner(token=held.token).changed({"TMPDIR": str(path)}))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _delete_if_left(path: Path) -> None:
    """Delete a folder of a process that is gone, and end the processes that it left running."""
    lock = path / prefix_lock.LOCK
    with suppress(OSError, HvdenvError):
        if path.lstat().st_uid != os.getuid():
            return
        # The file that its holder touches every few seconds.
        living = lock if lock.exists() else path
        old = time.time() - living.stat().st_mtime > LEFT_ALONE_SECONDS
        if not lock.exists() and not old:
            return
        # A clock that jumped makes the heartbeats of a living process look old.
        gone = old and not prefix_lock.runs_here(path)
        with prefix_lock.hold(path, wait=0, break_lock=gone) as held:
            if held.replaced:
                end_marked(held.replaced.token)
        if held.replaced or old:
            shutil.rmtree(path, ignore_errors=True)
