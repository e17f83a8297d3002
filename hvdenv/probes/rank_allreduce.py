"""One rank's allreduces, judged by the rank itself. Started by rank.py.

usage: python rank_allreduce.py FRAMEWORK REPORT_FD DUMP_SECONDS

Every rank knows what every other rank puts in and computes the right answer on its own.
The report is one line of JSON to REPORT_FD. After DUMP_SECONDS the stacks of all threads
go to standard error. Runs on Python 3.6 and up; needs numpy, which the frameworks bring.
"""

import faulthandler
import importlib
import json
import os
import sys

SHAPES = ((1,), (17,), (3, 5), (2, 7, 11), (100003,))
DTYPES = ("float32", "float64", "int64")
OPERATIONS = ("Sum", "Average")


def values(numpy, rank, shape, dtype):
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


def wanted(numpy, size, shape, dtype, operation):
    """The right answer for all ranks' values."""
    total = values(numpy, 0, shape, dtype)
    for rank in range(1, size):
        total = total + values(numpy, rank, shape, dtype)
    return total if operation == "Sum" else total.astype("float64") / size


def tolerance(numpy, size, dtype, operation):
    """Relative and absolute error that a right average may have; a sum may have none."""
    if operation == "Sum":
        return 0.0, 0.0
    if dtype == "int64":
        return 1e-15, 1.0  # some versions round, some truncate
    return float(numpy.finfo(dtype).eps) * (size + 4), 0.0


def compare(numpy, name, got, want, relative, absolute):
    """None, or what is wrong with the answer."""
    if got.shape != want.shape:
        return {
            "test": name,
            "got": "shape %s" % (got.shape,),
            "wanted": "shape %s" % (want.shape,),
        }
    if relative == absolute == 0.0:
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


def operation_arguments(hvd, operation):
    """How this version of Horovod is told what to do with the values."""
    if hasattr(hvd, operation):
        return {"op": getattr(hvd, operation)}
    return {"average": operation == "Average"}


def torch_reducer():
    """horovod.torch and a function that reduces many named arrays at once."""
    torch = importlib.import_module("torch")  # first: horovod.torch needs its libraries
    hvd = importlib.import_module("horovod.torch")
    torch.set_num_threads(1)

    def reduce_all(inputs):
        handles = [
            (name, hvd.allreduce_async(torch.from_numpy(array), name=name, **arguments))
            for name, array, arguments in inputs
        ]
        return {name: hvd.synchronize(handle).numpy() for name, handle in handles}

    return hvd, reduce_all, torch.__version__


def tensorflow_reducer():
    """horovod.tensorflow and a function that reduces many named arrays."""
    tensorflow = importlib.import_module("tensorflow")
    hvd = importlib.import_module("horovod.tensorflow")
    if not tensorflow.executing_eagerly():
        tensorflow.compat.v1.enable_eager_execution()

    def reduce_all(inputs):
        with tensorflow.device("/cpu:0"):
            return {
                name: hvd.allreduce(tensorflow.constant(array), name=name, **arguments).numpy()
                for name, array, arguments in inputs
            }

    return hvd, reduce_all, tensorflow.__version__


REDUCERS = {"torch": torch_reducer, "tensorflow": tensorflow_reducer}


def reduce_and_judge(hvd, reduce_all):
    """All tests.

    Returns:
        How many there were, and what was wrong in the first few that failed.
    """
    import numpy

    tests = [
        ("%s.%s.%s" % (dtype, "x".join(map(str, shape)), operation), shape, dtype, operation)
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
    wrong = []
    for name, shape, dtype, operation in tests:
        want = wanted(numpy, hvd.size(), shape, dtype, operation)
        bounds = tolerance(numpy, hvd.size(), dtype, operation)
        wrong.append(compare(numpy, name, got[name], want, *bounds))
    return len(tests), [one for one in wrong if one]


def enabled(hvd, name):
    """mpi_enabled() or gloo_enabled(); None where this version does not have it."""
    ask = getattr(hvd, name, None)
    return bool(ask()) if ask else None


def main(framework, report_fd, dump_seconds):
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(dump_seconds))
    sys.path.pop(0)  # this folder: its file names must not stand in for modules
    hvd, reduce_all, version = REDUCERS[framework]()
    hvd.init()
    tests, wrong = reduce_and_judge(hvd, reduce_all)
    cross = [getattr(hvd, name, lambda: None)() for name in ("cross_rank", "cross_size")]
    report = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "local_size": hvd.local_size(),
        "cross_rank": cross[0],
        "cross_size": cross[1],
        "mpi_enabled": enabled(hvd, "mpi_enabled"),
        "gloo_enabled": enabled(hvd, "gloo_enabled"),
        "python": sys.executable,
        "horovod": os.path.dirname(importlib.import_module("horovod").__file__),
        "framework": version,
        "tests": tests,
        "failed": len(wrong),
        "wrong": wrong[:3],
    }
    os.write(int(report_fd), (json.dumps(report) + "\n").encode("ascii"))
    hvd.shutdown()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
