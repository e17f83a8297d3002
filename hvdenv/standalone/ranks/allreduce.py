"""The first test of every rank: some allreduces of collective_cases.py.

Runs on Python 3.6 and newer with numpy, which the frameworks require.
"""

import contextlib
import importlib
import sys
from typing import Any, Iterator, List, Tuple

import collective_cases
import events
from context import Context

CASES = [
    collective_cases.case("allreduce", dtype, shape, reduce=reduction)
    for shape in ((1,), (17,), (3, 5), (2, 7, 11), (100003,))
    for dtype in ("float32", "float64", "int64")
    for reduction in ("Sum", "Average")
]


@contextlib.contextmanager
def waiting_in_library(context: Context) -> Iterator[None]:
    """Within this block, time in the operation of Horovod's library for TensorFlow is waiting.

    Horovod's Python functions around it are the rank's own work.
    """
    library: Any = getattr(sys.modules.get("horovod.tensorflow.mpi_ops"), "MPI_LIB", None)
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


def reduce_and_judge(context: Context, prefix: str = "") -> Tuple[List[str], int]:
    """Reduce the cases, with a prefix for the names of tensors.

    Returns:
        What is wrong in each wrong case, and in how many of these the rank got its own input back.
    """
    numpy, rank, size = context.numpy, context.hvd.rank(), context.hvd.size()
    begun, wrong, own = [], [], 0
    with context.on_device(), waiting_in_library(context):
        for case in CASES:
            (array,) = collective_cases.inputs_of(numpy, case, rank, size)
            name = prefix + case.title.replace(" ", ".")
            arguments = context.reduction(case.reduce)
            wait = context.begin("allreduce", context.tensor(array), name=name, **arguments)
            begun.append((case, array, wait))
        for case, array, wait in begun:
            got = context.array(wait())
            problem = collective_cases.problem(numpy, case, rank, size, [(str(got.dtype), got)])
            if problem:
                wrong.append("%s: %s" % (case.title, problem))
                own += numpy.array_equal(got, array)
    return wrong, own


def run(context: Context) -> None:
    """Reduce, compare, and report the result."""
    importlib.import_module("numpy")  # not counted: its time depends on the file system
    began = context.worked
    tests, (wrong, own) = len(CASES), reduce_and_judge(context)
    busy = context.worked - began
    if context.gpu:
        context.device = context.gpu  # of the exercises, too
        context.stage("allreduce", "on GPUs")
        more, more_own = reduce_and_judge(context, "gpu.")
        tests, wrong, own = 2 * tests, wrong + more, own + more_own
    asked = {each: "%s_enabled" % each.lower() for each in ("MPI", "Gloo")}
    result = events.Result(
        tests=tests,
        wrong=len(wrong),
        cases=wrong[:3],
        own=int(own),
        busy=round(max(busy, 0.001), 3),
        enabled=[each for each in asked if getattr(context.hvd, asked[each], bool)()],
    )
    context.report(result)
