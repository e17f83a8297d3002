"""Packages that are not completely installed, by the RECORD files of their metadata."""

from __future__ import annotations

import base64
import csv
import io
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hvdenv.reading import MANIFEST, open_file


class File(NamedTuple):
    """A file of the environment; ``digest`` is its sha256 in hexadecimal, or empty."""

    digest: str
    size: int


class _Promise(NamedTuple):
    distribution: str
    path: str
    file: File


def find_problems(root: Path, site_packages: Path, files: Mapping[str, File]) -> list[str]:
    """One sentence for each file that its package's RECORD lists with other content.

    Packages can share files; the package installed last determines the content then.

    Args:
        files: of the environment, without links, by their path relative to its root.

    Raises:
        OSError: a RECORD cannot be read.
    """
    base = str(site_packages.relative_to(root))
    of_conda = any(path.startswith("conda/conda-meta/") for path in files)
    folders = {posixpath.dirname(path) for path in files}
    infos = [each for each in sorted(folders) if posixpath.dirname(each) == base]
    promises: dict[str, list[_Promise]] = {}
    problems: list[str] = []
    for info in (each for each in infos if each.endswith(".dist-info")):
        name = posixpath.basename(info)
        distribution = name.removesuffix(".dist-info")
        needed = {each: files.get(f"{info}/{each}") for each in ("METADATA", "RECORD")}
        for each, file in needed.items():
            if file is None or not (file.size or of_conda):
                what = "empty" if file else "missing"
                problems.append(f"{distribution}: {name}/{each} is {what}")
        if needed["RECORD"] is None:
            continue
        try:
            for path, file in _promised(root / info / "RECORD", name, of_conda=of_conda):
                inside = posixpath.normpath(posixpath.join(base, path))
                promises.setdefault(inside, []).append(_Promise(distribution, path, file))
        except (ValueError, csv.Error) as error:
            problems.append(f"{distribution}: {name}/RECORD is damaged ({error})")
    for path, listed in sorted(promises.items()):
        found = files.get(path) or _behind_links(root / path)
        if problem := _broken(found, listed):
            problems.append(problem)
    return problems


def is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") and "__pycache__/" in path


def _promised(record: Path, info: str, *, of_conda: bool) -> Iterator[tuple[str, File]]:
    """The files that a RECORD lists with their size."""
    with open_file(record, MANIFEST) as raw:
        text = io.TextIOWrapper(raw, "utf-8", errors="surrogateescape", newline="")
        for path, digest, size in csv.reader(text):
            # METADATA was edited after the RECORD was written (torch 1.12.0), so it only has
            # to exist. conda rewrites programs for the prefix; the RECORD is older.
            unlike = path == f"{info}/METADATA" or (of_conda and path.startswith("../../../bin/"))
            if size and not is_bytecode(path) and not unlike:
                yield path, File(_hexadecimal(digest), int(size))


def _hexadecimal(text: str) -> str:
    """The sha256 of a RECORD; empty for any other algorithm."""
    algorithm, _, value = text.partition("=")
    if algorithm != "sha256":
        return ""
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def _behind_links(path: Path) -> File | None:
    """A file that is a link, or whose folder is one; None if there is none."""
    try:
        return File("", path.stat().st_size)
    except OSError:
        return None


def _broken(found: File | None, promises: list[_Promise]) -> str:
    """What is wrong with a file; empty if it fits one of its RECORDs."""
    distribution, path, wanted = promises[0]
    if found is None:
        return f"{distribution}: {path} is missing"
    fitting = [each.file.digest for each in promises if each.file.size == found.size]
    if not fitting:
        return f"{distribution}: {path} has {found.size} bytes instead of {wanted.size}"
    if not found.digest or found.digest in fitting or "" in fitting:
        return ""
    return f"{distribution}: {path} has other content than its RECORD says"
