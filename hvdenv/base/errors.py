"""Errors that a user can do something about, one exit code each.

Nothing else in hvdenv decides an exit code; ``docs/reference/exit-codes.md`` is the table
that users see.
"""

from __future__ import annotations

# Exit code of `run` and `shell` if hvdenv fails; otherwise they return that of the program.
OWN_FAILURE = 125

MEANINGS = {
    0: "success",
    1: "verify found a failure, or could not run a check; doctor recognised nothing",
    2: "malformed usage, recipe, lock or other file; or another user could change a file that would be executed",
    3: "known incompatibility",
    4: "the lock does not match: the recipe requests something else, or this machine provides something else",
    5: "a step failed, or the machine or its scheduler prevents it",
    6: "busy: another build holds the prefix, or something still uses it",
    7: "nothing failed, but something expected could not be proven on this host",
    70: "a bug in hvdenv",
    OWN_FAILURE: "`run` and `shell`: hvdenv itself could not start the command",
    130: "interrupted",
    141: "the reader of the output closed it (`hvdenv plan local | head`)",
}


class HvdenvError(Exception):
    """What is wrong, where, and what to do about it.

    Args:
        where: file and line, key, step, host or rank.
        detail: text to show unchanged, such as the last lines of a log.
    """

    exit_code = 70

    def __init__(
        self, message: str, *, where: str = "", remedy: str = "", detail: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.remedy = remedy
        self.detail = detail

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        parts = [head]
        if self.detail:
            parts.append(self.detail.rstrip("\n"))
        if self.remedy:
            parts.append(f"what to do: {self.remedy}")
        return "\n".join(parts)


class UsageError(HvdenvError):
    """The command line is wrong."""

    exit_code = 2


class RecipeError(HvdenvError):
    """A recipe, site file, patch or other input file is malformed."""

    exit_code = 2


class UntrustedError(HvdenvError):
    """Another user could have changed what hvdenv would execute or import."""

    exit_code = 2


class IncompatibleError(HvdenvError):
    """A known incompatibility: building would fail or give a broken environment."""

    exit_code = 3


class LockError(HvdenvError):
    """A lock is for another recipe, or the environment does not match the lock."""

    exit_code = 4


class StepError(HvdenvError):
    """A step of a build failed, or the machine prevents it."""

    exit_code = 5


class NetworkError(StepError):
    """What a step needs cannot be downloaded here, however it tries."""


class BusyError(HvdenvError):
    """Another build holds the prefix, or a process uses it."""

    exit_code = 6


class InterruptedRunError(HvdenvError):
    """The user interrupted hvdenv, which ended everything that it had started."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("interrupted; hvdenv ended everything that it had started")
