"""Environments: a prefix, which is a symbolic link, and the generations that it can point to.

The generations of ``P`` are in ``.P.hvdenv`` beside it. A generation is complete if its
``hvdenv.json`` can be read. A complete one is never changed. Nothing without hvdenv's marker is
deleted.
"""

import itertools
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.errors import HvdenvError, StepError, UsageError
from hvdenv.base.places import blocked, make_folder, replacing, reporting, sync, write_json
from hvdenv.base.reading import STATE, read_json
from hvdenv.base.schema import Problem, decode, encode
from hvdenv.environments import manifest
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.recipe import Recipe

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


def _refuse_foreign(path: Path) -> None:
    """Refuse a path where anything exists; call it if hvdenv did not make that."""
    what = occupant(path)
    if what:
        raise UsageError(
            f"is {what} that hvdenv did not make",
            where=str(path),
            remedy="move it away, or choose another place with --prefix",
        )


def _refuse_inside(folder: Path, marker: str) -> None:
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


FORMAT = 1
RECORD = "hvdenv.json"
MARKER = ".hvdenv-generation"
_ID = re.compile(r"[0-9a-f]{12}(-[0-9]+)?")
_NEW, _REMOVED, _LINK = ".new-", ".removed-", ".link-"
# Prefixes of names that only a killed process leaves in a store.
TEMPORARY = (_NEW, _REMOVED, _LINK)
# The image of a generation is beside it, with this suffix; see image.py.
IMAGE = ".sqsh"


class Environment(NamedTuple):
    """An environment; construct it with at(). The prefix is absolute and not resolved."""

    prefix: Path

    @property
    def store(self) -> Path:
        """The directory of the generations."""
        return self.prefix.with_name(f".{self.prefix.name}.hvdenv")

    def generation(self, identity: str) -> Path:
        """The directory of a generation, which need not exist."""
        return self.store / identity

    def record(self, identity: str) -> Path:
        return self.store / identity / RECORD

    def pointed(self) -> str:
        """The generation that the prefix points to, in any state; or empty."""
        if not os.path.islink(self.prefix):
            return ""
        target = Path(os.path.abspath(self.prefix.parent / os.readlink(self.prefix)))
        here = os.path.realpath(target.parent) == os.path.realpath(self.store)
        return target.name if here else ""

    def active(self) -> str:
        """The complete generation that the prefix points to; or empty."""
        identity = self.pointed()
        return identity if identity and self.records([identity]) else ""

    def damage(self, identity: str) -> str:
        """What is wrong with a generation that has a record; empty if nothing is known.

        Checks only a sample of the files, which takes a few milliseconds.
        """
        try:
            record = read_record(self.record(identity))
        except HvdenvError as error:
            return error.message if os.path.lexists(self.record(identity)) else ""
        digest = record.manifest_digest
        return manifest.find_losses(self.generation(identity), digest) if digest else ""

    def begun(self, identity: str) -> bool:
        """Whether a generation was begun and never complete.

        The one that the prefix points to was complete: even if its record is lost, jobs may
        still use it.
        """
        known = identity in self.identities() and identity != self.pointed()
        return known and not os.path.lexists(self.record(identity))

    def identities(self) -> list[str]:
        """All generations that hvdenv made, sorted."""
        try:
            names = os.listdir(self.store)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []
        return sorted(name for name in names if _ID.fullmatch(name) and _ours(self.store / name))

    def remains(self) -> list[str]:
        """What is no generation: directories that killed builds and removals left, sorted."""
        names = (each.name for each in self.store.glob(".*-*"))
        return sorted(each for each in names if each.startswith((_NEW, _REMOVED)))

    def records(self, identities: Iterable[str] | None = None) -> dict[str, GenerationRecord]:
        """The records of the complete generations (default: of all), newest first."""
        found = {}
        for identity in self.identities() if identities is None else identities:
            if not _ours(self.generation(identity)):
                continue
            with suppress(HvdenvError):
                found[identity] = read_record(self.record(identity))
        order = sorted(found, key=lambda one: (found[one].created, one), reverse=True)
        return {identity: found[identity] for identity in order}


