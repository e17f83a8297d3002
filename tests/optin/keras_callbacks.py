"""A rank that trains with Horovod's callbacks for Keras, saves the best model, and loads it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy
import tensorflow

BASE, MULTIPLIER, STEPS = 0.01, 0.5, 3

keras = tensorflow.keras
is_keras_3 = getattr(keras, "__version__", "2").startswith("3.")
rates: list[float] = []


def note(batch: int, logs: Any) -> None:
    rates.append(float(model.optimizer.learning_rate.numpy()))


hvd.init()
path = str(Path(tempfile.mkdtemp()) / ("model.keras" if is_keras_3 else "model.h5"))
if is_keras_3:  # it refuses Horovod's callback, which has no path
    best = keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True)
else:
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = path

# Horovod's warmup sets the momentum, which of Keras 2.11 to 2.15 only these optimizers allow.
optimizers = keras.optimizers if is_keras_3 else keras.optimizers.legacy
rate = BASE * hvd.size()
# The same weights from the start, so that the loss falls and the last model is the best.
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Dense(3)])
model.build((None, 7))
optimizer = hvd.DistributedOptimizer(optimizers.SGD(learning_rate=rate, momentum=0.5))
model.compile(loss="mse", optimizer=optimizer, **({"jit_compile": False} if is_keras_3 else {}))
source = numpy.random.RandomState(hvd.rank())
inputs, targets = source.uniform(-1, 1, (4 * STEPS, 7)), source.uniform(-1, 1, (4 * STEPS, 3))
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=rate, warmup_epochs=1, steps_per_epoch=STEPS
    ),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=rate, multiplier=lambda _: MULTIPLIER, start_epoch=1
    ),
    keras.callbacks.LambdaCallback(on_batch_end=note),
]
model.fit(inputs, targets, 4, epochs=2, verbose=0, callbacks=callbacks + [best] * (not hvd.rank()))

growing = [BASE * ((step + 1) / STEPS * (hvd.size() - 1) + 1) for step in range(STEPS)]
assert numpy.allclose(rates, growing + [rate * MULTIPLIER] * STEPS, rtol=1e-5), rates
if hvd.rank() == 0:
    loaded = hvd.load_model(path, **({} if is_keras_3 else {"legacy_opts": True}))
    assert all(map(numpy.array_equal, model.get_weights(), loaded.get_weights()))
    assert hasattr(loaded.optimizer, "register_local_var"), "it is not a distributed optimizer"
hvd.shutdown()
