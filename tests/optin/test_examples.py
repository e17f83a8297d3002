"""Horovod's own examples, run as they are in an environment that verify has passed.

Not part of `make test`: they take minutes and are not in this project. Name a checkout of
the Horovod that the environment has, and an environment with torchvision:

    git clone --branch v0.28.1 https://github.com/horovod/horovod
    hvdenv build local && hvdenv install local torchvision
    HVDENV_TEST_EXAMPLES=horovod/examples HVDENV_TEST_PREFIX=$PREFIX \
        python -m pytest tests/optin/test_examples.py

Nothing is downloaded: with_data.py stands between the launcher and the script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.optin import with_data

HERE = Path(with_data.__file__)


class Example(NamedTuple):
    """A script, what it is given, and what it prints once when two ranks have done it."""

    script: str
    arguments: tuple[str, ...]
    says: str


BENCHMARK = ("--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "2")
TOTAL = r"Total img/sec on 2 [CG]PU\(s\): \d"
EXAMPLES = {
    "pytorch_mnist": Example(
        "pytorch/pytorch_mnist.py",
        ("--data-dir", "data", "--epochs", "3"),
        r"Train Epoch: 3 \[0/1024 [\s\S]*Accuracy: (?:[89]\d\.\d\d|100\.00)%",
    ),
    "pytorch_synthetic_benchmark": Example(
        "pytorch/pytorch_synthetic_benchmark.py",
        ("--model", "resnet18", "--batch-size", "2", "--fp16-allreduce", *BENCHMARK),
        TOTAL,
    ),
    "adasum_small_model": Example(
        "adasum/adasum_small_model.py", ("--op", "Adasum"), r"1\.0 Adasum 0\.1 2 \d+"
    ),
    "tensorflow2_mnist": Example("tensorflow2/tensorflow2_mnist.py", (), r"Step #30\tLoss: 0\."),
    "tensorflow2_keras_mnist": Example(
        "tensorflow2/tensorflow2_keras_mnist.py", (), r"Epoch 2/2[\s\S]*accuracy: (?:0\.[89]|1\.0)"
    ),
    "tensorflow2_synthetic_benchmark": Example(
        "tensorflow2/tensorflow2_synthetic_benchmark.py",
        ("--model", "MobileNetV2", "--batch-size", "2", *BENCHMARK),
        TOTAL,
    ),
    "tensorflow2_keras_synthetic_benchmark": Example(
        "tensorflow2/tensorflow2_keras_synthetic_benchmark.py",
        ("--model", "MobileNetV2", "--batch-size", "2", *BENCHMARK[2:]),
        TOTAL,
    ),
}


def named(variable: str) -> Path:
    """The directory that a variable names, or else the test is skipped."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} names no directory")
    return Path(value).absolute()


@pytest.fixture(scope="session")
def prefix() -> Path:
    """An environment that verify passes."""
    prefix = named("HVDENV_TEST_PREFIX")
    hvdenv(prefix.parent, "verify", "--prefix", str(prefix), "--quick", "--timeout", "1800")
    return prefix


def hvdenv(folder: Path, *words: str) -> str:
    """What a call of the command line prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "hvdenv", *words],
        cwd=folder,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        (name, launcher)
        for name in EXAMPLES
        for launcher in ("mpirun", "horovodrun-gloo")
        if (name, launcher) != ("adasum_small_model", "horovodrun-gloo")  # Adasum needs MPI
    ],
)
def test_an_example_of_horovod(prefix: Path, tmp_path: Path, name: str, launcher: str) -> None:
    example = EXAMPLES[name]
    script = named("HVDENV_TEST_EXAMPLES") / example.script
    with_data.write_files(tmp_path / "data")
    said = hvdenv(
        tmp_path,
        "run",
        "--prefix",
        str(prefix),
        "-n",
        "2",
        "--launcher",
        launcher,
        "--",
        "python",
        str(HERE),
        str(script),
        *example.arguments,
    )
    assert len(re.findall(example.says, said)) == 1, said
