"""Progress for a person, on standard error: lines, and on a terminal what runs now."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress

from hvdenv.base.runner import environment
from hvdenv.plans.step import Progress, Step
from hvdenv.reports.render import COLUMNS, shortened
from hvdenv.session.output import report

# The line that Ninja prints for each object.
_OBJECTS = re.compile(r"\s*\[(\d+)/(\d+)\] ")
# How often plain lines report the progress of the compile.
COMPILE_LINE_SECONDS = 20.0
# Parts of verify that take less get no line.
PART_SECONDS = 3.0


class View:
    """Prints lines. On a terminal, a last line shows what runs, and changes.

    Args:
        live: whether there may be such a line.
    """

    def __init__(self, *, live: bool) -> None:
        self.live = live and sys.stderr.isatty() and environment().get("TERM") != "dumb"

    def print(self, line: str) -> None:
        self.show("")
        report(line)

    def show(self, text: str) -> None:
        """Replace the last line of a terminal."""
        if self.live:
            # Otherwise the stream would remove the control sequences.
            write = getattr(sys.stderr, "write_unfiltered", sys.stderr.write)
            write(f"\r\x1b[K{shortened(text, _columns() - 1)}")
            sys.stderr.flush()


def _columns() -> int:
    return shutil.get_terminal_size((COLUMNS, 0)).columns


class Silent(Progress):
    """Progress of a build that prints only notes that need attention."""

    def note(self, text: str) -> None:
        report(text)


class Lines(Silent):
    """A line for each step of a build; every line that commands print if ``verbose``."""

    def __init__(self, steps: int, *, verbose: bool = False) -> None:
        self.steps = steps
        self.verbose = verbose
        self.view = View(live=not verbose)
        self._label = ""
        self._reported = 0.0
        self._noted = set[str]()

    def __exit__(self, *error: object) -> None:
        self.view.show("")

    def step_started(self, number: int, step: Step) -> None:
        self._reported = time.monotonic()
        self._label = f"[{number:2}/{self.steps}] {step.name}"
        if self.view.live:
            self.view.show(f"{self._label}: {step.reason}")
        elif step.commands:
            self.note(f"{self._label}: {step.reason}")

    def step_line(self, line: str) -> None:
        of_hvdenv = line.removeprefix("hvdenv: ")
        # Several steps may find the same, such as an index that does not answer.
        if self.verbose or (of_hvdenv != line and of_hvdenv not in self._noted):
            self.note(f"        {of_hvdenv}")
        elif objects := _OBJECTS.match(line):
            progress = f"compiled {objects[1]} of {objects[2]} objects"
            self.view.show(f"{self._label}: {progress}")
            if not self.view.live and time.monotonic() - self._reported > COMPILE_LINE_SECONDS:
                self._reported = time.monotonic()
                self.note(f"        {progress}")

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None:
        self.note(f"[{number:2}/{self.steps}] {step.name}: {note or 'done'} ({seconds:.1f} s)")

    def note(self, text: str) -> None:
        self._noted.add(text.strip())
        self.view.print(text)


def choose(steps: int, *, quiet: bool, verbose: bool) -> Progress:
    return Silent() if quiet else Lines(steps, verbose=verbose)


class VerifyProgress(AbstractContextManager["VerifyProgress"]):
    """Progress of verify: what took long, what failed, and on a terminal what runs."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.view = View(live=not quiet)
        self._began: dict[str, float] = {}
        self._lock = threading.RLock()

    def __exit__(self, *error: object) -> None:
        self.view.show("")

    def tell(self, what: str, label: str, detail: str) -> None:
        """Take what verify reports, as setup.Progress says."""
        now = time.monotonic()
        # A terminal that has gone away is no problem of the ranks.
        with self._lock, suppress(OSError):
            if what == "failed":
                self._print(f"failed: {label}: {detail}")
            elif what == "started":
                self._began[label] = now
            else:
                seconds = now - self._began.pop(label)
                if seconds >= PART_SECONDS:
                    self._print(f"{label} ({seconds:.1f} s)")
            self.view.show(f"  running: {', '.join(self._began)}" if self._began else "")

    def _print(self, text: str) -> None:
        if not self.quiet:
            self.view.print(shortened(f"  {text}", _columns()))
