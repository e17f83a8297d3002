"""Caches of compiled wheels, found by a hash of all their inputs.

An entry is a directory KEY[:2]/KEY with a record and a wheel. It gets its name when it is complete, and
never changes afterwards, so no lock is needed. Builds write only into the user's own cache, where an
entry that cannot be used is replaced. They also read shared ones, whose entries are judged by their
owner (docs/how-to/share-compiled-wheels.md).
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from hvdenv.base import trust
from hvdenv.base.errors import StepError
from hvdenv.base.places import (
    LEFT_ALONE_SECONDS,
    Places,
    blocked,
    make_folder,
    reporting,
    sync,
    write_bytes,
    write_json,
)
from hvdenv.base.reading import MIB, STATE, WHEEL, Content, hash_file, open_file, read_file
from hvdenv.base.runner import environment
from hvdenv.base.schema import Pattern, Problem, Table, decode
from hvdenv.environments.generations import timestamp
from hvdenv.model.cluster import Wheels
from hvdenv.model.recipe import Sha256

RECORD = "entry.json"
# Directories, separated by colons.
VARIABLE = "HVDENV_WHEEL_CACHE"

WheelName = Annotated[str, Pattern(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.whl", "the name of a wheel")]
_Time = Annotated[
    str, Pattern(r"[0-9-]{10}T[0-9:]{8}\+00:00", "a time such as 2026-11-22T00:29:40+00:00")
]


class Cache(NamedTuple):
    """A wheel cache.

    Attributes:
        shared: whether it is read only; false for the user's own cache.
        trusted: users who may own entries, in addition to this one and root.
    """

    folder: Path
    shared: bool = False
    trusted: tuple[str, ...] = ()

    def entry(self, key: str) -> Path:
        """The directory of the entry with this key, which need not exist."""
        return self.folder / key[:2] / key


class Record(NamedTuple):
    format: Literal[1]
    key: Sha256
    inputs: Table
    file: WheelName
    sha256: Sha256
    created: _Time


class Taken(NamedTuple):
    """The result of take().

    Attributes:
        entry: where the wheel was copied from; None if there is none to use.
        notes: why existing entries or caches were not used, a line each.
    """

    entry: Path | None
    notes: tuple[str, ...] = ()


class Listed(NamedTuple):
    """An entry, for people and programs.

    Attributes:
        problem: why builds do not use it.
        mpi, compiler: as they report themselves.
        used: when a build last took it; unknown for shared ones.
    """

    key: str
    cache: str
    shared: bool
    problem: str = ""
    wheel: str = ""
    frameworks: dict[str, str] = {}
    mpi: str = ""
    compiler: str = ""
    bytes: int = 0
    created: str = ""
    used: str | None = None


class NotUsedError(Exception):
    """Why an existing entry is not used, or not published."""


def own(places: Places) -> Cache:
    return Cache(places.wheels)


def shared(wheels: Wheels, environ: Mapping[str, str] | None = None) -> tuple[Cache, ...]:
    """The caches that $HVDENV_WHEEL_CACHE or a site names."""
    environ = environment() if environ is None else environ
    named = [*environ.get(VARIABLE, "").split(":"), *wheels.read]
    folders = dict.fromkeys(os.path.abspath(folder) for folder in named if folder)
    return tuple(Cache(Path(folder), True, wheels.trust) for folder in folders)


def key(inputs: Mapping[str, object]) -> str:
    """The key of an entry: a hash of all that goes into a wheel."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def names(cache: Cache) -> list[str]:
    """The keys of all entries, complete or not.

    Raises:
        StepError: the cache cannot be read.
    """
    try:
        os.listdir(cache.folder)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not cache.shared:
            return []
        problem = blocked(cache.folder, error, "read")
        if cache.shared:
            problem.remedy = f"correct ${VARIABLE} or places.wheels in the site file"
        raise problem from error
    found = (path.name for path in cache.folder.glob("[0-9a-f][0-9a-f]/*"))
    return sorted(name for name in found if re.fullmatch(r"[0-9a-f]{64}", name))


def find_all(caches: Iterable[Cache]) -> tuple[list[tuple[Cache, str]], list[StepError]]:
    """The entries of several caches, and why others could not be read."""
    found, problems = [], list[StepError]()
    for cache in caches:
        try:
            found += [(cache, name) for name in names(cache)]
        except StepError as error:
            problems.append(error)
    return found, problems


def read(cache: Cache, name: str) -> Record | None:
    """The record of an entry; None if there is no such entry.

    Raises:
        NotUsedError: it is damaged, or an untrusted user could have written it.
    """
    folder = cache.entry(name)
    try:
        content = read_file(folder / RECORD, STATE)
    except OSError as error:
        exists = cache.folder.is_dir()
        missing = isinstance(error, FileNotFoundError) and not os.path.lexists(folder)
        if missing and (exists or not cache.shared):
            return None
        at = folder if exists else cache.folder
        raise NotUsedError(f"{at} cannot be read: {error.strerror}") from error
    _refuse_untrusted(cache, content)
    try:
        record = decode(Record, json.loads(content.data))
        same = record.key == name == key(record.inputs)
    except (ValueError, RecursionError, Problem) as error:
        raise NotUsedError(f"{folder} is damaged: its record is malformed") from error
    if not same:
        raise NotUsedError(f"{folder / RECORD} does not describe this wheel")
    return record


