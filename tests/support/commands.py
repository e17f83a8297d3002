"""How tests call commands of hvdenv: see the fixture `hvdenv`."""

from __future__ import annotations

from typing import NamedTuple

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
