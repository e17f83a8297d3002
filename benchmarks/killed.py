"""What a build costs that was killed (SIGKILL) at a random moment, and what it leaves.

    python benchmarks/killed.py [--times 30] [-- BUILD OPTIONS, such as --variant torch]

The first build, which fills the caches, gives the seconds of each step. Each later one is killed
at a random moment of that time, with caches that lack the wheel of Horovod, and is then built
again. Prints the step that was killed and the seconds of the second build beyond that step and
those after it: at most 30 are allowed. Fails if anything but a whole environment looks complete.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from hvdenv.environments import generations

ALLOWED_SECONDS = 30.0


class Build(NamedTuple):
    """A finished build.

    Attributes:
        steps: the seconds of each, in order.
    """

    seconds: float
    steps: dict[str, float]


def words(home: Path, options: list[str]) -> list[str]:
    return [
        "env",
        f"HVDENV_HOME={home}",
        sys.executable,
        "-m",
        "hvdenv",
        "build",
        "local",
        *options,
    ]


def build(home: Path, options: list[str]) -> Build:
    started = time.monotonic()
    done = subprocess.run(words(home, options), check=True, stderr=subprocess.PIPE, text=True)
    found = re.findall(r"\] ([\w-]+): .*?\((\d+\.\d) s\)", done.stderr)
    return Build(time.monotonic() - started, {step: float(seconds) for step, seconds in found})


def killed_step(home: Path, options: list[str], moment: float) -> str:
    """Begin a build and kill it after so many seconds; the step that it was at."""
    with subprocess.Popen(words(home, options), stderr=subprocess.PIPE, text=True) as process:
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        assert process.stderr
        begun = re.findall(r"\] ([\w-]+): ", process.stderr.read())
    return begun[-1] if begun else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    chance, most = random.Random(1), 0.0
    with tempfile.TemporaryDirectory(prefix="hvdenv-bench-") as folder:
        home = Path(folder)
        first = build(home, arguments.options)
        (prefix,) = (each for each in (home / "envs").iterdir() if each.is_symlink())
        environment = generations.at(prefix)
        for _ in range(arguments.times):
            prefix.unlink()
            shutil.rmtree(environment.store)
            shutil.rmtree(home / "cache/wheels")
            moment = chance.uniform(0, first.seconds)
            step = killed_step(home, arguments.options, moment)
            # It may have been whole already, when the signal came.
            whole = bool(environment.active())
            assert whole == (len(environment.records()) == 1)
            again = build(home, arguments.options)
            assert environment.active() and len(environment.identities()) == 1
            names = list(first.steps)
            later = names[names.index(step) :] if step in names else names
            beyond = again.seconds - sum(again.steps.get(each, 0.0) for each in later)
            most = max(most, beyond)
            print(
                f"{moment:6.1f} s  {step:12}  again {again.seconds:6.1f} s  beyond {beyond:5.1f} s"
            )
    print(f"at most {most:.1f} s beyond the killed step and those after it")
    sys.exit(most > ALLOWED_SECONDS)


if __name__ == "__main__":
    main()
