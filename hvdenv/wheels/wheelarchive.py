"""Entries of a wheel cache as one tar file, to copy them to another machine."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, cast

from hvdenv.errors import RecipeError
from hvdenv.places import blocked, keep_mode, named_file, sync
from hvdenv.reading import ARCHIVE, open_file
from hvdenv.runner import Runner
from hvdenv.wheels.cache_entry import (
    LARGEST,
    RECORD,
    SIGNATURE,
    Cache,
    Entry,
    NotUsedError,
    checked_entry,
    opened_folder,
    read_record,
)
from hvdenv.wheels.wheelcache import describe, place, temporary_folder, write_file

_MEMBER = re.compile(
    rf"(?P<key>[0-9a-f]{{64}})/(?P<file>{re.escape(RECORD)}|{re.escape(SIGNATURE)}"
    r"|[A-Za-z0-9][A-Za-z0-9._+-]{0,200}\.whl)"
)

# Limits of one file, in bytes and members. Wheels of Horovod have 5 to 150 MB.
LARGEST_TOTAL, MOST_MEMBERS, LARGEST_HEADER = 16 << 30, 10_000, 1 << 20


def export(entries: Mapping[str, Cache], file: Path, runner: Runner) -> None:
    """Write entries into a tar file, atomically; the same entries give the same bytes.

    Args:
        entries: the cache of each key.
        file: the file.
        runner: verifies signatures.

    Raises:
        RecipeError: an entry cannot be used.
        StepError: the file cannot be written, or is a device.
    """
    file = named_file(file)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
            for key, cache in sorted(entries.items()):
                _add(tar, cache, key, runner)
            keep_mode(stream.fileno(), file)
        sync(temporary)
        os.replace(temporary, file)
    except OSError as error:
        raise blocked(file, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _add(tar: tarfile.TarFile, cache: Cache, key: str, runner: Runner) -> None:
    try:
        with checked_entry(cache, key, runner) as entry:
            if entry is None:
                raise NotUsedError("it is gone")
            with open(os.dup(entry.wheel), "rb") as wheel:
                wheel.seek(0)
                for name, stream in sorted(_files(entry, wheel), key=lambda each: each[0]):
                    member = tarfile.TarInfo(f"{key}/{name}")
                    member.size = stream.seek(0, io.SEEK_END)
                    stream.seek(0)
                    tar.addfile(member, stream)
    except NotUsedError as error:
        raise RecipeError(
            f"not exported: {error}",
            where=key,
            remedy="check all entries with `hvdenv cache verify`, or export some by their keys",
        ) from error


def _files(entry: Entry, wheel: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    yield RECORD, io.BytesIO(entry.raw)
    yield entry.record.file, wheel
    if entry.signature:
        yield SIGNATURE, io.BytesIO(entry.signature)


def import_archive(cache: Cache, file: Path, runner: Runner) -> list[str]:
    """Put the entries of a tar file into a cache, after checking all of it.

    Existing entries are kept.

    Args:
        cache: the target.
        file: as export() writes it.
        runner: verifies signatures.

    Returns:
        The keys of the entries in the file.

    Raises:
        RecipeError: it is not such a file, or an entry of it cannot be used.
        StepError: the cache cannot be written.
    """
    try:
        # Beside the entries, so that they only have to be renamed.
        with open_file(file, ARCHIVE) as stream, temporary_folder(cache) as (temporary, within):
            unpacked = cache._replace(folder=temporary)
            keys = _unpack(stream, file, within)
            for key in keys:
                problem = describe(unpacked, key, runner, thorough=True).problem
                if problem:
                    raise _refused(file, problem.replace(f"{temporary}/", ""))
            for key in keys:
                with _folder(within, key[:2]) as shard, _folder(shard, key) as descriptor:
                    place(cache, unpacked.entry(key), descriptor, key, runner)
    except OSError as error:
        raise blocked(Path(error.filename or cache.folder), error, "import") from error
    return keys


def _unpack(stream: IO[bytes], file: Path, into: int) -> list[str]:
    """Unpack the entries into a folder with the layout of a cache; returns their keys.

    Nothing is written before all headers, all records and the hash of each wheel are checked.
    """
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", _Bounded(stream)), mode="r:") as tar:
            found = _entries(tar, file)
            for key, members in found.items():
                _check_hash(tar, file, key, members)
            for key, members in found.items():
                with _folder(into, key[:2]) as shard, _folder(shard, key) as descriptor:
                    for name, member in members.items():
                        write_file(descriptor, name, _blocks(tar, member))
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise _refused(file, str(error)) from error
    return sorted(found)


class _Bounded:
    """A stream that refuses to read a large header of a tar file into memory."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= LARGEST_HEADER:
            raise ValueError(f"a header has {size:,} bytes; the limit is {LARGEST_HEADER:,}")
        return self._stream.read(size)


def _entries(tar: tarfile.TarFile, file: Path) -> dict[str, dict[str, tarfile.TarInfo]]:
    """The members of each entry by their names, from the headers alone."""
    found: dict[str, dict[str, tarfile.TarInfo]] = {}
    total = 0
    for number, member in enumerate(tar, 1):
        key, name = _member(file, member)
        if name in found.setdefault(key, {}):
            raise _refused(file, f"{member.name} is in it twice")
        found[key][name] = member
        total += member.size
        if total > LARGEST_TOTAL or number > MOST_MEMBERS:
            raise _refused(
                file,
                f"it holds more than {MOST_MEMBERS:,} files or {LARGEST_TOTAL:,} bytes",
            )
    if not found:
        raise _refused(file, "there is no entry in it")
    for key, members in found.items():
        wheels = [name for name in members if name.endswith(".whl")]
        if len(wheels) > 1:
            raise _refused(file, f"{key} has more than one wheel")
        if not wheels or RECORD not in members:
            raise _refused(file, f"{key} has no {'record' if wheels else 'wheel'}")
    return found


def _check_hash(
    tar: tarfile.TarFile, file: Path, key: str, members: Mapping[str, tarfile.TarInfo]
) -> None:
    record, _ = read_record(b"".join(_blocks(tar, members[RECORD])))
    if record.key != key or record.file not in members:
        raise _refused(file, f"{key}/{RECORD} does not describe this wheel")
    digest = hashlib.sha256()
    for block in _blocks(tar, members[record.file]):
        digest.update(block)
    if digest.hexdigest() != record.sha256:
        raise _refused(
            file,
            f"{key}/{record.file} is damaged: its hash is {digest.hexdigest()},"
            f" recorded was {record.sha256}",
        )


def _blocks(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    source = tar.extractfile(member)
    assert source
    return iter(partial(source.read, 1 << 20), b"")


def _member(file: Path, member: tarfile.TarInfo) -> tuple[str, str]:
    """The key and the file name of a member."""
    match = _MEMBER.fullmatch(member.name)
    if not match:
        raise _refused(file, f"{member.name!r} is not a file of an entry")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse:
        raise _refused(file, f"{member.name} is not a regular file")
    if member.size > LARGEST.get(match["file"], LARGEST[""]):
        raise _refused(file, f"{member.name} is too large")
    return match["key"], match["file"]


@contextmanager
def _folder(within: int, name: str) -> Iterator[int]:
    """The descriptor of a folder in another, created if missing."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=within)
    with opened_folder(name, within) as descriptor:
        yield descriptor


def _refused(file: Path, problem: str) -> RecipeError:
    return RecipeError(
        f"nothing is imported: {problem}",
        where=str(file),
        remedy="use a file that `hvdenv cache export` has written",
    )
