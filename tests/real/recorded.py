"""An exercise for tests: all that verify runs by default, and which of Horovod's names it reads."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import collectives  # beside rank_work.py, as events is
import training
from events import Operation

READ: dict[str, set[str]] = {}


class Recorded(ModuleType):
    """A module that notes the names that are read."""

    def __getattribute__(self, name: str) -> Any:
        READ.setdefault(ModuleType.__getattribute__(self, "__name__"), set()).add(name)
        return ModuleType.__getattribute__(self, name)


def run(context: Any, option: str) -> None:
    """Run the exercises, and report the names as types of an operation for each module."""
    if context.framework == "tensorflow":
        importlib.import_module("horovod.tensorflow.keras")
    for name, module in list(sys.modules.items()):
        if name.startswith("horovod."):
            module.__class__ = Recorded
    collectives.run(context, "")
    training.run(context, "")
    for name, names in READ.items():
        public = sorted(each for each in names if not each.startswith("_"))
        context.report(Operation(operation=f"read: {name}", right=1, wrong=0, types=public))
