"""How long hvdenv's small commands take, beside an empty program of the same Python.

    python benchmarks/startup.py [--rounds N]

Bounds: 5 for --help, recipes and show; 10 for plan. `local` is built first, in HVDENV_HOME,
where it is not there: its last line is a build with nothing to do.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = (("--help",), ("recipes",), ("show", "local"), ("plan", "local"), ("build", "local"))


def seconds_of(*words: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    # The installed program: `python -m` imports half of runpy before anything of hvdenv.
    program = str(Path(sys.executable).with_name("hvdenv"))
    seconds_of(program, "build", "local", "--quiet")
    for words in COMMANDS:
        pairs = [
            (seconds_of("-c", "pass"), seconds_of(program, *words)) for _ in range(arguments.rounds)
        ]
        empty, command = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{' '.join(words):12} {command * 1000:6.0f} ms   empty program {empty * 1000:4.0f} ms   "
            f"ratio {command / empty:.1f}"
        )


if __name__ == "__main__":
    main()