def at(prefix: Path) -> Environment:
    """The environment with this prefix, which need not exist.

    Raises:
        UsageError: the path cannot be a prefix.
    """
    absolute = Path(os.path.abspath(os.path.expanduser(prefix)))
    if not absolute.name:
        raise UsageError("cannot be a prefix", where=str(prefix), remedy="choose a directory")
    return Environment(absolute)


def timestamp(seconds: float | None = None, precision: str = "microseconds") -> str:
    """A time (default: now) in the format of records: UTC, always the same length."""
    when = datetime.now(timezone.utc)
    if seconds is not None:
        when = datetime.fromtimestamp(seconds, timezone.utc)
    return when.isoformat(timespec=precision)


def claim(environment: Environment) -> None:
    """Check that an environment can be built here, and create its store.

    Raises:
        UsageError: something that hvdenv did not make is in the way, the parent directory does not
            exist, or the path has characters that break tools.
        StepError: no permission to write there.
    """
    prefix, parent = environment.prefix, environment.prefix.parent
    refuse_unfit(prefix)
    if not parent.is_dir():
        raise UsageError(
            "the directory for the prefix does not exist",
            where=str(parent),
            remedy=f"create it (mkdir -p {parent}), or choose another place with --prefix",
        )
    _refuse_inside(parent, MARKER)
    if not environment.pointed():
        _refuse_foreign(prefix)
    store = environment.store
    if not store.is_dir() or store.is_symlink():
        _refuse_foreign(store)
    from tempfile import TemporaryFile  # no light command should wait for it

    with reporting(parent):  # the link is only made when all is built
        TemporaryFile(dir=parent).close()
    make_folder(store)


def new_identity(environment: Environment, digest: str) -> str:
    """The new generation to build for a plan with this digest."""
    identity = digest[:12]
    for number in itertools.count(2):
        if not os.path.lexists(environment.generation(identity)):
            break
        identity = f"{digest[:12]}-{number}"
    return identity


def create(environment: Environment, identity: str) -> Path:
    """Create the directory of a generation, which has hvdenv's marker from the first moment.

    The environment must be claimed and its lock held.

    Raises:
        StepError: the store cannot be written.
    """
    path = environment.generation(identity)
    temporary = environment.store / f"{_NEW}{os.urandom(16).hex()}"
    with reporting(path):
        temporary.mkdir()
        write_json(temporary / MARKER, {"format": FORMAT, "prefix": str(environment.prefix)})
        os.rename(temporary, path)
        sync(environment.store)
    return path


def switch(environment: Environment, identity: str) -> None:
    """Point the prefix to a complete generation, atomically. The lock must be held.

    Raises:
        StepError: it is not complete, or the link cannot be made.
        UsageError: something that hvdenv did not make is in the way.
    """
    read_record(environment.record(identity))
    if damage := environment.damage(identity):
        raise StepError(
            f"files of this generation are damaged: {damage}",
            where=str(environment.generation(identity)),
            remedy="build it again: hvdenv build RECIPE --rebuild",
        )
    prefix = environment.prefix
    if not environment.pointed():
        _refuse_foreign(prefix)
    temporary = environment.store / f"{_LINK}{os.urandom(16).hex()}"
    with replacing(prefix, temporary):
        # Relative, so that it is valid wherever the directory is mounted.
        os.symlink(os.path.join(environment.store.name, identity), temporary)


def write_record(path: Path, record: GenerationRecord) -> None:
    """Write the record of a generation, which makes it complete. Adds the format number.

    Raises:
        StepError: it cannot be written.
    """
    write_json(path, {"format": FORMAT, **encode(record)})


