"""How long a second prefix of a stack takes: from a lock with warm caches, against by hand.

    python benchmarks/again.py [--frameworks torch|both]

- by hand: a virtual environment, the frameworks by pip with a warm cache of its own, and
  `pip wheel --no-cache-dir` of Horovod with the patches without which nothing compiles;
- hvdenv: `build --locked` into another prefix, after one that filled the caches.

Prints seconds of wall and CPU time, and the ratios hvdenv / by hand.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from compile import compile_once, plan_of  # type: ignore[import-not-found]

VARIANTS: dict[str, list[str]] = {"torch": ["--variant", "torch"], "both": []}


class Taken(NamedTuple):
    """Seconds that something took, and those of processors."""

    wall: float
    cpu: float


def timed(way: Callable[[str, Path], None], frameworks: str, folder: Path) -> Taken:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    way(frameworks, folder)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(wall, cpu)


def by_hand(frameworks: str, folder: Path) -> None:
    """Environment, frameworks and Horovod, one after the other."""
    plan = plan_of(frameworks, folder)
    python = folder / "venv" / "bin" / "python"
    steps = {step.name: step for step in plan.steps}
    asked: list[str] = [
        word
        for name in ("build-tools", "frameworks")
        for word in steps[name].commands[-1].argv
        if word[0].isalpha() and any(sign in word for sign in ("==", ">=", "<"))
    ]
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *asked], check=True)
    compile_once(python, plan, folder / "work", lean=False)


def from_lock(frameworks: str, prefix: Path) -> None:
    words: list[str | Path] = ["build", "local", *VARIANTS[frameworks], "--locked", "--quiet"]
    words += ["--prefix", prefix]
    subprocess.run([sys.executable, "-m", "hvdenv", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", choices=("torch", "both"), default="both")
    chosen = parser.parse_args().frameworks
    with tempfile.TemporaryDirectory(prefix="hvdenv-bench-", dir=os.getcwd()) as folder:
        from_lock(chosen, Path(folder) / "first")
        second = timed(from_lock, chosen, Path(folder) / "second")
        hand = timed(by_hand, chosen, Path(folder) / "hand")
    for name, taken in (("by hand", hand), ("hvdenv", second)):
        print(f"{name:8} wall {taken.wall:6.1f} s   processor {taken.cpu:6.1f} s")
    print(
        f"ratio    wall {second.wall / hand.wall:6.2f}     processor {second.cpu / hand.cpu:6.2f}"
    )


if __name__ == "__main__":
    main()
