"""Reading an entry of a wheel cache: what is checked is what is used.

An entry is a folder with a record and a wheel. In a cache that other users can write, an entry
is trusted by its owner (docs/how-to/share-compiled-wheels.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from hvdenv import trust
from hvdenv.model.recipe import Sha256
from hvdenv.places import OTHERS_WRITE, reporting
from hvdenv.schema import Pattern, Problem, decode

RECORD = "entry.json"
# Size limits in bytes.
_LARGEST_RECORD, _LARGEST_WHEEL = 1 << 20, 1 << 30

WheelName = Annotated[str, Pattern(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.whl", "the name of a wheel")]
_Time = Annotated[
    str, Pattern(r"[0-9-]{10}T[0-9:]{8}\+00:00", "a time such as 2026-11-22T00:29:40+00:00")
]


class Cache(NamedTuple):
    """A wheel cache.

    Attributes:
        shared: whether other users write it; false for the user's own cache.
        trusted: user ids that may own entries, besides the user's own and root's.
    """

    folder: Path
    shared: bool = False
    trusted: frozenset[int] = frozenset()

    def entry(self, key: str) -> Path:
        """The folder of the entry with this key, which need not exist."""
        return self.folder / key[:2] / key


class Record(NamedTuple):
    """What an entry states about itself, besides its inputs."""

    format: Literal[1]
    key: Sha256
    file: WheelName
    sha256: Sha256
    created: _Time


class Entry(NamedTuple):
    """An open entry.

    Attributes:
        raw: its record, as it was read.
        used: when its folder was last touched, in seconds.
    """

    folder: Path
    descriptor: int
    raw: bytes
    record: Record
    inputs: dict[str, object]
    wheel: int
    bytes: int
    used: float


class NotUsedError(Exception):
    """Why an existing entry is not used."""


class DamagedError(NotUsedError):
    """The entry is broken and can be deleted."""


def key(inputs: Mapping[str, object]) -> str:
    """The key of an entry: a hash of all that goes into a wheel."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def open_entry(cache: Cache, name: str) -> Iterator[Entry | None]:
    """Open an entry, from folder to folder by descriptors; None if there is none.

    Raises:
        NotUsedError: it is damaged, or an untrusted user could have written it.
    """
    folder = cache.entry(name)
    with ExitStack() as stack:
        try:
            descriptor = _enter_entry(stack, cache, folder)
        except OSError as error:
            raise NotUsedError(f"{cache.folder} cannot be read: {error.strerror}") from error
        yield (None if descriptor is None else _read_entry(stack, cache, folder, descriptor))


def check(entry: Entry, target: Path | None = None) -> None:
    """Compare the wheel of an open entry with its hash, and copy it to a target if there is one.

    Raises:
        NotUsedError: the wheel is damaged or cannot be read.
        StepError: the target cannot be written.
    """
    digest = hashlib.sha256()
    with reporting(target or entry.folder), open(target or os.devnull, "wb") as stream:
        for block in _source(entry):
            digest.update(block)
            stream.write(block)
    if digest.hexdigest() != entry.record.sha256:
        raise DamagedError(
            f"{entry.folder / entry.record.file} is damaged: its hash is {digest.hexdigest()},"
            f" recorded was {entry.record.sha256}"
        )


