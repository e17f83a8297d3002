"""Train a digit classifier with Keras on any number of ranks.

    hvdenv run local -n 2 -- python keras_mnist.py

Without --data the program trains on generated images. The comments number the eight steps that
make a training program distributed.
"""

import argparse
import gzip
import os

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="DIR", help="directory with the four .gz files of MNIST")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step of one rank")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank")
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="save here after each epoch; resume if FILE exists"
    )
    return parser.parse_args()


def read_idx(path):
    """The array in a file of MNIST: magic number, shape, bytes."""
    with gzip.open(path) as file:
        content = file.read()
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def generate_images(count, seed):
    """Images of ten coarse patterns, each shifted by some pixels and covered by noise."""
    patterns = np.random.RandomState(0).rand(10, 7, 7).repeat(4, axis=1).repeat(4, axis=2)
    random = np.random.RandomState(seed)
    labels = random.randint(0, 10, count)
    shifts = random.randint(-2, 3, (count, 2))
    images = np.stack([np.roll(patterns[k], s, (0, 1)) for k, s in zip(labels, shifts)])
    return 0.25 * images + 0.75 * random.rand(count, 28, 28), labels


def load_images(folder, name, count, seed):
    """Images as float32 with one channel, and their labels."""
    if folder:
        images = read_idx(os.path.join(folder, name + "-images-idx3-ubyte.gz")) / 255
        labels = read_idx(os.path.join(folder, name + "-labels-idx1-ubyte.gz"))
    else:
        images, labels = generate_images(count, seed)
    images = ((images - images.mean()) / images.std()).astype(np.float32)
    return images[..., None], labels.astype(np.int64)


def state_of(model, optimizer):
    """All variables of both; creates those that the optimizer otherwise makes in its first step."""
    create = getattr(optimizer, "build", None) or optimizer._create_all_weights  # TensorFlow < 2.11
    create(model.trainable_variables)
    variables = optimizer.variables
    return [*model.weights, *(variables() if callable(variables) else variables)]


class SaveState(keras.callbacks.Callback):
    def __init__(self, path, state):
        super().__init__()
        self.path, self.state = path, state

    def on_epoch_end(self, epoch, logs=None):
        with open(self.path + ".tmp", "wb") as file:
            np.savez(file, epoch + 1, *[variable.numpy() for variable in self.state])
        os.replace(self.path + ".tmp", self.path)


class PrintMetrics(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        loss, accuracy = logs["val_loss"], logs["val_accuracy"]
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)


def main():
    arguments = parse_arguments()

    # 1. Initialize Horovod.
    hvd.init()
    tf.keras.utils.set_random_seed(0)  # the same model in each run

    # 2. Use one GPU per rank. The launcher may already show each rank only its own.
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )

    # 3. Scale the learning rate: a step now uses the images of all ranks.
    learning_rate = arguments.lr * hvd.size()
    optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9)

    # 4. Wrap the optimizer: it averages the gradients over the ranks before each step.
    optimizer = hvd.DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    model.jit_compile = False  # XLA does not support Horovod's operations

    # 5. Start all ranks from the state of rank 0: the callback sends parameters and optimizer
    # state after the first batch.
    done = 0
    state = state_of(model, optimizer)  # on all ranks: Horovod matches variables by their names
    if hvd.rank() == 0 and arguments.checkpoint and os.path.exists(arguments.checkpoint):
        with np.load(arguments.checkpoint) as saved:
            done, *values = [saved[name] for name in saved.files]
        for variable, value in zip(state, values):
            variable.assign(value)
        optimizer.learning_rate = learning_rate  # the number of ranks may have changed
    done = int(hvd.broadcast(int(done), root_rank=0, name="epoch"))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)]

    # 6. Give each rank its share of the images, in a new order each epoch. All ranks shuffle with
    # the same seed, so that shares do not overlap, and take the same number of steps.
    images, labels = load_images(arguments.data, "train", 4096, seed=1)
    train = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=0)
    train = train.shard(hvd.size(), hvd.rank()).take(len(images) // hvd.size())
    images, labels = load_images(arguments.data, "t10k", 1024, seed=2)
    share = slice(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size())
    test = tf.data.Dataset.from_tensor_slices((images[share], labels[share]))

    # 7. Save on rank 0 only. SaveState renames the file when it is complete.
    if hvd.rank() == 0 and arguments.checkpoint:
        callbacks.append(SaveState(arguments.checkpoint, state))

    # 8. Average the metrics over the ranks, before any callback that prints them.
    callbacks.append(hvd.callbacks.MetricAverageCallback())
    if hvd.rank() == 0:
        callbacks.append(PrintMetrics())

    model.fit(
        train.batch(arguments.batch_size),
        validation_data=test.batch(256),
        callbacks=callbacks,
        initial_epoch=done,
        epochs=arguments.epochs,
        verbose=0,
    )


if __name__ == "__main__":
    main()
