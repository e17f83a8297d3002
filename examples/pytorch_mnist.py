"""Train a digit classifier with PyTorch on any number of ranks.

    hvdenv run local -n 2 -- python pytorch_mnist.py

Without --data the program trains on generated images. The comments number the eight steps that
make a training program distributed.
"""

import argparse
import gzip
import os

import horovod.torch as hvd
import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


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
    return torch.from_numpy(images[:, None]), torch.from_numpy(labels.astype(np.int64))


def main():
    arguments = parse_arguments()

    # 1. Initialize Horovod.
    hvd.init()
    torch.manual_seed(0)  # the same model in each run

    # 2. Use one GPU per rank. The launcher may already show each rank only its own.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, kernel_size=5, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 12 * 12, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    ).to(device)

    # 3. Scale the learning rate: a step now uses the images of all ranks.
    learning_rate = arguments.lr * hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)

    # 4. Wrap the optimizer: it averages the gradients over the ranks before each step.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # 5. Start all ranks from the state of rank 0: parameters, optimizer state and epoch.
    done = 0
    if hvd.rank() == 0 and arguments.checkpoint and os.path.exists(arguments.checkpoint):
        saved = torch.load(arguments.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["epoch"]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate  # the number of ranks may have changed
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # its step may change parameters
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    done = int(hvd.broadcast(torch.tensor(done), root_rank=0, name="epoch"))

    # 6. Give each rank its share of the images, in a new order each epoch. The sampler makes all
    # shares equally large, so that all ranks take the same number of steps.
    images, labels = load_images(arguments.data, "train", 4096, seed=1)
    train = TensorDataset(images, labels)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=arguments.batch_size, sampler=sampler)
    images, labels = load_images(arguments.data, "t10k", 1024, seed=2)
    test = TensorDataset(images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()])

    for epoch in range(done + 1, arguments.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

        # 7. Save on rank 0 only. Rename the file when it is complete.
        if hvd.rank() == 0 and arguments.checkpoint:
            state = {
                "epoch": epoch,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(state, arguments.checkpoint + ".tmp")
            os.replace(arguments.checkpoint + ".tmp", arguments.checkpoint)

        # 8. Average the metrics over the ranks: each rank tests its own share of the images.
        model.eval()
        sums = torch.zeros(3)
        with torch.no_grad():
            for images, labels in DataLoader(test, batch_size=256):
                output, labels = model(images.to(device)), labels.to(device)
                loss = functional.cross_entropy(output, labels, reduction="sum")
                correct = (output.argmax(1) == labels).sum()
                sums += torch.tensor([loss.item(), correct.item(), len(labels)])
        loss, correct, count = hvd.allreduce(sums, name="metrics").tolist()
        if hvd.rank() == 0:
            loss, accuracy = loss / count, correct / count
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
