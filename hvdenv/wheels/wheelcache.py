"""Wheels that were compiled before, found again by what went into them.

An entry (entries.py) is a folder that is named by the hash of its inputs: KEY[:2]/KEY. It
gets its name when it is whole, and is never changed then, so no lock is needed. Each user
has a cache of their own; besides, a site can have some that are shared: docs/how-to/share-compiled-wheels.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from hvdenv import signing
from hvdenv.errors import StepError
from hvdenv.model.cluster import Wheels
from hvdenv.places import Places, blocked, make_folder, sync_folder
from hvdenv.reading import WHEEL, open_file
from hvdenv.runner import Runner, environment
from hvdenv.wheels.cache_entry import (
    RECORD,
    SIGNATURE,
    Cache,
    DamagedError,
    Entry,
    NotUsedError,
    check,
    key,
    opened_folder,
    reading,
    see_owner,
)

FORMAT = 1
# Folders, separated as those of PATH are.
VARIABLE = "HVDENV_WHEEL_CACHE"
# What a killed process left is taken away when nobody can be at it any more.
LEFT_ALONE = timedelta(days=1)

_KEY = r"[0-9a-f]{64}"


class Taken(NamedTuple):
    """What came of looking for a wheel.

    Attributes:
        entry: where the wheel was copied from; None if there is none to use.
        notes: why entries or caches that are there were not used, a line each.
    """

    entry: Path | None
    notes: tuple[str, ...] = ()


class Listed(NamedTuple):
    """An entry, for people and programs.

    Attributes:
        key: hash of its inputs.
        cache: the folder that it lies in.
        shared: whether that is shared.
        problem: why it would not be used; empty if it would.
        damaged: whether it is broken, rather than not trusted.
        wheel: name of the file.
        frameworks: version of each that it was compiled against.
        mpi, compiler: what they call themselves.
        bytes: size of the wheel.
        created: when it was stored.
        used: when a build last took it; not known of shared ones.
        signed: whether it has a signature.
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
    signed: bool = False

    @property
    def horovod(self) -> str:
        return self._tag(1)

    @property
    def python(self) -> str:
        return self._tag(2)

    def _tag(self, number: int) -> str:
        parts = self.wheel.split("-")
        return parts[number] if len(parts) == 5 else ""


def own(places: Places) -> Cache:
    """The user's own cache."""
    return Cache(places.wheels)


def shared(wheels: Wheels, environ: Mapping[str, str] | None = None) -> tuple[Cache, ...]:
    """The caches that a site or a variable names; the one that is published to first.

    Args:
        wheels: what the site says.
        environ: environment variables; those of this process if not given.
    """
    environ = environment() if environ is None else environ
    named = [wheels.publish or "", *environ.get(VARIABLE, "").split(":"), *wheels.read]
    folders = dict.fromkeys(os.path.abspath(folder) for folder in named if folder)
    trusted = frozenset(uid for name in wheels.trust if (uid := _user_id(name)) is not None)
    signers = Path(wheels.signers) if wheels.signers else None
    return tuple(Cache(Path(folder), True, trusted, signers) for folder in folders)


def take(caches: Sequence[Cache], inputs: Mapping[str, Any], target: Path, runner: Runner) -> Taken:
    """Copy a wheel from the first cache that has it; its hash is compared while it is copied.

    What is damaged in the user's own cache is deleted. Everything else is left alone.

    Args:
        caches: where to look, in this order.
        inputs: all that goes into the wheel, as JSON values.
        target: the file to copy it to.
        runner: runs what verifies signatures.

    Raises:
        StepError: the target cannot be written.
    """
    notes = []
    for cache in caches:
        try:
            with reading(cache, key(inputs)) as entry:
                if entry is None:
                    continue
                check(cache, entry, runner, target)
        except NotUsedError as error:
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


