"""Progress of a build for a person: plain lines, or a live view on a terminal."""

from __future__ import annotations

import re
import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hvdenv.masking import clean
from hvdenv.plans.step import Step

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# How often plain lines report the progress of the compile.
COMPILE_LINE_SECONDS = 20.0


class Silent(AbstractContextManager["Silent"]):
    """Prints only notes that need attention."""

    def __exit__(self, *error: object) -> None: ...

    def step_started(self, number: int, step: Step) -> None: ...

    def step_line(self, line: str) -> None: ...

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None: ...

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Lines(Silent):
    """A line for each step, on standard error; every line that commands print if ``verbose``."""

    def __init__(self, steps: int, *, verbose: bool = False) -> None:
        self.steps = steps
        self.verbose = verbose
        self.clock = ObjectClock()
        self._reported = 0.0

    def step_started(self, number: int, step: Step) -> None:
        self.clock = ObjectClock()
        self._reported = time.monotonic()
        if step.commands:
            self.note(f"[{number:2}/{self.steps}] {step.name}: {step.reason}")

    def step_line(self, line: str) -> None:
        if self.verbose or line.startswith("hvdenv: "):
            self.note(f"        {line}")
            return
        progress = self.clock.report(line)
        if progress and time.monotonic() - self._reported > COMPILE_LINE_SECONDS:
            self._reported = time.monotonic()
            self.note(f"        {progress}")

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None:
        self.note(f"[{number:2}/{self.steps}] {step.name}: {note or 'done'} ({seconds:.1f} s)")


class Live(Lines):
    """A live line for the step that runs, finished steps above it."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress: RichProgress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[report]}"),
            TimeElapsedColumn(), transient=True,
            # It moves the cursor; everything else is filtered.
            console=Console(file=getattr(sys.stderr, "unfiltered", sys.stderr)),
        )  # fmt: skip
        self._task: TaskID | None = None

    def __enter__(self) -> Live:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def step_started(self, number: int, step: Step) -> None:
        self.clock = ObjectClock()
        description = f"[{number:2}/{self.steps}] {step.name}".replace("[", "\\[")
        self._task = self._progress.add_task(description, total=None, report="")

    def step_line(self, line: str) -> None:
        if self._task is None:
            return
        progress = self.clock.report(line)
        if line.startswith("hvdenv: "):
            self.note(line)
        elif progress:
            self._progress.update(
                self._task, total=self.clock.total, completed=self.clock.done, report=progress
            )

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        super().step_done(number, step, note, seconds)

    def note(self, text: str) -> None:
        self._progress.console.print(clean(text), markup=False, highlight=False)


_OBJECTS = re.compile(r"^\s*\[(\d+)/(\d+)\] ")


class ObjectClock:
    """Estimates the rest of a compile from the objects that are done."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self._first: tuple[float, int] | None = None

    def report(self, line: str) -> str:
        """``compiled 12 of 78 objects, about 90 s left``; empty if the line reports nothing."""
        counted = _OBJECTS.match(line)  # of Ninja
        if counted is None:
            return ""
        self.done, self.total = int(counted[1]), int(counted[2])
        now = time.monotonic()
        if self._first is None:
            self._first = (now, self.done)
        since, at_first = self._first
        text = f"compiled {self.done} of {self.total} objects"
        if self.done - at_first >= 5:
            left = (now - since) / (self.done - at_first) * (self.total - self.done)
            text += f", about {left:.0f} s left"
        return text


def choose(steps: int, *, quiet: bool, verbose: bool) -> Silent:
    if quiet:
        return Silent()
    return Live(steps) if sys.stderr.isatty() and not verbose else Lines(steps, verbose=verbose)
