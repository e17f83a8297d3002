"""Caches of compiled wheels, found by a hash of all their inputs.

An entry (cache_entry.py) is a folder named by the hash of its inputs: KEY[:2]/KEY. It gets its
name when it is complete, and never changes afterwards, so no lock is needed. Each user has a
cache of their own; a site can also have shared ones (docs/how-to/share-compiled-wheels.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from hvdenv.environments.generations import timestamp
from hvdenv.errors import RecipeError, StepError
from hvdenv.model.cluster import Wheels
from hvdenv.places import LEFT_ALONE_SECONDS, Places, blocked, make_folder, reporting, sync
from hvdenv.reading import WHEEL, open_file
from hvdenv.runner import environment
from hvdenv.trust import user_id
from hvdenv.wheels.cache_entry import (
    RECORD,
    Cache,
    DamagedError,
    Entry,
    NotUsedError,
    blocks,
    check,
    key,
    make_folder_alike,
    open_entry,
    opened_folder,
    refuse_untrusted_owner,
)

FORMAT = 1
# Folders, separated by colons.
VARIABLE = "HVDENV_WHEEL_CACHE"

_KEY = r"[0-9a-f]{64}"


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
        damaged: whether it is broken, rather than not trusted.
        mpi, compiler: as they report themselves.
        used: when a build last took it; unknown for shared ones.
    """

    key: str
    cache: str
    shared: bool
    problem: str = ""
    damaged: bool = False
    wheel: str = ""
    frameworks: dict[str, str] = {}
    mpi: str = ""
    compiler: str = ""
    bytes: int = 0
    created: str = ""
    used: str | None = None

    @property
    def since(self) -> str:
        return self.used or self.created

    @property
    def package(self) -> str:
        """Name and version of the package; of Horovod, or of a framework built from source."""
        return f"{self._tag(0)} {self._tag(1)}"

    @property
    def horovod(self) -> str:
        return self._tag(1) if self._tag(0) == "horovod" else ""

    @property
    def python(self) -> str:
        return self._tag(2)

    def _tag(self, number: int) -> str:
        parts = self.wheel.split("-")
        return parts[number] if len(parts) == 5 else ""


def own(places: Places) -> Cache:
    return Cache(places.wheels)


def shared(wheels: Wheels, environ: Mapping[str, str] | None = None) -> tuple[Cache, ...]:
    """The caches that a site or $HVDENV_WHEEL_CACHE names; the one to publish to comes first."""
    environ = environment() if environ is None else environ
    named = [wheels.publish or "", *environ.get(VARIABLE, "").split(":"), *wheels.read]
    folders = dict.fromkeys(os.path.abspath(folder) for folder in named if folder)
    trusted = frozenset(uid for name in wheels.trust if (uid := user_id(name)) is not None)
    return tuple(Cache(Path(folder), True, trusted) for folder in folders)


def take(caches: Sequence[Cache], inputs: Mapping[str, object], folder: Path) -> Taken:
    """Copy a wheel from the first cache that has it to a folder, and compare its hash.

    A damaged entry of the user's own cache is deleted. Everything else is left alone.

    Args:
        caches: in the order of preference.
        inputs: all that goes into the wheel, as JSON values.

    Raises:
        StepError: the folder cannot be written.
    """
    notes = []
    for cache in caches:
        target: Path | None = None
        try:
            with open_entry(cache, key(inputs)) as entry:
                if entry is None:
                    continue
                target = folder / entry.record.file
                check(entry, target)
        except NotUsedError as error:
            if target:
                target.unlink(missing_ok=True)
            notes.append(f"cached wheel not used: {error}")
            if isinstance(error, DamagedError) and not cache.shared:
                _discard(cache.entry(key(inputs)))
        else:
            if not cache.shared:
                with suppress(OSError):
                    os.utime(entry.folder)
            return Taken(entry.folder, tuple(notes))
    return Taken(None, tuple(notes))


