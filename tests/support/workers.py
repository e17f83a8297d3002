"""What the workers of one test session (pytest-xdist) share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """The temporary directory of the session, above those of its workers."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process make something; the others wait, and find it made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
