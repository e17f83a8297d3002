"""The exercise ``collectives``: all operations of this Horovod, on inputs that every rank knows.

All ranks try the same cases of collective_cases.py in the same order. Each rank compares its own
results and reports an events.Operation for each operation; the last one is a process that is
forked while the ranks reduce. Runs on Python 3.6 and newer.
"""

import importlib
import inspect
import multiprocessing
import re
from typing import Any, Callable, Counter, Dict, List, Tuple

import collective_cases
import events
from collective_cases import Case
from context import Absent, Array, Context, Wait, numbers_of

# Bounds that keep a report small enough for one event.
SHOWN, CASE, REASON = 3, 300, 90
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
    """The results of one operation's cases.

    Attributes:
        skipped: how many cases could not be tried, by type and reason.
        ended: why Horovod could not go on.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.right: List[Case] = []
        self.wrong: List[str] = []
        self.skipped: Counter[Tuple[str, str]] = Counter()
        self.unproven = self.ended = ""

    def take(self, case: Case, problem: str) -> None:
        """Count a case that was tried; the problem is empty if the result is correct."""
        if problem:
            named = "" if case.kind in self.operation else case.kind + " "
            self.wrong.append("%s%s: %s" % (named, case.title, problem))
        else:
            self.right.append(case)

    def event(self) -> events.Operation:
        """What is reported."""
        return events.Operation(
            operation=self.operation,
            right=len(self.right),
            wrong=len(self.wrong),
            types=sorted({case.dtype for case in self.right} - {""}),
            skipped=[events.Skipped(*key, n) for key, n in sorted(self.skipped.items())],
            cases=[shortened(text, CASE) for text in self.wrong[:SHOWN]],
            ended=self.ended,
            unproven=self.unproven,
        )


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
        tally.unproven = self.beyond_these_ranks(operation)
        if tally.unproven:
            tally.skipped["", tally.unproven] = sum(map(len, batches))
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
            tally.skipped["", shortened(error, REASON)] += 1
        except Exception as error:
            text = "%s: %s" % (type(error).__name__, error)
            absent = _ABSENT.search(text)
            if absent:
                tally.skipped[case.dtype, shortened(absent.group(), REASON)] += 1
                return None
            tally.take(case, text)
            if _OVER.search(text):
                tally.ended = shortened(text, CASE)
                raise Ended(tally) from error
        return None

    def beyond_these_ranks(self, operation: str) -> str:
        """Why these ranks cannot prove an operation that Horovod has; empty if they can."""
        too_few = self.size < collective_cases.LEAST_FOR_SETS
        sets = operation == collective_cases.PROCESS_SETS and hasattr(self.hvd, "add_process_set")
        return "a process set of two ranks needs a third one beside it" if sets and too_few else ""

    # One case.

    def begin(self, case: Case) -> Wait:
        """Begin a case and return a function that waits for its results."""
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


def shortened(text: object, length: int) -> str:
    """A line of ASCII with the beginning and the end of a text."""
    line = " ".join(str(text).encode("ascii", "replace").decode("ascii").split())
    return (
        line
        if len(line) <= length
        else line[: length // 2 - 3] + " ... " + line[-length // 2 + 2 :]
    )


def run(context: Context, option: str) -> None:
    """Try all operations, with tensors on the rank's device, and report each."""
    caller = Caller(context)
    with context.on_device():
        try:
            for operation, batches in collective_cases.operations(caller.size):
                context.report(caller.try_all(operation, batches).event())
        except Ended as error:
            context.report(error.args[0].event())
