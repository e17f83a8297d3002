"""Temporary directories of one command: to resolve, fetch or build in.

Each holds the lock of its process, so that the next command can tell which ones a killed
process has left.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.errors import HvdenvError
from hvdenv.base.masking import learn_from_pip
from hvdenv.base.places import LEFT_ALONE_SECONDS, make_folder, reporting
from hvdenv.base.runner import Runner, end_marked
from hvdenv.environments import prefix_lock

# The directories may be in /tmp, which other programs use as well.
_PREFIX = "hvdenv-scratch-"
_SETTLE_SECONDS = 10.0


class Scratch(NamedTuple):
    """A directory that is deleted in the end, and a runner whose commands have it as TMPDIR."""

    path: Path
    runner: Runner


@contextmanager
def folder(root: Path, purpose: str) -> Iterator[Scratch]:
    """Create a directory below ``root``; those of killed runs are deleted first.

    From now on, passwords of pip's configuration are masked: what runs here reads it.

    Raises:
        StepError: ``root`` cannot be written.
    """
    learn_from_pip()
    for left in list(make_folder(root).glob(f"{_PREFIX}*")):
        _delete_if_left(left)
    with reporting(root):
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=root))
    try:
        # Another process may be looking whether this one is gone.
        with prefix_lock.hold(path, wait=_SETTLE_SECONDS) as held:
            yield Scratch(path, Runner(token=held.token).changed({"TMPDIR": str(path)}))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _delete_if_left(path: Path) -> None:
    """Delete a directory of a process that is gone, and end the processes that it left running."""
    with suppress(OSError, HvdenvError):
        if path.lstat().st_uid != os.getuid():
            return
        is_new = time.time() - path.stat().st_mtime < LEFT_ALONE_SECONDS
        if is_new and not any(path.glob(f"{prefix_lock.PREFIX}*")):
            return  # another process has just created it
        with prefix_lock.hold(path, wait=0, stale=LEFT_ALONE_SECONDS) as held:
            for token in held.replaced:
                end_marked(token)
            shutil.rmtree(path, ignore_errors=True)
