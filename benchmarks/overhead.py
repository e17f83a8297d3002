"""What verify itself takes for each rank, on 2, 8 and 32 Gloo ranks of torch on this host.

    python benchmarks/overhead.py [--prefix PREFIX] [--ranks 2,8,32]

For each number of ranks: the events and bytes that a rank sends, processor seconds and memory
of its own of the process that watches over it (hvdenv/standalone/ranks/rank.py), and seconds and memory of
hvdenv itself, which reads and judges them. 32 ranks of torch take 8 GiB and some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from hvdenv.base.places import find_places
from hvdenv.base.runner import TOKEN_VARIABLE, Runner
from hvdenv.environments.installation import Installation, inspect_prefix
from hvdenv.sites.launchers import Launch
from hvdenv.standalone.ranks.events import to_table
from hvdenv.verification.inspection import host_mpi
from hvdenv.verification.rank_judgement import judge_run
from hvdenv.verification.rank_start import start_ranks
from hvdenv.verification.setup import Setup

TIMEOUT = 1500.0
PERIOD = 0.5


class Watchers(threading.Thread):
    """Looks at the watching processes of a run until it is told to stop."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token
        self.stop = threading.Event()
        self.seconds: dict[int, float] = {}
        self.memory: dict[int, int] = {}

    def run(self) -> None:
        while not self.stop.wait(PERIOD):
            for process in psutil.process_iter():
                try:
                    self._look(process)
                except psutil.Error:
                    continue

    def _look(self, process: psutil.Process) -> None:
        words = process.cmdline()
        if words[1:3] != ["-S", "-u"] or not words[3].endswith("/rank.py"):
            return
        if not process.environ().get(TOKEN_VARIABLE, "").startswith(self.token):
            return
        times = process.cpu_times()
        self.seconds[process.pid] = times.user + times.system
        memory = process.memory_full_info().uss
        self.memory[process.pid] = max(memory, self.memory.get(process.pid, 0))


class Cost(NamedTuple):
    """Of one run; figures per rank where nothing else is said."""

    ranks: int
    events: float
    size: float
    watcher_seconds: float
    watcher_memory: float
    judging_seconds: float
    own_memory: float
    wall: float


def measure(installation: Installation, count: int) -> Cost:
    runner = Runner()
    launch = Launch((), count, os.geteuid() == 0)
    setup = Setup(installation, runner, launch=launch)
    mpi = host_mpi(setup, TIMEOUT)
    watchers = Watchers(runner.token)
    watchers.start()
    started = time.monotonic()
    try:
        run = start_ranks(setup, TIMEOUT, mpi, "torch", "Gloo")
    finally:
        watchers.stop.set()
        watchers.join()
    wall, judging = time.monotonic() - started, time.process_time()
    judgement = judge_run(run)
    judging = time.process_time() - judging
    assert judgement.status == "pass", judgement
    assert len(watchers.seconds) == count, f"{len(watchers.seconds)} of {count} were seen"
    events = [event for rank in run.ranks for event in rank.events]
    return Cost(
        count,
        len(events) / count,
        sum(len(json.dumps(to_table(event))) for event in events) / count,
        statistics.mean(watchers.seconds.values()),
        statistics.mean(watchers.memory.values()) / 2**20,
        judging,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        wall,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", type=Path, default=find_places().envs / "local")
    parser.add_argument("--ranks", default="2,8,32")
    arguments = parser.parse_args()
    installation = inspect_prefix(str(arguments.prefix))
    print("ranks  events  bytes  watcher: s   MiB   judging: s  hvdenv: MiB  run: s")
    for count in map(int, arguments.ranks.split(",")):
        cost = measure(installation, count)
        print(
            f"{cost.ranks:5} {cost.events:7.1f} {cost.size:6.0f} {cost.watcher_seconds:11.2f}"
            f" {cost.watcher_memory:5.1f} {cost.judging_seconds:12.4f} {cost.own_memory:12.0f}"
            f" {cost.wall:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
