"""The exercise ``collectives``: all operations of this Horovod, on inputs that every rank knows.

All ranks try the same cases of collective_cases.py in the same order. Each rank compares its own
results and reports an events.Operation for each operation; the last one is a process that is
forked while the ranks reduce. Runs on Python 3.6 and newer.
"""

import importlib
import inspect
import multiprocessing
import re
import socket
import time
import zlib
from typing import Any, Callable, Dict, List, Set, Tuple

import collective_cases
import events
from collective_cases import Case
from context import Absent, Array, Context, Wait, numbers_of

# Bounds that keep a report small enough for one event.
SHOWN, CASE, REASON = 3, 300, 90
BARRIER_SECONDS = 0.05  # the delay of one rank of each host
CHILD_SECONDS = 60

# Errors of Horovod and the frameworks for unsupported types and operations.
_ABSENT = re.compile(
    r"Tensor type \S+ is not supported|not in (the )?list of allowed values"
    r"|Type \S+ is not supported in \w+ mode|No \w+ operation enabled"
)
_OVER = re.compile(r"shut ?down", re.IGNORECASE)


class Ended(Exception):
    """Horovod cannot go on."""


class Tally:
    """The results of one operation's cases."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.right = 0
        self.types: Set[str] = set()
        self.skipped: Dict[Tuple[str, str], int] = {}
        self.unproven = self.ended = ""  # ended: why Horovod could not go on
        self.wrong: List[str] = []

    def skip(self, why: str, dtype: str = "", count: int = 1) -> None:
        """Count cases that cannot be tried."""
        self.skipped[dtype, why] = self.skipped.get((dtype, why), 0) + count

    def take(self, case: Case, problem: str) -> None:
        """Count a case that was tried; the problem is empty if the result is correct."""
        if problem:
            named = "" if case.kind in self.operation else case.kind + " "
            self.wrong.append("%s%s: %s" % (named, case.title, problem))
        else:
            self.right += 1
            self.types.update([case.dtype] if case.dtype else [])

    def event(self) -> events.Operation:
        """What is reported."""
        return events.Operation(
            operation=self.operation,
            right=self.right,
            wrong=len(self.wrong),
            types=sorted(self.types),
            skipped=[events.Skipped(*key, n) for key, n in sorted(self.skipped.items())],
            cases=[shortened(text, CASE) for text in self.wrong[:SHOWN]],
            ended=self.ended,
            unproven=self.unproven,
        )


def adasum_limit(context: Context) -> str:
    """Why Adasum cannot be compared with numpy's here; empty if it can."""
    if context.device and context.hvd.local_size() > 1:
        return "on GPUs it averages within each host first"
    if context.controller == "Gloo":
        return "on CPUs only MPI supports it"
    if context.hvd.size() & (context.hvd.size() - 1):
        return "the number of ranks must be a power of two"
    return ""


def gloo_sets_hang(hvd: Any) -> str:
    """Why process sets that overlap can hang over Gloo in this Horovod; empty if they do not."""
    # Seen with 0.26.1, which calls torch's Gloo: a rank negotiates while others still connect.
    if numbers_of(importlib.import_module("horovod").__version__) < (0, 27):
        return "Horovod before 0.27 can hang when it adds sets that overlap over Gloo"
    # The patch gloo-rendezvous also changes compiled code, which cannot be examined.
    server = importlib.import_module("horovod.runner.http.http_server")
    if hvd.cross_size() > 1 and "finished_list.clear()" in inspect.getsource(server):
        return "Horovod up to 0.28.1 hangs when it adds such sets over Gloo on several hosts"
    return ""


