"""What exercises work with on a rank: the framework, Horovod and the way to report.

Runs on Python 3.6 and newer.
"""

import contextlib
import functools
import importlib
import inspect
import json
import os
import time
from typing import Any, Callable, ContextManager, Dict, Iterator, Tuple

import events

# Arrays of numpy, which mypy does not know here.
Array = Any
Shape = Tuple[int, ...]
Wait = Callable[[], Any]

POLL_SECONDS = 0.0005


def numbers_of(version: str) -> Tuple[int, ...]:
    """The leading numbers of a version: (2, 16) for 2.16.0rc1."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def queued() -> float:
    """Seconds for which this thread had work and no core; 0.0 if the kernel does not count them."""
    try:
        with open("/proc/thread-self/schedstat") as stream:
            return int(stream.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Absent(Exception):
    """This Horovod does not support it."""


@functools.lru_cache(maxsize=None)
def parameters(function: Callable[..., Any]) -> Tuple[inspect.Parameter, ...]:
    """Those of a function; to find them out takes longer than many calls."""
    return tuple(inspect.signature(function).parameters.values())


class Context:
    """One rank, with its framework and Horovod.

    Attributes:
        framework: ``torch`` or ``tensorflow``.
        controller: ``MPI`` or ``Gloo``.
        native: the framework's module.
        hvd: Horovod's module for it.
        version: of the framework.
        gpu: this rank's GPU as the framework calls it; empty without one.
        device: the GPU of tensors that tensor() makes; empty for the host's memory.
        waited: seconds spent within waiting() so far, without those in the queue for a core.
    """

    def __init__(self, framework: str, controller: str, descriptor: int) -> None:
        self.framework = framework
        self.controller = controller
        self._descriptor = descriptor
        self.native = importlib.import_module(framework)  # first: Horovod needs its libraries
        self.hvd = importlib.import_module("horovod." + framework)
        self.version = str(self.native.__version__)
        self.gpu = self.device = ""
        self.waited = 0.0
        if framework == "torch":
            self.native.set_num_threads(1)
        elif not self.native.executing_eagerly():
            self.native.compat.v1.enable_eager_execution()

    @property
    def numpy(self) -> Any:
        """The module, which the frameworks require."""
        return importlib.import_module("numpy")

    def report(self, event: events.RankEvent) -> None:
        """Send one event to the supervisor, rank.py."""
        line = json.dumps(events.to_table(event)) + "\n"
        os.write(self._descriptor, line.encode("ascii"))

    def stage(self, name: str, detail: str = "") -> None:
        """Report what is tried next, which tells where a rank failed."""
        self.report(events.Stage(name, detail))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this block the rank waits for others."""
        began = self.worked
        try:
            yield
        finally:
            self.waited += self.worked - began

    @property
    def worked(self) -> float:
        """Seconds since some time, without waiting for other ranks or for a core."""
        before, now, after = queued(), time.monotonic(), queued()
        while before != after:  # it lost its core in between
            before, now, after = after, time.monotonic(), queued()
        return now - after - self.waited

    # Calls of Horovod, whatever its version

    def need(self, name: str) -> Any:
        """An attribute of Horovod; raises Absent if there is none."""
        if not hasattr(self.hvd, name):
            raise Absent("there is no %s.%s" % (self.hvd.__name__, name))
        return getattr(self.hvd, name)

    def call(self, function: str, *values: Any, **arguments: Any) -> Any:
        """Call a function of Horovod; `name` is left out if the function does not accept it."""
        called = self.need(function)
        known = parameters(called)
        if not any(each.kind == each.VAR_KEYWORD for each in known):
            names = {each.name for each in known}
            for unknown in sorted(set(arguments) - names - {"name"}):
                raise Absent("%s.%s has no %s" % (self.hvd.__name__, function, unknown))
            arguments = {key: arguments[key] for key in arguments if key in names}
        return called(*values, **arguments)

    def begin(self, function: str, *values: Any, idle: bool = False, **arguments: Any) -> Wait:
        """Begin an operation, and return a function that waits for its result.

        Args:
            function: of Horovod.
            values, arguments: of the function.
            idle: whether other processes may use the core while it waits.
        """
        if self.framework != "torch":
            result = self.call(function, *values, **arguments)
            return lambda: result
        handle = self.call(function + "_async", *values, **arguments)
        return lambda: self.wait_for(handle, idle)

    def wait_for(self, handle: Any, idle: bool) -> Any:
        """The result of torch's handle once it is ready."""
        with self.waiting():
            while idle and not self.hvd.poll(handle):
                time.sleep(POLL_SECONDS)
            return self.hvd.synchronize(handle)  # alone, it would keep the core busy until then

    def reduction(self, operation: str) -> Dict[str, Any]:
        """The arguments that select a reduction, such as ``Sum``."""
        if hasattr(self.hvd, operation):
            return {"op": getattr(self.hvd, operation)}
        if operation not in ("Sum", "Average"):
            self.need(operation)
        return {"average": operation == "Average"}

    def on_all(self, true_here: bool) -> bool:
        """Whether something is true on all ranks, which must then do the same."""
        with self.on_device():
            here = self.tensor(self.numpy.array([true_here], "int32"))
            wait = self.begin("allreduce", here, name="on_all_ranks", **self.reduction("Sum"))
            return int(self.array(wait())[0]) == int(self.hvd.size())

    # Tensors

    def on_device(self) -> ContextManager[Any]:
        """Within this block TensorFlow uses `device` only; by itself it would choose a GPU."""
        if self.framework == "torch":
            return contextlib.ExitStack()
        device: ContextManager[Any] = self.native.device(self.device or "/cpu:0")
        return device

    def tensor(self, array: Array) -> Any:
        """The framework's tensor with an array's values, on `device`."""
        if self.framework == "torch":
            return self.native.from_numpy(array).to(self.device or "cpu")
        with self.on_device():
            return self.native.constant(array)

    def array(self, tensor: Any) -> Array:
        """The values of a tensor."""
        return tensor.cpu().numpy() if self.framework == "torch" else tensor.numpy()

    def numbers(self) -> events.Joined:
        """The numbers of this rank and of its host."""
        hvd = self.hvd
        return events.Joined(
            rank=hvd.rank(),
            size=hvd.size(),
            local_rank=hvd.local_rank(),
            local_size=hvd.local_size(),
            cross_rank=getattr(hvd, "cross_rank", lambda: None)(),
            cross_size=getattr(hvd, "cross_size", lambda: None)(),
        )
