"""How long `hvdenv verify local` takes beside the commands that one would type.

    python benchmarks/verify.py [--rounds N]

By hand, one after the other: `horovodrun --check-build`, then an allreduce on two ranks
for each framework over MPI (mpirun) and over Gloo (horovodrun --gloo). Prints the seconds
of each and the ratio verify / by hand, in turn, round by round: of `--quick`, which proves the
same numbers, and of the default, which proves every operation and a training as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from hvdenv.base.places import find_places

TORCH = (
    "import torch, horovod.torch as hvd; hvd.init(); "
    "assert hvd.allreduce(torch.ones(9) * (hvd.rank() + 1), op=hvd.Sum)[0] == 3; print('right')"
)
TENSORFLOW = (
    "import tensorflow as tf, horovod.tensorflow as hvd; hvd.init(); "
    "assert hvd.allreduce(tf.ones(9) * (hvd.rank() + 1), op=hvd.Sum)[0] == 3; print('right')"
)


def by_hand(prefix: Path) -> dict[str, list[str]]:
    bin_folder = prefix / "venv" / "bin"
    python = str(bin_folder / "python")
    mpirun = [str(bin_folder / "mpirun"), "-np", "2", "--oversubscribe", python, "-c"]
    gloo = [str(bin_folder / "horovodrun"), "--gloo", "-np", "2", python, "-c"]
    return {
        "horovodrun --check-build": [str(bin_folder / "horovodrun"), "--check-build"],
        "mpirun torch": [*mpirun, TORCH],
        "mpirun tensorflow": [*mpirun, TENSORFLOW],
        "horovodrun --gloo torch": [*gloo, TORCH],
        "horovodrun --gloo tensorflow": [*gloo, TENSORFLOW],
    }


def seconds_of(command: list[str], prefix: Path) -> float:
    variables = {
        **os.environ,
        "PATH": f"{prefix / 'venv' / 'bin'}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    started = time.monotonic()
    done = subprocess.run(command, check=True, env=variables, capture_output=True, text=True)
    seconds = time.monotonic() - started
    assert "-np" not in command or done.stdout.count("right") == 2, "a rank did nothing"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    hvdenv = [sys.executable, "-m", "hvdenv"]
    subprocess.run([*hvdenv, "build", "local", "--quiet"], check=True)
    prefix = find_places().envs / "local"
    ratios: dict[str, list[float]] = {"verify --quick": [], "verify": []}
    for number in range(arguments.rounds):
        hand = {name: seconds_of(command, prefix) for name, command in by_hand(prefix).items()}
        print(f"round {number + 1}")
        for name, seconds in hand.items():
            print(f"  {name:30} {seconds:6.1f} s")
        print(f"  {'by hand':30} {sum(hand.values()):6.1f} s")
        for command, found in ratios.items():
            words = [*hvdenv, *command.split(), "local", "--quiet"]
            seconds = seconds_of(words, prefix)
            found.append(seconds / sum(hand.values()))
            print(f"  {f'hvdenv {command} local':30} {seconds:6.1f} s   ratio {found[-1]:.2f}")
    for command, found in ratios.items():
        print(f"{command}: ratio {statistics.median(found):.2f} (median of {len(found)})")


if __name__ == "__main__":
    main()
