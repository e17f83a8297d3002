"""Whether any result of Horovod's operations is wrong now and then.

    python benchmarks/sweep.py [--rounds 200] [--ranks 2,3,4,5] [--framework F] [--controller C]

Tries all operations with all types, as often as `--rounds` says, in one start of ranks for each
number of ranks, framework and controller (rounds.py is what a rank does). Prints a line for each
start, and after it what differed from the expected result. Exit code: 1 if anything did. Without
the patch torch-operation-names, the second round of torch hangs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from hvdenv.base.places import find_places
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation, inspect_prefix
from hvdenv.sites.launchers import Launch
from hvdenv.standalone.ranks.events import Operation
from hvdenv.verification import rank_checks
from hvdenv.verification.inspection import host_mpi
from hvdenv.verification.rank_start import start_ranks
from hvdenv.verification.setup import COLLECTIVES, Setup

FRAMEWORKS, CONTROLLERS = ("torch", "tensorflow"), ("MPI", "Gloo")


def sweep(
    installation: Installation,
    ranks: int,
    framework: str,
    controller: str,
    options: argparse.Namespace,
) -> bool:
    """Run all rounds and print the result; returns whether it is right."""
    launch = Launch((), ranks, os.geteuid() == 0)
    exercises = (f"rounds={options.rounds}",)
    setup = Setup(installation, Runner(), launch=launch, exercises=exercises)
    mpi = host_mpi(setup, options.timeout)
    began = time.monotonic()
    run = start_ranks(setup, options.timeout, mpi, framework, controller)
    run = run._replace(exercises=(COLLECTIVES,))
    first = run.ranks[0] if run.ranks else None
    right = sum(each.right for each in first.all(Operation)) if first else 0
    load = os.getloadavg()[0]
    judged = [
        (name, each) for name, each in rank_checks.judge_collectives(run) if each.status == "fail"
    ]
    print(
        f"{ranks} ranks, {framework} over {controller}: {right} results right on rank 0,"
        f" {len(judged)} operations wrong, {time.monotonic() - began:.0f} s, load {load:.0f}",
        flush=True,
    )
    for name, judgement in judged:
        print(f"  {name}: {judgement.message}\n{judgement.evidence}", flush=True)
    return not judged


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", type=Path, default=find_places().envs / "local")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--ranks", default="2,3,4,5")
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append")
    parser.add_argument("--controller", choices=CONTROLLERS, action="append")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for each start")
    options = parser.parse_args()
    found = inspect_prefix(str(options.prefix))
    variables = (("PYTHONPATH", str(Path(__file__).parent)), ("HOROVOD_DYNAMIC_PROCESS_SETS", "1"))
    installation = found._replace(env=(*found.env, *variables))
    outcomes = [
        sweep(installation, ranks, framework, controller, options)
        for ranks in map(int, options.ranks.split(","))
        for framework in options.framework or FRAMEWORKS
        for controller in options.controller or CONTROLLERS
    ]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