def store(
    cache: Cache, inputs: Mapping[str, Any], wheel: Path, runner: Runner, signing_key: str = ""
) -> None:
    """Put a copy of a wheel into a cache.

    Where another build has put one there in the meantime, that one stays.

    Args:
        cache: which; a shared one has to be there.
        inputs: all that went into the wheel, as JSON values.
        wheel: the file.
        runner: runs what signs and verifies.
        signing_key: file of the key to sign with; no signature if empty.

    Raises:
        StepError: the cache cannot be written, or has an entry in this place that can be
            neither used nor removed.
    """
    entry = cache.entry(key(inputs))
    if os.path.lexists(entry) and not describe(cache, key(inputs), runner, thorough=True).problem:
        return
    if cache.signers and not signing_key:
        raise StepError(
            "entries need a signature there, and no key to sign with is named",
            where=str(cache.folder),
            remedy="name one in places.wheels.key",
        )
    try:
        with made_folder(cache) as (temporary, descriptor):
            digest = _copy_in(wheel, descriptor)
            record = _record_of(inputs, wheel, digest)
            write_file(descriptor, RECORD, record)
            if signing_key:
                signature = signing.sign(record, signing_key, runner)
                write_file(descriptor, SIGNATURE, signature)
            place(cache, temporary, descriptor, entry.name, runner)
    except OSError as error:
        raise blocked(entry, error) from error


def sign(cache: Cache, name: str, signing_key: str, runner: Runner) -> None:
    """Sign an entry that is there and whole, whoever signed it before.

    Raises:
        StepError: it is not whole, the key does not sign, or the entry cannot be written.
    """
    unsigned = cache._replace(signers=None)
    try:
        with reading(unsigned, name) as entry:
            if entry is None:
                raise NotUsedError("there is no such entry")
            check(unsigned, entry, runner)
            signature = signing.sign(entry.raw, signing_key, runner)
            temporary, within = f".{uuid.uuid4().hex}", entry.descriptor
            write_file(within, temporary, signature)
            os.chmod(temporary, stat.S_IMODE(os.fstat(entry.wheel).st_mode), dir_fd=within)
            os.replace(temporary, SIGNATURE, src_dir_fd=within, dst_dir_fd=within)
    except NotUsedError as error:
        raise StepError(f"not signed: {error}", where=str(cache.folder)) from error
    except OSError as error:
        raise blocked(cache.entry(name), error) from error


def names(cache: Cache) -> list[str]:
    """The keys of all entries, whole or not.

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


def describe(cache: Cache, name: str, runner: Runner, *, thorough: bool) -> Listed:
    """What an entry holds.

    Args:
        cache: where it is.
        name: its key.
        runner: runs what verifies signatures.
        thorough: compare the wheel's hash and verify the signature.
    """
    listed = Listed(name, str(cache.folder), cache.shared)
    try:
        with reading(cache, name) as entry:
            if entry is None:
                return listed._replace(problem="it has gone")
            listed = _described(listed, entry)
            if thorough:
                check(cache, entry, runner)
    except NotUsedError as error:
        damaged = isinstance(error, DamagedError)
        return listed._replace(problem=str(error), damaged=damaged)
    return listed


class Used(Protocol):
    """What a cache holds, and when it was used; empty where that is not known."""

    @property
    def bytes(self) -> int: ...

    @property
    def used(self) -> str | None: ...

    @property
    def created(self) -> str: ...


Something = TypeVar("Something", bound=Used)


def superfluous(
    entries: Sequence[Something], *, largest: float | None = None, oldest: str = ""
) -> list[Something]:
    """Entries that can go: those that were not used for longest.

    Args:
        entries: of one cache.
        largest: how many bytes may stay.
        oldest: what was neither stored nor used since this time goes.
    """
    newest_first = sorted(entries, key=lambda each: each.used or each.created, reverse=True)
    total, going = 0, []
    for entry in newest_first:
        total += entry.bytes
        if (entry.used or entry.created) < oldest or (largest is not None and total > largest):
            going.append(entry)
    return going


def trim(cache: Cache, largest: float, spared: str, runner: Runner) -> list[Listed]:
    """Take the least recently used entries away until the cache is not larger than this."""
    entries = [describe(cache, name, runner, thorough=False) for name in names(cache)]
    others = [each for each in entries if each.key != spared]
    largest -= sum(each.bytes for each in entries if each.key == spared)
    going = superfluous(others, largest=largest)
    return [each for each in going if remove(cache, each.key)]


def remove(cache: Cache, name: str) -> bool:
    """Take an entry away; False if that is not allowed."""
    return _discard(cache.entry(name))


def sweep(cache: Cache) -> int:
    """Remove what killed processes left; how much it was."""
    before = (datetime.now() - LEFT_ALONE).timestamp()
    swept = 0
    for path in (*cache.folder.glob(".*"), *cache.folder.glob("??/.*")):
        with suppress(OSError):
            if path.lstat().st_mtime < before:
                swept += _discard(path)
    return swept


def _user_id(name: str) -> int | None:
    """The number of a user; None for one that this host does not know, who owns nothing here."""
    import pwd

    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def _described(listed: Listed, entry: Entry) -> Listed:
    stack = entry.inputs.get("stack")
    stack = stack if isinstance(stack, dict) else {}
    frameworks = stack.get("frameworks")
    used = datetime.fromtimestamp(entry.used, timezone.utc)
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
        used=None if listed.shared else used.isoformat(timespec="seconds"),
        signed=bool(entry.signature),
    )


def _discard(entry: Path) -> bool:
    """Take an entry away: first its name, so that nobody finds it half deleted."""
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


@contextmanager
def made_folder(cache: Cache) -> Iterator[tuple[Path, int]]:
    """A new folder in a cache, and its descriptor, that does not outlive its use there.

    Raises:
        StepError: nobody would use what is stored in this cache.
    """
    if not cache.shared:
        make_folder(cache.folder)
    temporary = cache.folder / f".{uuid.uuid4().hex}"
    try:
        with opened_folder(cache.folder) as root:
            if cache.shared:
                see_owner(cache, os.fstat(root), cache.folder)
            # Never writable for a group, whatever the umask: it would not be trusted.
            os.mkdir(temporary.name, 0o755, dir_fd=root)
            with opened_folder(temporary.name, root) as descriptor:
                yield temporary, descriptor
    except NotUsedError as error:
        raise StepError(str(error), where=str(cache.folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_in(wheel: Path, within: int) -> str:
    digest = hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        with open_file(wheel, WHEEL) as source:
            while block := source.read(1 << 20):
                digest.update(block)
                yield block

    write_file(within, wheel.name, blocks())
    return digest.hexdigest()


def write_file(within: int, name: str, content: bytes | Iterator[bytes]) -> None:
    """Write a new file into a folder, and have it on the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(name, flags, 0o644, dir_fd=within)
    with open(descriptor, "wb") as stream:
        for block in [content] if isinstance(content, bytes) else content:
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())


