"""Where a program for TensorFlow 2 takes steps, reduces gradients, and reads and saves data.

A program's steps are often compiled: Python sees the calls of compiled functions, and the variables
between them. A step is one more in the `iterations` of an optimizer of Keras after such a call, or
after apply_gradients(). Nothing is added to a compiled function, so its numbers stay as they are.
fit() trains in compiled functions, so it is given a data set that reports what is read from it.
Runs on Python 3.6 and newer.
"""

import functools
import inspect
import itertools
import sys
from typing import Any, Generator, Iterator, List, Mapping, Optional, Set, Tuple

import events
from recorder import (
    Batch,
    Function,
    around,
    batch_of,
    collectives,
    on,
    on_gpu,
    recorder,
    savers,
)

CALLBACKS = {"BroadcastGlobalVariablesCallback", "MetricAverageCallback"}
# These decide by metrics. Callbacks run in the order of their list.
DECIDING = {"EarlyStopping", "ReduceLROnPlateau"}

_HOROVOD = r"horovod\.tensorflow"
_DATA = r"tensorflow\.python\.data\.ops\."
_COMPILED = (
    r"tensorflow\.python\.eager\.(?:polymorphic_function\.polymorphic_function|def_function)"
)
_CHECKPOINT = r"tensorflow\.python\.(?:training\.tracking\.util|checkpoint\.checkpoint)"
_KERAS = r"(?:tensorflow\.python\.)?keras(?:\.src)?\."
_CALLBACKS = _KERAS + r"callbacks(?:\.model_checkpoint)?"
_MODELS = _KERAS + r"(?:engine\.training|backend\.tensorflow\.trainer|models\.model)"
_OPTIMIZERS = (
    _KERAS + r"optimizers?(?:\.optimizer_experimental|\.optimizer_v2|\.legacy|_v2)?"
    r"\.(?:optimizer|optimizer_v2|base_optimizer)"
)
# A version of Keras has one or two of these.
_MODEL = "Model|TensorFlowTrainer|Trainer"
_OPTIMIZER = "_BaseOptimizer|BaseOptimizer|OptimizerV2|Optimizer"

# A CheckpointManager, which numbers its files, calls the second one or, in older versions, the third.
savers(_CHECKPOINT, "Checkpoint.save", "Checkpoint._write", "Checkpoint.write")
savers(_CHECKPOINT, "Checkpoint.restore", "Checkpoint.read", write=False)
savers(_MODELS, _MODEL + ".save", _MODEL + ".save_weights")
savers(_MODELS, _MODEL + ".load_weights", write=False)
collectives(_HOROVOD + r"\.mpi_ops", "broadcast_", "join")
collectives(
    _HOROVOD + r"\.functions", "broadcast_variables", "broadcast_object", "allgather_object"
)


class Seen:
    """What is known of the program's data and gradients.

    Attributes:
        depth: how many compiled functions are under way.
        evaluating: how many calls of evaluate() and predict() are under way.
        fitting: the models whose fit() runs.
        batches: how many fit() reads in an epoch; 0 if unknown.
        epoch: the one in which fit() starts.
        queue: what a data set has supplied to fit(), with the number of its source.
        shapes: those of gradients that tapes have computed.
        reduced: whether any gradient was averaged.
    """

    depth = evaluating = batches = epoch = 0
    fitting: List[Any] = []
    queue: List[Tuple[int, Batch]] = []
    shapes: Set[str] = set()
    reduced = False


# Optimizers


def counted(optimizer: Any) -> Optional[int]:
    """How many steps an optimizer has taken, by its own counter; None if it has none yet."""
    try:
        with sys.modules["tensorflow"].init_scope():
            return int(optimizer._iterations.numpy())
    except Exception:  # it is of a graph of TensorFlow 1
        return None


@on(_OPTIMIZERS, _OPTIMIZER + ".__init__")
def makes(optimizer: Any, *_: Any, **__: Any) -> None:
    """An optimizer is made."""
    recorder.made(optimizer)


