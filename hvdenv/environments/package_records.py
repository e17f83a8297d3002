"""Packages that are not completely installed, by the RECORD files of their metadata."""

from __future__ import annotations

import base64
import csv
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hvdenv.places import reporting
from hvdenv.reading import MANIFEST, open_file

# Seen from site-packages.
_PROGRAMS = "../../../bin/"


class _Promise(NamedTuple):
    distribution: str
    path: str
    digest: str
    size: int


def verify_records(site_packages: Path, digests: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each problem of a package that is not completely installed.

    With ``digests``, the sha256 of files by absolute path, their content is compared as well.

    Raises:
        StepError: the folder cannot be read.
    """
    base = os.path.abspath(site_packages)
    promises: dict[str, list[_Promise]] = {}
    problems: list[str] = []
    with reporting(site_packages, "read"):
        names = sorted(os.listdir(base))
    for name in names:
        if name.startswith("~"):
            problems.append(f"{name}: left behind by an interrupted pip")
        if name.endswith(".dist-info") and not name.startswith("~"):
            problems += _collect(base, name, promises)
    for path, candidates in sorted(promises.items()):
        if problem := _broken(path, candidates, digests):
            problems.append(problem)
    return problems


def finished_packages(site_packages: Path) -> dict[str, frozenset[Path]]:
    """Completely installed packages, as ``name-version``, with all their files.

    The RECORD, which an installer writes last, lists the file INSTALLER then.

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
        paths = [row[0] for row in _rows(record) if row]
        files = frozenset(Path(os.path.normpath(os.path.join(base, path))) for path in paths)
        if f"{name}/INSTALLER" in paths and all(file.exists() for file in files):
            found[package] = files
    return found


def is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") and "__pycache__/" in path


def _collect(base: str, name: str, promises: dict[str, list[_Promise]]) -> list[str]:
    """Add what the RECORD of one distribution states; returns what is wrong with it."""
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
        for path, digest, size in _rows(record):
            # METADATA was edited after the RECORD was written (torch 1.12.0), so it only has
            # to exist. conda rewrites programs for the prefix; the RECORD is older.
            unlike = path == f"{name}/METADATA" or (of_conda and path.startswith(_PROGRAMS))
            if size and not is_bytecode(path) and not unlike:
                full = os.path.normpath(os.path.join(base, path))
                promise = _Promise(distribution, path, _record_digest(digest), int(size))
                promises.setdefault(full, []).append(promise)
    except (ValueError, csv.Error) as error:
        return [f"{distribution}: {name}/RECORD is damaged ({error})"]
    return []


def _rows(record: str) -> Iterator[list[str]]:
    with open_file(record, MANIFEST) as raw:
        yield from csv.reader(io.TextIOWrapper(raw, "utf-8", errors="surrogateescape", newline=""))


def _record_digest(text: str) -> str:
    """The sha256 of a RECORD in hexadecimal; empty for any other algorithm."""
    algorithm, _, value = text.partition("=")
    if algorithm != "sha256":
        return ""
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def _broken(path: str, promises: list[_Promise], digests: Mapping[str, str] | None) -> str:
    """What is wrong with a file; empty if it fits one of its RECORDs.

    Packages can share files; the package installed last determines the content then.
    """
    first = promises[0]
    try:
        size = os.stat(path).st_size
    except OSError:
        return f"{first.distribution}: {first.path} is missing"
    fitting = [promise for promise in promises if promise.size == size]
    if not fitting:
        return f"{first.distribution}: {first.path} has {size} bytes instead of {first.size}"
    digest = digests.get(path) if digests else None
    if digest is None or any(promise.digest in ("", digest) for promise in fitting):
        return ""
    return f"{first.distribution}: {first.path} has other content than its RECORD says"