def store(cache: Cache, inputs: Mapping[str, object], wheel: Path) -> None:
    """Put a copy of a wheel into a cache. An entry that another build has stored is kept.

    Args:
        cache: a shared one must exist.

    Raises:
        StepError: the cache cannot be written, or has an entry with this key that can neither be
            used nor removed.
    """
    name = key(inputs)
    entry = cache.entry(name)
    if os.path.lexists(entry) and not describe(cache, name, thorough=True).problem:
        return
    with reporting(entry), open_file(wheel, WHEEL) as source:
        digest = hashlib.sha256()
        for block in blocks(source.fileno()):
            digest.update(block)
        document = {
            "format": FORMAT,
            "key": name,
            "inputs": inputs,
            "file": wheel.name,
            "sha256": digest.hexdigest(),
            "created": timestamp(precision="seconds"),
        }
        record = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
        content = _same(source.fileno(), digest.hexdigest(), wheel)
        _add(cache, name, {wheel.name: content, RECORD: [record]})


def copy(entries: Mapping[str, Cache], target: Cache) -> None:
    """Copy entries into another cache, after checking all of them.

    Existing entries are kept.

    Args:
        entries: the cache of each key.
        target: a shared one must exist.

    Raises:
        RecipeError: an entry cannot be used; nothing is copied then.
        StepError: the target cannot be written.
    """
    for checked in (False, True):
        for name, cache in sorted(entries.items()):
            try:
                with open_entry(cache, name) as entry:
                    if entry is None:
                        raise NotUsedError("it is gone")
                    check(entry)
                    if checked:
                        record, path = entry.record, entry.folder / entry.record.file
                        content = _same(entry.wheel, record.sha256, path)
                        _add(target, name, {record.file: content, RECORD: [entry.raw]})
            except NotUsedError as error:
                raise RecipeError(
                    f"not copied: {error}",
                    where=name,
                    remedy="check all wheels with `hvdenv wheels list`",
                ) from error
            except OSError as error:
                raise blocked(target.folder, error) from error


def names(cache: Cache) -> list[str]:
    """The keys of all entries, complete or not.

    Raises:
        StepError: the cache cannot be read.
    """
    try:
        return sorted(
            entry
            for shard in os.listdir(cache.folder)
            if re.fullmatch(r"[0-9a-f]{2}", shard) and (cache.folder / shard).is_dir()
            for entry in os.listdir(cache.folder / shard)
            if re.fullmatch(_KEY, entry) and entry.startswith(shard)
        )
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not cache.shared:
            return []
        raise blocked(cache.folder, error, "read") from error


def describe(cache: Cache, name: str, *, thorough: bool) -> Listed:
    """What an entry contains; ``thorough`` checks its hash as well."""
    listed = Listed(name, str(cache.folder), cache.shared)
    try:
        with open_entry(cache, name) as entry:
            if entry is None:
                return listed._replace(problem="it is gone")
            listed = _described(listed, entry)
            if thorough:
                check(entry)
    except NotUsedError as error:
        damaged = isinstance(error, DamagedError)
        return listed._replace(problem=str(error), damaged=damaged)
    return listed


class Used(Protocol):
    """An item of a cache, and the time since when it is unused."""

    @property
    def bytes(self) -> int: ...

    @property
    def since(self) -> str: ...


Something = TypeVar("Something", bound=Used)


def least_recently_used(
    entries: Sequence[Something], *, largest: float | None = None, oldest: str = ""
) -> list[Something]:
    """The least recently used items above a total size, and those unused since a time.

    Args:
        largest: bytes to keep.
        oldest: remove what was neither stored nor used since this time.
    """
    total, going = 0, []
    for entry in sorted(entries, key=lambda each: each.since, reverse=True):
        total += entry.bytes
        if entry.since < oldest or (largest is not None and total > largest):
            going.append(entry)
    return going


def trim(cache: Cache, largest: float, spared: str) -> list[Listed]:
    """Remove least recently used entries, but not the spared one, down to a total size."""
    entries = [describe(cache, name, thorough=False) for name in names(cache)]
    others = [each for each in entries if each.key != spared]
    largest -= sum(each.bytes for each in entries if each.key == spared)
    going = least_recently_used(others, largest=largest)
    return [each for each in going if remove(cache, each.key)]


def remove(cache: Cache, name: str) -> bool:
    """Remove an entry; False if that is not permitted."""
    return _discard(cache.entry(name))


def sweep(cache: Cache) -> None:
    """Remove what killed processes left."""
    before = time.time() - LEFT_ALONE_SECONDS
    for path in (*cache.folder.glob(".*"), *cache.folder.glob("??/.*")):
        with suppress(OSError):
            if path.lstat().st_mtime < before:
                _discard(path)


