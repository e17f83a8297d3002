"""The first exercise of every rank: named allreduces of whole numbers, judged by the rank itself.

Every rank knows what every other rank puts in and computes the right answer on its own.
rank_work.py runs it. Runs on Python 3.6 and up; needs numpy, which the frameworks bring.
"""

import importlib
import os
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import events
from context import Array, Context, Shape

Input = Tuple[str, Array, Dict[str, Any]]
Reducer = Callable[[List[Input]], Dict[str, Array]]

SHAPES = ((1,), (17,), (3, 5), (2, 7, 11), (100003,))
DTYPES = ("float32", "float64", "int64")
OPERATIONS = ("Sum", "Average")


def values(numpy: Any, rank: int, shape: Shape, dtype: str) -> Array:
    """What a rank puts in: whole numbers from 500 to 1496, times a factor for wide types.

    Whole numbers make sums exact in float32 for 11000 ranks, in any order; that none is
    near 0 makes a rank that is left out or counted twice visible in every element; the
    factors make visible what was reduced in a type of fewer bits.
    """
    index = numpy.arange(numpy.prod(shape), dtype="int64")
    whole = 500 + (index * 31 + rank * 389 + index * rank * 7) % 997
    if dtype == "int64":
        whole = whole * (2**33 + 1)
    elif dtype == "float64":
        whole = whole * (1 + 2.0**-30)
    return whole.astype(dtype).reshape(shape)


def wanted(numpy: Any, size: int, shape: Shape, dtype: str, operation: str) -> Array:
    """The right answer for all ranks' values."""
    total = values(numpy, 0, shape, dtype)
    for rank in range(1, size):
        total = total + values(numpy, rank, shape, dtype)
    return total if operation == "Sum" else total.astype("float64") / size


def tolerance(numpy: Any, size: int, dtype: str, operation: str) -> Tuple[float, float]:
    """Relative and absolute error that a right average may have; a sum may have none."""
    if operation == "Sum":
        return 0.0, 0.0
    if dtype == "int64":
        return 1e-15, 1.0  # some versions round, some truncate
    return float(numpy.finfo(dtype).eps) * (size + 4), 0.0


def compare(
    numpy: Any, name: str, got: Array, want: Array, relative: float, absolute: float
) -> Optional[Dict[str, Any]]:
    """None, or what is wrong with the answer."""
    if got.shape != want.shape:
        return {
            "test": name,
            "got": "shape %s" % (got.shape,),
            "wanted": "shape %s" % (want.shape,),
        }
    if relative == absolute == 0.0:
        # Older Horovods give averages in other types, but never sums.
        if got.dtype != want.dtype:
            return {"test": name, "got": str(got.dtype), "wanted": str(want.dtype)}
        wrong = got != want
    else:
        got = got.astype("float64")
        wrong = ~(abs(got - want) <= absolute + relative * abs(want))
    if not wrong.any():
        return None
    at = int(numpy.flatnonzero(wrong.reshape(-1))[0])
    return {
        "test": name,
        "got": repr(got.reshape(-1)[at].item()),
        "wanted": repr(want.reshape(-1)[at].item()),
        "index": at,
        "elements": int(wrong.sum()),
        "of": int(wrong.size),
    }


def operation_arguments(hvd: Any, operation: str) -> Dict[str, Any]:
    """How this version of Horovod is told what to do with the values."""
    if hasattr(hvd, operation):
        return {"op": getattr(hvd, operation)}
    return {"average": operation == "Average"}


def torch_reducer(context: Context) -> Reducer:
    """A function that reduces many named arrays at once."""

    def reduce_all(inputs: List[Input]) -> Dict[str, Array]:
        handles = [
            (name, context.hvd.allreduce_async(context.tensor(array), name=name, **arguments))
            for name, array, arguments in inputs
        ]
        with context.waiting():
            results = [(name, context.hvd.synchronize(handle)) for name, handle in handles]
        return {name: context.array(result) for name, result in results}

    return reduce_all


def tensorflow_reducer(context: Context) -> Reducer:
    """A function that reduces many named arrays."""

    def reduce_all(inputs: List[Input]) -> Dict[str, Array]:
        # Otherwise it takes a GPU for tensors of the host's memory as well.
        with context.native.device(context.device or "/cpu:0"):
            return {name: reduce_one(name, array, given) for name, array, given in inputs}

    def reduce_one(name: str, array: Array, arguments: Dict[str, Any]) -> Array:
        tensor = context.tensor(array)
        with context.waiting():
            result = context.hvd.allreduce(tensor, name=name, **arguments)
        return context.array(result)

    return reduce_all


REDUCERS = {"torch": torch_reducer, "tensorflow": tensorflow_reducer}


def reduce_and_judge(
    hvd: Any, reduce_all: Reducer, prefix: str = ""
) -> Tuple[int, List[Dict[str, Any]], int]:
    """All tests.

    Args:
        hvd: Horovod's module.
        reduce_all: reduces many named arrays.
        prefix: of their names.

    Returns:
        How many there were, what was wrong in those that failed, and in how many of these the
        rank got back what it had put in.
    """
    import numpy

    tests = [
        (
            "%s%s.%s.%s" % (prefix, dtype, "x".join(map(str, shape)), operation),
            shape,
            dtype,
            operation,
        )
        for shape in SHAPES
        for dtype in DTYPES
        for operation in OPERATIONS
    ]
    got = reduce_all(
        [
            (name, values(numpy, hvd.rank(), shape, dtype), operation_arguments(hvd, operation))
            for name, shape, dtype, operation in tests
        ]
    )
    wrong, own = [], 0
    for name, shape, dtype, operation in tests:
        want = wanted(numpy, hvd.size(), shape, dtype, operation)
        bounds = tolerance(numpy, hvd.size(), dtype, operation)
        found = compare(numpy, name, got[name], want, *bounds)
        if found:
            wrong.append(found)
            own += numpy.array_equal(got[name], values(numpy, hvd.rank(), shape, dtype))
    return len(tests), wrong, own


def enabled(hvd: Any, name: str) -> Optional[bool]:
    """mpi_enabled() or gloo_enabled(); None where this version does not have it."""
    ask = getattr(hvd, name, None)
    return bool(ask()) if ask else None


def run(context: Context) -> None:
    """Reduce, compare, and report ``result`` with what Horovod says about this rank.

    ``busy`` are the seconds that it needed itself, without those in which it waited for others.
    """
    hvd = context.hvd
    importlib.import_module("numpy")  # its seconds are the file system's
    reduce_all = REDUCERS[context.framework](context)
    began, waited = time.time(), context.waited
    tests, wrong, own = reduce_and_judge(hvd, reduce_all)
    busy = time.time() - began - (context.waited - waited)
    if context.gpu:
        context.device = context.gpu  # exercises go on there
        context.stage("allreduce", "on GPUs")
        more, wrong_there, own_there = reduce_and_judge(hvd, reduce_all, "gpu.")
        tests, wrong, own = tests + more, wrong + wrong_there, own + own_there
    result = events.Result(
        mpi_enabled=enabled(hvd, "mpi_enabled"),
        gloo_enabled=enabled(hvd, "gloo_enabled"),
        python=sys.executable,
        horovod=os.path.dirname(str(importlib.import_module("horovod").__file__)),
        framework=context.version,
        tests=tests,
        failed=len(wrong),
        wrong=wrong[:3],
        own=int(own),
        busy=round(max(busy, 0.001), 3),
        **context.numbers()._asdict(),
    )
    context.report(result)
