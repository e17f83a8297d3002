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
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
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


def test_one_rank(cli: Cli, original: Installation, script: str) -> None:
    (accuracy,) = train(cli, original.prefix, 1, script, "--epochs", "1").values()
    assert 0.9 < accuracy < 1


def test_two_ranks_resume(cli: Cli, original: Installation, script: str, tmp_path: Path) -> None:
    """No other file is left."""
    words = (script, "--checkpoint", str(tmp_path / "state"), "--epochs")
    first = train(cli, original.prefix, 2, *words, "1")
    assert first.keys() == {1} and 0.9 < first[1] < 1
    second = train(cli, original.prefix, 2, *words, "2")
    assert second.keys() == {2} and second[2] > 0.9
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_files_of_mnist(cli: Cli, original: Installation, script: str, tmp_path: Path) -> None:
    """Unequal shares: neither number of images can be divided by two."""
    for name, count in (("train", 2047), ("t10k", 255)):
        labels = [number % 10 for number in range(count)]
        images = b"".join(bytes(56 * k) + b"\xff" * 224 + bytes(560 - 56 * k) for k in labels)
        for file, content in (
            (f"{name}-labels-idx1-ubyte.gz", struct.pack(">ii", 0x801, count) + bytes(labels)),
            (f"{name}-images-idx3-ubyte.gz", struct.pack(">4i", 0x803, count, 28, 28) + images),
        ):
            (tmp_path / file).write_bytes(gzip.compress(content))
    accuracies = train(cli, original.prefix, 2, script, "--data", str(tmp_path), "--epochs", "1")
    assert accuracies[1] > 0.99
