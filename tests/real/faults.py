"""An exercise for tests: the training, again and again, with parts of Horovod that do wrong.

A fault is a list of what stands in for what while the training runs: a test could doctor the
installation as well, but only once for each start of ranks, and frameworks import slowly. Only
the parts of the training that it concerns are run. They are reported as ``FAULT: PART``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import training  # beside rank_work.py, as events is
from events import Training

Function = Callable[..., Any]

# Parts of the training: all of a framework, or those with these names.
ALL = ""
OPTIMIZER, TAPE, FIT = "DistributedOptimizer", "DistributedGradientTape", "Keras fit"


class Fault(NamedTuple):
    """A fault.

    Attributes:
        parts: names of the parts of the training, separated by commas.
        changes: what has which attribute, and what stands in for it.
    """

    parts: str
    changes: tuple[tuple[Any, str, Any], ...] = ()


class Context:
    """A rank's context that reports parts of the training under the name of a fault."""

    def __init__(self, context: Any, fault: str) -> None:
        self._context = context
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def report(self, event: Any) -> None:
        if isinstance(event, Training):
            event = event._replace(part=f"{self._fault}: {event.part}")
        self._context.report(event)


def nothing(*arguments: Any, **more: Any) -> None:
    """Stands in for what should do something."""


def always(function: Function, **fixed: Any) -> Function:
    """A function that ignores what it is given for some arguments."""
    return lambda *arguments, **more: function(*arguments, **{**more, **fixed})


def torch_faults(context: Any) -> dict[str, Fault]:
    hvd = context.hvd
    optimizer, parameters = hvd.DistributedOptimizer, hvd.broadcast_parameters

    def no_buffers(saved: Mapping[str, Any], root_rank: int) -> None:
        parameters({name: each for name, each in saved.items() if "norm" not in name}, root_rank)

    plain = {
        "parameters": (hvd, "broadcast_parameters", nothing),
        "buffers": (hvd, "broadcast_parameters", no_buffers),
        "state": (hvd, "broadcast_optimizer_state", nothing),
        "alone": (hvd, "DistributedOptimizer", lambda inner, **more: inner),
        "added": (hvd, "DistributedOptimizer", always(optimizer, op=hvd.Sum)),
    }
    return {
        "none": Fault(ALL),
        **{name: Fault(OPTIMIZER, (change,)) for name, change in plain.items()},
    }


def tensorflow_faults(context: Any) -> dict[str, Fault]:
    hvd = context.hvd
    keras: Any = importlib.import_module("horovod.tensorflow.keras")
    callbacks = keras.callbacks
    tape, optimizer = hvd.DistributedGradientTape, keras.DistributedOptimizer

    def unwrapped(inner: Any, **more: Any) -> Any:
        return inner

    return {
        "none": Fault(ALL),
        "variables": Fault(TAPE, ((hvd, "broadcast_variables", nothing),)),
        "alone": Fault(
            f"{TAPE},{FIT}",
            (
                (hvd, "DistributedGradientTape", unwrapped),
                (callbacks.BroadcastGlobalVariablesCallback, "on_batch_end", nothing),
            ),
        ),
        "added": Fault(
            TAPE, ((hvd, "DistributedGradientTape", functools.partial(tape, op=hvd.Sum)),)
        ),
        "optimizer": Fault(
            FIT, ((keras, "DistributedOptimizer", functools.partial(optimizer, op=keras.Sum)),)
        ),
        "plain optimizer": Fault(FIT, ((keras, "DistributedOptimizer", unwrapped),)),
    }


FAULTS = {"torch": torch_faults, "tensorflow": tensorflow_faults}


def run(context: Any, option: str) -> None:
    """Train with each fault in turn."""
    parts = training.PARTS[context.framework]
    for name, fault in FAULTS[context.framework](context).items():
        names = fault.parts.split(",") if fault.parts else parts
        concerned = {each: parts[each] for each in names}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(training.PARTS, {context.framework: concerned}))
            for change in fault.changes:
                stack.enter_context(mock.patch.object(*change))
            stand_in: Any = Context(context, name)
            training.run(stand_in, "")
