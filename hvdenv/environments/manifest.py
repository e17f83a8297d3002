"""Every file of a finished environment with its hash, to notice what is lost later.

The file is text, sorted by path, fields separated by tabs::

    hvdenv.manifest/1
    exclude <TAB> logs
    9f86d0818... <TAB> 1234 <TAB> bin/python3
    link <TAB> lib <TAB> lib64

Backslash, tab, newline and carriage return are escaped as in Python; a name that is
no UTF-8 keeps its bytes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.errors import StepError
from hvdenv.places import blocked, sync_folder
from hvdenv.reading import MANIFEST, open_file, read_file

NAME = "manifest.txt"
_HEADER = "hvdenv.manifest/1"
_LINK = "link"
_EXCLUDE = "exclude"
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escape[1]: character for character, escape in _ESCAPES.items()}
_BLOCK = 1 << 20

Kind = Literal["missing", "changed", "extra"]
Hashes = Mapping[str, "Entry"]


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
        files: number of files and links.
        bytes: their size.
        problems: what does not agree with the RECORDs of the installed packages.
    """

    digest: str
    files: int
    bytes: int
    problems: tuple[str, ...] = ()


class Difference(NamedTuple):
    """Where a tree is not what its manifest says.

    Attributes:
        kind: ``missing``, ``changed`` or ``extra``.
        path: relative to the root.
        detail: what was expected and what is there.
    """

    kind: Kind
    path: str
    detail: str = ""


class Manifest(NamedTuple):
    """A manifest that was read.

    Attributes:
        exclude: paths that it says nothing about.
        entries: by relative path.
    """

    exclude: tuple[str, ...]
    entries: dict[str, Entry]


def write(root: Path, exclude: Iterable[str] = (), site_packages: Path | None = None) -> Written:
    """Hash every file under a folder and write ``manifest.txt`` there.

    Args:
        root: the folder.
        exclude: relative paths of files or folders to leave out.
        site_packages: compare the hashes with the RECORDs in this folder as well.

    Raises:
        StepError: a file cannot be read, or the manifest cannot be written.
    """
    skipped = tuple(sorted({*exclude, NAME}))
    try:
        entries = dict(_hashed(root, _walk(root, skipped)))
        digest = _save(root / NAME, Manifest(skipped, entries))
    except OSError as error:
        raise blocked(Path(error.filename or root), error, "read or write") from error
    problems: list[str] = []
    if site_packages is not None:
        base = os.path.abspath(root)
        problems = verify_records(
            site_packages, {os.path.join(base, path): entry for path, entry in entries.items()}
        )
    size = sum(entry.size for entry in entries.values())
    return Written(digest, len(entries), size, tuple(problems))


def read(path: Path, digest: str = "") -> Manifest:
    """Read a manifest.

    Args:
        path: the file.
        digest: what its own sha256 must be; not looked at if empty.

    Raises:
        StepError: it is not there, cannot be read, or is damaged.
    """
    try:
        content = read_file(path, MANIFEST).data
    except OSError as error:
        raise blocked(path, error, "read") from error
    actual = hashlib.sha256(content).hexdigest()
    if digest and actual != digest:
        raise _damaged(path, f"its hash is {actual}, recorded was {digest}")
    header, *lines = content.decode("utf-8", "surrogateescape").split("\n")
    if header != _HEADER or not lines or lines.pop() != "":
        raise _damaged(path, f"it does not begin with {_HEADER} or was cut off")
    exclude: list[str] = []
    entries: dict[str, Entry] = {}
    try:
        for line in lines:
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


def sample(root: Path, manifest: Manifest) -> dict[str, int]:
    """Sizes of the files that a power cut or a purge would hit first, by relative path.

    They are the youngest ones: Horovod and what is made after it; and the list of each
    package. All of them can be looked at in a millisecond or two.

    Args:
        root: the folder.
        manifest: of it.
    """
    young = {
        path: entry.size
        for path, entry in manifest.entries.items()
        if entry.digest != _LINK
        and not _compiled(path)
        and ("/" not in path or path.endswith(".dist-info/RECORD") or _OF_HOROVOD in path)
    }
    return {**young, NAME: (root / NAME).stat().st_size}


