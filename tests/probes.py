"""Probes as modules: hvdenv runs them as programs and imports none of them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from hvdenv import PROBES


def load(name: str) -> ModuleType:
    """A probe, which finds those that it imports beside it."""
    sys.path.insert(0, str(PROBES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(PROBES))
