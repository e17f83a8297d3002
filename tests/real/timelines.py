"""An exercise for tests: Horovod's timeline, as it is and with functions that do wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import collectives  # it is beside rank_work.py
from collective_cases import case


def writes(text: str) -> Callable[[str], object]:
    """Stands in for hvd.start_timeline()."""
    return lambda path: Path(path).write_text(text)


def before_init(context: Any, option: str) -> None:
    """As with verify --full."""
    collectives.before_init(context, "full")


def run(context: Any, option: str) -> None:
    """Record a timeline; with each fault, too."""
    faults: dict[str, Callable[[str], object]] = {
        "right": context.hvd.start_timeline,
        "no file": lambda path: None,
        "cut off": writes('[{"name": "ALLREDUCE"},'),
        "without events": writes("[]"),
    }
    caller = collectives.Caller(context)
    for name, start in faults.items():
        limit = collectives.TIMELINE_LIMIT if name == "right" else 0.1
        with (
            mock.patch.object(context.hvd, "start_timeline", start),
            mock.patch.object(collectives, "TIMELINE_LIMIT", limit),
        ):
            context.report(caller.try_all(name, [[case("timeline")]]).event())
