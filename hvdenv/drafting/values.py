"""What the reading of one command yields, and what all of them together yield: plain data."""

from __future__ import annotations

from typing import NamedTuple

Key = tuple[str, ...]
Scalar = str | int | bool | dict[str, str]

# How much a value counts where two differ. Equal weights are a conflict.
INFERRED, COMMAND, SCRIPT, GIVEN = range(4)


class Value(NamedTuple):
    """A value of the recipe.

    Attributes:
        key: its place.
        value: of a list: one item.
        item: whether it is an item of a list.
        inferred: whether the command does not state it, but implies it.
    """

    key: Key
    value: Scalar
    item: bool = False
    inferred: bool = False


# Before an item of a list that a command excludes: HOROVOD_WITHOUT_GLOO=1. No value contains it.
WITHOUT = "\1"


class Left(NamedTuple):
    """A command, or a part of one, without a place in the draft.

    Attributes:
        reason: why.
        understood: whether it needs none: hvdenv does it, or it changes no environment.
    """

    reason: str
    understood: bool = False


Read = Value | Left


class Origin(NamedTuple):
    """Where something comes from.

    Attributes:
        source: the page, or the command that was run.
        line: of the page; 0 if it is none.
        text: the command, fit to be shown.
    """

    source: str
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.text}" if self.line else self.source


class Drafted(NamedTuple):
    """A value of the recipe and its origin."""

    key: Key
    value: Scalar
    origin: Origin
    weight: int
    item: bool = False


class Leftover(NamedTuple):
    """A command without a place in the draft, and its origin."""

    origin: Origin
    reason: str
    understood: bool = False


class Found(NamedTuple):
    """Everything that the sources yield, in their order."""

    values: tuple[Drafted, ...] = ()
    left: tuple[Leftover, ...] = ()
    commands: int = 0


def at(*parts: str) -> Key:
    """A key: ``at("horovod.gpu", "operations")``. Only the first part is split."""
    return (*parts[0].split("."), *parts[1:])
