"""What observe.py sees of a training program for TensorFlow 2: its data and its reductions.

A program's steps are often compiled: Python sees the calls of compiled functions, and the variables
between them. observe_keras.py knows the optimizers. Nothing is added to a compiled function, so
its numbers stay as they are. Runs on Python 3.6 and newer.
"""

import sys
from typing import Any, Callable, List, Set, Tuple

from observer import Batch, batch_of, checksum, observer, replaces, watch, watch_calls

# How much is kept of what the program passes to its functions.
MOST_HANDED = 64


class TensorFlowObserver:
    """What is known of the program's data and gradients.

    Attributes:
        depth: how many compiled functions are under way.
        ended: looks for steps after a compiled function.
        fitting: the models whose fit() runs.
        evaluating: how many calls of evaluate() and predict() are under way.
        batches: how many fit() reads in an epoch; 0 if unknown.
        queue: what a data set has supplied to fit(), with the number of its source.
        handed: what the program passes to its models and compiled functions.
        shapes: those of gradients that tapes have computed.
        reduced: whether any gradient was averaged.
    """

    def __init__(self) -> None:
        self.depth = self.evaluating = self.batches = 0
        self.ended: Callable[[], None] = lambda: None
        self.fitting: List[Any] = []
        self.queue: List[Tuple[int, Batch]] = []
        self.handed: List[Batch] = []
        self.shapes: Set[str] = set()
        self.reduced = False

    @property
    def tensorflow(self) -> Any:
        """The module, which the program has imported."""
        return sys.modules["tensorflow"]

    # Data

    def arrays(self, data: Any) -> List[Any]:
        """The tensors in lists and dictionaries that Python can read now, as arrays."""
        arrays = [
            each.numpy() if hasattr(each, "numpy") else each
            for each in self.tensorflow.nest.flatten(data, expand_composites=True)
        ]
        kinds = [getattr(getattr(each, "dtype", None), "kind", "O") for each in arrays]
        return [each for each, kind in zip(arrays, kinds) if kind not in "OSU"]

    def checksums(self, data: Any) -> List[int]:
        """Numbers that differ if the tensors in lists and dictionaries do."""
        return [checksum(each) for each in self.arrays(data)]

    def read(self, data: Any) -> None:
        """The program reads a batch."""
        if not observer.phase:
            observer.batches.append(batch_of(self.arrays(data)))

    def hands(self, caller: Any, words: Tuple[Any, ...]) -> None:
        """A frame calls a model or a compiled function with arguments, perhaps with its batch."""
        name = caller.f_code.co_filename
        if self.depth or observer.phase or not observer.program.has(name):
            return
        tensors = [
            each
            for each in self.tensorflow.nest.flatten(words)
            if getattr(each, "shape", ()) and not hasattr(each, "assign")
        ]
        if tensors:
            self.handed = [*self.handed, batch_of(self.arrays(tensors))][-MOST_HANDED:]

    def supply(self, steps: int) -> None:
        """Find the batches of the next steps: read by fit(), by Python, or passed by it."""
        taken, self.queue = self.queue[:steps], self.queue[steps:]
        for number, batch in taken:
            observer.fed = number
            observer.batches.append(batch)
        if steps == 1:  # what was passed to more of them is no batch of theirs
            observer.batches = observer.batches or self.handed
        self.handed = []

    def passes(self, data: Any) -> int:
        """Report that a pass over a data set begins; returns the number of the source."""
        self.queue.clear()
        count = int(data.cardinality().numpy()) if hasattr(data, "cardinality") else -2
        if self.fitting:
            count = self.batches or count
        share, inputs = None, [data]
        while inputs and not share:
            each = inputs.pop()
            share = getattr(each, "_hvdenv", None)
            inputs += each._inputs()
        return observer.passes(
            data,
            "shard()" if share else type(data).__name__,
            batches=count if count >= 0 else None,
            looped=not self.fitting,
            **(share or {}),
        )

    def tapped(self, data: Any, number: int) -> Any:
        """A data set with the same elements, each of which is reported when it is read."""
        tensorflow = self.tensorflow

        def take(*arrays: Any) -> int:
            observer.guarded(self.queue.append, (number, batch_of(arrays)))
            return 0

        def report(*parts: Any) -> Any:
            tensors = [
                each
                for each in tensorflow.nest.flatten(parts, expand_composites=True)
                if each.dtype.is_numpy_compatible and each.dtype != tensorflow.string
            ]
            tensorflow.numpy_function(take, tensors, tensorflow.int64)
            return parts if len(parts) > 1 or isinstance(data.element_spec, tuple) else parts[0]

        report.autograph_info__ = {}  # type: ignore[attr-defined]
        found = data.map(report)
        return found if found.element_spec == data.element_spec else data

    # Reductions

    def derived(self, result: Any) -> None:
        """A tape has computed gradients: what has one of their shapes later is one, too."""
        shapes = [each.shape for each in self.tensorflow.nest.flatten(result) if each is not None]
        self.shapes.update(str(each) for each in shapes if each.rank != 0)

    def reduces(self, name: str, tensor: Any) -> None:
        """A tensor is about to be reduced over all ranks, now or in a function being compiled."""
        shape: Any = getattr(tensor, "shape", None)
        gradient = str(shape) in self.shapes
        frame: Any = sys._getframe(3)
        while frame and not gradient:  # AutoGraph puts tf__ before names
            gradient = frame.f_code.co_name.replace("tf__", "") == "allreduce_grads"
            frame = frame.f_back
        count = shape.num_elements() if hasattr(shape, "num_elements") else None
        self.reduced = self.reduced or gradient
        observer.called(name, count or 0, gradient)


