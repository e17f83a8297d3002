"""Runs the parts of verify side by side, as far as there are cores and time for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

from hvdenv.errors import InterruptedRunError, StepError
from hvdenv.reports.report import Measurement
from hvdenv.verification.setup import Setup

# Processes that hang are ended within this time.
_ENDING_SECONDS = 3.0
# Less time than this does not show whether ranks hang or import slowly.
_SHARE_SECONDS = 60.0
# Ranks leave this time to the parts that explain their results, and these always have a little.
_RESERVE_SECONDS, _LEAST_SECONDS = 30.0, 2.0

T = TypeVar("T")
# Called with ``started``, ``stage``, ``failed`` or ``finished``, the label of a part, and
# for ``stage`` and ``failed`` with what its ranks do or what is wrong.
Progress = Callable[[str, str, str], None]


class Parts(AbstractContextManager["Parts"]):
    """Runs functions of a setup and of the seconds that they have, in the order of their start.

    Attributes:
        measurements: how long each part took.
        unjudged: label and problem of what parts told before an error ended them, so that no
            check judges it.
    """

    def __init__(self, setup: Setup, on_event: Progress) -> None:
        self.measurements: list[Measurement] = []
        self.unjudged: list[tuple[str, str]] = []
        self._setup = setup
        self._on_event = on_event
        self._end = time.monotonic() + setup.seconds - min(_ENDING_SECONDS, setup.seconds / 10)
        # Ranks mostly import on one core and wait for each other, so half of them count.
        each = max(setup.launch.ranks // 2, 1)
        self._side_by_side = ThreadPoolExecutor(max(setup.cores // each, min(setup.cores, 2)))
        self._alone = ThreadPoolExecutor(1)
        self._futures: list[Future[Any]] = []
        self._lock = threading.RLock()
        self._waiting_runs = 0

    def __exit__(self, *error: object) -> None:
        self._side_by_side.shutdown()
        self._alone.shutdown()

    def start(
        self,
        label: str,
        part: Callable[..., T],
        *arguments: object,
        setup: Setup | None = None,
        ranks: bool = False,
        alone: bool = False,
    ) -> Future[T]:
        """Start a part as soon as there is room.

        Args:
            label: how progress and measurements call it.
            part: a function of a setup and of the seconds that it has.
            arguments: what it takes besides; the results of futures are waited for.
            setup: another one than that of all parts.
            ranks: whether it starts ranks, and shares its time with other runs of ranks.
            alone: whether it waits for other parts that run alone.
        """
        with self._lock:
            self._waiting_runs += ranks
        pool = self._alone if alone else self._side_by_side
        future = pool.submit(self._run, label, part, arguments, setup or self._setup, ranks)
        self._futures.append(future)
        return future

    @contextmanager
    def together(self) -> Iterator[None]:
        """All runs of ranks that are started in this block share the time, also with the first."""
        with self._lock:
            yield

    def wait(self) -> None:
        """Wait for all parts that were started."""
        wait(self._futures)

    def _run(
        self,
        label: str,
        part: Callable[..., T],
        arguments: tuple[object, ...],
        setup: Setup,
        ranks: bool,
    ) -> T:
        if self._setup.runner.stopped:
            raise InterruptedRunError
        timeout = self._share() if ranks else max(self._end - time.monotonic(), _LEAST_SECONDS)
        told: list[str] = []
        setup = setup._replace(tell=partial(self._tell, label, told))
        began = time.monotonic()
        self._on_event("started", label, "")
        try:
            known = (each.result() if isinstance(each, Future) else each for each in arguments)
            return part(setup, timeout, *known)
        except Exception as error:
            self.unjudged += [(label, each) for each in told]
            if not isinstance(error, InterruptedRunError):
                self._on_event("failed", label, str(error))
            raise
        finally:
            seconds = round(time.monotonic() - began, 3)
            self.measurements.append(Measurement(label, seconds, "s"))
            self._on_event("finished", label, "")

    def _tell(self, label: str, told: list[str], what: str, detail: str) -> None:
        if what == "failed":
            told.append(detail)
        self._on_event(what, label, detail)

    def _share(self) -> float:
        """Seconds for a run of ranks: one that hangs must not use up the time of all others.

        Raises:
            StepError: there is no time left.
        """
        with self._lock:
            runs = self._waiting_runs
            self._waiting_runs -= 1
        seconds = self._setup.seconds
        left = self._end - time.monotonic() - min(_RESERVE_SECONDS, seconds / 4)
        if left < 1:
            raise StepError(
                f"not tried: verify had used up its {seconds:.0f} seconds",
                remedy="fix what took so long, or allow more time with --timeout",
            )
        return max(left / runs, min(left, _SHARE_SECONDS))