def check(cache: Cache, record: Record, target: Path | None = None) -> None:
    """Compare a wheel with its hash, and copy it to a target if there is one.

    Raises:
        NotUsedError: the wheel is damaged or not trusted, or cannot be read or copied.
    """
    path, digest = cache.entry(record.key) / record.file, hashlib.sha256()
    try:
        with open_file(path, WHEEL) as stream:
            _refuse_untrusted(cache, Content(path, b"", os.fstat(stream.fileno())))
            with open(target or os.devnull, "wb") as copy:
                while block := stream.read(MIB):
                    digest.update(block)
                    copy.write(block)
        if digest.hexdigest() != record.sha256:
            found = f"its hash is {digest.hexdigest()}, recorded was {record.sha256}"
            raise NotUsedError(f"{path} is damaged: {found}")
    except (OSError, NotUsedError) as error:
        if target:
            target.unlink(missing_ok=True)
        if isinstance(error, NotUsedError):
            raise
        doing = "copied" if target else "read"
        raise NotUsedError(f"{path} cannot be {doing}: {error.strerror}") from error


def take(caches: Sequence[Cache], inputs: Mapping[str, object], folder: Path) -> Taken:
    """Copy a wheel from the first cache that has it to a directory, and compare its hash.

    Args:
        caches: in the order of preference.
        inputs: all that goes into the wheel, as JSON values.
    """
    notes = []
    for cache in caches:
        entry = cache.entry(key(inputs))
        try:
            if not (record := read(cache, entry.name)):
                continue
            check(cache, record, folder / record.file)
        except NotUsedError as error:
            notes.append(f"cached wheel not used: {error}")
            continue
        if not cache.shared:
            with suppress(OSError):
                os.utime(entry)
        return Taken(entry, tuple(notes))
    return Taken(None, tuple(notes))


def store(cache: Cache, inputs: Mapping[str, object], wheel: Path) -> None:
    """Put a copy of a wheel into a cache. A good entry that another build has stored is kept.

    Raises:
        StepError: the cache cannot be written, or has an entry with this key that can neither be
            used nor removed.
    """
    name, folder = key(inputs), cache.folder / f".{os.urandom(16).hex()}"
    entry = cache.entry(name)
    if not describe(cache, name).problem:
        return
    try:
        with reporting(entry), open_file(wheel, WHEEL) as stream:
            # Another build may have stored a good one since.
            if os.path.lexists(entry) and describe(cache, name).problem:
                _delete(entry)
            make_folder(entry.parent)
            # Never writable for a group, whatever the umask: others would not trust it.
            folder.mkdir(0o755)
            blocks = iter(lambda: stream.read(MIB), b"")
            write_bytes(folder / wheel.name, blocks, 0o644)
            record = Record(
                format=1,
                key=name,
                inputs=dict(inputs),
                file=wheel.name,
                sha256=hash_file(folder / wheel.name, WHEEL)[0],
                created=timestamp(precision="seconds"),
            )
            write_json(folder / RECORD, record._asdict(), 0o644)
            folder.rename(entry)
            for each in (entry.parent, cache.folder):
                sync(each)
    except StepError:
        if describe(cache, name).problem:
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def describe(cache: Cache, name: str, *, thorough: bool = True) -> Listed:
    """What an entry contains; ``thorough`` checks its hash as well."""
    listed = Listed(name, str(cache.folder), cache.shared)
    try:
        record = read(cache, name)
        if record is None:
            return listed._replace(problem="it is gone")
        folder, stack = cache.entry(name), _table(record.inputs.get("stack"))
        frameworks = _table(stack.get("frameworks"))
        size, used = 0, ""
        with suppress(OSError):
            size = (folder / record.file).stat().st_size
            used = timestamp(folder.stat().st_mtime, "seconds")
        listed = listed._replace(
            wheel=record.file,
            frameworks={
                each: str(_table(frameworks[each]).get("version", "")) for each in frameworks
            },
            mpi=str(stack.get("mpi", "")).partition(" Report ")[0],
            compiler=str(stack.get("compiler", "")).partition(" Copyright ")[0],
            bytes=size,
            created=record.created,
            used=None if cache.shared else used,
        )
        if thorough:
            check(cache, record)
    except NotUsedError as error:
        return listed._replace(problem=str(error))
    return listed


def _table(value: object) -> Table:
    return value if isinstance(value, dict) else {}


def prune(
    cache: Cache, *, largest: float, spared: str = "", thorough: bool = False
) -> list[tuple[Listed, bool]]:
    """Remove unusable and least recently used entries of the user's own cache.

    Args:
        largest: bytes to keep.
        spared: the key of an entry to keep.
        thorough: compare hashes to find damaged ones.

    Returns:
        the entries, and whether each could be removed.
    """
    entries = [describe(cache, name, thorough=thorough) for name in names(cache)]
    # The one to keep counts first.
    entries.sort(key=lambda each: (each.key == spared, each.used or ""), reverse=True)
    going, total = [], 0
    for each in entries:
        total += 0 if each.problem else each.bytes
        if each.key != spared and (each.problem or total > largest):
            going.append(each)
    before = time.time() - LEFT_ALONE_SECONDS
    for path in cache.folder.glob(".*"):  # what killed processes left
        with suppress(OSError):
            if path.lstat().st_mtime < before:
                _delete(path)
    return [(each, _delete(cache.entry(each.key))) for each in going]


def _delete(path: Path) -> bool:
    with suppress(OSError):
        path.unlink()  # a file or link; a directory cannot be unlinked
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def _refuse_untrusted(cache: Cache, content: Content) -> None:
    """Refuse what an untrusted user could have written.

    Raises:
        NotUsedError: such a user owns it or a directory on the way, or can write it.
    """
    for fault in trust.judge_content(content, trust.trusted_owners(cache.trusted)):
        if not fault.note:
            raise NotUsedError(f"{fault.path} {fault.problem}")
