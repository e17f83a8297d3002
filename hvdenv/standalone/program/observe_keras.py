"""What observe.py sees of the optimizers and models of Keras. Runs on Python 3.6 and newer.

A step is one more in an optimizer's `iterations` after a call of a compiled function, or of
apply_gradients(). fit() trains in compiled functions, so it is given a data set that reports what
is read from it.
"""

import inspect
import itertools
import sys
from typing import Any, Dict, List, Optional

import events
from observe_tensorflow import seen
from observer import observer, physical_gpu, replaces, watch

CALLBACKS = {"BroadcastGlobalVariablesCallback", "MetricAverageCallback"}
# These decide by metrics. Callbacks run in the order of their list.
DECIDING = {"EarlyStopping", "ReduceLROnPlateau"}


def iterations(optimizer: Any) -> Optional[int]:
    """How many steps an optimizer has taken, by its own counter; None if it has none yet."""
    try:
        with seen.tensorflow.init_scope():
            return int(optimizer._iterations.numpy())
    except Exception:  # it is of a graph of TensorFlow 1
        return None


class Optimizer:
    """An optimizer of Keras that changes variables.

    Attributes:
        number: as it is reported.
        done: its counter at the last look; None if it had none yet.
    """

    def __init__(self, optimizer: Any, number: int, variables: List[Any]) -> None:
        self.optimizer = optimizer
        self.number = number
        self.variables = variables
        self.done = iterations(optimizer)

    def checksums(self) -> List[int]:
        """Those of its variables."""
        return [sum(seen.checksums(each.numpy())) for each in self.variables]

    def rate(self) -> Optional[float]:
        """The learning rate of the last step, if there is one for all variables."""
        try:
            value = self.optimizer.learning_rate
            schedule = getattr(self.optimizer, "_learning_rate", value)
            # With a schedule, learning_rate of Keras 3 is that of the next step.
            if callable(schedule) and hasattr(schedule, "get_config"):
                value = schedule(max(self.done or 0, 1) - 1)
            return float(value.numpy() if hasattr(value, "numpy") else value)
        except Exception:
            return None

    def device(self) -> str:
        """The GPU of its variables, as all processes of the host would call it."""
        place = str(getattr(self.variables[0], "device", ""))
        return physical_gpu(int(place.rpartition(":")[2])) if "GPU" in place else ""


