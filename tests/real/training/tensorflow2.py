"""A right program for TensorFlow 2: a custom loop, compiled, on synthetic data.

The test plants mistakes by replacing text: mistakes_tensorflow.py names the lines.
"""

import os
import sys

import horovod.tensorflow as hvd
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
dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.shard(hvd.size(), hvd.rank())
dataset = dataset.shuffle(512, seed=3).batch(16, drop_remainder=True)

model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)])
loss_of = tf.keras.losses.BinaryCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(0.01 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function  # type: ignore[untyped-decorator]
def training_step(features: tf.Tensor, labels: tf.Tensor, first_batch: bool) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(features, training=True))
    tape = hvd.DistributedGradientTape(tape)
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))  # noqa: B905
    # Variables exist only after the first step.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


for epoch in range(2):
    for batch, (features, labels) in enumerate(dataset):
        loss = training_step(features, labels, epoch == 0 and batch == 0)
    mean = hvd.allreduce(loss, name="loss")
    if hvd.rank() == 0:
        print("epoch", epoch, "loss:", float(mean))
    if hvd.rank() == 0:
        checkpoint.save(os.path.join(sys.argv[1], "checkpoint"))
