"""Every file of a finished environment with its hash, to notice what is lost later.

The file is text, sorted by path, fields separated by tabs::

    hvdenv.manifest/1
    exclude <TAB> logs
    9f86d0818... <TAB> 1234 <TAB> bin/python3
    link <TAB> lib <TAB> lib64

Backslash, tab, newline and carriage return are escaped as in Python; a name that is
not UTF-8 keeps its bytes.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.base.errors import StepError
from hvdenv.base.places import in_shares, reporting, write_text
from hvdenv.base.reading import MANIFEST, read_file

NAME = "manifest.txt"
_HEADER = "hvdenv.manifest/1"
_LINK = "link"
_EXCLUDE = "exclude"
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escape[1]: character for character, escape in _ESCAPES.items()}
_OF_HOROVOD = "/site-packages/horovod/"

Kind = Literal["missing", "changed", "extra"]


class Entry(NamedTuple):
    """A file or link of an environment.

    Attributes:
        digest: sha256 in hexadecimal, or ``link``.
        size: bytes of a file; 0 for a link.
        target: what a link points to; empty for a file.
    """

    digest: str
    size: int
    target: str = ""


class Written(NamedTuple):
    """What write() found.

    Attributes:
        digest: sha256 of the manifest itself.
        entries: by relative path.
    """

    digest: str
    entries: dict[str, Entry]

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    def hashes(self, root: Path) -> dict[str, str]:
        """The sha256 of each file by its absolute path; links have none."""
        files = ((path, each.digest) for path, each in self.entries.items())
        return {str(root / path): digest for path, digest in files if digest != _LINK}


class ChangedFile(NamedTuple):
    """How a tree differs from its manifest."""

    kind: Kind
    path: str
    detail: str = ""


class Manifest(NamedTuple):
    exclude: tuple[str, ...]
    entries: dict[str, Entry]


def write(root: Path, exclude: Iterable[str] = ()) -> Written:
    """Hash every file under a directory and write ``manifest.txt`` there.

    Args:
        exclude: relative paths of files or directories to leave out.

    Raises:
        StepError: a file cannot be read, or the manifest cannot be written.
    """
    skipped = tuple(sorted({*exclude, NAME}))
    with reporting(root, "read or write", inside=True):
        entries = dict(_hashed(root, _walk(root, skipped)))
        digest = _save(root / NAME, Manifest(skipped, entries))
    return Written(digest, entries)


def read(path: Path, digest: str = "", wanted: Callable[[str], bool] | None = None) -> Manifest:
    """Read a manifest, and compare its own sha256 if one is given.

    Args:
        wanted: which lines to decode, by their text; default: all.

    Raises:
        StepError: it cannot be read, or is damaged.
    """
    with reporting(path, "read"):
        content = read_file(path, MANIFEST).data
    actual = hashlib.sha256(content).hexdigest()
    if digest and actual != digest:
        raise _damaged(path, f"its hash is {actual}, recorded was {digest}")
    header, *lines = content.decode("utf-8", "surrogateescape").split("\n")
    if header != _HEADER or not lines or lines.pop() != "":
        raise _damaged(path, f"it does not begin with {_HEADER} or was cut off")
    exclude: list[str] = []
    entries: dict[str, Entry] = {}
    try:
        for line in filter(wanted, lines):
            first, second, *rest = line.split("\t")
            if first == _EXCLUDE:
                exclude.append(_unescape(second))
            elif first == _LINK:
                entries[_unescape(rest[0])] = Entry(_LINK, 0, _unescape(second))
            else:
                entries[_unescape(rest[0])] = Entry(first, int(second))
    except (ValueError, IndexError, KeyError) as error:
        raise _damaged(path, f"not a line of a manifest: {line!r}") from error
    return Manifest(tuple(exclude), entries)


def find_losses(root: Path, digest: str) -> str:
    """What a power cut or a purge has taken from a tree, judged by a sample; empty if nothing.

    The sample has the youngest files (Horovod and what was made after it) and the RECORD of each
    package. Checking all of them takes a few milliseconds.

    Args:
        digest: of the manifest.
    """
    try:
        entries = read(root / NAME, digest, _is_sampled).entries
    except StepError as error:
        return error.message
    lost = []
    for path, entry in entries.items():
        if entry.digest == _LINK:
            continue
        try:
            size = os.stat(root / path).st_size
        except OSError as error:
            lost.append(f"{path}: {error.strerror}")
            continue
        if size < entry.size:
            lost.append(f"{path} has {size} bytes instead of {entry.size}")
    more = f" and {len(lost) - 1} more files" if lost[1:] else ""
    return f"{lost[0]}{more}" if lost else ""


def _is_sampled(line: str) -> bool:
    """Whether find_losses() looks at the file of a line."""
    young = _OF_HOROVOD in line or "/" not in line or line.endswith(".dist-info/RECORD")
    return young and not is_bytecode(line)


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
        known = [path for path in present if path in manifest.entries and closely(path)]
        present.update(_hashed(root, [(path, present[path]) for path in known]))
    return [
        difference
        for path in sorted(manifest.entries.keys() | present.keys())
        if not is_bytecode(path)
        and (difference := _judge(path, manifest.entries.get(path), present.get(path)))
    ]


def is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") and "__pycache__/" in path


def _walk(root: Path, exclude: Iterable[str]) -> Iterator[tuple[str, Entry]]:
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
                    yield path, Entry(_LINK, 0, os.readlink(child.path))
                elif child.is_dir():
                    folders.append((path + "/", child.path))
                elif child.is_file():
                    yield path, Entry("", child.stat(follow_symlinks=False).st_size)


def _hashed(root: Path, entries: Iterable[tuple[str, Entry]]) -> Iterator[tuple[str, Entry]]:
    """The same entries with the hashes of the files."""

    def hash_all(paths: Sequence[str]) -> list[tuple[str, Entry]]:
        view = memoryview(bytearray(1 << 20))
        return [(path, _hash(os.path.join(root, path), view)) for path in paths]

    files = []
    for path, entry in entries:
        if entry.digest == _LINK:
            yield path, entry
        else:
            files.append((entry.size, path))
    # Each thread gets some of the large ones.
    paths = [path for _, path in sorted(files)]
    threads = min(8, len(os.sched_getaffinity(0)))
    for part in in_shares(hash_all, paths, threads=threads):
        yield from part


def _hash(path: str, view: memoryview) -> Entry:
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(view):
            digest.update(view[:count])
            size += count
    return Entry(digest.hexdigest(), size)


def _judge(path: str, expected: Entry | None, actual: Entry | None) -> ChangedFile | None:
    if expected is None:
        return ChangedFile("extra", path)
    if actual is None:
        return ChangedFile("missing", path)
    if expected.target != actual.target:
        return ChangedFile("changed", path, f"link to {actual.target!r}, not {expected.target!r}")
    if expected.size != actual.size:
        return ChangedFile("changed", path, f"{actual.size} bytes instead of {expected.size}")
    if actual.digest not in ("", expected.digest):
        return ChangedFile("changed", path, f"sha256 {actual.digest}, not {expected.digest}")
    return None


def _save(path: Path, manifest: Manifest) -> str:
    """Write a manifest atomically; returns its digest."""
    lines = [_HEADER]
    lines += [f"{_EXCLUDE}\t{_escape(name)}" for name in manifest.exclude]
    for name, entry in sorted(manifest.entries.items()):
        middle = _escape(entry.target) if entry.digest == _LINK else str(entry.size)
        lines.append(f"{entry.digest}\t{middle}\t{_escape(name)}")
    content = "".join(f"{line}\n" for line in lines)
    write_text(path, content)
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()


def _escape(text: str) -> str:
    return re.sub(r"[\\\t\n\r]", lambda found: _ESCAPES[found[0]], text)


def _unescape(text: str) -> str:
    if "\\" not in text:  # most names: a manifest is read at each start
        return text
    return re.sub(r"\\(.)", lambda found: _UNESCAPES[found[1]], text)


def _damaged(path: Path, reason: str) -> StepError:
    return StepError(
        f"damaged manifest: {reason}",
        where=str(path),
        remedy="the files of the environment can no longer be checked: build it again",
    )