def read_record(path: Path) -> GenerationRecord:
    """Read the record of a generation; unknown keys are ignored.

    Raises:
        StepError: it does not exist, is damaged, or has another format.
    """
    try:
        document = read_json(path, STATE)
        known = document.get("format") if isinstance(document, dict) else None
        if known == FORMAT:
            return decode(GenerationRecord, document, lenient=True)
    except FileNotFoundError as error:
        raise StepError(
            "no record: this build never finished, or the record was removed",
            where=str(path),
            remedy="build the environment again: hvdenv build RECIPE",
        ) from error
    except OSError as error:
        raise blocked(path, error, "read") from error
    except Problem as problem:
        raise _damaged(path, "; ".join(map(str, problem.all))) from problem
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    raise StepError(
        f"the record has format {known!r}; this hvdenv knows format {FORMAT}",
        where=str(path),
        remedy="use the hvdenv that built it, or build the environment again with this one",
    )


def recorded_recipe(record: GenerationRecord, path: Path) -> Recipe:
    """The recipe that an environment was built from.

    Raises:
        StepError: this hvdenv cannot read it.
    """
    try:
        return decode(Recipe, record.resolved, lenient=True)
    except Problem as problem:
        raise _damaged(path, "its recipe: " + "; ".join(map(str, problem.all))) from problem


def require(environment: Environment) -> None:
    """Refuse a path where hvdenv built no environment."""
    if not environment.store.is_dir() or environment.store.is_symlink():
        raise UsageError(
            "no environment that hvdenv built",
            where=str(environment.prefix),
            remedy="list them with `hvdenv envs`",
        )


def begins(environment: Environment, complete: Sequence[str], wanted: str, none: str) -> str:
    """The only complete generation whose name begins with ``wanted``.

    Args:
        none: the error if ``wanted`` is empty.
    """
    fitting = [each for each in complete if wanted and each.startswith(wanted)]
    if wanted in complete:
        fitting = [wanted]
    if len(fitting) != 1:
        which = f"{len(fitting) or 'no'} complete generations begin with {wanted}"
        raise UsageError(
            which if wanted else none,
            where=str(environment.prefix),
            remedy=f"complete are: {', '.join(complete)}; active is {environment.active() or 'none'}"
            if complete
            else "finish it with `hvdenv build RECIPE`; none of its builds is complete",
        )
    return fitting[0]


def delete(environment: Environment, identity: str) -> str:
    """Remove a generation and its image. The lock must be held.

    It loses its name first, so that a kill leaves nothing that looks complete.

    Returns:
        Why some of it could not be deleted; or empty.

    Raises:
        StepError: no permission.
    """
    condemned = environment.store / f"{_REMOVED}{os.urandom(16).hex()}"
    with reporting(environment.generation(identity), "remove"):
        for image in environment.store.glob(f"{identity}{IMAGE}*"):
            image.unlink()
        os.rename(environment.generation(identity), condemned)
        sync(environment.store)
    return erase(condemned)


def delete_unfinished(environment: Environment) -> list[str]:
    """Remove what killed and failed builds left. The lock must be held.

    A generation with a damaged record is left alone: jobs may be using it.

    Returns:
        Why some of it could not be deleted.

    Raises:
        StepError: no permission.
    """
    begun = [each for each in environment.identities() if environment.begun(each)]
    return [note for each in begun if (note := delete(environment, each))]


def erase(path: Path) -> str:
    """Delete a file, link or tree, without following links. Returns why some is left; or empty."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return ""
    # NFS renames an open file instead of deleting it; the rest can still be deleted.
    shutil.rmtree(path, ignore_errors=True)
    if not path.exists():
        return ""
    return (
        f"{path} could not be deleted completely; the next prune tries again (read-only? in use?)"
    )


def _ours(path: Path) -> bool:
    """Whether a directory is a generation that hvdenv made; False if it cannot be looked into."""
    marker = path / MARKER
    whole = os.path.isdir(path) and os.path.isfile(marker)
    return whole and not os.path.islink(path) and not os.path.islink(marker)


def _damaged(path: Path, reason: str) -> StepError:
    return StepError(
        f"the record is damaged: {reason}",
        where=str(path),
        remedy="go back to another generation with `hvdenv envs rollback`, or build again",
    )
