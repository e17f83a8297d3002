"""How tests call commands of hvdenv: see the fixture `hvdenv`."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Said(NamedTuple):
    """What a command printed."""

    out: str
    err: str


class Hvdenv(Protocol):
    """Runs a command and asserts its exit code."""

    def __call__(self, *words: str, code: int = 0) -> Said: ...
