"""The exercise ``scripts``: what training scripts call besides operations on tensors.

Python objects, numbers of ranks, sparse tensors, batch normalisation, processes that are forked
after ``hvd.init()``, and a second ``hvd.init()``. Each script is reported like an operation of
collectives.py. An error ends the exercise on this rank, whose hvd.shutdown() then ends the others.
Runs on Python 3.6 and newer.
"""

import functools
import multiprocessing
import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple

import allreduce
import collectives
import training
from collectives import Absent, Caller, Tally
from context import Context

# Bytes of objects: more than the limits of pipes and transports, and than 1 MiB.
OBJECT_BYTES = (1000, 70_001, 1_300_007)
FEATURES, ROWS, EPSILON = 3, 5, 1e-3
CHILD_SECONDS = 60
ITEMS = 8


class Step(NamedTuple):
    """One call of a script; `run` returns what is wrong, or nothing."""

    title: str
    run: Callable[[], str]
    dtype: str = ""


def difference(got: Any, want: Any) -> str:
    """What is wrong; empty if nothing is."""
    return "" if got == want else "got %s, wanted %s" % (got, want)


def equal(caller: Caller, got: Any, want: Any, bound: float = 1e-5) -> str:
    """How far a tensor is from an array, if that is too much."""
    _, array = caller.array(got)
    if array.shape != want.shape:
        return difference(array.shape, want.shape)
    worst = float(abs(array - want).max())
    return "" if worst <= bound else "values differ by %.3g from the right ones" % worst


# Objects.


