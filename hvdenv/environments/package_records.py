"""Packages that are not completely installed, by the RECORD files of their metadata.

After a power cut, files in the cache that they are unpacked from may be empty.
"""

from __future__ import annotations

import base64
import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdenv.reading import MANIFEST, open_file


class _Promise(NamedTuple):
    """What a RECORD states of a file; ``sha256`` in hexadecimal, or empty."""

    name: str
    size: int
    sha256: str


def find_problems(site_packages: Path, hashes: Mapping[str, str]) -> list[str]:
    """One sentence for each file that is not what the RECORD of its package states.

    Packages can share files; the package installed last determines the content then.

    Args:
        hashes: sha256 of files by their absolute path; of others only the size is compared.

    Raises:
        OSError: a RECORD cannot be read.
    """
    # conda rewrites programs for the prefix, and some of its packages have empty metadata.
    of_conda = (site_packages.parents[2] / "conda-meta").is_dir()
    problems: list[str] = []
    promised: dict[str, list[_Promise]] = {}
    for info in sorted(site_packages.glob("*.dist-info")):
        found = {name: _size(info / name) for name in ("METADATA", "RECORD")}
        for name, size in found.items():
            if size is None or not (size or of_conda):
                what = "missing" if size is None else "empty"
                problems.append(f"{info.stem}: {info.name}/{name} is {what}")
        try:
            for path, size, sha256 in _listed(info / "RECORD") if found["RECORD"] else ():
                # METADATA was edited after the RECORD was written (torch 1.12.0).
                if path != f"{info.name}/METADATA" and not (of_conda and path.startswith("../")):
                    inside = os.path.normpath(site_packages / path)
                    promise = _Promise(f"{info.stem}: {path}", size, sha256)
                    promised.setdefault(inside, []).append(promise)
        except (ValueError, csv.Error) as error:
            problems.append(f"{info.stem}: {info.name}/RECORD is damaged ({error})")
    for inside, promises in sorted(promised.items()):
        if problem := _broken(promises, _size(Path(inside)), hashes.get(inside, "")):
            problems.append(problem)
    return problems


def _broken(promises: Sequence[_Promise], size: int | None, sha256: str) -> str:
    """What is wrong with a file; empty if it fits one of its RECORDs."""
    first = promises[0]
    if size is None:
        return f"{first.name} is missing"
    fitting = {each.sha256 for each in promises if each.size == size}
    if not fitting:
        return f"{first.name} has {size} bytes instead of {first.size}"
    if sha256 and "" not in fitting and sha256 not in fitting:
        return f"{first.name} has other content than its RECORD states"
    return ""


def _size(path: Path) -> int | None:
    """The size of a file; None if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _listed(record: Path) -> Iterator[tuple[str, int, str]]:
    """The files that a RECORD lists with their size and sha256, without bytecode."""
    with open_file(record, MANIFEST) as raw:
        text = io.TextIOWrapper(raw, "utf-8", errors="surrogateescape", newline="")
        for path, digest, size in csv.reader(text):
            if size and "__pycache__/" not in path:
                algorithm, _, value = digest.partition("=")
                padded = value + "=" * (-len(value) % 4) if algorithm == "sha256" else ""
                yield path, int(size), base64.urlsafe_b64decode(padded).hex()
