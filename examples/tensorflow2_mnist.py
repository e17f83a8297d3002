"""Train a digit classifier with TensorFlow 2 on any number of ranks.

    hvdenv run local -n 2 -- python tensorflow2_mnist.py

Without --data the program trains on generated images. The comments number the eight steps that
make a training program distributed.
"""

import argparse
import gzip
import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf


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


def main():
    arguments = parse_arguments()

    # 1. Initialize Horovod.
    hvd.init()
    tf.random.set_seed(0)  # the same model in each run

    # 2. Use one GPU per rank. The launcher may already show each rank only its own.
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

    model = tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            tf.keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    # 3. Scale the learning rate: a step now uses the images of all ranks.
    learning_rate = arguments.lr * hvd.size()
    optimizer = tf.keras.optimizers.SGD(learning_rate, momentum=0.9)

    # 4. Wrap the tape: it averages the gradients over the ranks.
    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    # 5. Start all ranks from the state of rank 0: parameters, optimizer state and epoch.
    epoch = tf.Variable(0, dtype=tf.int64)
    state = [*state_of(model, optimizer), epoch]
    if hvd.rank() == 0 and arguments.checkpoint and os.path.exists(arguments.checkpoint):
        with np.load(arguments.checkpoint) as saved:
            for variable, name in zip(state, saved.files):
                variable.assign(saved[name])
    hvd.broadcast_variables(state, root_rank=0)
    optimizer.learning_rate = learning_rate  # the number of ranks may have changed

    # 6. Give each rank its share of the images, in a new order each epoch. All ranks shuffle with
    # the same seed, so that shares do not overlap, and take the same number of steps.
    train = load_images(arguments.data, "train", 4096, seed=1)
    count = len(train[0])
    train = tf.data.Dataset.from_tensor_slices(train)
    images, labels = load_images(arguments.data, "t10k", 1024, seed=2)
    test_images, test_labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]

    while epoch.numpy() < arguments.epochs:
        epoch.assign_add(1)
        share = train.shuffle(count, seed=epoch.numpy()).shard(hvd.size(), hvd.rank())
        for images, labels in share.take(count // hvd.size()).batch(arguments.batch_size):
            train_step(images, labels)

        # 7. Save on rank 0 only. Rename the file when it is complete.
        if hvd.rank() == 0 and arguments.checkpoint:
            with open(arguments.checkpoint + ".tmp", "wb") as file:
                np.savez(file, *[variable.numpy() for variable in state])
            os.replace(arguments.checkpoint + ".tmp", arguments.checkpoint)

        # 8. Average the metrics over the ranks: each rank tests its own share of the images.
        output = model.predict(test_images, batch_size=256, verbose=0)
        loss = loss_of(test_labels, output).numpy()
        accuracy = np.mean(output.argmax(axis=1) == test_labels)
        sums = tf.constant([loss, accuracy, 1], tf.float32) * len(test_labels)
        loss, accuracy, tested = hvd.allreduce(sums, name="metrics").numpy()
        if hvd.rank() == 0:
            loss, accuracy = loss / tested, accuracy / tested
            print(f"epoch {epoch.numpy()}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