@on(r"horovod\._keras", "create_distributed_optimizer")
def wraps(keras: Any, optimizer: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
    """Horovod makes an optimizer from the configuration of another one, without its state."""
    distributed = yield
    recorder.made(distributed).lost = bool(counted(optimizer))


@around(_OPTIMIZERS, _OPTIMIZER + ".apply_gradients", _OPTIMIZER + ".apply")
def applies(original: Function, *words: Any, **named: Any) -> Any:
    """Called instead of apply_gradients(pairs), and of apply(gradients, variables) of Keras 3."""
    given = inspect.signature(original).bind(*words, **named)
    optimizer, first, *rest = given.arguments
    pairs = given.arguments[first] = list(given.arguments[first])
    if original.__name__ == "apply":
        pairs = list(zip(pairs, (given.arguments[rest[0]] if rest else None) or ()))
    recorder.guarded(trains, given.arguments[optimizer], pairs)
    result = original(*given.args, **given.kwargs)
    if not Seen.depth and sys.modules["tensorflow"].executing_eagerly():
        recorder.guarded(look)
    return result


def trains(optimizer: Any, pairs: List[Any]) -> None:
    """An optimizer is about to change variables, now or in a function being compiled."""
    one = recorder.made(optimizer)
    variables = [variable for gradient, variable in pairs if gradient is not None]
    if variables and not one.number:
        one.counter = counted(optimizer)
        one.lost = one.lost and not one.counter
        names = [str(getattr(each, "path", each.name)) for each in variables]
        # A wrapped one of Keras 2 averages in minimize(), not if gradients are given to it.
        recorder.trains(one, variables, names, distributed=Seen.reduced)


def look() -> None:
    """Report the steps that optimizers have taken since the last look."""
    for one in [each for each in recorder.optimizers.values() if each.number]:
        now = counted(one.optimizer)
        if now is not None and now != one.counter:
            # A counter without a past, or one that was restored, has made one step.
            count = now - one.counter if one.counter is not None and now > one.counter else 1
            one.counter = now
            # What fit() has read for these steps; a loop of the program has reported its own.
            for number, batch in Seen.queue[:count]:
                recorder.fed = number
                recorder.batches.append(batch)
            del Seen.queue[:count]
            place = str(getattr(one.tensors[0], "device", ""))
            if "GPU" in place and not recorder.device:
                recorder.device = on_gpu(int(place.rpartition(":")[2]))
            one.facts["rate"] = rate(one.optimizer)
            recorder.stepped(one, count)
    if recorder.phase == 1:
        for model in Seen.fitting:
            model.stop_training = True


def rate(optimizer: Any) -> Optional[float]:
    """The learning rate, if there is one for all variables."""
    try:
        value = optimizer.learning_rate
        return float(value.numpy() if hasattr(value, "numpy") else value)
    except Exception:
        return None


@on(_COMPILED, "Function.__call__")
def compiled(*_: Any, **__: Any) -> Iterator[None]:
    """A compiled function is called."""
    Seen.depth += 1
    try:
        yield
    finally:
        Seen.depth -= 1
    if not Seen.depth:
        look()


# Reductions


@on(r"tensorflow\.python\.eager\.backprop", "GradientTape.gradient")
def derives(*_: Any, **__: Any) -> Generator[None, Any, None]:
    """A tape computes gradients: what has one of their shapes later is one, too."""
    result = yield
    found = sys.modules["tensorflow"].nest.flatten(result)
    shapes = [each.shape for each in found if each is not None]
    Seen.shapes.update(str(each) for each in shapes if each.rank != 0)


def reduces(operation: str, *words: Any, **named: Any) -> None:
    """Tensors are about to be reduced over all ranks, now or in a function being compiled."""
    given = words[0] if words else named.get("tensor", named.get("tensors"))
    for tensor in given if isinstance(given, (list, tuple)) else [given]:
        shape: Any = getattr(tensor, "shape", None)
        gradient = str(shape) in Seen.shapes
        count = shape.num_elements() if hasattr(shape, "num_elements") else None
        Seen.reduced = Seen.reduced or gradient
        recorder.called(operation, count or 0, gradient)


for _name in ("allreduce", "grouped_allreduce", "allgather"):  # which reduces sparse gradients
    on(_HOROVOD, _name)(functools.partial(reduces, _name))


@on(_HOROVOD + r"\.mpi_ops", "broadcast")
def broadcasts(tensor: Any, *_: Any, **__: Any) -> None:
    """A tensor is about to be broadcast; a number of Python has no shape."""
    shape: Any = getattr(tensor, "shape", ())
    recorder.called("broadcast", 0 if len(shape) else 1)


# Data


@on(_MODELS, _MODEL + ".train_on_batch")
def trains_on_batch(_: Any, *words: Any, **named: Any) -> None:
    """The program gives a batch to a model."""
    recorder.read((words, named))


@on(_DATA + "dataset_ops", "DatasetV2.shard")
def shares(_: Any, num_shards: Any, index: Any, *__: Any, **___: Any) -> Generator[None, Any, None]:
    """A data set is divided."""
    local = recorder.program.gives_local_rank()
    result = yield
    if isinstance(num_shards, int) and isinstance(index, int):
        result._hvdenv = {"replicas": num_shards, "rank": index, "local": local}


@around(_DATA + "dataset_ops", "DatasetV2.__iter__")
def iterates(original: Function, data: Any) -> Any:
    """A pass over a data set begins."""
    if Seen.depth or Seen.evaluating or not sys.modules["tensorflow"].executing_eagerly():
        return original(data)
    number = recorder.guarded(passes, data) or 0
    if Seen.fitting:
        tapped = recorder.guarded(tap, data, number)
        return original(data if tapped is None else tapped)
    iterator = original(data)
    iterator._hvdenv = number
    return iterator


@around(_DATA + "iterator_ops", "OwnedIterator.__next__")
def following(original: Function, iterator: Any) -> Any:
    """Python reads from a data set."""
    number = getattr(iterator, "_hvdenv", 0)
    if number and not recorder.next_batch(number):
        raise StopIteration
    found = original(iterator)
    if number:
        flatten = sys.modules["tensorflow"].nest.flatten
        recorder.guarded(lambda: recorder.read(flatten(found, expand_composites=True)))
    return found


def passes(data: Any) -> int:
    """Report that a pass over a data set begins; returns the number of the source."""
    Seen.queue.clear()
    count = int(data.cardinality().numpy()) if hasattr(data, "cardinality") else -2
    if Seen.fitting:
        count = Seen.batches or count
    share, inputs = None, [data]
    while inputs and not share:
        each = inputs.pop()
        share = getattr(each, "_hvdenv", None)
        inputs += each._inputs()
    return recorder.passes(
        data,
        "shard()" if share else type(data).__name__,
        batches=count if count >= 0 else None,
        epoch=Seen.epoch if Seen.fitting else None,
        looped=not Seen.fitting,
        **(share or {}),
    )


def tap(data: Any, number: int) -> Any:
    """A data set with the same elements, each of which is reported when it is read."""
    tensorflow = sys.modules["tensorflow"]

    def take(*parts: Any) -> int:
        recorder.guarded(lambda: Seen.queue.append((number, batch_of(parts))))
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


# fit() and callbacks


@on(_MODELS, _MODEL + ".fit")
def fits(model: Any, *words: Any, **named: Any) -> Iterator[None]:
    """fit() is called."""
    given = inspect.signature(type(model).fit).bind(model, *words, **named)
    recorder.guarded(prepares, given.arguments)
    Seen.fitting.append(model)
    try:
        yield
    finally:
        Seen.fitting.pop()
        Seen.queue.clear()


def prepares(named: Mapping[str, Any]) -> None:
    """A model is about to be trained by fit() with these arguments."""
    callbacks = {type(each).__name__: each for each in named.get("callbacks") or ()}
    unaveraged = itertools.takewhile(lambda name: name != "MetricAverageCallback", callbacks)
    early = [name for name in unaveraged if name in DECIDING]
    for name in sorted(CALLBACKS & set(callbacks)):
        recorder.called(name)
    if early or (named.get("verbose", 1) and "MetricAverageCallback" not in callbacks):
        text = "lets {} decide".format(early[0]) if early else "shows the progress of fit()"
        recorder.emit(events.Shown(text, recorder.program.site()))
    # They may be numbers of numpy, as hvd.broadcast() returns.
    steps, epoch = named.get("steps_per_epoch"), named.get("initial_epoch")
    Seen.batches, Seen.epoch = int(steps or 0), int(epoch or 0)
    samples = getattr(named.get("x"), "shape", None)
    if samples and not Seen.batches and not named.get("validation_split"):
        Seen.batches = -(-int(samples[0]) // int(named.get("batch_size") or 32))


@on(_MODELS, _MODEL + ".evaluate", _MODEL + ".predict")
def evaluates(*_: Any, **__: Any) -> Iterator[None]:
    """evaluate() or predict() is called."""
    Seen.evaluating += 1
    try:
        yield
    finally:
        Seen.evaluating -= 1


@on(_CALLBACKS, "ModelCheckpoint.__init__")
def makes_callback(callback: Any, *_: Any, **__: Any) -> Iterator[None]:
    """Keep whether the local rank decides that a callback is used: it saves within fit()."""
    yield
    callback._hvdenv = recorder.program.decided_by_local_rank()


@on(_CALLBACKS, "ModelCheckpoint._save_model")
def saves(callback: Any, *_: Any, **__: Any) -> Iterator[None]:
    """A callback saves."""
    recorder.by_local_rank = bool(getattr(callback, "_hvdenv", False))
    try:
        yield
    finally:
        recorder.by_local_rank = False