class KerasObserver:
    """What is known of the program's optimizers: where they were made, and their steps.

    Attributes:
        target: the learning rate at the end of fit()'s warm-up, if it has one.
        trained: optimizers that wrap one with a state.
    """

    def __init__(self) -> None:
        self.target: Optional[float] = None
        self.optimizers: Dict[int, Optimizer] = {}
        self.sites: Dict[int, str] = {}
        self.trained: List[Any] = []

    def made(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """The program makes an optimizer."""
        site = observer.program.site()
        if site:
            self.sites.setdefault(id(optimizer), site)

    def applies(self, optimizer: Any, pairs: List[Any]) -> None:
        """An optimizer is about to change variables, now or in a function being compiled."""
        variables = [variable for gradient, variable in pairs if gradient is not None]
        if id(optimizer) in self.optimizers or not variables:
            return
        done = iterations(optimizer)
        number = observer.optimizer(
            type(optimizer).__name__,
            self.sites.get(id(optimizer), ""),
            [str(getattr(each, "path", each.name)) for each in variables],
            # A distributed optimizer averages in minimize(), not if gradients are given to it.
            distributed=seen.reduced and hasattr(optimizer, "_allreduce_grads"),
            lost=any(each is optimizer for each in self.trained) and not done,
        )
        self.optimizers[id(optimizer)] = Optimizer(optimizer, number, variables)

    def look(self) -> None:
        """Report the steps that optimizers have taken since the last look."""
        for each in list(self.optimizers.values()):
            now = iterations(each.optimizer)
            if now is None or now == each.done:
                continue
            # A counter without a past, or one that was restored, has made one step.
            count = now - each.done if each.done is not None and now > each.done else 1
            each.done = now
            seen.supply(count)
            observer.device = observer.device or each.device()
            rate = self.target or each.rate()
            observer.stepped(each.number, each.checksums, count, rate=rate)
        if observer.phase == 1:
            for model in seen.fitting:
                model.stop_training = True


steps = KerasObserver()
seen.ended = steps.look


def _apply_gradients(original: Any, self: Any, pairs: Any, *words: Any, **named: Any) -> Any:
    pairs = list(pairs)
    observer.guarded(steps.applies, self, pairs)
    return _applied(original(self, pairs, *words, **named))


def _apply(original: Any, self: Any, gradients: Any, *words: Any, **named: Any) -> Any:
    gradients = list(gradients)
    variables = words[0] if words else named.get("trainable_variables")
    observer.guarded(steps.applies, self, list(zip(gradients, variables or ())))
    return _applied(original(self, gradients, *words, **named))


def _applied(result: Any) -> Any:
    if not seen.depth and seen.tensorflow.executing_eagerly():
        observer.guarded(seen.ended)
    return result


def watch_optimizers(module: Any) -> None:
    """Watch the base classes of optimizers in a module of Keras."""
    for name in ("_BaseOptimizer", "BaseOptimizer", "OptimizerV2", "Optimizer"):
        kind = getattr(module, name, None)
        methods = getattr(kind, "__dict__", ())
        if "__init__" in methods:
            watch(kind, "__init__", steps.made)
        if "apply_gradients" in methods:
            replaces(kind, "apply_gradients")(_apply_gradients)
        if "apply" in methods:  # of Keras 3
            replaces(kind, "apply")(_apply)


def watch_models(module: Any) -> None:
    """Watch fit() and the savers of models in a module of Keras."""
    for name in ("Model", "TensorFlowTrainer", "Trainer"):
        kind = getattr(module, name, None)
        methods = getattr(kind, "__dict__", ())
        for saver in {"save", "save_weights"} & set(methods):
            watch(kind, saver, _saves)
        if "load_weights" in methods:
            watch(kind, "load_weights", _loads)
        if "train_on_batch" in methods:
            watch(kind, "train_on_batch", lambda _, *words, **named: seen.read((words, named)))
        if "fit" in methods:
            replaces(kind, "fit")(_fit)
            replaces(kind, "evaluate")(_evaluates)
            replaces(kind, "predict")(_evaluates)
        if name == "Model":
            replaces(kind, "__call__")(_call)


def _saves(_: Any, path: Any, *__: Any, **___: Any) -> None:
    observer.file(path, True, saver=True)


def _loads(_: Any, path: Any, *__: Any, **___: Any) -> None:
    observer.file(path, False, saver=True)


def _call(original: Any, self: Any, *words: Any, **named: Any) -> Any:
    observer.guarded(seen.hands, sys._getframe(2), words)
    return original(self, *words, **named)


def _fit(original: Any, self: Any, *words: Any, **named: Any) -> Any:
    observer.guarded(_fits, inspect.signature(original).bind(self, *words, **named).arguments)
    seen.fitting.append(self)
    try:
        return original(self, *words, **named)
    finally:
        seen.fitting.pop()
        seen.queue.clear()


def _fits(named: Dict[str, Any]) -> None:
    callbacks = {type(each).__name__: each for each in named.get("callbacks") or ()}
    before = itertools.takewhile(lambda name: name != "MetricAverageCallback", callbacks)
    early = [name for name in before if name in DECIDING]
    for name in sorted(CALLBACKS & set(callbacks)):
        observer.called(name)
    steps.target = getattr(callbacks.get("LearningRateWarmupCallback"), "initial_lr", None)
    if early or (named.get("verbose", 1) and "MetricAverageCallback" not in callbacks):
        text = "lets {} decide".format(early[0]) if early else "shows the progress of fit()"
        observer.emit(events.Shown(text, observer.program.site()))
    seen.batches = named.get("steps_per_epoch") or 0
    samples = getattr(named.get("x"), "shape", None)
    if samples and not seen.batches and not named.get("validation_split"):
        seen.batches = -(-int(samples[0]) // int(named.get("batch_size") or 32))


def _evaluates(original: Any, self: Any, *words: Any, **named: Any) -> Any:
    seen.evaluating += 1
    try:
        return original(self, *words, **named)
    finally:
        seen.evaluating -= 1


def watch_callbacks(module: Any) -> None:
    """Watch whether the local rank decides that ModelCheckpoint is used: it saves within fit()."""
    kind = getattr(module, "ModelCheckpoint", None)

    @replaces(kind, "__init__")
    def make(original: Any, self: Any, *words: Any, **named: Any) -> None:
        original(self, *words, **named)
        self._hvdenv = observer.guarded(observer.program.decided_by_local_rank)

    @replaces(kind, "_save_model")
    def save(original: Any, self: Any, *words: Any, **named: Any) -> Any:
        observer.by_local_rank = bool(getattr(self, "_hvdenv", False))
        try:
            return original(self, *words, **named)
        finally:
            observer.by_local_rank = False


def watch_wrapper(module: Any) -> None:
    """Watch horovod._keras, which makes an optimizer from the configuration of another one."""

    @replaces(module, "create_distributed_optimizer")
    def wrap(original: Any, keras: Any, optimizer: Any, *words: Any, **named: Any) -> Any:
        distributed = original(keras, optimizer, *words, **named)
        if iterations(optimizer):
            steps.trained.append(distributed)
        return distributed


_KERAS = r"(?:tensorflow\.python\.)?keras(?:\.src)?\."
ACTIONS = {
    _KERAS + r"optimizers?(?:\.optimizer_experimental|\.optimizer_v2|\.legacy|_v2)?"
    r"\.(?:optimizer|optimizer_v2|base_optimizer)": watch_optimizers,
    _KERAS + r"(?:engine\.training|backend\.tensorflow\.trainer|models\.model)": watch_models,
    _KERAS + r"callbacks(?:\.model_checkpoint)?": watch_callbacks,
    r"horovod\._keras": watch_wrapper,
}