class Caller:
    """Calls Horovod for any framework and version."""

    def __init__(self, context: Context) -> None:
        self.numpy = context.numpy
        self.context = context
        self.hvd = context.hvd
        self.native = context.native
        self.torch = context.framework == "torch"
        self.rank, self.size = context.hvd.rank(), context.hvd.size()
        self.sets: Dict[str, Any] = {}

    def try_all(self, operation: str, batches: List[List[Case]]) -> Tally:
        """Try the cases of one operation.

        Raises:
            Ended: Horovod gave up; the tally is its argument.
        """
        tally = Tally(operation)
        tally.unproven = self.beyond_this_host(operation)
        why = tally.unproven or (operation == "Adasum" and adasum_limit(self.context))
        if why:
            tally.skip(why, count=sum(len(batch) for batch in batches))
            return tally
        if operation == collective_cases.PROCESS_SETS and not self.attempt(
            tally, batches[0][0], self.add_sets
        ):
            return tally
        for batch in batches:
            own = [case for case in batch if self.rank in case.members(self.size)]
            begun = [(case, self.attempt(tally, case, self.begin, case)) for case in own]
            for case, wait in begun:
                if wait is not None:
                    self.attempt(tally, case, self.finish, tally, case, wait)
        while self.sets:
            self.hvd.remove_process_set(self.sets.popitem()[1])
        return tally

    def attempt(
        self, tally: Tally, case: Case, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call a function for a case; count exceptions and return None for them."""
        self.context.stage("collectives", "%s: %s" % (tally.operation, case.title))
        try:
            return function(*arguments)
        except (Absent, NotImplementedError, collective_cases.TooLarge) as error:
            tally.skip(shortened(error, REASON))
        except Exception as error:
            text = "%s: %s" % (type(error).__name__, error)
            absent = _ABSENT.search(text)
            if absent:
                tally.skip(shortened(absent.group(), REASON), case.dtype)
                return None
            tally.take(case, text)
            if _OVER.search(text):
                tally.ended = shortened(text, CASE)
                raise Ended(tally) from error
        return None

    def beyond_this_host(self, operation: str) -> str:
        """Why these ranks cannot prove an operation that Horovod has; empty if they can."""
        if operation == collective_cases.PROCESS_SETS:
            too_few = self.size < collective_cases.LEAST_FOR_SETS
            if too_few and hasattr(self.hvd, "add_process_set"):
                return "a process set of two ranks needs a third one beside it"
        if operation == "join" and not self.torch and not self.context.on_all(self.can_join()):
            return "built for GPUs, this Horovod has hvd.join() for TensorFlow on GPUs only"
        return ""

    def can_join(self) -> bool:
        """Whether TensorFlow finds a kernel for hvd.join().

        Built for allreduces on GPUs, Horovod 0.24 and newer registers none for CPUs. The question
        takes a sixth of a second.
        """
        for_gpus = (getattr(self.hvd, name, lambda: True) for name in ("cuda_built", "rocm_built"))
        if not any(built() for built in for_gpus):
            return True
        kernels = importlib.import_module("tensorflow.python.framework.kernels")
        devices = {
            each.device_type for each in kernels.get_registered_kernels_for_op("HorovodJoin").kernel
        }
        return devices != {"GPU"} or bool(self.native.config.list_physical_devices("GPU"))

    # One case.

    def begin(self, case: Case) -> Wait:
        """Begin a case and return a function that waits for its results."""
        if case.kind == "barrier":
            return self.barrier(case.name or "barrier")
        if case.kind == "join":
            return self.join()
        if case.kind == "fork":
            return self.fork()
        arrays = collective_cases.inputs_of(self.numpy, case, self.rank, self.size)
        tensors = [self.tensor(array, case.dtype) for array in arrays]
        members = case.members(self.size)
        values = [tensors if len(tensors) > 1 else tensors[0]]
        arguments = self.arguments(case)
        if case.kind == "broadcast":
            values.append(members[case.root])
        if case.kind == "alltoall" and case.rows:
            arguments["splits"] = collective_cases.splits(case, self.rank, members)
        return self.context.begin(
            collective_cases.function_of(case), *values, idle=True, **arguments
        )

    def finish(self, tally: Tally, case: Case, wait: Wait) -> None:
        """Wait for a case and compare its results."""
        result = wait()
        tensors = list(result) if isinstance(result, (tuple, list)) else [result]
        got = [self.array(tensor) for tensor in tensors]
        tally.take(case, collective_cases.problem(self.numpy, case, self.rank, self.size, got))

    def arguments(self, case: Case) -> Dict[str, Any]:
        """The arguments of the call other than tensors."""
        # No spaces: names are scopes in TensorFlow's graphs.
        found: Dict[str, Any] = {
            "name": case.name or re.sub(r"\W+", "_", case.kind + " " + case.title)
        }
        if case.reduce:
            if case.reduce == "Adasum" and len(case.shapes) > 1 and not self.torch:
                raise Absent("grouped Adasum of TensorFlow ends with an UnboundLocalError")
            found.update(self.context.reduction(case.reduce))
        if case.among:
            found["process_set"] = self.sets[case.among]
        return found

    def add_sets(self) -> int:
        """Add all process sets, on every rank in the same order, and return their number.

        Raises:
            Absent: this Horovod has none, or can hang when it adds them.
        """
        self.context.need("add_process_set")
        if self.context.controller == "Gloo":
            reason = gloo_sets_hang(self.hvd)
            if reason:
                raise Absent(reason)
        for name, ranks in collective_cases.SETS.items():
            self.sets[name] = self.context.call("add_process_set", ranks(self.size))
        return len(self.sets)

    def tensor(self, array: Array, dtype: str) -> Any:
        """The framework's tensor; torch's shares the memory of the array."""
        tensor = self.context.tensor(array)
        if dtype != "bfloat16":
            return tensor
        return tensor.bfloat16() if self.torch else self.native.cast(tensor, "bfloat16")

    def array(self, tensor: Any) -> Tuple[str, Array]:
        """The type and values of a tensor or, from some functions, an array."""
        if not hasattr(tensor, "numpy"):
            array = self.numpy.asarray(tensor)
            return str(array.dtype), array
        dtype = str(tensor.dtype)[len("torch.") :] if self.torch else tensor.dtype.name
        if dtype == "bfloat16":
            tensor = tensor.float() if self.torch else self.native.cast(tensor, "float32")
        return dtype, self.context.array(tensor)

    # Operations without tensors.

    def barrier(self, function: str) -> Wait:
        """Returns how many ranks of this host left the barrier before the last one had arrived."""
        self.context.need(function)
        if self.hvd.local_rank() == self.hvd.local_size() - 1:
            time.sleep(BARRIER_SECONDS)
        host = zlib.crc32(socket.gethostname().encode())
        arrived = microseconds()
        self.context.call(function)
        times = self.numpy.array([[host, arrived, microseconds()]], "int64")
        mine = self.tensor(times, "int64")
        _, table = self.array(self.context.call("allgather", mine, name=function + " times"))
        times = table[table[:, 0] == host]
        return lambda: self.numpy.array((times[:, 2] < times[:, 1].max()).sum())

    def join(self) -> Wait:
        """Returns the results of this rank's steps, and the rank that joined last."""
        self.context.need("join")  # without it, ranks with more steps would hang
        results = []
        for step in range(collective_cases.join_steps(self.rank, self.size)):
            self.context.stage("collectives", "join: step %d, before hvd.join()" % step)
            case = collective_cases.joined_case(step)
            (array,) = collective_cases.inputs_of(self.numpy, case, self.rank, self.size)
            tensor = self.tensor(array, case.dtype)
            results.append(self.context.call("allreduce", tensor, **self.arguments(case)))
        self.context.stage("collectives", "join: in hvd.join()")
        last = self.context.call("join", *device_of_join(self.context))
        # Up to Horovod 0.22, hvd.join() does not return the rank.
        known = hasattr(last, "numpy") or isinstance(last, int)
        last = self.array(last)[1] if known else self.size - 1
        return lambda: [*results, self.numpy.array(int(last))]

    def fork(self) -> Wait:
        """Fork a process while the ranks reduce; raises RuntimeError if it does not answer."""
        forking: Any = multiprocessing.get_context("fork")
        receiver, sender = forking.Pipe(duplex=False)
        child = forking.Process(target=sender.send, args=(0,), daemon=True)
        child.start()
        sender.close()
        self.context.on_all(True)
        try:
            if not receiver.poll(CHILD_SECONDS):
                raise RuntimeError("it does not answer within %d s" % CHILD_SECONDS)
            answer = self.numpy.array(receiver.recv())
            return lambda: answer
        except EOFError:
            child.join(CHILD_SECONDS)
            raise RuntimeError("it ended with exit code %s" % child.exitcode) from None
        finally:
            child.terminate()
            child.join(CHILD_SECONDS)


def device_of_join(context: Context) -> List[int]:
    """The argument of hvd.join(): the index of torch's GPU.

    Ranks that have joined send zeros, by default from the host. NCCL's ranks would wait for them
    forever. TensorFlow knows the device by itself.
    """
    index = context.device.partition(":")[2] if context.framework == "torch" else ""
    return [int(index)] if index else []


def shortened(text: object, length: int) -> str:
    """A line of ASCII with the beginning and the end of a text."""
    line = " ".join(str(text).encode("ascii", "replace").decode("ascii").split())
    return (
        line
        if len(line) <= length
        else line[: length // 2 - 3] + " ... " + line[-length // 2 + 2 :]
    )


def microseconds() -> int:
    """The time on a clock that all processes of a host share."""
    return int(time.monotonic() * 1e6)


def run(context: Context, option: str) -> None:
    """Try all operations, with tensors on the rank's device, and report each."""
    caller = Caller(context)
    with context.on_device():
        try:
            for operation, batches in collective_cases.operations(caller.size):
                context.report(caller.try_all(operation, batches).event())
        except Ended as error:
            context.report(error.args[0].event())