seen = TensorFlowObserver()


def watch_compiled(module: Any) -> None:
    """Watch calls of compiled functions."""

    @replaces(getattr(module, "Function", None), "__call__")
    def call(original: Any, self: Any, *words: Any, **named: Any) -> Any:
        observer.guarded(seen.hands, sys._getframe(2), words)
        seen.depth += 1
        try:
            return original(self, *words, **named)
        finally:
            seen.depth -= 1
            if not seen.depth and sys.exc_info()[0] is None:
                observer.guarded(seen.ended)


def watch_tapes(module: Any) -> None:
    """Watch which tensors are gradients."""

    @replaces(module.GradientTape, "gradient")
    def gradient(original: Any, self: Any, *words: Any, **named: Any) -> Any:
        result = original(self, *words, **named)
        observer.guarded(seen.derived, result)
        return result


def watch_iterators(module: Any) -> None:
    """Watch what Python reads from data sets."""

    @replaces(module.OwnedIterator, "__next__")
    def following(original: Any, self: Any) -> Any:
        number = getattr(self, "_hvdenv", 0)
        if number and not observer.next_batch(number):
            raise StopIteration
        found = original(self)
        if number:
            observer.guarded(seen.read, found)
        return found


def watch_data_sets(module: Any) -> None:
    """Watch passes over data sets, and their shares."""

    @replaces(module.DatasetV2, "shard")
    def shard(original: Any, self: Any, num_shards: Any, index: Any, *words: Any) -> Any:
        result = original(self, num_shards, index, *words)
        if isinstance(num_shards, int) and isinstance(index, int):
            local = observer.guarded(observer.program.gives_local_rank, "shard", 1, "index")
            result._hvdenv = {"replicas": int(num_shards), "rank": int(index), "local": bool(local)}
        return result

    @replaces(module.DatasetV2, "__iter__")
    def iterate(original: Any, self: Any) -> Any:
        if seen.depth or seen.evaluating or not seen.tensorflow.executing_eagerly():
            return original(self)
        number = observer.guarded(seen.passes, self) or 0
        if seen.fitting:
            data = observer.guarded(seen.tapped, self, number)
            return original(self if data is None else data)
        iterator = original(self)
        iterator._hvdenv = number
        return iterator


def watch_horovod(module: Any) -> None:
    """Watch horovod.tensorflow, where reductions begin."""

    def reduces_many(tensors: Any, *_: Any, **__: Any) -> None:
        for tensor in tensors:
            seen.reduces("grouped_allreduce", tensor)

    watch(module, "allreduce", lambda tensor, *_, **__: seen.reduces("allreduce", tensor))
    watch(module, "allgather", lambda tensor, *_, **__: seen.reduces("allgather", tensor))
    watch(module, "grouped_allreduce", reduces_many)


def watch_operations(module: Any) -> None:
    """Watch horovod.tensorflow.mpi_ops."""
    watch_calls(module, "broadcast_", "join")

    def broadcast(tensor: Any, *_: Any, **__: Any) -> None:
        shape: Any = getattr(tensor, "shape", ())  # a number of Python has none
        observer.called("broadcast", 0 if len(shape) else 1)

    watch(module, "broadcast", broadcast)


def watch_functions(module: Any) -> None:
    """Watch horovod.tensorflow.functions: what programs call before they train."""
    watch_calls(module, "broadcast_variables", "broadcast_object", "allgather_object")


def watch_checkpoints(module: Any) -> None:
    """Watch tf.train.Checkpoint, which writes by C++."""

    def watch_file(name: str, write: bool) -> None:
        watch(module.Checkpoint, name, lambda _, path, *__, **___: observer.file(path, write, True))

    for name in ("save", "write", "restore", "read"):
        watch_file(name, name in ("save", "write"))


def watch_managers(module: Any) -> None:
    """Watch tf.train.CheckpointManager, which numbers its files."""

    def saves(manager: Any, *_: Any, **__: Any) -> None:
        observer.file(manager._checkpoint_prefix, True, True)

    watch(module.CheckpointManager, "save", saves)


ACTIONS = {
    r"tensorflow\.python\.eager\.(?:polymorphic_function\.polymorphic_function|def_function)": (
        watch_compiled
    ),
    r"tensorflow\.python\.eager\.backprop": watch_tapes,
    r"tensorflow\.python\.data\.ops\.iterator_ops": watch_iterators,
    r"tensorflow\.python\.data\.ops\.dataset_ops": watch_data_sets,
    r"tensorflow\.python\.(?:training\.tracking\.util|checkpoint\.checkpoint)": watch_checkpoints,
    r"tensorflow\.python\.(?:training|checkpoint)\.checkpoint_management": watch_managers,
    r"horovod\.tensorflow": watch_horovod,
    r"horovod\.tensorflow\.mpi_ops": watch_operations,
    r"horovod\.tensorflow\.functions": watch_functions,
}