def _record_of(inputs: Mapping[str, Any], wheel: Path, digest: str) -> bytes:
    record = {
        "format": FORMAT,
        "key": key(inputs),
        "inputs": inputs,
        "file": wheel.name,
        "sha256": digest,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def _permit(cache: Cache, descriptor: int) -> None:
    """Let those read an entry who may read the shared cache, whatever the umask."""
    if not cache.shared:
        return
    mode = stat.S_IMODE(os.stat(cache.folder).st_mode)
    for name in os.listdir(descriptor):
        os.chmod(name, mode & 0o644 | 0o600, dir_fd=descriptor)
    os.fchmod(descriptor, mode & 0o2755 | 0o700)


def place(cache: Cache, temporary: Path, descriptor: int, name: str, runner: Runner) -> None:
    """Give a finished entry its name, where no good one has it already.

    Args:
        cache: in which made_folder() made the folder.
        temporary: the folder with the entry's files.
        descriptor: of that folder; its name can lead to another, where others write the cache.
        name: the entry's key.
        runner: runs what verifies signatures.

    Raises:
        StepError: the name is taken by one that is not used and that cannot be removed.
    """
    entry = cache.entry(name)
    _have_shard(cache, entry.parent)
    _permit(cache, descriptor)
    sync_folder(temporary)
    while not _renamed(temporary, entry):
        found = describe(cache, name, runner, thorough=True)
        if not found.problem:
            return
        if os.path.lexists(entry) and not (found.damaged and _discard(entry)):
            raise StepError(f"its place is taken: {found.problem}", where=str(entry))
    for folder in (entry.parent, cache.folder):
        sync_folder(folder)


def _have_shard(cache: Cache, shard: Path) -> None:
    """The folder above an entry; in a shared cache whoever may write this may write that."""
    if not cache.shared:
        make_folder(shard)
        return
    with opened_folder(cache.folder) as root:
        try:
            os.mkdir(shard.name, 0o700, dir_fd=root)
        except FileExistsError:
            return
        with opened_folder(shard.name, root) as made:
            os.fchmod(made, stat.S_IMODE(os.fstat(root).st_mode))


def _renamed(temporary: Path, entry: Path) -> bool:
    """Whether an entry got its name, or the name is taken."""
    try:
        os.rename(temporary, entry)
    except OSError:
        if os.path.lexists(entry):
            return False
        raise
    return True
