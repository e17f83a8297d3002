"""How long `hvdenv verify local` takes beside the commands that one would type.

    python benchmarks/verify.py [--rounds N]

By hand, one after the other: `horovodrun --check-build`, then an allreduce on two ranks
for each framework over MPI (mpirun) and over Gloo (horovodrun --gloo). Prints the seconds
of each and the ratio verify / by hand, in turn, round by round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from hvdenv.places import find_places

TORCH = (
    "import torch, horovod.torch as hvd; hvd.init(); "
    "assert hvd.allreduce(torch.ones(9) * (hvd.rank() + 1), op=hvd.Sum)[0] == 3"
)
TENSORFLOW = (
    "import tensorflow as tf, horovod.tensorflow as hvd; hvd.init(); "
    "assert hvd.allreduce(tf.ones(9) * (hvd.rank() + 1), op=hvd.Sum)[0] == 3"
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
        "horovodrun --gloo torch": [*gloo, f"'{TORCH}'"],
        "horovodrun --gloo tensorflow": [*gloo, f"'{TENSORFLOW}'"],
    }


def seconds_of(command: list[str], prefix: Path) -> float:
    variables = {
        **os.environ,
        "PATH": f"{prefix / 'venv' / 'bin'}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    started = time.monotonic()
    subprocess.run(command, check=True, env=variables, capture_output=True)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    hvdenv = [sys.executable, "-m", "hvdenv"]
    subprocess.run([*hvdenv, "build", "local", "--quiet"], check=True)
    prefix = find_places().prefix("local", ())
    ratios = []
    for number in range(arguments.rounds):
        hand = {name: seconds_of(command, prefix) for name, command in by_hand(prefix).items()}
        verify = seconds_of([*hvdenv, "verify", "local", "--quiet"], prefix)
        ratios.append(verify / sum(hand.values()))
        print(f"round {number + 1}")
        for name, seconds in hand.items():
            print(f"  {name:30} {seconds:6.1f} s")
        print(f"  {'by hand':30} {sum(hand.values()):6.1f} s")
        print(f"  {'hvdenv verify local':30} {verify:6.1f} s   ratio {ratios[-1]:.2f}")
    print(f"ratio: {statistics.median(ratios):.2f} (median of {len(ratios)})")


if __name__ == "__main__":
    main()
