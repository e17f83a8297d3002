"""Which paths can be a prefix, and what is in the way at one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hvdenv.errors import UsageError

# Spaces break the first line of scripts, colons break PATH, commas break linker options; the
# others have a meaning in shells, make or run paths.
_SPECIAL = "'\"`$;&|<>(){}*?!#%:,"
# Bytes that are not UTF-8 (surrogates in Python) cannot be written into scripts.
UNFIT_IN_PREFIX = rf"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff{_SPECIAL}\[\]\\]"
# The same for bash, whose bracket expressions have no escapes, so "]" comes first. Bash needs it
# in a quoted variable.
UNFIT_IN_BASH = rf"[][:space:][:cntrl:][{_SPECIAL}\]"


def refuse_unfit(prefix: Path) -> None:
    """Refuse a path with characters that break tools."""
    unfit = re.search(UNFIT_IN_PREFIX, str(prefix))
    if unfit:
        raise UsageError(
            f"{unfit[0]!r} in its path would break what is built there",
            where=str(prefix),
            remedy="choose a directory without spaces and special characters "
            "with --prefix or HVDENV_HOME",
        )


def refuse_foreign(path: Path) -> None:
    """Refuse a path where anything exists; call it if hvdenv did not make that."""
    what = occupant(path)
    if what:
        raise UsageError(
            f"is {what} that hvdenv did not make",
            where=str(path),
            remedy="move it away, or choose another place with --prefix",
        )


def refuse_inside(folder: Path, marker: str) -> None:
    """Refuse a directory inside an environment, by the file that marks each generation."""
    real = Path(os.path.realpath(folder))
    for path in (real, *real.parents):
        if (path / marker).exists() or re.fullmatch(r"\..+\.hvdenv", path.name):
            raise UsageError(
                "is inside another environment of hvdenv",
                where=str(folder),
                remedy="choose a place outside of it with --prefix",
            )


def occupant(path: Path) -> str:
    """What exists at a path, for a message; or empty."""
    if path.is_symlink():
        return f"a symbolic link to {os.readlink(path)}"
    if not path.is_dir():
        return "a file" if os.path.lexists(path) else ""
    for name, kind in (("pyvenv.cfg", "a Python environment"), ("conda-meta", "a conda prefix")):
        if os.path.lexists(path / name):
            return kind
    return "a directory"
