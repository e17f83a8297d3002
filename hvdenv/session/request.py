"""What the user asked for, in the options that commands share."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hvdenv.errors import UsageError
from hvdenv.reading import HOSTS, read_text
from hvdenv.runner import environment
from hvdenv.session.trust_gate import Gate

SITE_VARIABLE = "HVDENV_SITE"


class Request(NamedTuple):
    """A request; what a command has no option for has its default.

    Attributes:
        gate: refuses files of other users.
        recipe: its name or path; empty if only a prefix is named.
        overrides: each KEY=VALUE.
        python: version such as 3.11; None for the best.
        facts: file with the facts of another machine.
        anywhere: nothing is built, run or submitted: the machine need not be one of the cluster's,
            and the environment need not exist.
        image: to run from; None for the one beside the environment, unless ``no_image``.
        lock: directory of the lock; None for the one of the recipe below ``lockfiles``.
        fetched: directory with files that `hvdenv fetch` downloaded.
        allow: rules that block nothing.
        accept_drift: what may differ from the lock.
    """

    gate: Gate
    recipe: str = ""
    variant: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    site: Path | None = None
    prefix: Path | None = None
    python: str | None = None
    facts: Path | None = None
    anywhere: bool = False
    image: Path | None = None
    no_image: bool = False
    locked: bool = False
    lock: Path | None = None
    lockfiles: Path | None = None
    fetched: Path | None = None
    offline: bool = False
    allow: tuple[str, ...] = ()
    accept_drift: tuple[str, ...] = ()
    quiet: bool = False
    verbose: bool = False

    @property
    def named(self) -> str:
        """The recipe and its variants, or else the prefix, for a command to type."""
        variants = (word for each in self.variant for word in ("--variant", each))
        first = (self.recipe,) if self.recipe else ("--prefix", str(self.prefix))
        return shlex.join((*first, *variants))


def site_file(named: Path | None) -> Path | None:
    """The site file that an option names, or else the user's shell."""
    variable = environment().get(SITE_VARIABLE)
    return named or (Path(variable) if variable else None)


def read_hostfile(path: Path) -> str:
    with usable(path, "name the hosts with --hosts", "cannot read the host file"):
        return read_text(path, HOSTS, errors="replace")


@contextmanager
def usable(path: object, remedy: str, what: str = "cannot read it") -> Iterator[None]:
    """Report an error with a file that the user named as a usage error."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}", where=str(path), remedy=remedy) from error
