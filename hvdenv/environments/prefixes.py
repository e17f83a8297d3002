"""Which paths can be a prefix, and what lies in the way at one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hvdenv.errors import UsageError

# Spaces break the first line of scripts, colons break PATH, commas what the linker is
# told; the rest means something to shells, to make or in run paths.
_SPECIAL = "'\"`$;&|<>(){}*?!#%:,"
# Bytes that are no UTF-8, which Python has as surrogates, cannot be written into scripts.
UNFIT_IN_PREFIX = rf"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff{_SPECIAL}\[\]\\]"
# The same for bash, whose bracket expressions know no escapes: first comes "]". It has to be
# quoted and put into a variable there.
UNFIT_IN_BASH = rf"[][:space:][:cntrl:][{_SPECIAL}\]"


def refuse_unfit(prefix: Path) -> None:
    """Refuse a path with characters that tools stumble over.

    Raises:
        UsageError: it has some.
    """
    unfit = re.search(UNFIT_IN_PREFIX, str(prefix))
    if unfit:
        raise UsageError(
            f"{unfit[0]!r} in its path would break what is built there",
            where=str(prefix),
            remedy="name a folder without spaces and special characters "
            "with --prefix or HVDENV_HOME",
        )


def refuse_foreign(path: Path) -> None:
    """Refuse a path at which something lies.

    Args:
        path: where nothing of hvdenv's lies.

    Raises:
        UsageError: something else does.
    """
    what = what_is_at(path)
    if what:
        raise UsageError(
            f"is {what} that hvdenv did not make",
            where=str(path),
            remedy="move it away, or name another place with --prefix",
        )


def refuse_inside(folder: Path, marker: str) -> None:
    """Refuse a folder in an environment: a complete one is never changed.

    Args:
        folder: in which the prefix would lie.
        marker: the name of a file that every generation has.

    Raises:
        UsageError: it lies in the generation or the store of an environment.
    """
    real = Path(os.path.realpath(folder))
    for path in (real, *real.parents):
        if (path / marker).exists() or re.fullmatch(r"\..+\.hvdenv", path.name):
            raise UsageError(
                "lies inside another environment of hvdenv",
                where=str(folder),
                remedy="name a place outside of it with --prefix",
            )


def what_is_at(path: Path) -> str:
    """What is at a path, for a message; empty if nothing is."""
    if path.is_symlink():
        return f"a symbolic link to {os.readlink(path)}"
    if not path.is_dir():
        return "a file" if os.path.lexists(path) else ""
    for name, kind in (("pyvenv.cfg", "a Python environment"), ("conda-meta", "a conda prefix")):
        if os.path.lexists(path / name):
            return kind
    return "a folder"
