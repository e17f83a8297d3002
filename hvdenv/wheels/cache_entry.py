"""Reading an entry of a wheel cache: what is checked is what is used.

An entry is a folder with a record and a wheel. In a cache that other users can write, an entry
is trusted by its owner, or by the signature of its record (docs/how-to/share-compiled-wheels.md).
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

from hvdenv import signing, trust
from hvdenv.model.recipe import Sha256
from hvdenv.places import OTHERS_WRITE, reporting
from hvdenv.runner import Runner
from hvdenv.schema import Pattern, Problem, decode

RECORD, SIGNATURE = "entry.json", "entry.json.sig"
# Size limits of a record, a signature and a wheel, in bytes.
LARGEST = {RECORD: 1 << 20, SIGNATURE: 1 << 16, "": 1 << 30}

WheelName = Annotated[str, Pattern(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.whl", "the name of a wheel")]
_Time = Annotated[
    str, Pattern(r"[0-9-]{10}T[0-9:]{8}\+00:00", "a time such as 2026-11-22T00:29:40+00:00")
]


class Cache(NamedTuple):
    """A wheel cache.

    Attributes:
        shared: whether other users write it; false for the user's own cache.
        trusted: user ids that may own entries and signers, besides the user's own and root's.
        signers: file with the public keys of accepted signers. If set, entries must be signed, and
            their owner does not matter.
    """

    folder: Path
    shared: bool = False
    trusted: frozenset[int] = frozenset()
    signers: Path | None = None

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
        raw: its record, as it was signed.
        signature: of the record; or empty.
        used: when its folder was last touched, in seconds.
    """

    folder: Path
    descriptor: int
    raw: bytes
    record: Record
    inputs: dict[str, object]
    signature: bytes
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


def check(cache: Cache, entry: Entry, runner: Runner, target: Path | None = None) -> None:
    """Check the hash and, if the site requires one, the signature of an open entry.

    The wheel is copied to the target, if there is one, at the same time.

    Raises:
        NotUsedError: a check failed.
        StepError: the target cannot be written.
    """
    if refusal := signature_refusal(cache, entry.raw, entry.signature, runner):
        raise NotUsedError(f"{entry.folder}: {refusal}")
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
        raise ValueError(str(error)) from error
    if not same:
        raise ValueError("its key is not that of its inputs")
    return record, inputs


def refuse_untrusted_owner(cache: Cache, status: os.stat_result, path: Path) -> None:
    """Refuse what an untrusted user could have written.

    Raises:
        NotUsedError: such a user owns it, or others can write it.
    """
    if cache.signers:
        return
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
        signature = b""
        if SIGNATURE in os.listdir(descriptor):
            opened = _open_file(stack, cache, folder / SIGNATURE, descriptor)
            signature = b"".join(blocks(opened))
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
        signature=signature,
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
    if status.st_size > LARGEST.get(path.name, LARGEST[""]):
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


def signature_refusal(cache: Cache, text: bytes, signature: bytes, runner: Runner) -> str:
    """Why a text is not accepted with this signature; empty if it is, or needs none.

    Raises:
        NotUsedError: an untrusted user could have written the file of signers.
    """
    signers = cache.signers
    if not signers:
        return ""
    if not signature:
        return "it is not signed, and the site requires it"
    try:
        refuse_untrusted_owner(cache._replace(signers=None), os.stat(signers), signers)
    except OSError as error:
        return f"the file of accepted signers cannot be read: {signers}: {error.strerror}"
    return signing.refusal(text, signature, signers, runner)


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