@contextmanager
def opened_folder(path: Path | str, within: int | None = None) -> Iterator[int]:
    """The descriptor of a folder; one within another is not opened through a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if within is None else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_record(raw: bytes) -> tuple[Record, dict[str, object]]:
    """The record of an entry, and the inputs in it.

    Raises:
        ValueError: it is malformed or contradicts itself.
    """
    try:
        document = json.loads(raw)
        inputs = document.pop("inputs")
        record = decode(Record, document)
        same = record.key == key(inputs) and isinstance(inputs, dict)
    except (KeyError, TypeError, AttributeError, RecursionError, Problem) as error:
        raise ValueError("its record is malformed") from error
    if not same:
        raise ValueError("its key is not that of its inputs")
    return record, inputs


def refuse_untrusted_owner(cache: Cache, status: os.stat_result, path: Path) -> None:
    """Refuse what an untrusted user could have written.

    Raises:
        NotUsedError: such a user owns it, or others can write it.
    """
    if status.st_uid not in trust.trusted_owners(map(str, cache.trusted)):
        raise NotUsedError(f"{path} belongs to user {status.st_uid}")
    if status.st_mode & OTHERS_WRITE:
        raise NotUsedError(f"{path} can be written by others")


def _enter_entry(stack: ExitStack, cache: Cache, folder: Path) -> int | None:
    """The descriptor of an entry's folder; None if there is none."""
    descriptor: int | None
    try:
        # The site names this folder, which may be a link.
        descriptor = stack.enter_context(opened_folder(cache.folder))
    except FileNotFoundError:
        if cache.shared:
            raise
        return None
    # The user's own cache may be in a group's folder; only its entries are checked.
    if cache.shared:
        refuse_untrusted_owner(cache, os.fstat(descriptor), cache.folder)
    for path in (folder.parent, folder):
        descriptor = _enter(stack, path, descriptor)
        if descriptor is None:
            return None
        if cache.shared or path == folder:
            refuse_untrusted_owner(cache, os.fstat(descriptor), path)
    return descriptor


def _enter(stack: ExitStack, folder: Path, within: int) -> int | None:
    """The descriptor of a folder in another; None if there is none."""
    try:
        status = os.stat(folder.name, dir_fd=within, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        raise NotUsedError(f"{folder} is a symbolic link")
    if not stat.S_ISDIR(status.st_mode):
        raise DamagedError(f"{folder} is not a folder")
    return stack.enter_context(opened_folder(folder.name, within))


def _read_entry(stack: ExitStack, cache: Cache, folder: Path, descriptor: int) -> Entry:
    try:
        raw = b"".join(blocks(_open_file(stack, cache, folder / RECORD, descriptor)))
        record, inputs = read_record(raw)
        if record.key != folder.name:
            raise DamagedError(f"{folder / RECORD} does not describe this wheel")
        wheel = _open_file(stack, cache, folder / record.file, descriptor)
    except OSError as error:
        what = DamagedError if isinstance(error, FileNotFoundError) else NotUsedError
        raise what(f"{folder} cannot be read: {error.strerror}: {error.filename}") from error
    except ValueError as error:
        raise DamagedError(f"{folder} is damaged ({error})") from error
    return Entry(
        folder=folder,
        descriptor=descriptor,
        raw=raw,
        record=record,
        inputs=inputs,
        wheel=wheel,
        bytes=os.fstat(wheel).st_size,
        used=os.fstat(descriptor).st_mtime,
    )


def _open_file(stack: ExitStack, cache: Cache, path: Path, within: int) -> int:
    """Open a file without following a link or waiting for a pipe."""
    if stat.S_ISLNK(os.stat(path.name, dir_fd=within, follow_symlinks=False).st_mode):
        raise NotUsedError(f"{path} is a symbolic link")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path.name, flags, dir_fd=within)
    stack.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    refuse_untrusted_owner(cache, status, path)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(f"{path} is not a regular file")
    if status.st_size > (_LARGEST_RECORD if path.name == RECORD else _LARGEST_WHEEL):
        raise DamagedError(f"{path} is too large")
    return descriptor


def blocks(descriptor: int) -> Iterator[bytes]:
    """The content of a file, from its beginning."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    while block := os.read(descriptor, 1 << 20):
        yield block


def _source(entry: Entry) -> Iterator[bytes]:
    """The wheel in blocks; errors of its file system are errors of the entry."""
    try:
        yield from blocks(entry.wheel)
    except OSError as error:
        raise NotUsedError(f"{entry.folder} cannot be read: {error.strerror}") from error


def make_folder_alike(path: Path) -> None:
    """Create a folder, unless there is one, with the permissions of its parent whatever the umask.

    It gets its name last: nobody finds it with other permissions, even if this process is killed.
    """
    if os.path.lexists(path):
        return
    temporary = f".{uuid.uuid4().hex}"
    with opened_folder(path.parent) as parent:
        os.mkdir(temporary, 0o700, dir_fd=parent)
        with opened_folder(temporary, parent) as made:
            os.fchmod(made, stat.S_IMODE(os.fstat(parent).st_mode))
        try:
            os.rename(temporary, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            os.rmdir(temporary, dir_fd=parent)
            if not os.path.lexists(path):
                raise
