"""Compiled wheels of Horovod as far as a cache cares what they are, and the umask they get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


def wheel_in(folder: Path, content: bytes = b"wheel" * 1000) -> Path:
    """A file that goes for a wheel."""
    path = folder / NAME
    path.write_bytes(content)
    return path


@contextmanager
def umask(value: int) -> Iterator[None]:
    """What is written within is written under this umask."""
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)
