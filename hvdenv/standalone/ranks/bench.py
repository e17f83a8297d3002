"""The exercise ``bench``: how long allreduces take, from 1 KiB to 256 MiB.

OPTION is the time limit in seconds. Sizes grow fourfold. Each size has rounds of named
allreduces, one after the other, so that Horovod uses its response cache. The slowest rank
counts, and all ranks make their decisions by its figures, so that they stay in step.
yardstick.c does the same without Horovod. Rank 0 reports an events.Timed for each size, and an
events.BenchEnd if time or memory do not suffice for a size.

Runs on Python 3.6 and newer with numpy, which the frameworks require.
"""

import contextlib
import os
import time
from typing import Callable, List, Tuple

import events
from context import Context

Loop = Callable[[int], None]

FACTOR = 4
SIZES = [1024 * FACTOR**power for power in range(10)]
TRIALS, FEWEST, ROUNDS, REPEATS = 3, 3, 50, 1000
ROUND_SECONDS = 0.01
# The tensor, a separate result, and copies of the network layers.
COPIES = 4
# Of control groups version 2 and 1: directory, files with limit and use, and reclaimable memory.
GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def number(path: str, name: str = "") -> int:
    """The number in a file, or the number after a name in it."""
    with open(path) as stream:
        words = stream.read().split()
    return int(words[words.index(name) + 1 if name else 0])


def available(root: str = "/") -> int:
    """Bytes of memory that this job can still allocate on this host."""
    free = [number(os.path.join(root, "proc/meminfo"), "MemAvailable:") * 1024]
    with open(os.path.join(root, "proc/self/cgroup")) as stream:
        lines = [line.rstrip("\n").split(":", 2) for line in stream]
    for _, controllers, path in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit, used, spare = GROUPS[1 if controllers else 0]
        names = [name for name in path.split("/") if name]
        for depth in range(len(names) + 1):
            group = os.path.join(root, top, *names[:depth])
            with contextlib.suppress(OSError, ValueError):  # "max", or the topmost group
                free.append(
                    number(os.path.join(group, limit))
                    - number(os.path.join(group, used))
                    + number(os.path.join(group, "memory.stat"), spare)
                )
    return min(free)


def timed(
    what: str, amount: int, rounds: List[float], repeats: int, device: str = ""
) -> events.Timed:
    ordered = sorted(rounds)
    quartiles = [ordered[quarter * (len(ordered) - 1) // 4] for quarter in range(5)]
    return events.Timed(
        what=what,
        amount=amount,
        seconds=quartiles,
        repeats=repeats,
        rounds=len(rounds),
        device=device,
    )


def reduction(context: Context, size: int, name: str) -> Loop:
    """A function that repeatedly reduces a tensor of this size, with torch in place."""
    if context.framework == "torch":
        # Not from numpy, which uses huge pages for large arrays, unlike torch.
        tensor = context.native.empty(size // 4, device=context.device or "cpu").fill_(0)
        reduce = context.hvd.allreduce_
    else:
        tensor = context.tensor(context.numpy.full(size // 4, 0, "float32"))
        reduce = context.hvd.allreduce
    arguments = context.reduction("Sum")

    def loop(repeats: int) -> None:
        with context.on_device():
            for _ in range(repeats):
                reduce(tensor, name=name, **arguments)

    return loop


class Clock:
    """Measures what all ranks do together, and gives all of them the same figures."""

    def __init__(self, context: Context, limit: float) -> None:
        self._context = context
        self._started = time.perf_counter()
        self._limit = limit
        self.agree(0.0)

    def agree(self, own: float) -> float:
        """The maximum of all ranks' values; also a barrier."""
        row = [[own, time.perf_counter() - self._started]]
        tensor = self._context.tensor(self._context.numpy.array(row, "float64"))
        found = self._context.array(self._context.hvd.allgather(tensor, name="bench.clock"))
        slowest, elapsed = found.max(axis=0)
        self.left = self._limit - float(elapsed)
        return float(slowest)

    def time(self, loop: Loop, repeats: int) -> float:
        """Seconds of one repetition, on the slowest rank."""
        started = time.perf_counter()
        loop(repeats)
        return self.agree((time.perf_counter() - started) / repeats)


def measure(clock: Clock, loop: Loop, share: float) -> Tuple[List[float], int]:
    """Measure a loop for a share of the time that is left.

    Returns the seconds of one repetition in each round, and the repetitions in a round.
    """
    one = min(clock.time(loop, 1) for _ in range(TRIALS))
    repeats = min(int(ROUND_SECONDS / one) + 1, REPEATS)
    end = clock.left * (1 - share)
    rounds: List[float] = []
    while len(rounds) < FEWEST or (len(rounds) < ROUNDS and clock.left > end):
        rounds.append(clock.time(loop, repeats))
    return rounds, repeats


def why_not(clock: Clock, size: int, last: float, ranks: int) -> str:
    """What does not suffice on some rank for messages of a size: ``time``, ``memory`` or empty.

    Args:
        last: seconds of an allreduce of the size before.
        ranks: how many of this host need the memory at once.
    """
    if (TRIALS + FEWEST) * FACTOR * last > clock.left:
        return "time"
    return "memory" if clock.agree(float(COPIES * size * ranks > available())) else ""


def run(context: Context, option: str) -> None:
    """Measure size by size, as long as there is time and memory for the next one."""
    first, ranks = context.hvd.rank() == 0, context.hvd.local_size()
    clock, last = Clock(context, float(option)), 0.0
    for index, size in enumerate(SIZES):
        why = why_not(clock, size, last, ranks)
        if why:
            if first:
                context.report(events.BenchEnd(size, why))
            return
        context.stage("bench", "{} bytes".format(size))
        loop = reduction(context, size, "bench.{}".format(size))
        rounds, repeats = measure(clock, loop, 0.5 / (len(SIZES) - index))
        last = min(rounds)
        if first:
            context.report(timed("allreduce", size, rounds, repeats, context.device))
