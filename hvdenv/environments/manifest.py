"""Every file of a finished environment with its hash, to notice what is lost later.

The file is JSON::

    {"format": 2, "exclude": ["logs"],
     "entries": {"bin/python3": ["9f86d0818...", 1234], "lib64": "lib"}}

A file has its sha256 and its size, a link what it points to. Names that are not UTF-8 keep their
bytes, as surrogates.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.base.errors import StepError
from hvdenv.base.places import in_shares, reporting, write_text
from hvdenv.base.reading import GIB, MANIFEST, Kind, hash_file, read_file

NAME = "manifest.json"
_FORMAT = 2
_FILE = Kind("a file of an environment", 1024 * GIB)
_OF_HOROVOD = "/site-packages/horovod/"


class File(NamedTuple):
    sha256: str
    size: int


class Manifest(NamedTuple):
    """What a tree had when it was finished.

    Attributes:
        exclude: relative paths that were left out.
        entries: by relative path: files, and what links point to.
        digest: sha256 of the manifest itself.
    """

    exclude: tuple[str, ...]
    entries: dict[str, File | str]
    digest: str

    @property
    def files(self) -> dict[str, File]:
        return {path: each for path, each in self.entries.items() if isinstance(each, File)}


class ChangedFile(NamedTuple):
    """How a tree differs from its manifest."""

    kind: Literal["missing", "changed", "extra"]
    path: str
    detail: str = ""


def write(root: Path, exclude: Iterable[str] = ()) -> Manifest:
    """Hash every file under a directory and write its manifest there.

    Args:
        exclude: relative paths of files or directories to leave out.

    Raises:
        StepError: a file cannot be read, or the manifest cannot be written.
    """
    skipped = sorted({*exclude, NAME})
    with reporting(root, "read or write", inside=True):
        found = dict(_walk(root, skipped))
        entries = {**found, **_hashed(root, found)}
        document = {"format": _FORMAT, "exclude": skipped, "entries": entries}
        write_text(root / NAME, json.dumps(document, sort_keys=True) + "\n")
    return read(root / NAME)


def read(
    path: Path, digest: str = "", wanted: Callable[[str], bool] = lambda path: True
) -> Manifest:
    """Read a manifest, and compare its own sha256 if one is given.

    Args:
        wanted: which entries to decode, by their paths.

    Raises:
        StepError: it cannot be read, or is damaged.
    """
    with reporting(path, "read"):
        if not path.exists():
            raise _damaged(path, f"there is no {path.name}")
        content = read_file(path, MANIFEST).data
    actual = hashlib.sha256(content).hexdigest()
    if digest and actual != digest:
        raise _damaged(path, f"its hash is {actual}, recorded was {digest}")
    try:
        document = json.loads(content)
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r} instead of {_FORMAT}")
        entries: dict[str, File | str] = {
            name: each if isinstance(each, str) else File(str(each[0]), int(each[1]))
            for name, each in document["entries"].items()
            if wanted(name)
        }
        exclude = tuple(map(str, document["exclude"]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"it is malformed ({error})") from error
    return Manifest(exclude, entries, actual)


def find_losses(root: Path, digest: str) -> str:
    """What a power cut or a purge has taken from a tree, judged by a sample; empty if nothing.

    The sample has the youngest files (Horovod and what was made after it) and the RECORD of each
    package.

    Args:
        digest: of the manifest.
    """
    try:
        files = read(root / NAME, digest, _is_sampled).files
    except StepError as error:
        return error.message
    lost = []
    for path, file in files.items():
        try:
            size = os.stat(root / path).st_size
        except OSError as error:
            lost.append(f"{path}: {error.strerror}")
            continue
        if size < file.size:
            lost.append(f"{path} has {size} bytes instead of {file.size}")
    more = f" and {len(lost) - 1} more files" if lost[1:] else ""
    return f"{lost[0]}{more}" if lost else ""


def _is_sampled(path: str) -> bool:
    """Whether find_losses() looks at a file."""
    young = _OF_HOROVOD in path or "/" not in path or path.endswith(".dist-info/RECORD")
    return young and not is_bytecode(path)


def compare(
    root: Path,
    manifest: Manifest,
    closely: Callable[[str], bool] = lambda path: False,
    at_each: Callable[[], None] = lambda: None,
) -> list[ChangedFile]:
    """What has changed in a tree since its manifest was written, sorted by path.

    Compiled Python files are skipped, since Python may rewrite them.

    Args:
        closely: for which paths to compare hashes; for others existence, size and link target.
        at_each: called for each file in the tree; may raise to stop.

    Raises:
        StepError: a file cannot be read.
    """
    with reporting(root, "read", inside=True):
        present = {}
        for path, entry in _walk(root, manifest.exclude):
            at_each()
            present[path] = entry
        known = {each: present[each] for each in present.keys() & manifest.entries if closely(each)}
        present.update(_hashed(root, known))
    return [
        difference
        for path in sorted(manifest.entries.keys() | present.keys())
        if not is_bytecode(path)
        and (difference := _judge(path, manifest.entries.get(path), present.get(path)))
    ]


def is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") and "__pycache__/" in path


def _walk(root: Path, exclude: Iterable[str]) -> Iterator[tuple[str, File | str]]:
    """Every file and link under a directory, without hashes; links are not followed."""
    skipped = frozenset(exclude)
    folders = [("", os.fspath(root))]
    while folders:
        relative, folder = folders.pop()
        with os.scandir(folder) as children:
            for child in children:
                path = relative + child.name
                if path in skipped:
                    continue
                if child.is_symlink():
                    yield path, os.readlink(child.path)
                elif child.is_dir():
                    folders.append((path + "/", child.path))
                elif child.is_file():
                    yield path, File("", child.stat(follow_symlinks=False).st_size)


def _hashed(root: Path, entries: dict[str, File | str]) -> dict[str, File]:
    """The files among entries, with their hashes."""

    def hash_all(paths: Sequence[str]) -> list[tuple[str, File]]:
        return [(path, File(*hash_file(os.path.join(root, path), _FILE))) for path in paths]

    files = [(each.size, path) for path, each in entries.items() if isinstance(each, File)]
    # Each thread gets some of the large ones.
    paths = [path for _, path in sorted(files)]
    threads = min(8, len(os.sched_getaffinity(0)))
    return {
        path: file for part in in_shares(hash_all, paths, threads=threads) for path, file in part
    }


def _judge(path: str, expected: File | str | None, actual: File | str | None) -> ChangedFile | None:
    if expected is None:
        return ChangedFile("extra", path)
    if actual is None:
        return ChangedFile("missing", path)
    if not (isinstance(expected, File) and isinstance(actual, File)):
        detail = f"{_described(actual)} instead of {_described(expected)}"
        return ChangedFile("changed", path, detail) if actual != expected else None
    if expected.size != actual.size:
        return ChangedFile("changed", path, f"{actual.size} bytes instead of {expected.size}")
    if actual.sha256 not in ("", expected.sha256):
        return ChangedFile("changed", path, f"sha256 {actual.sha256}, not {expected.sha256}")
    return None


def _described(entry: File | str) -> str:
    return "a file" if isinstance(entry, File) else f"a link to {entry!r}"


def _damaged(path: Path, reason: str) -> StepError:
    return StepError(
        f"damaged manifest: {reason}",
        where=str(path),
        remedy="the files of the environment can no longer be checked: build it again",
    )