def compare(
    root: Path,
    manifest: Manifest,
    closely: Callable[[str], bool] = lambda path: False,
    at_each: Callable[[], None] = lambda: None,
) -> list[Difference]:
    """What has changed in a tree since its manifest was written.

    Compiled Python files are not looked at: Python writes them anew as it likes.

    Args:
        root: the folder.
        manifest: from read().
        closely: for which paths the content counts; of others existence, size and where
            a link points to.
        at_each: called for each file that is there; what it raises ends this.

    Returns:
        The differences, sorted by path.

    Raises:
        StepError: something there cannot be read.
    """
    differences: list[Difference] = []
    try:
        present = {}
        for path, entry in _walk(root, manifest.exclude):
            at_each()
            present[path] = entry
        known = [path for path in present if path in manifest.entries and closely(path)]
        present.update(_hashed(root, [(path, present[path]) for path in known]))
    except OSError as error:
        raise blocked(Path(error.filename or root), error, "read") from error
    for path in sorted(manifest.entries.keys() | present.keys()):
        if not _compiled(path):
            difference = _judge(path, manifest.entries.get(path), present.get(path))
            if difference:
                differences.append(difference)
    return differences


def verify_records(site_packages: Path, hashes: Hashes | None = None) -> list[str]:
    """Find packages that are not wholly installed, by what their RECORDs promise.

    Args:
        site_packages: the folder that packages are installed in.
        hashes: entries of a manifest by absolute path, to compare hashes as well.

    Returns:
        One sentence for each thing that is wrong; empty if nothing is.

    Raises:
        StepError: the folder cannot be read.
    """
    base = os.path.abspath(site_packages)
    promises: dict[str, list[_Promise]] = {}
    problems: list[str] = []
    try:
        names = sorted(os.listdir(base))
    except OSError as error:
        raise blocked(site_packages, error, "read") from error
    for name in names:
        if name.startswith("~"):
            problems.append(f"{name}: left behind by an interrupted pip")
        if name.endswith(".dist-info") and not name.startswith("~"):
            problems += _collect(base, name, promises)
    for path, candidates in sorted(promises.items()):
        problem = _broken(path, candidates, hashes)
        if problem:
            problems.append(problem)
    return problems


def finished_packages(site_packages: Path) -> dict[str, frozenset[Path]]:
    """Packages that were installed to their end, as ``name-version``, with all their files.

    An installer names itself in the RECORD of a package, which it writes last.

    Raises:
        StepError: the folder cannot be read.
    """
    base = os.path.abspath(site_packages)
    broken = {problem.partition(": ")[0] for problem in verify_records(site_packages)}
    found = {}
    for name in sorted(os.listdir(base)):
        package = name.removesuffix(".dist-info")
        if package in (name, *broken) or name.startswith("~"):
            continue
        record = os.path.join(base, name, "RECORD")
        with open(record, encoding="utf-8", errors="surrogateescape", newline="") as stream:
            paths = [row[0] for row in csv.reader(stream) if row]
        files = frozenset(Path(os.path.normpath(os.path.join(base, path))) for path in paths)
        if f"{name}/INSTALLER" in paths and all(file.exists() for file in files):
            found[package] = files
    return found


_OF_HOROVOD = "/site-packages/horovod/"
# As seen from site-packages.
_PROGRAMS = "../../../bin/"


class _Promise(NamedTuple):
    """What one RECORD says about a file."""

    distribution: str
    path: str
    digest: str
    size: int


def _collect(base: str, name: str, promises: dict[str, list[_Promise]]) -> list[str]:
    """Add what the RECORD of one distribution says; returns what is wrong with it."""
    distribution = name[: -len(".dist-info")]
    of_conda = os.path.isdir(os.path.join(base, "../../../conda-meta"))
    for needed in ("METADATA", "RECORD"):
        path = os.path.join(base, name, needed)
        if not os.path.isfile(path):
            return [f"{distribution}: {name}/{needed} is missing"]
        if not os.path.getsize(path) and not of_conda:
            return [f"{distribution}: {name}/{needed} is empty"]
    try:
        record = os.path.join(base, name, "RECORD")
        with open_file(record, MANIFEST) as raw:
            stream = io.TextIOWrapper(raw, "utf-8", errors="surrogateescape", newline="")
            for path, digest, size in csv.reader(stream):
                # Wheels were edited after their RECORD was written (torch 1.12.0): this
                # file only has to be there. conda makes programs for the place where they
                # lie, and the RECORD is of where the package was made.
                unlike = path == f"{name}/METADATA" or (of_conda and path.startswith(_PROGRAMS))
                if size and not _compiled(path) and not unlike:
                    full = os.path.normpath(os.path.join(base, path))
                    promise = _Promise(distribution, path, _record_digest(digest), int(size))
                    promises.setdefault(full, []).append(promise)
    except (ValueError, csv.Error) as error:
        return [f"{distribution}: {name}/RECORD is damaged ({error})"]
    return []


