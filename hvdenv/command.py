"""What is run and what came of it: plain data, nothing is run here."""

from __future__ import annotations

import shlex
from typing import NamedTuple


class Command(NamedTuple):
    """One process to start.

    Attributes:
        argv: the program and its arguments; never a shell string.
        env: variables set on top of the cleaned environment, in order.
        cwd: folder to run in; empty for the current one.
        timeout: seconds after which the process and its children are ended.
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = ""
    timeout: float | None = None


class Outcome(NamedTuple):
    """What came of a Command. True when it succeeded.

    Attributes:
        command: what was run.
        returncode: exit status; minus the signal number if a signal ended it.
        output: standard output and standard error together (the last 4 MiB).
        seconds: wall time.
        timed_out: whether hvdenv ended it at its timeout.
    """

    command: Command
    returncode: int
    output: str
    seconds: float
    timed_out: bool = False

    def __bool__(self) -> bool:
        return self.returncode == 0

    def tail(self, lines: int = 20) -> str:
        """The last lines of the output."""
        return "\n".join(self.output.splitlines()[-lines:])


def spelled_out(command: Command) -> str:
    """A command as one could type it."""
    words = [f"{name}={shlex.quote(value)}" for name, value in command.env]
    return " ".join(
        ["env", *words, shlex.join(command.argv)] if words else [shlex.join(command.argv)]
    )
