"""The exercise ``bench``: how long allreduces take, from 1 KiB to 64 MiB.

OPTION is the time limit in seconds. Sizes grow fourfold. Each size has rounds of named
allreduces, one after the other, so that Horovod uses its response cache. The slowest rank
counts, and all ranks make their decisions by its figures, so that they stay in step.
yardstick.c does the same without Horovod. Rank 0 reports an events.Timed for each size for which
the time suffices.

Runs on Python 3.6 and newer with numpy, which the frameworks require.
"""

import time
from typing import Callable, List

import events
from context import Context

Loop = Callable[[int], None]

TRIALS, FEWEST, ROUNDS, REPEATS = 3, 3, 50, 1000
ROUND_SECONDS = 0.01


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


def measure(clock: Clock, loop: Loop, share: float) -> List[float]:
    """The seconds of one repetition in each round, in a share of the time that is left."""
    one = min(clock.time(loop, 1) for _ in range(TRIALS))
    repeats = min(int(ROUND_SECONDS / one) + 1, REPEATS)
    end = clock.left * (1 - share)
    rounds: List[float] = []
    while len(rounds) < FEWEST or (len(rounds) < ROUNDS and clock.left > end):
        rounds.append(clock.time(loop, repeats))
    return sorted(rounds)


def run(context: Context, option: str) -> None:
    """Measure size by size, as long as there is time for the next one."""
    sizes, clock, fastest = events.BENCH_SIZES, Clock(context, float(option)), 0.0
    for index, size in enumerate(sizes):
        if (TRIALS + FEWEST) * 4 * fastest > clock.left:  # a size takes four times as long
            return
        context.stage("bench", "{} bytes".format(size))
        loop = reduction(context, size, "bench.{}".format(size))
        rounds = measure(clock, loop, 0.5 / (len(sizes) - index))
        fastest = rounds[0]
        if context.hvd.rank() == 0:
            quartiles = [rounds[quarter * (len(rounds) - 1) // 4] for quarter in range(5)]
            context.report(events.Timed(size, context.hvd.size(), quartiles, context.device))
