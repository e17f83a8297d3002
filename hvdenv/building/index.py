"""A static index of published wheels, for pip and every other installer of Python packages.

    DIR/index.html                 the projects: horovod
    DIR/horovod/index.html         its wheels with their hashes (PEP 503)
    DIR/files/NAME.whl             wheels

A listed wheel never changes, and a wheel is listed when it is complete. Pages are replaced
atomically, so readers need no lock. Publishers write a page again if it lacks a wheel that another
publisher has added meanwhile.
"""

import html
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote, unquote

from packaging.utils import parse_wheel_filename

from hvdenv.base.errors import UsageError
from hvdenv.base.places import blocked, make_folder, named_folder, reporting, sweep, write_bytes
from hvdenv.base.reading import MIB, STATE, WHEEL, hash_file, open_file, read_file
from hvdenv.building.published import CheckedWheel, compiled_for, make, name_of

FILES, PROJECT = "files", "horovod"
_LINK = re.compile(rf'href="\.\./{FILES}/([^"#]+)#sha256=([0-9a-f]{{64}})"')


def prepare(folder: Path) -> Path:
    """The directory of an index, created if missing.

    Raises:
        UsageError: it contains something else.
        StepError: it cannot be written, or another user could have made a link in it.
    """
    folder = named_folder(folder)
    make_folder(folder)
    with reporting(folder):
        others = [name for name in os.listdir(folder) if not name.startswith(".")]
        if others and not any((folder / name).is_dir() for name in (FILES, PROJECT)):
            raise UsageError(
                "this directory contains other files",
                where=str(folder),
                remedy="name a new directory, an empty one or an index",
            )
        for name in (FILES, PROJECT):
            named_folder(folder / name, last=True)
            # With the permissions of the directory, whatever the umask.
            if not (folder / name).exists():
                (folder / name).mkdir(0o700)
                (folder / name).chmod(stat.S_IMODE(folder.stat().st_mode))
    return folder


def add(index: Path, source: CheckedWheel) -> tuple[str, bool]:
    """Add a wheel to an index; returns its name, and whether it is new.

    The next write_pages() lists it.

    Args:
        source: a checked entry of a cache.

    Raises:
        Unpublished: hvdenv cannot tell what it was compiled for, or has other patches.
        StepError: the directory cannot be written.
    """
    facts = compiled_for(source)
    name = name_of(source, facts)
    path = index / FILES / name
    with suppress(OSError):  # otherwise it is replaced, if possible
        if hash_file(path, WHEEL)[0] == _listed(index).get(name):
            return name, False
    with TemporaryDirectory() as folder:
        wheel = Path(folder) / "wheel"
        make(source, facts, wheel)
        with open_file(wheel, WHEEL) as stream:
            _place(path, iter(lambda: stream.read(MIB), b""))
    return name, True


def _place(path: Path, content: Iterable[bytes]) -> None:
    """Write a file atomically; those who may read its directory may read it, whatever the umask."""
    mode = stat.S_IMODE(path.parent.stat().st_mode) & 0o044 | 0o600
    write_bytes(path, content, mode, exactly=True)


def _listed(index: Path) -> dict[str, str]:
    """The sha256 of each wheel on the page, by its file name."""
    page = _content(index / PROJECT / "index.html").decode("utf-8", "replace")
    return {unquote(name): sha256 for name, sha256 in _LINK.findall(page)}


def _names(index: Path) -> list[str]:
    try:
        return sorted(path.name for path in (index / FILES).iterdir() if _is_ours(path.name))
    except OSError as error:
        raise blocked(index / FILES, error, "read") from error


def _is_ours(name: str) -> bool:
    try:
        return parse_wheel_filename(name)[0] == PROJECT
    except ValueError:
        return False


def write_pages(index: Path) -> int:
    """List all wheels, and return their number; pages that do not change are not written.

    A page never takes over the hash of a wheel that has changed: installers refuse it.

    Raises:
        StepError: the directory cannot be read or written.
    """
    for folder in (index, index / PROJECT, index / FILES):
        sweep(folder)  # publishers may have been killed
    while True:
        names, listed = _names(index), _listed(index)
        wheels = {}
        for name in names:
            with reporting(index / FILES / name, "read"):
                wheels[name] = listed.get(name) or hash_file(index / FILES / name, WHEEL)[0]
        for path, page in _pages(wheels).items():
            if _content(index / path) != page:
                _place(index / path, [page])
        if _names(index) == names:
            return len(names)


def _content(path: Path) -> bytes:
    """The text of a page; empty if there is none."""
    try:
        return read_file(path, STATE).data
    except OSError:
        return b""


def _pages(wheels: Mapping[str, str]) -> dict[str, bytes]:
    """The pages that list wheels with these hashes."""
    links = [(f"../{FILES}/{quote(n)}#sha256={wheels[n]}", n) for n in sorted(wheels)]
    return {
        f"{PROJECT}/index.html": _page("Links for horovod", links),
        "index.html": _page("Simple index", [(f"{PROJECT}/", PROJECT)]),
    }


def _page(title: str, links: Iterable[tuple[str, str]]) -> bytes:
    lines = [f'<a href="{html.escape(url)}">{html.escape(name)}</a><br>\n' for url, name in links]
    return (
        '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="pypi:repository-version" content="1.0">\n'
        f"<title>{title}</title>\n</head>\n<body>\n{''.join(lines)}</body>\n</html>\n"
    ).encode()
