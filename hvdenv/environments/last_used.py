"""When a generation was last used, as far as that is known.

hvdenv notes each use in a small file under HVDENV_HOME, since a complete generation is never
changed and may belong to another user. When activate.sh is sourced without hvdenv, only the
access time of that file is known, which some file systems do not keep.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.environments.generations import MARKER, RECORD, timestamp
from hvdenv.errors import StepError
from hvdenv.places import Places, make_folder, write_text


class LastUsed(NamedTuple):
    """The latest known use.

    Attributes:
        when: in UTC, in the format of records; empty if unknown.
    """

    when: str = ""
    how: Literal["", "hvdenv", "access time"] = ""


def note(places: Places, environment: Path) -> None:
    """Note that an environment, by its prefix or generation, is used now.

    Does nothing if hvdenv did not build it or the note cannot be written.
    """
    generation = Path(os.path.realpath(environment))
    if not (generation / MARKER).is_file():
        return
    path = _note(places, generation)
    try:
        make_folder(path.parent)
        write_text(path, f"{generation}\n")
    except StepError:
        return


def forget(places: Places, generation: Path) -> None:
    _note(places, generation).unlink(missing_ok=True)


def find(places: Places, generation: Path) -> LastUsed:
    """When a generation was last used."""
    noted = _time(_note(places, generation), "st_mtime")
    activate = generation / "activate.sh"
    read = _time(activate, "st_atime")
    # The build itself reads it before it writes the record.
    if read > max(noted, _time(generation / RECORD, "st_mtime"), _time(activate, "st_ctime")):
        return LastUsed(timestamp(read), "access time")
    return LastUsed(timestamp(noted), "hvdenv") if noted else LastUsed()


def keeps_access_times(folder: Path) -> bool:
    """Whether reading a file there leaves a trace."""
    try:
        return not os.statvfs(folder).f_flag & os.ST_NOATIME
    except OSError:
        return False


def _note(places: Places, generation: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(os.path.realpath(generation))).hexdigest()
    return places.used / digest[:16]


def _time(path: Path, which: str) -> float:
    try:
        return float(getattr(path.stat(), which))
    except OSError:
        return 0.0
