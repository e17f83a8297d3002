"""Where a Python environment imports Horovod from, as far as its files show. Nothing is run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from mmap import PROT_READ, mmap
from pathlib import Path

from hvdenv.reading import EXTENSION, SYSTEM, open_file, read_text

# The variable with the directories that every Python searches before its own packages.
PYTHON_PATH = "PYTHONPATH"
# The module that finds an editable installation, and the directories that it states.
_FINDER = re.compile(r"import (__editable__\w+)")
_MAPPED = re.compile(r"['\"]horovod['\"]: ['\"]([^'\"]+)['\"]")


def horovod_in(base: Path, python_path: str = "") -> Path | None:
    """The package horovod that an environment imports; None if it sees none.

    Args:
        base: the directory with its ``bin/python``.
        python_path: the value of PYTHONPATH.
    """
    return next(_packages(base, python_path), None)


def provider(base: Path, python_path: str = "") -> str:
    """The prefix of the other environment whose Horovod and horovodrun this one has; or empty."""
    if (base / "bin" / "horovodrun").exists():
        return ""
    prefixes = (each.parents[3] for each in _packages(base, python_path) if len(each.parents) > 3)
    return next((str(each) for each in prefixes if (each / "bin" / "horovodrun").exists()), "")


def _packages(base: Path, python_path: str) -> Iterator[Path]:
    """Every package horovod that an environment sees; it imports the first."""
    named = (Path(each) for each in python_path.split(os.pathsep) if os.path.isabs(each))
    for folder in (*named, *_search_path(base)):
        if (folder / "horovod" / "__init__.py").is_file():
            yield folder / "horovod"


def uses_mpi(package: Path) -> bool:
    """Whether an extension of Horovod was linked against an MPI."""
    return any(map(_names_mpi, package.glob("*/mpi_lib*.so")))


def _names_mpi(file: Path) -> bool:
    try:
        with open_file(file, EXTENSION) as stream:
            return mmap(stream.fileno(), 0, prot=PROT_READ).find(b"libmpi") >= 0
    except (OSError, ValueError):  # an empty file cannot be mapped
        return False


def _search_path(base: Path) -> Iterator[Path]:
    own = sorted(base.glob("lib*/python3*/*-packages"))
    shared = []
    if shares_packages(base):
        versions = {"python3", *(folder.parent.name for folder in own)}
        prefix = Path(settings(base).get("home", "/usr/bin")).parent
        for each in dict.fromkeys((prefix / "local", prefix)):
            found = sorted(each.glob("lib*/python3*/*-packages"))
            shared += [folder for folder in found if folder.parent.name in versions]
    for folder in (*own, *shared):
        yield folder
        for file in sorted(folder.glob("*.pth")):
            yield from _added_folders(file)


def settings(base: Path) -> dict[str, str]:
    """The keys of pyvenv.cfg; empty if the environment is no virtual one."""
    pairs = (line.partition("=") for line in _text(base / "pyvenv.cfg").splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def shares_packages(base: Path) -> bool:
    """Whether a virtual environment also sees packages of the Python that it was made with."""
    return settings(base).get("include-system-site-packages", "").lower() == "true"


def _added_folders(file: Path) -> Iterator[Path]:
    """The directories that a .pth file adds."""
    for line in map(str.strip, _text(file).splitlines()):
        if finder := _FINDER.match(line):
            for package in _MAPPED.findall(_text(file.with_name(f"{finder[1]}.py"))):
                yield Path(package).parent
        elif line and not line.startswith(("#", "import ", "import\t")):
            yield file.parent / line


def _text(file: Path) -> str:
    try:
        return read_text(file, SYSTEM, errors="replace")
    except OSError:
        return ""
