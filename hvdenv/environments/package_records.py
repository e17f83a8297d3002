"""Packages that are not completely installed, by the RECORD files of their metadata.

After a power cut, files in the cache that they are unpacked from may be empty.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path

from hvdenv.reading import MANIFEST, open_file


def find_problems(site_packages: Path) -> list[str]:
    """One sentence for each file whose size is not what the RECORD of its package states.

    Packages can share files; the package installed last determines the size then.

    Raises:
        OSError: a RECORD cannot be read.
    """
    # conda rewrites programs for the prefix, and some of its packages have empty metadata.
    of_conda = (site_packages.parents[2] / "conda-meta").is_dir()
    problems: list[str] = []
    promised: dict[str, list[tuple[str, int]]] = {}
    for info in sorted(site_packages.glob("*.dist-info")):
        found = {name: _size(info / name) for name in ("METADATA", "RECORD")}
        for name, size in found.items():
            if size is None or not (size or of_conda):
                what = "missing" if size is None else "empty"
                problems.append(f"{info.stem}: {info.name}/{name} is {what}")
        try:
            for path, size in _sizes(info / "RECORD") if found["RECORD"] else ():
                # METADATA was edited after the RECORD was written (torch 1.12.0).
                if path != f"{info.name}/METADATA" and not (of_conda and path.startswith("../")):
                    inside = os.path.normpath(site_packages / path)
                    promised.setdefault(inside, []).append((f"{info.stem}: {path}", size))
        except (ValueError, csv.Error) as error:
            problems.append(f"{info.stem}: {info.name}/RECORD is damaged ({error})")
    for inside, promises in sorted(promised.items()):
        size, (name, expected) = _size(Path(inside)), promises[0]
        if size is None:
            problems.append(f"{name} is missing")
        elif all(size != each for _, each in promises):
            problems.append(f"{name} has {size} bytes instead of {expected}")
    return problems


def _size(path: Path) -> int | None:
    """The size of a file; None if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sizes(record: Path) -> Iterator[tuple[str, int]]:
    """The files that a RECORD lists with their size, without bytecode."""
    with open_file(record, MANIFEST) as raw:
        text = io.TextIOWrapper(raw, "utf-8", errors="surrogateescape", newline="")
        for path, _, size in csv.reader(text):
            if size and "__pycache__/" not in path:
                yield path, int(size)
