"""How long it takes from nothing to a proven environment: `make demo` against by hand.

    python benchmarks/cold.py

Each way begins in an empty directory with empty caches:

- by hand: a virtual environment, the frameworks by pip, `pip wheel` of Horovod with the
  patches without which nothing compiles, `horovodrun --check-build`, and an allreduce on two
  ranks for each framework over MPI and over Gloo;
- hvdenv: a clone of this checkout's last commit, and `make demo` in it.

Prints seconds of wall and CPU time, and the ratios hvdenv / by hand.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import verify  # type: ignore[import-not-found]
from again import by_hand, timed  # type: ignore[import-not-found]

REPOSITORY = Path(__file__).resolve().parents[1]


def commands_by_hand(frameworks: str, folder: Path) -> None:
    """Build as again.py does, then check."""
    by_hand(frameworks, folder)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = (folder / "work" / "wheels").glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
    for name, command in verify.by_hand(folder).items():
        print(f"  {name}: {verify.seconds_of(command, folder):.1f} s", flush=True)


def demo(_: str, folder: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, folder], check=True)
    subprocess.run(["make", "demo"], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory(prefix="hvdenv-bench-", dir=os.getcwd()) as folder:
        for name, way in (("hvdenv", demo), ("by hand", commands_by_hand)):
            for variable in ("HVDENV_HOME", "PIP_CACHE_DIR", "UV_CACHE_DIR", "XDG_CACHE_HOME"):
                os.environ[variable] = f"{folder}/caches of {name}/{variable}".replace(" ", "-")
            found[name] = timed(way, "both", Path(folder, name.replace(" ", "-")))
            print(
                f"{name:8} wall {found[name].wall:6.1f} s   processor {found[name].cpu:6.1f} s",
                flush=True,
            )
    hvdenv, hand = found["hvdenv"], found["by hand"]
    print(
        f"ratio    wall {hvdenv.wall / hand.wall:6.2f}     processor {hvdenv.cpu / hand.cpu:6.2f}"
    )


if __name__ == "__main__":
    main()
