"""What build and verify show while they run."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from hvdenv.base.command import Command
from hvdenv.plans.step import Step
from hvdenv.session import progress
from hvdenv.session.progress import Lines, Silent, VerifyProgress, choose


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time."""
    clock = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def play(parts: VerifyProgress, now: list[float]) -> None:
    """A run of ranks that fails beside a collector that is quick."""
    parts.tell("started", "extension files", "")
    parts.tell("started", "torch over MPI", "")
    now[0] += 1
    parts.tell("finished", "extension files", "")
    now[0] += 11
    parts.tell("failed", "torch over MPI", f"wrong values in alltoall{' and more' * 20}")
    now[0] += 30
    parts.tell("finished", "torch over MPI", "")


def test_lines_for_what_takes_long_or_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    play(VerifyProgress(), now)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "  failed: torch over MPI: wrong values in alltoall and more and more and more...",
        "  torch over MPI (42.0 s)",
    ]


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return terminal


def test_a_terminal_shows_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with Lines(12) as lines:
        lines.step_started(5, Step("stack", "look"))
        lines.step_line("[1/78] Building \x1b[31m")
        lines.step_done(5, Step("stack", "look"), "", 1.0)
    with VerifyProgress() as parts:
        parts.tell("started", "torch over MPI", "")
        parts.tell("finished", "torch over MPI", "")
    shown = ["", "[ 5/12] stack: look", "[ 5/12] stack: compiled 1 of 78 objects"]
    shown += ["[ 5/12] stack: done (1.0 s)\n", "", "  running: torch over MPI", "", ""]
    assert [each.replace("\r", "") for each in terminal.getvalue().split("\x1b[K")] == shown


class Gone(io.StringIO):
    """A terminal that has gone away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_terminal_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    VerifyProgress().tell("failed", "torch over MPI", "ranks died")


def test_plain_lines_for_each_step(capsys: pytest.CaptureFixture[str], now: list[float]) -> None:
    lines = Lines(12)
    lines.step_started(6, Step("wheel", "compile", (Command(("x",)),)))
    lines.step_line("[1/78] Building")
    lines.step_line("noise")
    lines.step_line("hvdenv: said by a probe")
    lines.step_line("hvdenv: said by a probe")
    now[0] += 30.0
    lines.step_line("[7/78] Building")
    lines.step_line("[8/78] Building")
    lines.step_done(6, Step("wheel", "compile"), "", 31.25)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "[ 6/12] wheel: compile",
        "        said by a probe",
        "        compiled 7 of 78 objects, about 355 s left",
        "[ 6/12] wheel: done (31.2 s)",
    ]


def test_verbose_shows_every_line_and_quiet_none(capsys: pytest.CaptureFixture[str]) -> None:
    step = Step("wheel", "compile")
    with choose(12, quiet=False, verbose=False) as lines:
        assert isinstance(lines, Lines) and not lines.view.live  # there is no terminal
    with choose(12, quiet=False, verbose=True) as verbose:
        verbose.step_line("noise")
    with choose(12, quiet=True, verbose=False) as quiet:
        assert type(quiet) is Silent
        quiet.step_started(1, step)
        quiet.step_line("noise")
        quiet.step_done(1, step, "", 0.0)
    assert capsys.readouterr().err == "        noise\n"
