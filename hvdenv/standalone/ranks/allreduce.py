"""The first test of every rank: some allreduces of collective_cases.py.

Runs on Python 3.6 and newer with numpy, which the frameworks require.
"""

import contextlib
import importlib
import os
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import collective_cases
import events
from context import Array, Context

Input = Tuple[str, Array, Dict[str, Any]]
Reducer = Callable[[List[Input]], Dict[str, Array]]

CASES = [
    collective_cases.case("allreduce", dtype, shape, reduce=operation)
    for shape in ((1,), (17,), (3, 5), (2, 7, 11), (100003,))
    for dtype in ("float32", "float64", "int64")
    for operation in ("Sum", "Average")
]


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


def reduce_and_judge(hvd: Any, reduce_all: Reducer, prefix: str = "") -> Tuple[List[str], int]:
    """Reduce the cases, with a prefix for the names of tensors.

    Returns:
        What is wrong in each wrong case, and in how many of these the rank got its own input back.
    """
    import numpy

    rank, size = hvd.rank(), hvd.size()
    named = [(prefix + case.title.replace(" ", "."), case) for case in CASES]
    inputs = {name: collective_cases.inputs_of(numpy, case, rank, size)[0] for name, case in named}
    got = reduce_all(
        [(name, inputs[name], operation_arguments(hvd, case.reduce)) for name, case in named]
    )
    wrong, own = [], 0
    for name, case in named:
        found = [(str(got[name].dtype), got[name])]
        problem = collective_cases.problem(numpy, case, rank, size, found)
        if problem:
            wrong.append("%s: %s" % (case.title, problem))
            own += numpy.array_equal(got[name], inputs[name])
    return wrong, own


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
    tests, (wrong, own) = len(CASES), reduce_and_judge(hvd, reduce_all)
    busy = context.worked - began
    if context.gpu:
        context.device = context.gpu  # of the exercises, too
        context.stage("allreduce", "on GPUs")
        more, more_own = reduce_and_judge(hvd, reduce_all, "gpu.")
        tests, wrong, own = 2 * tests, wrong + more, own + more_own
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
