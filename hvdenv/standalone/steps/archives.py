"""Read files and archives in blocks, within one limit: a megabyte can unpack to a terabyte.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import gzip
import hashlib
import tarfile
import zipfile
from contextlib import contextmanager
from typing import BinaryIO, Iterator, Union

# Of what an archive unpacks to. The source of Horovod 0.28.1 has 24 MB in 3,726 files, a wheel 6 MB.
MOST_BYTES, MOST_MEMBERS = 1 << 30, 50000
# Of the list of files in a zip archive, which is read at once.
MOST_LISTED = 8 << 20
BLOCK = 1 << 20
_END, _END_SIZE, _LOCATOR, _LOCATOR_SIZE = b"PK\5\6", 22, b"PK\6\7", 20


def sha256_of(path: str) -> str:
    """The sha256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(BLOCK), b""):
            found.update(block)
    return found.hexdigest()


class ArchiveError(ValueError):
    """The archive is larger than any that hvdenv reads, or is not of a kind that it reads."""


@contextmanager
def opened_zip(stream: BinaryIO) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive, such as a wheel, all of whose files are within the limit.

    Raises:
        ArchiveError: they are not.
        BadZipFile: it is damaged.
    """
    _refuse_long_list(stream)
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        _refuse(sum(member.file_size for member in members), len(members))
        # zipfile unpacks others at once, whatever their size.
        if any(m.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for m in members):
            raise ArchiveError("its files are neither stored nor deflated")
        yield archive


def _refuse_long_list(stream: BinaryIO) -> None:
    """Look at the end of the archive, as zipfile does, before zipfile reads the list."""
    size = stream.seek(0, 2)
    stream.seek(max(0, size - _END_SIZE - _LOCATOR_SIZE - (1 << 16)))
    tail = stream.read()
    at = len(tail) - _END_SIZE
    if tail[at : at + 4] != _END or tail[-2:] != b"\0\0":
        at = tail.rfind(_END)
    listed = int.from_bytes(tail[at + 12 : at + 16], "little") if at >= 0 else 0
    if listed > MOST_LISTED or tail[max(0, at - _LOCATOR_SIZE) : at][:4] == _LOCATOR:
        raise ArchiveError("its list of files is longer than %d bytes" % MOST_LISTED)
    stream.seek(0)


def _refuse(total: int, members: int) -> None:
    if total > MOST_BYTES or members > MOST_MEMBERS:
        raise ArchiveError(
            "it unpacks to more than %d bytes or %d files" % (MOST_BYTES, MOST_MEMBERS)
        )


def blocks(archive: zipfile.ZipFile, member: Union[str, zipfile.ZipInfo]) -> Iterator[bytes]:
    """The content of a file of an archive.

    Raises:
        KeyError: there is none of this name.
        BadZipFile, EOFError, RuntimeError, zlib.error: it is damaged or encrypted.
    """
    with archive.open(member) as stream:
        while True:
            block = stream.read(BLOCK)
            if not block:
                return
            yield block


def content(archive: zipfile.ZipFile, name: str) -> bytes:
    """A small file of an archive.

    Raises:
        ArchiveError: it is larger than one block.
        others: as of blocks().
    """
    if archive.getinfo(name).file_size > BLOCK:
        raise ArchiveError("%s is larger than %d bytes" % (name, BLOCK))
    return archive.read(name)


class _Unpacked(gzip.GzipFile):
    """What a .tar.gz holds. tarfile reads a header at once, whatever its size."""

    def read(self, size: "int | None" = -1) -> bytes:
        if size is None or not 0 <= size <= BLOCK:
            raise ArchiveError("it has a header of more than %d bytes" % BLOCK)
        return super().read(size)


@contextmanager
def opened_tar(path: str) -> Iterator[tarfile.TarFile]:
    """Open a .tar.gz, to list its files with members() and unpack it.

    Raises:
        ArchiveError, OSError, TarError, EOFError, zlib.error: it cannot be read.
    """
    with _Unpacked(path) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
        yield archive


def members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files of an archive, up to the limit; nothing is unpacked.

    Raises:
        ArchiveError: it has more.
    """
    total = 0
    for number, member in enumerate(archive, 1):
        total += member.size
        _refuse(total, number)
        yield member
