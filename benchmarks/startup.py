"""Measures hvdenv's light commands against an empty program of the same Python.

    python benchmarks/startup.py [--rounds N]

Exits with 1 if a command exceeds its bound. Run it on an idle machine, and after
`python -m compileall`: an installed hvdenv has compiled modules.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Bounds, as multiples of `python -c pass`.
COMMANDS = (
    (5, ("--help",)),
    (5, ("--version",)),
    (5, ("completion", "bash")),
    (12, ("recipes",)),
    (12, ("show", "local")),
    (12, ("plan", "local")),
    (15, ("check", "local", "--offline")),
)


def seconds_of(*words: str) -> float:
    started = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    # The installed program: `python -m` imports half of runpy before anything of hvdenv.
    program = str(Path(sys.executable).with_name("hvdenv"))
    slow = False
    for bound, words in COMMANDS:
        pairs = [
            (seconds_of(sys.executable, "-c", "pass"), seconds_of(program, *words))
            for _ in range(arguments.rounds)
        ]
        empty, command = (statistics.median(column) for column in zip(*pairs, strict=True))
        slow |= command > bound * empty
        print(
            f"{' '.join(words):16} {command * 1000:6.0f} ms   empty program {empty * 1000:4.0f} ms   "
            f"ratio {command / empty:.1f} (bound {bound})"
        )
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
