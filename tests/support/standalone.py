"""Stand-alone programs as modules, for tests; hvdenv itself runs them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from hvdenv import (
    IMAGE_PROGRAMS,
    INSPECT_PROGRAMS,
    RANK_PROGRAMS,
    STEP_PROGRAMS,
    WHEEL_PROGRAMS,
)

FOLDERS = [
    str(folder)
    for folder in (
        IMAGE_PROGRAMS,
        STEP_PROGRAMS,
        INSPECT_PROGRAMS,
        RANK_PROGRAMS,
        WHEEL_PROGRAMS,
        RANK_PROGRAMS.with_name("program"),
    )
]


def load(name: str) -> ModuleType:
    """A program as a module, with the programs that it imports."""
    before = sys.path[:]
    sys.path[:0] = FOLDERS
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before
