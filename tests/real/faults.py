"""An exercise for tests: the training, again and again, with parts of Horovod that do wrong.

A fault is a list of what stands in for what while the training runs: a test could doctor the
installation as well, but only once for each start of ranks, and frameworks import slowly.
The parts of the training with fault NAME are reported as ``NAME: PART``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

import training  # beside rank_work.py, as events is
from events import Training

# What has which attribute, and what stands in for it.
Fault = list[tuple[Any, str, Any]]


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


def torch_faults(context: Any) -> dict[str, Fault]:
    torch, hvd = context.native, context.hvd
    sampler = torch.utils.data.distributed.DistributedSampler
    one_shard, save = sampler.__init__, torch.save

    def coarse(tensor: Any) -> tuple[Any, Any]:
        return ((tensor * 16).round() / 16).half(), tensor.dtype

    def zeros(state: Mapping[str, Any], path: str) -> None:
        save({name: 0 * value for name, value in state.items()}, path)

    def first(self: Any, data: Any, num_replicas: int, rank: int) -> None:
        one_shard(self, data, num_replicas=num_replicas, rank=0)

    return {
        "none": [],
        "parameters": [(hvd, "broadcast_parameters", nothing)],
        "state": [(hvd, "broadcast_optimizer_state", nothing)],
        "alone": [(hvd, "DistributedOptimizer", lambda optimizer, **more: optimizer)],
        "added": [
            (hvd, "DistributedOptimizer", functools.partial(hvd.DistributedOptimizer, op=hvd.Sum))
        ],
        "coarse": [(hvd.Compression.fp16, "compress", staticmethod(coarse))],
        "shard": [(sampler, "__init__", first)],
        "metric": [(hvd, "allreduce", lambda tensor, name: tensor)],
        "checkpoint": [(torch, "save", zeros)],
    }


def tensorflow_faults(context: Any) -> dict[str, Fault]:
    hvd = context.hvd
    keras = importlib.import_module("horovod.tensorflow.keras")
    callbacks = keras.callbacks
    tape, optimizer = hvd.DistributedGradientTape, keras.DistributedOptimizer
    warmup = callbacks.LearningRateWarmupCallback

    def half(self: Any, epoch: float) -> None:
        self.model.optimizer.lr.assign(self.initial_lr * self.multiplier(epoch) / 2)

    return {
        "none": [],
        "variables": [
            (hvd, "broadcast_variables", nothing),
            (warmup, "_adjust_learning_rate", half),
        ],
        "alone": [
            (hvd, "DistributedGradientTape", lambda plain: plain),
            (callbacks.BroadcastGlobalVariablesCallback, "on_batch_end", nothing),
        ],
        "added": [
            (hvd, "DistributedGradientTape", functools.partial(tape, op=hvd.Sum)),
            (callbacks.MetricAverageCallback, "on_epoch_end", nothing),
        ],
        "optimizer": [
            (hvd, "rank", lambda: 0),
            (keras, "DistributedOptimizer", functools.partial(optimizer, op=keras.Sum)),
        ],
        "plain optimizer": [(keras, "DistributedOptimizer", lambda plain: plain)],
    }


FAULTS = {"torch": torch_faults, "tensorflow": tensorflow_faults}


def run(context: Any, option: str) -> None:
    """Train with each fault in turn."""
    for name, fault in FAULTS[context.framework](context).items():
        with contextlib.ExitStack() as stack:
            for where, what, instead in fault:
                stack.enter_context(mock.patch.object(where, what, instead))
            stand_in: Any = Context(context, name)
            training.run(stand_in, "")