def _record_digest(text: str) -> str:
    """The sha256 of a RECORD in hexadecimal; empty for any other algorithm."""
    algorithm, _, value = text.partition("=")
    if algorithm != "sha256":
        return ""
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def _broken(path: str, promises: list[_Promise], hashes: Hashes | None) -> str:
    """What is wrong with a file; empty if it is as one of its RECORDs promises.

    Packages do share files, and then the one installed last has its way.
    """
    first = promises[0]
    try:
        size = os.stat(path).st_size
    except OSError:
        return f"{first.distribution}: {first.path} is missing"
    fitting = [promise for promise in promises if promise.size == size]
    if not fitting:
        return f"{first.distribution}: {first.path} has {size} bytes instead of {first.size}"
    entry = hashes.get(path) if hashes else None
    if entry is None or entry.digest == _LINK:
        return ""
    if any(promise.digest in ("", entry.digest) for promise in fitting):
        return ""
    return f"{first.distribution}: {first.path} has other content than its RECORD says"


def _walk(root: Path, exclude: Iterable[str]) -> Iterator[tuple[str, Entry]]:
    """Every file and link under a folder, without hashes; links are not followed."""
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
    """The same entries with the hashes of the files, the largest files first."""
    from concurrent.futures import ThreadPoolExecutor

    def hash_all(paths: list[str]) -> list[tuple[str, Entry]]:
        buffer = bytearray(_BLOCK)
        return [(path, _hash(os.path.join(root, path), buffer)) for path in paths]

    files: list[tuple[int, str]] = []
    for path, entry in entries:
        if entry.digest == _LINK:
            yield path, entry
        else:
            files.append((entry.size, path))
    files.sort(reverse=True)
    with ThreadPoolExecutor(_workers()) as pool:
        for batch in pool.map(hash_all, _batches(files)):
            yield from batch


def _workers() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return min(8, len(affinity(0)) if affinity else os.cpu_count() or 1)


def _batches(files: list[tuple[int, str]]) -> Iterator[list[str]]:
    """Groups of files that are each worth a task."""
    batch: list[str] = []
    weight = 0
    for size, path in files:
        batch.append(path)
        weight += size + (1 << 14)
        if weight > 8 * _BLOCK:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _hash(path: str, buffer: bytearray) -> Entry:
    digest = hashlib.sha256()
    size = 0
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            size += count
    return Entry(digest.hexdigest(), size)


def _judge(path: str, expected: Entry | None, actual: Entry | None) -> Difference | None:
    if expected is None:
        return Difference("extra", path)
    if actual is None:
        return Difference("missing", path)
    if expected.target != actual.target:
        return Difference("changed", path, f"link to {actual.target!r}, not {expected.target!r}")
    if expected.size != actual.size:
        return Difference("changed", path, f"{actual.size} bytes instead of {expected.size}")
    if actual.digest not in ("", expected.digest):
        return Difference("changed", path, f"sha256 {actual.digest}, not {expected.digest}")
    return None


def _compiled(path: str) -> bool:
    return path.endswith(".pyc") and "__pycache__/" in path


def _save(path: Path, manifest: Manifest) -> str:
    """Write a manifest atomically; returns its digest."""
    lines = [_HEADER]
    lines += [f"{_EXCLUDE}\t{_escape(name)}" for name in manifest.exclude]
    for name, entry in sorted(manifest.entries.items()):
        middle = _escape(entry.target) if entry.digest == _LINK else str(entry.size)
        lines.append(f"{entry.digest}\t{middle}\t{_escape(name)}")
    content = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return hashlib.sha256(content).hexdigest()


def _escape(text: str) -> str:
    return re.sub(r"[\\\t\n\r]", lambda found: _ESCAPES[found[0]], text)


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _UNESCAPES[found[1]], text)


def _damaged(path: Path, reason: str) -> StepError:
    return StepError(
        f"damaged manifest: {reason}",
        where=str(path),
        remedy="what the environment is made of can no longer be told: build it again",
    )