def an_object(rank: int, length: int) -> Dict[str, Any]:
    """An object of a rank; no two ranks have pickles of one length."""
    pattern = bytes(bytearray((number * 31 + rank * 7) % 251 for number in range(1009)))
    return {"rank": rank, "bytes": (pattern * (length // 1009 + 1))[: length + 13 * rank]}


def object_problem(got: Any, want: Any) -> str:
    """What is wrong with an object."""
    text = "got another object than that of rank %d with %d bytes"
    return "" if got == want else text % (want["rank"], len(want["bytes"]))


def objects(caller: Caller) -> Iterator[Step]:
    """Every rank passes an object of about the same size."""

    def broadcast(length: int, root: int) -> str:
        function = caller.need("broadcast_object")
        return object_problem(
            function(an_object(caller.rank, length), root), an_object(root, length)
        )

    def gather(length: int) -> str:
        got = caller.need("allgather_object")(an_object(caller.rank, length))
        want = [an_object(rank, length) for rank in range(caller.size)]
        wrong = [object_problem(*pair) for pair in zip(got, want)]
        return difference(len(got), len(want)) or next(filter(None, wrong), "")

    for number, length in enumerate(OBJECT_BYTES):
        root = number % caller.size
        title = "broadcast_object of %d bytes from rank %d" % (length, root)
        yield Step(title, functools.partial(broadcast, length, root))
        title = "allgather_object of %d bytes on each rank" % length
        yield Step(title, functools.partial(gather, length))


# Numbers.


def numbers(caller: Caller) -> Iterator[Step]:
    """Functions that return a number or a truth."""
    hvd = caller.hvd

    def operation(name: str, want: int) -> str:
        return difference(int(caller.array(caller.need(name)())[1]), want)

    def homogeneous() -> str:
        answer = caller.need("is_homogeneous")()
        sizes = caller.need("allgather_object")(hvd.local_size())
        return difference(bool(answer), len(set(sizes)) == 1)

    def threads() -> str:
        if caller.context.controller != "MPI":
            raise Absent("it is about MPI only")
        return difference(type(hvd.mpi_threads_supported()), bool)

    def everybody() -> str:
        everyone = caller.need("global_process_set")
        return difference((everyone.rank(), everyone.size()), (hvd.rank(), hvd.size()))

    yield Step("is_initialized", lambda: difference(caller.need("is_initialized")(), True))
    yield Step("mpi_threads_supported", threads)
    yield Step("global_process_set", everybody)
    if not caller.torch:
        yield Step("is_homogeneous", homogeneous)
        yield Step("rank_op", lambda: operation("rank_op", hvd.rank()))
        yield Step("size_op", lambda: operation("size_op", hvd.size()))
        if collectives.release() >= (0, 28):  # before, it returned the rank
            yield Step("local_rank_op", lambda: operation("local_rank_op", hvd.local_rank()))
        yield Step("local_size_op", lambda: operation("local_size_op", hvd.local_size()))
        yield Step("process_set_included_op", lambda: operation("process_set_included_op", 1))


# Tensors.


def sparse(caller: Caller) -> Iterator[Step]:
    """The sum of sparse tensors, with one row of each rank and one that all have."""
    numpy, native, hvd = caller.numpy, caller.native, caller.hvd
    values = numpy.array([[1.0, 2.0], [3.0, 4.0]], "float32")
    want = numpy.zeros((caller.size + 1, 2), "float32")
    want[:-1], want[-1] = values[0], caller.size * values[1]

    def torch() -> str:
        start = caller.need("sparse_allreduce_async")
        where = native.tensor([[caller.rank, caller.size]])
        tensor = native.sparse_coo_tensor(where, native.from_numpy(values), want.shape)
        result = start(tensor.to(caller.context.device or "cpu"), "scripts.sparse", hvd.Sum)()
        return equal(caller, result.to_dense(), want)

    def tensorflow() -> str:
        where = native.constant([caller.rank, caller.size])
        slices = native.IndexedSlices(caller.tensor(values, "float32"), where, want.shape)
        arguments = allreduce.operation_arguments(hvd, "Sum")
        result = hvd.allreduce(slices, **arguments)
        shape = native.constant(want.shape)
        return equal(caller, native.scatter_nd(result.indices[:, None], result.values, shape), want)

    if caller.torch:
        yield Step("sparse_allreduce_async", torch, "float32")
    else:
        yield Step("allreduce of IndexedSlices", tensorflow, "float32")


def batch_normalisation(caller: Caller) -> Iterator[Step]:
    """A layer that normalises over the batches of all ranks."""
    numpy, native = caller.numpy, caller.native
    source = numpy.random.RandomState(0)
    batches = source.uniform(-2, 2, (caller.size, ROWS, FEATURES)).astype("float32")
    every = batches.reshape(-1, FEATURES).astype("float64")
    mean, deviation = every.mean(axis=0), (every.var(axis=0) + EPSILON) ** 0.5
    own = batches[caller.rank]

    def judge(output: Any, moving_mean: Any, momentum: float) -> str:
        wrong = equal(caller, output, (own - mean) / deviation, 1e-3)
        return wrong or equal(caller, moving_mean, momentum * mean, 1e-4)

    def torch() -> str:
        layer = caller.need("SyncBatchNorm")(FEATURES, eps=EPSILON)
        if not caller.context.device:
            raise Absent("Horovod's SyncBatchNorm for PyTorch accepts tensors on GPUs only")
        layer = layer.to(caller.context.device)
        return judge(layer(caller.tensor(own, "float32")).detach(), layer.running_mean, 0.1)

    def tensorflow() -> str:
        layer = caller.need("SyncBatchNormalization")(axis=-1, epsilon=EPSILON, momentum=0.9)
        limit = training.keras_limit_of(caller.context)
        if limit:
            raise Absent(limit)
        output = layer(caller.tensor(own, "float32"), training=True)
        return judge(output, native.convert_to_tensor(layer.moving_mean), 0.1)

    name = "SyncBatchNorm" if caller.torch else "SyncBatchNormalization"
    yield Step(name, torch if caller.torch else tensorflow, "float32")


# Processes.


class Items:
    """A data set for torch's DataLoader: squares, and the process that computed them."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, number: int) -> List[int]:
        return [number * number, os.getpid()]


def answer(connection: Any, number: int) -> None:
    """The work of a forked process."""
    connection.send([number * number, os.getpid()])


def forked(caller: Caller) -> Iterator[Step]:
    """Processes that are forked after hvd.init(), while the ranks go on."""

    def process() -> str:
        context: Any = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=answer, args=(sender, ITEMS), daemon=True)
        child.start()
        sender.close()
        wrong = sum_problem(caller, "while a child runs")
        try:
            if not receiver.poll(CHILD_SECONDS):
                return "the child does not answer within %d s" % CHILD_SECONDS
            square, number = receiver.recv()
        except EOFError:
            child.join(CHILD_SECONDS)
            return "the child ended with exit code %s" % child.exitcode
        finally:
            child.terminate()
            child.join(CHILD_SECONDS)
        return wrong or difference((square, number), (ITEMS * ITEMS, child.pid))

    def loader() -> str:
        found = caller.native.utils.data.DataLoader(
            Items(), 2, num_workers=2, timeout=CHILD_SECONDS, multiprocessing_context="fork"
        )
        squares, children = [], set()
        for batch in found:
            squares += batch[0].tolist()
            children.update(batch[1].tolist())
        wrong = sum_problem(caller, "after a DataLoader")
        want = [number * number for number in range(ITEMS)]
        return wrong or difference(squares, want) or difference(len(children - {os.getpid()}), 2)

    yield Step("a process forked after hvd.init()", process)
    if caller.torch:
        yield Step("a DataLoader with two workers", loader)


# hvd.init().


def sum_problem(caller: Caller, when: str, **more: Any) -> str:
    """What is wrong with an allreduce in the host's memory."""
    hvd, numpy = caller.hvd, caller.numpy
    members = more["process_set"].ranks if more else range(caller.size)
    tensor = numpy.array([1.0 + caller.rank, 1.0], "float32")
    tensor = caller.native.from_numpy(tensor) if caller.torch else caller.native.constant(tensor)
    arguments = dict(allreduce.operation_arguments(hvd, "Sum"), **more)
    result = hvd.allreduce(tensor, name="scripts." + when.replace(" ", "_"), **arguments)
    got = [float(each) for each in caller.array(result)[1]]
    wrong = difference(got, [sum(1.0 + each for each in members), float(len(members))])
    return "an allreduce %s: %s" % (when, wrong) if wrong else ""


def second_init(caller: Caller) -> Iterator[Step]:
    """hvd.init() again: as it is, and after hvd.shutdown() with process sets."""
    hvd, place = caller.hvd, (caller.rank, caller.size)

    def repeated() -> str:
        hvd.init()
        return difference((hvd.rank(), hvd.size()), place) or sum_problem(caller, "after it")

    def anew() -> str:
        limit = limit_of_restart(caller.context)
        if limit:
            raise Absent(limit)
        kind = getattr(hvd, "ProcessSet", None)
        sets = [kind(list(range(caller.size - 1)))] if kind and caller.size > 1 else []
        hvd.shutdown()
        if getattr(hvd, "is_initialized", bool)():
            return "is_initialized() is still true after hvd.shutdown()"
        hvd.init(**({"process_sets": sets} if sets else {}))
        wrong = difference((hvd.rank(), hvd.size()), place)
        for each in [each for each in sets if each.included()]:
            wrong = wrong or sum_problem(caller, "in the process set", process_set=each)
        # Last: a rank outside of the set would end the exercise, and with it Horovod.
        return sum_problem(caller, "after both") or wrong

    yield Step("hvd.init() a second time", repeated)
    yield Step("hvd.shutdown(), then hvd.init() with process_sets", anew)


def limit_of_restart(context: Context) -> str:
    """Why a process cannot initialise Horovod again; empty if it can."""
    if context.controller == "MPI":
        return "hvd.shutdown() ends MPI, which no process can start twice"
    limit = collectives.gloo_sets_hang(context.hvd)
    if limit or collectives.has_gloo_rendezvous_patch():
        return limit
    return "without hvdenv's patch gloo-rendezvous, ranks may get addresses of the first hvd.init()"


SCRIPTS: Dict[str, Callable[[Caller], Iterator[Step]]] = {
    "objects": objects,
    "numbers": numbers,
    "sparse tensors": sparse,
    "batch normalisation": batch_normalisation,
    "forked processes": forked,
    "second init": second_init,
}


def run(context: Context, option: str) -> None:
    """Run all scripts; after an error, none of the others."""
    caller = Caller(context, "scripts")
    with context.on_device():
        for name, script in SCRIPTS.items():
            tally = collectives.Tally(name)
            failed = not all(tried(caller, tally, step) for step in script(caller))
            context.report(tally.event())
            if failed:
                return


def tried(caller: Caller, tally: Tally, step: Step) -> bool:
    """Try a step; false if it ended with an error."""
    errors = len(tally.wrong)
    try:
        wrong = caller.attempt(tally, step, step.run)
    except collectives.Ended:
        return False
    if wrong is not None:
        tally.take(step, wrong)
    return wrong is not None or len(tally.wrong) == errors
