"""Waiting for what happens soon, and seeing whether a process has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], object], seconds: float = 60, pause: float = 0.02) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: it does not, after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(pause)


def runs(pid: int) -> bool:
    """Whether a process has not ended; nobody may have waited for it."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
