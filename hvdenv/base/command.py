"""Commands and their outcomes, as plain data."""

import shlex
from typing import NamedTuple

from hvdenv.base.masking import MASK, mask, shown

# Stands for the interpreter that hvdenv itself runs on, with its libraries.
OWN_PYTHON = "hvdenv-python"


class Command(NamedTuple):
    """One process to start.

    Attributes:
        env: variables set on top of the cleaned environment, in order.
        cwd: directory to run in; empty for the current one, or / for Python.
        timeout: seconds after which the process and its children are ended.
        derived: variables in whose values $NAME is replaced by the process's variable of that name.
        memory: the most memory that it may reserve, in bytes; None for no limit.
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = ""
    timeout: float | None = None
    derived: tuple[tuple[str, str], ...] = ()
    memory: int | None = None


class Outcome(NamedTuple):
    """The result of a Command. True if it succeeded.

    Attributes:
        returncode: exit status; minus the signal number if a signal ended it.
        output: standard output and standard error together (the last 4 MiB).
    """

    command: Command
    returncode: int
    output: str
    seconds: float
    timed_out: bool = False

    def __bool__(self) -> bool:
        return self.returncode == 0

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.output.splitlines()[-lines:])


def spelled_out(command: Command) -> str:
    """A command line that can be pasted into a shell, without secrets."""
    words = [f"{name}={_quoted(name, value)}" for name, value in command.env]
    words += [f'{name}="{value}"' for name, value in command.derived]
    return mask(" ".join([*(["env", *words] if words else []), shlex.join(command.argv)]))


def _quoted(name: str, value: str) -> str:
    safe = shown(name, value)
    return safe if safe == MASK else shlex.quote(safe)
