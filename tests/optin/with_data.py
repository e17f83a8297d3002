"""Run by an environment's Python: a script as it is, with data that need no download.

usage: python with_data.py SCRIPT [ARGUMENT...]

What scripts take for MNIST is noise that has a bright patch for each digit, so that a model
learns it at once. Trainings whose length no argument shortens end after STEPS steps.
"""

from __future__ import annotations

import importlib
import random
import re
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

TRAIN, TEST, STEPS, EPOCHS = 2048, 512, 40, 2
SIDE = 28
DIM = bytes(value // 4 for value in range(256))
# What `datasets.MNIST(FOLDER)` of torchvision finds, and so does not download.
FILES = ("MNIST/raw/{}-images-idx3-ubyte", "MNIST/raw/{}-labels-idx1-ubyte")


def digits(count: int, seed: int) -> tuple[bytes, bytes]:
    """Images and labels, a byte for each pixel and label."""
    noise = random.Random(seed)
    images, labels = bytearray(), bytearray()
    for _ in range(count):
        label, image = noise.randrange(10), bytearray(noise.randbytes(SIDE * SIDE).translate(DIM))
        row, column = divmod(label, 5)
        for line in range(4 + 10 * row, 12 + 10 * row):
            start = SIDE * line + 1 + 5 * column
            image[start : start + 5] = b"\xff" * 5
        images += image
        labels.append(label)
    return bytes(images), bytes(labels)


def write_files(folder: Path) -> None:
    """Data sets in the files that MNIST is published in."""
    for name, count, seed in (("train", TRAIN, 0), ("t10k", TEST, 1)):
        heads = ((2051, count, SIDE, SIDE), (2049, count))
        for file, head, content in zip(FILES, heads, digits(count, seed), strict=True):
            path = folder / file.format(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(struct.pack(f">{len(head)}I", *head) + content)


def loaded(count: int, seed: int) -> tuple[Any, Any]:
    """The same as arrays."""
    numpy: Any = importlib.import_module("numpy")
    images, labels = (numpy.frombuffer(each, "uint8") for each in digits(count, seed))
    return images.reshape(count, SIDE, SIDE), labels


def shorten(tensorflow: Any) -> None:
    """Give Keras the same data, and let trainings end early."""
    tensorflow.keras.datasets.mnist.load_data = lambda path: (loaded(TRAIN, 0), loaded(TEST, 1))
    take, fit = tensorflow.data.Dataset.take, tensorflow.keras.Model.fit

    def few(self: Any, count: int, *arguments: Any) -> Any:
        return take(self, min(count, STEPS), *arguments)

    def soon(self: Any, *arguments: Any, **named: Any) -> Any:
        for name, limit in (("steps_per_epoch", STEPS), ("epochs", EPOCHS)):
            named[name] = min(named.get(name) or limit, limit)
        return fit(self, *arguments, **named)

    tensorflow.data.Dataset.take, tensorflow.keras.Model.fit = few, soon


def complete_torchvision() -> Any:
    """Bring a torchvision to load whose compiled part is for a torch with CUDA.

    That is the one of the public index; beside a torch without CUDA it lacks operators that
    it asks for on import, and that no script needs.

    Returns:
        What has to stay for as long as the script runs.
    """
    library = importlib.import_module("torch.library").Library("torchvision", "FRAGMENT")
    while True:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            lacking = re.search(r"torchvision::(\w+) does not exist", str(error))
            if not lacking:
                raise
            library.define(f"{lacking[1]}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
        else:
            return library


def main(script: str, *arguments: str) -> None:
    if "tensorflow" in script:
        shorten(importlib.import_module("tensorflow"))
    kept = complete_torchvision() if "torchvision" in Path(script).read_text() else None
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
