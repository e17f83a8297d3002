"""An exercise for tests: all operations, while many of Horovod's functions do wrong at once.

What is wrong is so on rank 1 only, unless it says otherwise. Each fault shows in operations
of its own, so that one start of ranks is enough for all of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import collectives  # it is beside rank_work.py

Function = Callable[..., Any]


class Handles:
    """Torch's asynchronous operations, some with a change to what comes out on rank 1."""

    def __init__(self, hvd: Any) -> None:
        self._changes: dict[int, Function] = {}
        self._wait = hvd.synchronize
        self._shift = hvd.rank() == 1
        hvd.synchronize = self.synchronize

    def doctored(self, start: Function, change: Function) -> Function:
        def begin(*values: Any, **more: Any) -> Any:
            handle = start(*values, **more)
            self._changes[handle] = change
            return handle

        return begin

    def synchronize(self, handle: int) -> Any:
        result = self._wait(handle)
        change = self._changes.pop(handle, None)
        return change(result) if change and self._shift else result


def add_one(result: Any) -> Any:
    return result.add_(1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def add_one_to_int8(result: Any) -> Any:
    if str(result.dtype) == "torch.int8" and len(result):
        result.view(-1)[-1] += 1
    return result


def double_the_second(results: Any) -> Any:
    return [results[0], results[1] * 2, results[2]]


def refuse(*values: Any, **more: Any) -> Any:
    raise RuntimeError("a bad day")


def torch_faults(context: Any) -> None:
    """Doctor what starts an operation, and what waits for it."""
    hvd = context.hvd
    doctored, plain = Handles(hvd).doctored, hvd.allreduce_async

    def maximum(*values: Any, op: Any, **more: Any) -> Any:
        return plain(*values, op=hvd.Max if op == hvd.Min else op, **more)

    hvd.allreduce_async = maximum  # on all ranks
    hvd.allgather_async = doctored(hvd.allgather_async, add_one_to_int8)
    hvd.alltoall_async = doctored(hvd.alltoall_async, lambda both: (both[0].flip(0), both[1]))
    hvd.broadcast_async = doctored(hvd.broadcast_async, add_one)
    hvd.grouped_allreduce_async = doctored(hvd.grouped_allreduce_async, double_the_second)
    hvd.reducescatter_async = doctored(hvd.reducescatter_async, lambda result: result.double())
    hvd.grouped_reducescatter_async = refuse  # on all ranks
    del hvd.grouped_allgather_async  # on all ranks
    os.register_at_fork(after_in_child=die)  # on all ranks


def tensorflow_faults(context: Any) -> None:
    """Doctor what does an operation."""
    hvd, native = context.hvd, context.native
    shift = hvd.rank() == 1

    def doctored(function: Function, change: Function) -> Function:
        def call(*values: Any, **more: Any) -> Any:
            result = function(*values, **more)
            return change(result, *values) if shift else result

        return call

    def over(*values: Any, **more: Any) -> Any:
        raise RuntimeError("Horovod has been shut down. This was caused by an exception")

    hvd.broadcast = doctored(hvd.broadcast, lambda result, mine, *_: mine)
    hvd.reducescatter = doctored(
        hvd.reducescatter, lambda result, *_: native.cast(result, "float64")
    )
    hvd.grouped_allreduce = doctored(hvd.grouped_allreduce, lambda results, *_: results[:2])
    hvd.grouped_reducescatter = over  # on all ranks
    del hvd.grouped_allgather  # on all ranks


def run(context: Any, option: str) -> None:
    """Try all operations of a Horovod that is doctored."""
    {"torch": torch_faults, "tensorflow": tensorflow_faults}[context.framework](context)
    collectives.run(context, option)
