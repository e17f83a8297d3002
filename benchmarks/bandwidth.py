"""What `hvdenv verify --bench` measures beside a loop written by hand.

    python benchmarks/bandwidth.py [--prefix PREFIX] [--pairs N] [--sizes 4,16,64]

Two ranks of torch over MPI reduce a tensor by hvdenv's own loop and clock
(hvdenv/standalone/ranks/bench.py), and then by a loop as one would write it in a script, in turn
within the same processes, so that what else the machine does disturbs both alike. Prints the bus
bandwidth of both and the ratio for each size in MiB: of the medians, and of the best of each, which
other programs disturb least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

from hvdenv import RANK_PROGRAMS
from hvdenv.base.places import find_places
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import inspect_prefix
from hvdenv.sites.launchers import LAUNCHERS, Launch
from hvdenv.standalone.ranks.events import Timed
from hvdenv.verification.inspection import host_mpi
from hvdenv.verification.setup import Setup

RANKS, TIMEOUT = 2, 60.0
PROGRAM = """
import json, statistics, sys, time
programs, pairs, *sizes = sys.argv[1:]
sys.path.insert(0, programs)
import bench
from context import Context
context = Context("torch", "MPI", 2)
import torch
import horovod.torch as hvd

hvd.init()
clock = bench.Clock(context, 1e9)
for size in map(int, sizes):
    loop = bench.reduction(context, size, "hvdenv")
    tensor = torch.zeros(size // 4).fill_(0)
    measured, by_hand = [], []
    for pair in range(int(pairs) + 3):
        clock.agree(0.0)  # as after the round before
        measured.append(clock.time(loop, 1))
        hvd.allreduce(torch.zeros(1), name="barrier")
        started = time.perf_counter()
        hvd.allreduce_(tensor, op=hvd.Sum, name="by hand")
        by_hand.append(time.perf_counter() - started)
    if hvd.rank() == 0:
        for name, choose in ("median", statistics.median), ("best", min):
            seconds = [choose(each[3:]) for each in (measured, by_hand)]
            print("@pair", json.dumps([size, name, *seconds]), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", type=Path, default=find_places().envs / "local")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--sizes", default="4,16,64")
    arguments = parser.parse_args()
    installation = inspect_prefix(str(arguments.prefix))
    sizes = [str(int(each) << 20) for each in arguments.sizes.split(",")]
    launch = Launch(
        (installation.python, "-c", PROGRAM, str(RANK_PROGRAMS), str(arguments.pairs), *sizes),
        RANKS,
        os.geteuid() == 0,
        host_mpi(Setup(installation, Runner()), TIMEOUT)[0],
    )
    start = LAUNCHERS["mpirun"].start(launch)
    variables = {
        **os.environ,
        **dict((*installation.env, *start.env)),
        "PATH": os.pathsep.join((*installation.path, os.environ["PATH"])),
    }
    with subprocess.Popen(start.argv, env=variables, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if "@pair " in line:
                size, name, *seconds = json.loads(line.partition("@pair ")[2])
                ours, hand = (Timed(size, RANKS, [s] * 5).bandwidth for s in seconds)
                print(
                    f"{size >> 20:4} MiB {name:6}  hvdenv {ours:6.3f} GB/s  by hand {hand:6.3f} GB/s"
                    f"  ratio {ours / hand:.2f}",
                    flush=True,
                )
    if process.returncode:
        raise SystemExit(f"mpirun ended with exit code {process.returncode}")


if __name__ == "__main__":
    main()
