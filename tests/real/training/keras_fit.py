"""A right program for Keras: fit() on each rank's own share of synthetic data.

The test plants mistakes by replacing text: mistakes_tensorflow.py names the lines.
"""

import os
import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
tf.keras.utils.set_random_seed(7 + hvd.rank())

numbers = np.random.default_rng(1)
x = numbers.normal(size=(1024, 12)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer, tf.keras.losses.BinaryCrossentropy(from_logits=True))

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
path = os.path.join(sys.argv[1], "model-{epoch}.weights.h5")
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(path, save_weights_only=True))
model.fit(x, y, batch_size=16, epochs=2, callbacks=callbacks, verbose=int(hvd.rank() == 0))
