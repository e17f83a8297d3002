"""The first test of every rank: named allreduces of whole numbers.

Every rank knows the inputs of all ranks and computes the expected results itself.
Runs on Python 3.6 and newer with numpy, which the frameworks require.
"""

import contextlib
import importlib
import os
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import events
from context import Array, Context, Shape

Input = Tuple[str, Array, Dict[str, Any]]
Reducer = Callable[[List[Input]], Dict[str, Array]]

SHAPES = ((1,), (17,), (3, 5), (2, 7, 11), (100003,))
DTYPES = ("float32", "float64", "int64")
OPERATIONS = ("Sum", "Average")


def values(numpy: Any, rank: int, shape: Shape, dtype: str) -> Array:
    """A rank's input: whole numbers from 500 to 1496, times a factor for wide types.

    Sums of whole numbers are exact in float32 for 11000 ranks, in any order. Because no number
    is near 0, every element shows a rank that is missing or counted twice. The factors reveal
    reductions in a type of fewer bits.
    """
    index = numpy.arange(numpy.prod(shape), dtype="int64")
    whole = 500 + (index * 31 + rank * 389 + index * rank * 7) % 997
    if dtype == "int64":
        whole = whole * (2**33 + 1)
    elif dtype == "float64":
        whole = whole * (1 + 2.0**-30)
    return whole.astype(dtype).reshape(shape)


def expected(numpy: Any, size: int, shape: Shape, dtype: str, operation: str) -> Array:
    """The expected result of all ranks' values."""
    total = values(numpy, 0, shape, dtype)
    for rank in range(1, size):
        total = total + values(numpy, rank, shape, dtype)
    return total if operation == "Sum" else total.astype("float64") / size


def tolerance(numpy: Any, size: int, dtype: str, operation: str) -> Tuple[float, float]:
    """The relative and absolute error that a correct average may have; sums are exact."""
    if operation == "Sum":
        return 0.0, 0.0
    if dtype == "int64":
        return 1e-15, 1.0  # some versions round, some truncate
    return float(numpy.finfo(dtype).eps) * (size + 4), 0.0


def compare(
    numpy: Any, name: str, got: Array, want: Array, relative: float, absolute: float
) -> Optional[Dict[str, Any]]:
    """What is wrong with a result; None if nothing is."""
    if got.shape != want.shape:
        return {
            "test": name,
            "got": "shape %s" % (got.shape,),
            "wanted": "shape %s" % (want.shape,),
        }
    if relative == absolute == 0.0:
        # Older versions of Horovod return averages, but not sums, in other types.
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
    """The arguments that select the reduction in this version of Horovod."""
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
        with context.on_device(), waiting_in_library(context):
            return {name: reduce_one(name, array, given) for name, array, given in inputs}

    def reduce_one(name: str, array: Array, arguments: Dict[str, Any]) -> Array:
        return context.array(context.hvd.allreduce(context.tensor(array), name=name, **arguments))

    return reduce_all


@contextlib.contextmanager
def waiting_in_library(context: Context) -> Iterator[None]:
    """Within this block, time in the operation of Horovod's library counts as waiting.

    Horovod's Python functions around it are the rank's own work.
    """
    library: Any = getattr(importlib.import_module("horovod.tensorflow.mpi_ops"), "MPI_LIB", None)
    operation = getattr(library, "horovod_allreduce", None)
    if operation is None:
        yield
        return

    def waiting(*arguments: Any, **named: Any) -> Any:
        with context.waiting():
            return operation(*arguments, **named)

    library.horovod_allreduce = waiting
    try:
        yield
    finally:
        library.horovod_allreduce = operation


REDUCERS = {"torch": torch_reducer, "tensorflow": tensorflow_reducer}


def reduce_and_judge(
    hvd: Any, reduce_all: Reducer, prefix: str = ""
) -> Tuple[int, List[Dict[str, Any]], int]:
    """Run all tests, with a prefix for their names.

    Returns:
        The number of tests, the failed ones, and in how many of these the rank got its own
        input back.
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
        want = expected(numpy, hvd.size(), shape, dtype, operation)
        bounds = tolerance(numpy, hvd.size(), dtype, operation)
        found = compare(numpy, name, got[name], want, *bounds)
        if found:
            wrong.append(found)
            own += numpy.array_equal(got[name], values(numpy, hvd.rank(), shape, dtype))
    return len(tests), wrong, own


def enabled(hvd: Any, name: str) -> Optional[bool]:
    """mpi_enabled() or gloo_enabled(); None if this version has no such function."""
    ask = getattr(hvd, name, None)
    return bool(ask()) if ask else None


def run(context: Context) -> None:
    """Reduce, compare, and report the result."""
    hvd = context.hvd
    importlib.import_module("numpy")  # not counted: its time depends on the file system
    reduce_all = REDUCERS[context.framework](context)
    began = context.worked
    tests, wrong, own = reduce_and_judge(hvd, reduce_all)
    busy = context.worked - began
    if context.gpu:
        context.device = context.gpu  # of the exercises, too
        context.stage("allreduce", "on GPUs")
        on_gpu = reduce_and_judge(hvd, reduce_all, "gpu.")
        tests, wrong, own = tests + on_gpu[0], wrong + on_gpu[1], own + on_gpu[2]
    result = events.Result(
        mpi_enabled=enabled(hvd, "mpi_enabled"),
        gloo_enabled=enabled(hvd, "gloo_enabled"),
        python=sys.executable,
        horovod=os.path.dirname(str(importlib.import_module("horovod").__file__)),
        framework=context.version,
        tests=tests,
        failed=len(wrong),
        wrong=[{key: str(value) for key, value in each.items()} for each in wrong[:3]],
        own=int(own),
        busy=round(max(busy, 0.001), 3),
        **context.numbers()._asdict(),
    )
    context.report(result)
