"""Progress for a person, on standard error: plain lines, or a live view on a terminal."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

from hvdenv.base.masking import clean
from hvdenv.plans.step import Step
from hvdenv.reports.render import COLUMNS, shortened
from hvdenv.session.output import report

if TYPE_CHECKING:
    from rich.progress import TaskID

# How often plain lines report the progress of the compile.
COMPILE_LINE_SECONDS = 20.0
# Parts of verify that take less get no line.
PART_SECONDS = 3.0
STAGE_COLUMNS = 48


class View(AbstractContextManager["View"]):
    """Prints lines. A live view also shows what runs, and for how long."""

    live = False

    def __exit__(self, *error: object) -> None: ...

    def print(self, line: str) -> None:
        report(line)

    def start(self, label: str) -> None: ...

    def stage(self, label: str, text: str) -> None: ...

    def end(self, label: str) -> None: ...


class Quiet(View):
    """Shows nothing."""

    def print(self, line: str) -> None: ...


class Live(View):
    """A line for each thing that runs, below the lines that are printed; gone at the end."""

    live = True

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        # It moves the cursor; everything else is filtered.
        console = Console(file=getattr(sys.stderr, "unfiltered", sys.stderr))
        columns = ("{task.description}", "{task.fields[stage]}")
        texts = (TextColumn(each, markup=False) for each in columns)
        self.progress = Progress(
            SpinnerColumn(), *texts, TimeElapsedColumn(), transient=True, console=console
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Live:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def print(self, line: str) -> None:
        self.progress.console.print(clean(line), markup=False, highlight=False)

    def start(self, label: str) -> None:
        self._tasks[label] = self.progress.add_task(label, total=None, stage="")

    def stage(self, label: str, text: str) -> None:
        self.progress.update(self._tasks[label], stage=shortened(text, STAGE_COLUMNS))

    def end(self, label: str) -> None:
        if label in self._tasks:  # a step that is not needed never started
            self.progress.remove_task(self._tasks.pop(label))


def choose_view(*, verbose: bool = False) -> View:
    return Live() if sys.stderr.isatty() and not verbose else View()


class Silent(AbstractContextManager["Silent"]):
    """Progress of a build that prints only notes that need attention."""

    def __exit__(self, *error: object) -> None: ...

    def step_started(self, number: int, step: Step) -> None: ...

    def step_line(self, line: str) -> None: ...

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None: ...

    def note(self, text: str) -> None:
        report(text)


class Lines(Silent):
    """A line for each step of a build; every line that commands print if ``verbose``."""

    def __init__(self, steps: int, *, verbose: bool = False) -> None:
        self.steps = steps
        self.verbose = verbose
        self.view = choose_view(verbose=verbose)
        self.clock = ObjectClock()
        self._label = ""
        self._reported = 0.0
        self._noted = set[str]()

    def __enter__(self) -> Lines:
        self.view.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.view.__exit__(*error)

    def step_started(self, number: int, step: Step) -> None:
        self.clock = ObjectClock()
        self._reported = time.monotonic()
        self._label = f"[{number:2}/{self.steps}] {step.name}"
        self.view.start(self._label)
        if step.commands and not self.view.live:
            self.note(f"{self._label}: {step.reason}")

    def step_line(self, line: str) -> None:
        of_hvdenv = line.removeprefix("hvdenv: ")
        # Several steps may find the same, such as an index that does not answer.
        if self.verbose or (of_hvdenv != line and of_hvdenv not in self._noted):
            self.note(f"        {of_hvdenv}")
        elif progress := self.clock.report(line):
            self.view.stage(self._label, progress)
            if not self.view.live and time.monotonic() - self._reported > COMPILE_LINE_SECONDS:
                self._reported = time.monotonic()
                self.note(f"        {progress}")

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None:
        self.view.end(self._label)
        self.note(f"[{number:2}/{self.steps}] {step.name}: {note or 'done'} ({seconds:.1f} s)")

    def note(self, text: str) -> None:
        self._noted.add(text.strip())
        self.view.print(text)


_OBJECTS = re.compile(r"^\s*\[(\d+)/(\d+)\] ")


class ObjectClock:
    """Estimates the rest of a compile from the objects that are done."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def report(self, line: str) -> str:
        """``compiled 12 of 78 objects, about 90 s left``; empty if the line reports nothing."""
        counted = _OBJECTS.match(line)  # of Ninja
        if counted is None:
            return ""
        done, total = int(counted[1]), int(counted[2])
        now = time.monotonic()
        since, at_first = self._first = self._first or (now, done)
        text = f"compiled {done} of {total} objects"
        if done - at_first >= 5:
            text += f", about {(now - since) / (done - at_first) * (total - done):.0f} s left"
        return text


def choose(steps: int, *, quiet: bool, verbose: bool) -> Silent:
    return Silent() if quiet else Lines(steps, verbose=verbose)


class VerifyProgress(AbstractContextManager["VerifyProgress"]):
    """Progress of verify: what took long, what failed, and on a terminal what runs."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.view = Quiet() if quiet else choose_view()
        self._began: dict[str, float] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> VerifyProgress:
        self.view.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.view.__exit__(*error)

    def tell(self, what: str, label: str, detail: str) -> None:
        """Take what verify reports, as setup.Progress says."""
        now = time.monotonic()
        # A terminal that has gone away is no problem of the ranks.
        with self._lock, suppress(OSError):
            if what == "failed":
                self._print(f"failed: {label}: {detail}")
            elif what == "started":
                self._began[label] = now
                self.view.start(label)
            else:
                seconds = now - self._began.pop(label)
                if seconds >= PART_SECONDS:
                    self._print(f"{label} ({seconds:.1f} s)")
                self.view.end(label)

    def _print(self, text: str) -> None:
        columns = shutil.get_terminal_size((COLUMNS, 0)).columns
        self.view.print(shortened(f"  {text}", columns))
