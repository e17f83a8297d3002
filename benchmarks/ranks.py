"""How long ranks take from their launch to the end of `hvd.init()`, and for what.

    python benchmarks/ranks.py [RECIPE] [--ranks N] [--rounds N]

The ranks run under `hvdenv run`, with torch. Prints the seconds of the slowest rank by part: launcher
(with the start of Python), import of torch, import of Horovod, init. The first round is the slowest
if the environment's files are not cached. The hosts need clocks that agree.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time

PARTS = ("launcher", "framework", "horovod", "init")
RANK = """
import sys, time
times = [float(sys.argv[1]), time.time()]
import torch
times.append(time.time())
import horovod.torch as hvd
times.append(time.time())
hvd.init()
times.append(time.time())
print("seconds:", *(after - before for before, after in zip(times, times[1:])), flush=True)
hvd.shutdown()
"""


def seconds_of_ranks(recipe: str, ranks: int) -> list[list[float]]:
    words = ["run", recipe, "-n", str(ranks), "--", "python", "-c", RANK, repr(time.time())]
    argv = [sys.executable, "-m", "hvdenv", *words]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    found = re.findall(r"seconds: (.+)", done.stdout)
    assert len(found) == ranks, done.stdout
    return [list(map(float, line.split())) for line in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="local")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for number in range(arguments.rounds):
        slowest = max(seconds_of_ranks(arguments.recipe, arguments.ranks), key=sum)
        parts = (f"{name} {each:.2f} s" for name, each in zip(PARTS, slowest, strict=True))
        print(f"round {number + 1}: {sum(slowest):.2f} s: {', '.join(parts)}")


if __name__ == "__main__":
    main()
