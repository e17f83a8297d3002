"""An exercise for tests: the training, again and again, with parts of Horovod that do wrong.

A fault is a list of what stands in for what while the training runs: a test could doctor the
installation as well, but only once for each start of ranks, and frameworks import slowly. Only
the parts of the training that it concerns are run. They are reported as ``FAULT: PART``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import training  # beside rank_work.py, as events is
from events import Training

Function = Callable[..., Any]

# Parts of the training: all of a framework, or those with these names.
ALL = ""
OPTIMIZER, TAPE, FIT = "DistributedOptimizer", "DistributedGradientTape", "Keras fit"


class Fault(NamedTuple):
    """A fault.

    Attributes:
        parts: names of the parts of the training, separated by commas.
        changes: what has which attribute, and what stands in for it.
    """

    parts: str
    changes: tuple[tuple[Any, str, Any], ...] = ()


class Context:
    """A rank's context that reports parts of the training under the name of a fault."""

    def __init__(self, context: Any, fault: str) -> None:
        self._context = context
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def report(self, event: Any) -> None:
        if isinstance(event, Training):
            event = event._replace(part=f"{self._fault}: {event.part}")
        self._context.report(event)


def nothing(*arguments: Any, **more: Any) -> None:
    """Stands in for what should do something."""


def always(function: Function, **fixed: Any) -> Function:
    """A function that ignores what it is given for some arguments."""
    return lambda *arguments, **more: function(*arguments, **{**more, **fixed})


def torch_faults(context: Any) -> dict[str, Fault]:
    return {"none": Fault(ALL), **faults_of_scripts(context), **faults_of_options(context)}


def faults_of_scripts(context: Any) -> dict[str, Fault]:
    """What concerns every script with torch."""
    hvd = context.hvd
    optimizer, parameters = hvd.DistributedOptimizer, hvd.broadcast_parameters

    def coarse(tensor: Any) -> tuple[Any, Any]:
        return ((tensor * 2).round() / 2).half(), tensor.dtype

    def no_buffers(saved: Mapping[str, Any], root_rank: int) -> None:
        parameters({name: each for name, each in saved.items() if "norm" not in name}, root_rank)

    plain = {
        "parameters": (hvd, "broadcast_parameters", nothing),
        "buffers": (hvd, "broadcast_parameters", no_buffers),
        "state": (hvd, "broadcast_optimizer_state", nothing),
        "alone": (hvd, "DistributedOptimizer", lambda inner, **more: inner),
        "added": (hvd, "DistributedOptimizer", always(optimizer, op=hvd.Sum)),
        "metric": (hvd, "allreduce", lambda tensor, name: tensor),
    }
    change = (hvd.Compression.fp16, "compress", staticmethod(coarse))
    return {
        **{name: Fault(OPTIMIZER, (change,)) for name, change in plain.items()},
        "coarse": Fault(f"{OPTIMIZER} with Compression.fp16", (change,)),
    }


def faults_of_options(context: Any) -> dict[str, Fault]:
    """What concerns options of torch's DistributedOptimizer, and other optimizers."""
    torch, hvd = context.native, context.hvd
    inside: Any = importlib.import_module("horovod.torch.optimizer")
    optimizer, state = hvd.DistributedOptimizer, hvd.broadcast_optimizer_state

    def averaged_passes(*arguments: Any, **more: Any) -> Any:
        made = optimizer(*arguments, **more)
        wait = made.synchronize

        def synchronize() -> None:
            wait()
            for group in made.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= made.backward_passes_per_step

        made.synchronize = synchronize
        return made

    def forget(made: Any, root_rank: int) -> None:
        state(made, root_rank)
        for each in made.state.values():
            each["exp_avg"].zero_()

    def one_rate(made: Any, root_rank: int) -> None:
        state(made, root_rank)
        made.param_groups[1]["lr"] = made.param_groups[0]["lr"]

    adam = "Adam and two groups"
    faults = {
        "passes": ("backward_passes_per_step", hvd, "DistributedOptimizer", averaged_passes),
        "adam": (adam, hvd, "broadcast_optimizer_state", forget),
        "rates": (adam, hvd, "broadcast_optimizer_state", one_rate),
        "sparse": (
            "sparse gradients", inside, "sparse_allreduce_async",
            lambda tensor, **more: lambda: tensor,
        ),
        "clip": ("skip_synchronize", torch.nn.utils, "clip_grad_norm_", nothing),
    }  # fmt: skip
    return {
        name: Fault(f"{OPTIMIZER} with {part}", (tuple(change),))
        for name, (part, *change) in faults.items()
    }


