"""The one reader of files: each is opened once, judged by its descriptor and bounded in size.

A refusal is an OSError whose ``strerror`` tells users what is wrong, so callers report it
as they report a missing file or a missing permission.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        name: as in "the limit for a recipe".
        limit: the largest size that is read, in bytes.
    """

    name: str
    limit: int


# Each limit is more than ten times the largest file of its kind that was seen in practice.
RECIPE = Kind("a recipe", MIB)
PAGE = Kind("a page", 4 * MIB)
SITE = Kind("a site file", MIB)
FACTS = Kind("a file with facts", MIB)
HOSTS = Kind("a file with hosts", 4 * MIB)
LOCK = Kind("a file of a lock", 32 * MIB)
REPORT = Kind("a report", 32 * MIB)
STATE = Kind("a record of hvdenv", 32 * MIB)
RESULT = Kind("the result of a command", 64 * MIB)
MANIFEST = Kind("a manifest", 256 * MIB)
SYSTEM = Kind("a file of the system", MIB)
LOG = Kind("a log", 4 * GIB)
OUTPUT = Kind("the output of a job", 1024 * GIB)
WHEEL = Kind("a wheel", 8 * GIB)
EXTENSION = Kind("an extension of Horovod", 8 * GIB)
OWN = Kind("a file of hvdenv's own", 16 * MIB)

_OTHER_TYPES = (
    (stat.S_ISDIR, "directory"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
    (stat.S_ISSOCK, "socket"),
)


class Content(NamedTuple):
    """What was in a file, and whose it was when it was opened.

    Attributes:
        status: of the descriptor that the bytes were read from, not of the path.
    """

    path: Path
    data: bytes
    status: os.stat_result

    @property
    def text(self) -> str:
        """The bytes as UTF-8.

        Raises:
            UnicodeDecodeError: they are not (a ValueError).
        """
        return self.data.decode("utf-8")


def read_file(path: str | os.PathLike[str], kind: Kind) -> Content:
    """Read a whole file; links are followed.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than its kind may be.
    """
    with open_file(path, kind) as stream:
        status = os.fstat(stream.fileno())
        data = bytearray()
        # The size says nothing of files in /proc, and one that is written to still grows.
        while block := stream.read(MIB):
            data += block
            if len(data) > kind.limit:
                raise _too_large(path, kind, f"over {kind.limit:,}")
    return Content(Path(path), bytes(data), status)


def read_text(path: str | os.PathLike[str], kind: Kind, errors: str = "strict") -> str:
    """Read a whole file as UTF-8; see read_file().

    Raises:
        OSError: as of read_file().
        UnicodeDecodeError: it is not UTF-8 (with ``errors="strict"``).
    """
    return read_file(path, kind).data.decode("utf-8", errors)


def read_json(path: str | os.PathLike[str], kind: Kind) -> Any:
    """Read a whole JSON document; see read_file().

    Raises:
        OSError: as of read_file().
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_file(path, kind).data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def hash_file(path: str | os.PathLike[str], kind: Kind) -> tuple[str, int]:
    """The SHA-256 and the size of a file; see open_file()."""
    digest, size = hashlib.sha256(), 0
    with open_file(path, kind) as stream:
        while block := stream.read(MIB):
            digest.update(block)
            size += len(block)
    return digest.hexdigest(), size


@contextmanager
def open_file(path: str | os.PathLike[str], kind: Kind) -> Iterator[BinaryIO]:
    """Open a file to be read bit by bit; links are followed.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than its kind may be.
    """
    descriptor = _descriptor(path)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _not_regular(path, found.st_mode)
        if found.st_size > kind.limit:
            raise _too_large(path, kind, f"{found.st_size:,}")
        with open(descriptor, "rb", closefd=False) as stream:
            yield stream
    finally:
        os.close(descriptor)


def _descriptor(path: str | os.PathLike[str]) -> int:
    """A descriptor whose opening never waits, as it would for a pipe without a writer."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _not_regular(path, stat.S_IFSOCK) from error
        raise


def _not_regular(path: str | os.PathLike[str], mode: int) -> OSError:
    what = next((word for is_one, word in _OTHER_TYPES if is_one(mode)), "special file")
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    return OSError(number, f"it is a {what}, not a regular file", os.fspath(path))


def _too_large(path: str | os.PathLike[str], kind: Kind, size: str) -> OSError:
    said = f"its size is {size} bytes, and the limit for {kind.name} is {kind.limit:,} bytes"
    return OSError(errno.EFBIG, said, os.fspath(path))
