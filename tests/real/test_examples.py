"""The example programs train on one and on two ranks, and resume from their checkpoints."""

from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation
from tests.real.conftest import Cli

FOLDER = Path(__file__).parents[2] / "examples"
# It has the model and the data of keras_mnist.py, and verify trains with a tape, too.
REPEATS = "tensorflow2_mnist.py"
SCRIPTS = [
    pytest.param(path.name, marks=pytest.mark.optin if path.name == REPEATS else ())
    for path in sorted(FOLDER.glob("*.py"))
]
METRICS = re.compile(r"epoch (\d+): loss \d+\.\d{4}, accuracy ([01]\.\d{4})$", re.MULTILINE)


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> str:
    return str(FOLDER / request.param)


def train(cli: Cli, prefix: str, ranks: int, *words: str) -> dict[int, float]:
    """The accuracy after each epoch."""
    done = cli("run", "--prefix", prefix, "-n", str(ranks), "--", "python", *words)
    found = METRICS.findall(done.stdout)
    accuracies = {int(epoch): float(accuracy) for epoch, accuracy in found}
    assert len(found) == len(accuracies), "more than one rank prints metrics"
    return accuracies


def test_the_command_prints_their_folder(cli: Cli) -> None:
    assert cli("examples").stdout == f"{FOLDER}\n"


def write_mnist(folder: Path) -> None:
    """Unequal shares: neither number of images can be divided by two."""
    for name, count in (("train", 2047), ("t10k", 255)):
        labels = [number % 10 for number in range(count)]
        images = b"".join(bytes(56 * k) + b"\xff" * 224 + bytes(560 - 56 * k) for k in labels)
        for file, content in (
            (f"{name}-labels-idx1-ubyte.gz", struct.pack(">ii", 0x801, count) + bytes(labels)),
            (f"{name}-images-idx3-ubyte.gz", struct.pack(">4i", 0x803, count, 28, 28) + images),
        ):
            (folder / file).write_bytes(gzip.compress(content))


def test_they_train_and_resume(
    cli: Cli, original: Installation, script: str, tmp_path: Path
) -> None:
    """Alone on generated images, and then on files of MNIST on two ranks, from the checkpoint."""
    data, state = tmp_path / "data", tmp_path / "state"
    state.mkdir()
    data.mkdir()
    write_mnist(data)
    words = (script, "--checkpoint", str(state / "file"), "--epochs")
    first = train(cli, original.prefix, 1, *words, "1")
    assert first.keys() == {1} and 0.9 < first[1] < 1
    second = train(cli, original.prefix, 2, *words, "2", "--data", str(data))
    assert second.keys() == {2} and second[2] > 0.99
    assert [path.name for path in state.iterdir()] == ["file"]