def _described(listed: Listed, entry: Entry) -> Listed:
    stack = entry.inputs.get("stack")
    stack = stack if isinstance(stack, dict) else {}
    frameworks = stack.get("frameworks")
    return listed._replace(
        wheel=entry.record.file,
        frameworks={
            name: str(each.get("version", "")) if isinstance(each, dict) else ""
            for name, each in (frameworks if isinstance(frameworks, dict) else {}).items()
        },
        mpi=str(stack.get("mpi", "")).partition(" Report ")[0],
        compiler=str(stack.get("compiler", "")).partition(" Copyright ")[0],
        bytes=entry.bytes,
        created=entry.record.created,
        used=None if listed.shared else timestamp(entry.used, "seconds"),
    )


def _discard(entry: Path) -> bool:
    """Remove an entry: its name first, so that no process finds it half deleted."""
    condemned = entry.with_name(f".{uuid.uuid4().hex}")
    try:
        os.rename(entry, condemned)
        if condemned.is_dir() and not condemned.is_symlink():
            shutil.rmtree(condemned, ignore_errors=True)
        else:
            condemned.unlink()
    except OSError:
        return False
    return True


def _add(cache: Cache, name: str, files: Mapping[str, Iterable[bytes]]) -> None:
    """Make an entry of files. It gets its name last.

    Raises:
        StepError: entries of this cache would not be used, or an entry that can neither be used
            nor removed has the name.
    """
    if not cache.shared:
        make_folder(cache.folder)
    temporary = cache.folder / f".{uuid.uuid4().hex}"
    try:
        with opened_folder(cache.folder) as root:
            if cache.shared:
                refuse_untrusted_owner(cache, os.fstat(root), cache.folder)
            # Never writable for a group, whatever the umask: it would not be trusted.
            os.mkdir(temporary.name, 0o755, dir_fd=root)
            # In a cache that others write, the name could lead elsewhere than the descriptor.
            with opened_folder(temporary.name, root) as descriptor:
                for file, content in files.items():
                    _write(descriptor, file, content)
                _permit(cache, descriptor)
                _place(cache, temporary, name)
    except NotUsedError as error:
        raise StepError(
            str(error), where=str(cache.folder),
            remedy="let only its owner write to it (chmod go-w), or name another cache",
        ) from error  # fmt: skip
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _same(wheel: int, sha256: str, path: Path) -> Iterator[bytes]:
    """The content of an open wheel, which must still have the hash that was recorded.

    Raises:
        StepError: it was changed since.
    """
    digest = hashlib.sha256()
    for block in blocks(wheel):
        digest.update(block)
        yield block
    if digest.hexdigest() != sha256:
        raise StepError(
            "this wheel was changed while hvdenv copied it", where=str(path),
            remedy="run the command again when no other program writes to it",
        )  # fmt: skip


def _write(within: int, name: str, content: Iterable[bytes]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(name, flags, 0o644, dir_fd=within)
    with open(descriptor, "wb") as stream:
        stream.writelines(content)
        stream.flush()
        os.fsync(stream.fileno())


def _permit(cache: Cache, descriptor: int) -> None:
    """Let those who may read the shared cache read an entry, whatever the umask."""
    if not cache.shared:
        return
    mode = stat.S_IMODE(os.stat(cache.folder).st_mode)
    for name in os.listdir(descriptor):
        os.chmod(name, mode & 0o644 | 0o600, dir_fd=descriptor)
    os.fchmod(descriptor, mode & 0o2755 | 0o700)


def _place(cache: Cache, temporary: Path, name: str) -> None:
    """Give a finished entry its name, unless a good entry has it already."""
    entry = cache.entry(name)
    # A shared folder gets the permissions of the cache.
    (make_folder_alike if cache.shared else make_folder)(entry.parent)
    sync(temporary)
    while not _renamed(temporary, entry):
        found = describe(cache, name, thorough=True)
        if not found.problem:
            return
        if os.path.lexists(entry) and not (found.damaged and _discard(entry)):
            raise StepError(
                f"its place is taken: {found.problem}", where=str(entry),
                remedy="remove it, or ask its owner to",
            )  # fmt: skip
    for folder in (entry.parent, cache.folder):
        sync(folder)


def _renamed(temporary: Path, entry: Path) -> bool:
    """Whether an entry got its name; False if the name is taken."""
    try:
        os.rename(temporary, entry)
    except OSError:
        if os.path.lexists(entry):
            return False
        raise
    return True
