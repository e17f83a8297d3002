"""How tests call commands of hvdenv (see the fixture `hvdenv`) and other programs."""

from __future__ import annotations

import subprocess
from typing import Any, NamedTuple

import pytest

from hvdenv.cli.main import main


class Said(NamedTuple):
    """What a command printed."""

    out: str
    err: str


class Hvdenv:
    """Runs a command, asserts its exit code, and returns what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> Said:
        self.capsys.readouterr()
        ended = main(words)
        said = Said(*self.capsys.readouterr())
        assert ended == code, (words, said)
        return said


def ended(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it printed."""
    options = {"text": True, "capture_output": True, "check": False, "timeout": 120, **options}
    return subprocess.run(list(map(str, words)), **options)
