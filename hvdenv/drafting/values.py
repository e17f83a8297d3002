"""What a line of a page, or a machine, says about a recipe: plain data."""

from collections.abc import Iterable
from typing import NamedTuple

from hvdenv.base.masking import clean

Key = tuple[str, ...]
Scalar = str | int | bool


class Weight:
    """How much a value counts where two differ. Equal weights are a conflict.

    What is open has a value that recipes do not accept.
    """

    OPEN, INFERRED, COMMAND, SCRIPT = range(4)


# In place of what only a shell knows, and of <what the reader fills in>. No value contains it.
UNKNOWN = "\0"
# Before an item of a list that a command excludes: HOROVOD_WITHOUT_GLOO=1. No value contains it.
WITHOUT = "\1"
# In code, angle brackets would be redirections.
PLACEHOLDER = "HVDENV_PLACEHOLDER"


def at(*parts: str) -> Key:
    """A key: ``at("horovod.gpu", "operations")``. Only the first part is split."""
    return (*parts[0].split("."), *parts[1:])


# Keys of values that later stages replace: an option of a job, with its scheduler and its meaning, and
# that the page builds Horovod.
OPTION, BUILD = "option", at("horovod.build")
LOAD = at("modules.load")


class Origin(NamedTuple):
    """Where something comes from.

    Attributes:
        source: the page, or the command that was run.
        line: of the page; 0 if it is none.
        text: the command, fit to be shown.
        last: the last line of a command of several lines.
    """

    source: str
    line: int = 0
    text: str = ""
    last: int = 0

    @property
    def place(self) -> str:
        """The source, with its lines."""
        if not self.line:
            return self.source
        return f"{self.source}:{self.line}" + (f"-{self.last}" if self.last > self.line else "")

    @property
    def lines(self) -> set[tuple[str, int]]:
        last = max(self.line, self.last)
        return {(self.source, line) for line in range(self.line, last + 1) if line}

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.line and self.text else self.place


# Until the reader of a page adds it.
_UNKNOWN = Origin("")


class Value(NamedTuple):
    """A value for a key of the recipe, or for one of the stages above.

    Attributes:
        value: of a list: one item.
        weight: INFERRED if the command does not state it, but implies it.
        item: whether it is an item of a list.
        role: what only one item of the list can be, such as the MPI; empty if it excludes no other.
            Of an option of a job: the table that its command is about.
    """

    key: Key
    value: Scalar
    origin: Origin = _UNKNOWN
    weight: int = Weight.COMMAND
    item: bool = False
    role: str = ""

    @property
    def table(self) -> str:
        return ".".join(self.key[:-1])


class Left(NamedTuple):
    """A line, or a part of one, that is no value of the draft.

    Attributes:
        reason: why.
        understood: whether it needs none: hvdenv does it, or it changes no environment.
        table: where the draft shows it; empty for the lists at the end.
    """

    origin: Origin
    reason: str
    understood: bool = False
    table: str = ""

    @property
    def key(self) -> Key:
        """That of no value."""
        return ("",)


Fact = Value | Left


def leave(reason: str, understood: bool = False) -> Left:
    return Left(_UNKNOWN, reason, understood)


class Found(NamedTuple):
    """Everything that the sources yield, in their order.

    Attributes:
        lines: every line that may be a command, and why it is none, if nothing else came of it.
    """

    facts: tuple[Fact, ...] = ()
    lines: tuple[Left, ...] = ()

    @property
    def values(self) -> list[Value]:
        return [each for each in self.facts if isinstance(each, Value)]


def find(values: Iterable[Value], key: str) -> Value | None:
    return next((each for each in values if each.key == at(key)), None)


def shown_whole(text: str) -> str:
    """A text of the page on one line, without control characters and secrets."""
    return " ".join(clean(text.replace("\\\n", " ")).split()).replace(PLACEHOLDER, "<...>")


def shown(text: str) -> str:
    """The same, cut."""
    text = shown_whole(text)
    return text if len(text) <= 160 else text[:157] + "..."
