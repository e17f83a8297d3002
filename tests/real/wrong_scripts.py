"""An exercise for tests: what scripts call, again and again, with a part of Horovod that does wrong.

Each fault is tried with the script that it concerns, and reported as ``FAULT: SCRIPT``.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import scripts  # beside rank_work.py, as events is
from events import Operation

Function = Callable[..., Any]
Fault = tuple[str, Any, str, Any]  # the script, what has which attribute, and what stands in for it

LIMIT = 2**16


class Context:
    """A rank's context that reports scripts under the name of a fault."""

    def __init__(self, context: Any, fault: str) -> None:
        self._context = context
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def report(self, event: Any) -> None:
        if isinstance(event, Operation):
            event = event._replace(operation=f"{self._fault}: {event.operation}")
        self._context.report(event)


class Children:
    """While `die` is true, forked processes end by a signal."""

    die = False

    @classmethod
    def after_fork(cls) -> None:
        if cls.die:
            os.kill(os.getpid(), signal.SIGSEGV)


def faults(context: Any) -> dict[str, Fault]:
    """Those of both frameworks; the last one leaves Horovod shut down."""
    hvd = context.hvd
    real, gather, init = hvd.broadcast_object, hvd.allgather_object, hvd.init

    def large(sent: Any, *root: Any) -> Any:
        if len(pickle.dumps(sent)) > LIMIT:
            raise RuntimeError("too large")
        return real(sent, *root)

    def cut(sent: Any) -> Any:
        return [{**each, "bytes": each["bytes"][: 2**20]} for each in gather(sent)]

    def once(*arguments: Any) -> None:
        raise ValueError("Horovod was initialised before")

    def without_sets(**arguments: Any) -> None:
        init()

    return {
        "none": ("", hvd, "rank", hvd.rank),
        "large": ("objects", hvd, "broadcast_object", large),
        "cut": ("objects", hvd, "allgather_object", cut),
        "alone": ("objects", hvd, "allgather_object", lambda sent: [sent]),
        "dead": ("forked processes", Children, "die", True),
        "ready": ("numbers", hvd, "is_initialized", lambda: False),
        **(torch_faults(context) if context.framework == "torch" else tensorflow_faults(context)),
        "once": ("second init", hvd, "init", once),
        "sets": ("second init", hvd, "init", without_sets),
    }


def torch_faults(context: Any) -> dict[str, Fault]:
    def own(tensor: Any, *more: Any) -> Function:
        return lambda: tensor

    return {"sparse": ("sparse tensors", context.hvd, "sparse_allreduce_async", own)}


def tensorflow_faults(context: Any) -> dict[str, Fault]:
    hvd, native = context.hvd, context.native
    plain = native.keras.layers.BatchNormalization
    return {
        "sparse": ("sparse tensors", hvd, "allreduce", lambda slices, **more: slices),
        "plain layer": ("batch normalisation", hvd, "SyncBatchNormalization", plain),
        "size": ("numbers", hvd, "size_op", lambda: native.constant(1)),
        "hosts": ("numbers", hvd, "is_homogeneous", lambda: False),
    }


def run(context: Any, option: str) -> None:
    """Run the scripts with each fault in turn."""
    os.register_at_fork(after_in_child=Children.after_fork)
    for name, (script, where, attribute, stand_in) in faults(context).items():
        concerned = {key: each for key, each in scripts.SCRIPTS.items() if script in ("", key)}
        if not script:
            del concerned["second init"]
        with (
            mock.patch.dict(scripts.SCRIPTS, concerned, clear=True),
            mock.patch.object(where, attribute, stand_in),
        ):
            renamed: Any = Context(context, name)
            scripts.run(renamed, "")
