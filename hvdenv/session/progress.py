"""Progress of a build for a person: plain lines, or a live view on a terminal."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, NamedTuple

from hvdenv.masking import clean
from hvdenv.plans.step import Step
from hvdenv.reports.render import COLUMNS, shortened

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, TaskID

# How often plain lines report the progress of the compile.
COMPILE_LINE_SECONDS = 20.0
# Parts of verify that take less get no line.
PART_SECONDS = 3.0
STAGE_COLUMNS = 20
# How long plain lines of verify say nothing.
SILENT_SECONDS = 20.0


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


def _rich(*columns: ProgressColumn) -> RichProgress:
    """A live view on standard error, without a trace once it is over."""
    from rich.console import Console
    from rich.progress import Progress

    # It moves the cursor; everything else is filtered.
    console = Console(file=getattr(sys.stderr, "unfiltered", sys.stderr))
    return Progress(*columns, transient=True, console=console)


class Live(Lines):
    """A live line for the step that runs, finished steps above it."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = _rich(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[report]}"),
            TimeElapsedColumn(),
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


class Part(NamedTuple):
    """A part of verify that runs, and what its ranks do; times are in seconds."""

    began: float
    stage: str = ""
    stage_began: float = 0.0


class Parts(AbstractContextManager["Parts"]):
    """Progress of verify as plain lines: what took long, what failed, and what still runs."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._said = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Parts:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def tell(self, what: str, label: str, detail: str) -> None:
        """Take what verify reports, as collection.Progress says."""
        now = time.monotonic()
        # A terminal that has gone away is no problem of the ranks.
        with self._lock, suppress(OSError):
            if what == "failed":
                self._say(f"failed: {label}: {detail}")
            elif what == "finished":
                self._finish(label, now)
            else:
                self._end_stage(label, now)
                began = self._parts[label].began if label in self._parts else now
                self._parts[label] = Part(began, detail, now)

    def _finish(self, label: str, now: float) -> None:
        self._end_stage(label, now)
        self._say_seconds(label, now - self._parts.pop(label).began)

    def _end_stage(self, label: str, now: float) -> None:
        if (part := self._parts.get(label)) and part.stage:
            self._say_seconds(f"{label}: {part.stage}", now - part.stage_began)

    def _say_seconds(self, what: str, seconds: float) -> None:
        if seconds >= PART_SECONDS:
            self._say(f"{what} ({seconds:.1f} s)")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self._print(shortened(f"  {text}", shutil.get_terminal_size((COLUMNS, 0)).columns))

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self.remind()

    def remind(self) -> None:
        """Say what runs, if nothing was said for a while."""
        with self._lock, suppress(OSError):
            now = time.monotonic()
            if self._parts and now - self._said > SILENT_SECONDS:
                names = (
                    f"{name}{part.stage and f': {part.stage}'} ({now - part.began:.0f} s)"
                    for name, part in self._parts.items()
                )
                self._say(f"running: {', '.join(names)}")


class LiveParts(Parts):
    """A live line for each part that runs; what took long and what failed above them."""

    def __init__(self) -> None:
        super().__init__()
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        texts = (
            TextColumn(f"{{task.{each}}}", markup=False)
            for each in ("description", "fields[stage]")
        )
        self._progress = _rich(SpinnerColumn(), *texts, TimeElapsedColumn())
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LiveParts:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def tell(self, what: str, label: str, detail: str) -> None:
        super().tell(what, label, detail)
        if what == "finished":
            self._progress.remove_task(self._tasks.pop(label))
        elif what == "started":
            self._tasks[label] = self._progress.add_task(label, total=None, stage="")
        elif what == "stage":
            self._progress.update(self._tasks[label], stage=shortened(detail, STAGE_COLUMNS))

    def _print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)


def choose_parts() -> Parts:
    return LiveParts() if sys.stderr.isatty() else Parts()
