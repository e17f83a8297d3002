"""What verify shows while it runs."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from hvdenv.session import progress
from hvdenv.session.progress import Live, Parts


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time."""
    clock = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def play(parts: Parts, now: list[float]) -> None:
    """A run of ranks that fails beside a collector that is quick."""
    parts.tell("started", "extension files", "")
    parts.tell("started", "torch over MPI", "")
    now[0] += 1
    parts.tell("finished", "extension files", "")
    parts.tell("stage", "torch over MPI", "allreduce")
    now[0] += 1
    parts.tell("stage", "torch over MPI", "collectives")
    now[0] += 10
    parts.tell("failed", "torch over MPI", f"wrong values in alltoall{' and more' * 20}")
    parts.remind()
    now[0] += 30
    parts.remind()
    parts.remind()
    parts.tell("finished", "torch over MPI", "")


def test_lines_for_what_takes_long_or_fails_or_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    play(Parts(), now)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "  failed: torch over MPI: wrong values in alltoall and more and more and more...",
        "  running: torch over MPI: collectives (42 s)",
        "  torch over MPI: collectives (40.0 s)",
        "  torch over MPI (42.0 s)",
    ]


def test_a_terminal_shows_what_runs(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with Parts() as parts:
        assert isinstance(parts.view, Live)
        parts.tell("started", "torch over MPI", "")
        parts.tell("stage", "torch over MPI", "collectives")
        parts.view.progress.refresh()
        shown = terminal.getvalue()
        parts.tell("finished", "torch over MPI", "")
    assert "torch over MPI" in shown and "collectives" in shown and "0:00:0" in shown


class Gone(io.StringIO):
    """A terminal that has gone away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_terminal_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    Parts().tell("failed", "torch over MPI", "ranks died")
