"""How much faster hvdenv compiles Horovod than a plain `pip wheel` of the same patched source.

    python benchmarks/compile.py [--frameworks torch|both] [--rounds N]

Both ways are run in turn in one environment (the one that `hvdenv build local` made, or
builds now), on the same source, with the same frameworks, MPI and number of cores:

- by hand: `pip wheel` with the patches without which nothing compiles on a current
  toolchain (CMake 4, C++17 for torch, includes), CMake's default generator (make);
- hvdenv: the commands of its plan.

Prints seconds of wall and CPU time, sizes, and the ratios hvdenv / by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from hvdenv import STEP_PROGRAMS
from hvdenv.base.places import find_places
from hvdenv.base.runner import Runner
from hvdenv.environments import generations
from hvdenv.knowledge.patches import all_patches
from hvdenv.model.layers import load_recipe
from hvdenv.model.observe import observe, own_interpreter
from hvdenv.plans.plan import Plan, make_plan, steps_of

# Without these nothing compiles; what they change is no part of the comparison.
NEEDED = ("cmake4-gloo", "cuda-on-request", "gcc13-includes", "torch-cxx17")
# Speed, size and sameness: what hvdenv adds.
LEAN = {"CMAKE_GENERATOR", "HVDENV_INSTALL_RPATH", "SOURCE_DATE_EPOCH", "HVDENV_BUILD_FOLDER"}


class Run(NamedTuple):
    """One compile."""

    wall: float
    cpu: float
    wheel_bytes: int
    extension_bytes: int


def environment_python() -> Path:
    """The interpreter of the environment `local`, built if it is not there."""
    subprocess.run([sys.executable, "-m", "hvdenv", "build", "local", "--quiet"], check=True)
    return generations.at(find_places().envs / "local").prefix / "venv" / "bin" / "python"


def plan_of(frameworks: str, folder: Path) -> Plan:
    variants = ["torch"] if frameworks == "torch" else []
    resolved = load_recipe("local", variants=variants)
    facts = observe(folder, Runner(), thorough=False)
    maker = steps_of(resolved.recipe, facts, own_interpreter())
    return make_plan(maker, resolved.variants).at(folder)


def compile_once(python: Path, plan: Plan, folder: Path, *, lean: bool) -> Run:
    source, wheels = folder / "source", folder / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    wheels.mkdir(parents=True)
    names = set(plan.wheel_inputs["patches"]) if lean else set(NEEDED)
    patches = [
        {"name": patch.name, "edits": [edit._asdict() for edit in patch.edit]}
        for patch in all_patches()
        if patch.name in names
    ]
    (folder / "patches.json").write_text(json.dumps(patches))
    subprocess.run(
        [
            python,
            STEP_PROGRAMS / "prepare_source.py",
            archive(python, plan),
            plan.wheel_inputs["source"],
            source,
            folder / "patches.json",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    step = next(step for step in plan.steps if step.name == "wheel")
    variables = {name: value for name, value in step.commands[0].env if lean or name not in LEAN}
    variables["PATH"] = f"{python.parent}:/usr/local/bin:/usr/bin:/bin"
    if not lean:
        variables["MAKEFLAGS"] = f"-j{variables.pop('CMAKE_BUILD_PARALLEL_LEVEL')}"
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [python, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-cache-dir",
         "--disable-pip-version-check", "--wheel-dir", wheels, source],
        check=True, env={**os.environ, **variables}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    extensions = list(source.glob("build/lib*/horovod/*/mpi_lib*.so"))
    return Run(
        wall,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        next(wheels.glob("*.whl")).stat().st_size,
        sum(path.stat().st_size for path in extensions),
    )


def archive(python: Path, plan: Plan) -> Path:
    """Horovod's source archive, fetched once."""
    folder = Path(tempfile.gettempdir()) / f"hvdenv-bench-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"horovod-{plan.versions['horovod']}.tar.gz"
    if not path.exists():
        subprocess.run(
            [
                python,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "--disable-pip-version-check",
                "--no-binary",
                "horovod",
                "--dest",
                folder,
                f"horovod=={plan.versions['horovod']}",
            ],
            check=True,
        )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", choices=("torch", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    python = environment_python()
    with tempfile.TemporaryDirectory(prefix="hvdenv-bench-") as folder:
        plan = plan_of(arguments.frameworks, Path(folder))
        pairs = []
        for number in range(arguments.rounds):
            stock = compile_once(python, plan, Path(folder) / "work", lean=False)
            lean = compile_once(python, plan, Path(folder) / "work", lean=True)
            pairs.append((stock, lean))
            print(f"round {number + 1}, frameworks: {arguments.frameworks}")
            for name, run in (("by hand", stock), ("hvdenv", lean)):
                print(
                    f"  {name:8} wall {run.wall:6.1f} s   processor {run.cpu:6.1f} s   "
                    f"wheel {run.wheel_bytes / 1e6:5.1f} MB   extensions {run.extension_bytes / 1e6:6.1f} MB"
                )
    for name in ("wall", "cpu"):
        ratios = [getattr(lean, name) / getattr(stock, name) for stock, lean in pairs]
        print(f"ratio {name}: {statistics.median(ratios):.2f} (median of {len(ratios)})")


if __name__ == "__main__":
    main()