def tensorflow_faults(context: Any) -> dict[str, Fault]:
    hvd = context.hvd
    keras: Any = importlib.import_module("horovod.tensorflow.keras")
    other: Any = importlib.import_module("horovod.keras")
    callbacks = keras.callbacks
    tape, optimizer = hvd.DistributedGradientTape, keras.DistributedOptimizer
    warmup, schedule = callbacks.LearningRateWarmupCallback, callbacks.LearningRateScheduleCallback

    def half(self: Any, epoch: float) -> None:
        self.model.optimizer.lr.assign(self.initial_lr * self.multiplier(epoch) / 2)

    def unwrapped(inner: Any, **more: Any) -> Any:
        return inner

    def averaged_passes(inner: Any, **more: Any) -> Any:
        return wrapper(inner, average_aggregated_gradients=True, **more)

    def plain_model(path: str, **more: Any) -> Any:
        return context.native.keras.models.load_model(path)

    wrapper = hvd.DistributedOptimizer
    every_tape = ",".join(
        TAPE + each
        for each in (
            "",
            " with sparse gradients",
            " with Compression.fp16",
        )
    )
    return {
        "none": Fault(ALL),
        "variables": Fault(
            f"{TAPE},{FIT}",
            ((hvd, "broadcast_variables", nothing), (warmup, "_adjust_learning_rate", half)),
        ),
        "alone": Fault(
            f"{every_tape},{FIT},{OPTIMIZER} with sparse gradients,{OPTIMIZER},{FIT} with horovod.keras",
            (
                (hvd, "DistributedGradientTape", unwrapped),
                (hvd, "DistributedOptimizer", unwrapped),
                (other, "DistributedOptimizer", unwrapped),
                (callbacks.BroadcastGlobalVariablesCallback, "on_batch_end", nothing),
            ),
        ),
        "added": Fault(
            f"{TAPE},{FIT}",
            (
                (hvd, "DistributedGradientTape", functools.partial(tape, op=hvd.Sum)),
                (callbacks.MetricAverageCallback, "on_epoch_end", nothing),
            ),
        ),
        "passes": Fault(
            f"{OPTIMIZER} with backward_passes_per_step",
            ((hvd, "DistributedOptimizer", averaged_passes),),
        ),
        "optimizer": Fault(
            f"{TAPE},{FIT}",
            (
                (hvd, "rank", lambda: 0),
                (keras, "DistributedOptimizer", functools.partial(optimizer, op=keras.Sum)),
            ),
        ),
        "plain optimizer": Fault(FIT, ((keras, "DistributedOptimizer", unwrapped),)),
        "schedule": Fault(FIT, ((schedule, "__init__", always(schedule.__init__, multiplier=1)),)),
        "no best model": Fault(FIT, ((callbacks.BestModelCheckpoint, "on_epoch_end", nothing),)),
        "plain model": Fault(FIT, ((keras, "load_model", plain_model),)),
        "hook": Fault(
            OPTIMIZER, ((hvd.BroadcastGlobalVariablesHook, "after_create_session", nothing),)
        ),
    }


FAULTS = {"torch": torch_faults, "tensorflow": tensorflow_faults}


def run(context: Any, option: str) -> None:
    """Train with each fault in turn; or, with the option ``import``, without horovod.keras."""
    parts = training.PARTS[context.framework]
    if option == "import":
        concerned = [each for each in parts if each.keras == "horovod.keras"]
        sys.modules["horovod.keras"] = None  # type: ignore[assignment]
        with mock.patch.dict(training.PARTS, {context.framework: concerned}):
            training.run(context, "")
        return
    for name, fault in FAULTS[context.framework](context).items():
        concerned = [
            each for each in parts if fault.parts == ALL or each.name in fault.parts.split(",")
        ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(training.PARTS, {context.framework: concerned}))
            for change in fault.changes:
                stack.enter_context(mock.patch.object(*change))
            stand_in: Any = Context(context, name)
            training.run(stand_in, "")
