"""Command lines of hvdenv, run in this process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from hvdenv.cli.main import main


class Said(NamedTuple):
    """What a command line printed."""

    out: str
    err: str


def call(*words: str) -> int:
    """What main() comes to, however it ends."""
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)


class CommandLine:
    """Runs a command line that must end with an exit code, and gives what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> Said:
        found = call(*words)
        said = Said(*self.capsys.readouterr())
        assert found == code, (words, said)
        return said
