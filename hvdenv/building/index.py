"""A static index of published wheels, for pip and every other installer of Python packages.

    DIR/index.html, index.json                     the projects: horovod
    DIR/horovod/index.html, index.json             its wheels with their hashes (PEP 503 and 691)
    DIR/files/NAME.whl                             wheels

A listed wheel never changes, and a wheel is listed when it is complete. Pages are replaced
atomically, so readers need no lock. Publishers write a page again if it lacks a wheel that another
publisher has added meanwhile.
"""

import html
import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import quote

from packaging.utils import parse_wheel_filename

from hvdenv.base.errors import UsageError
from hvdenv.base.places import blocked, make_folder, named_folder, reporting, sweep, write_bytes
from hvdenv.base.reading import MIB, STATE, WHEEL, hash_file, open_file, read_file, read_json
from hvdenv.base.schema import Problem, decode, encode
from hvdenv.building.published import CheckedWheel, compiled_for, make, name_of
from hvdenv.model.recipe import Sha256

FILES, PROJECT = "files", "horovod"


class Hashes(NamedTuple):
    sha256: Sha256


class ListedWheel(NamedTuple):
    """A wheel as a page lists it."""

    filename: str
    url: str
    hashes: Hashes
    size: int


class IndexPage(NamedTuple):
    """DIR/horovod/index.json, as far as it is needed here."""

    files: tuple[ListedWheel, ...]


class IndexContents(NamedTuple):
    """What is in an index.

    Attributes:
        wheels: those to list.
        problems: what is wrong with some files, by name.
    """

    wheels: tuple[ListedWheel, ...]
    problems: Mapping[str, str]


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
    known = _listed(index).get(name)
    with suppress(OSError):  # otherwise it is replaced, if possible
        if known and hash_file(path, WHEEL)[0] == known.hashes.sha256:
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


def examine(index: Path) -> IndexContents:
    """Compare every wheel of an index with the hash that its page states, if it is listed.

    Raises:
        StepError: the directory cannot be read.
    """
    listed, wheels, problems = _listed(index), [], {}
    for name in _names(index):
        known = listed.get(name)
        try:
            sha256, size = hash_file(index / FILES / name, WHEEL)
        except OSError as error:
            problems[name] = error.strerror or str(error)
            wheels += [known] if known else []
            continue
        found = ListedWheel(name, f"../{FILES}/{quote(name)}", Hashes(sha256), size)
        if known and known.hashes != found.hashes:
            problems[name] = f"its hash is {sha256}, published was {known.hashes.sha256}"
        # Installers refuse a changed one. A page never takes over its hash.
        wheels.append(known or found)
    return IndexContents(tuple(wheels), problems)


def _listed(index: Path) -> dict[str, ListedWheel]:
    try:
        document = read_json(index / PROJECT / "index.json", STATE)
        page = decode(IndexPage, document, lenient=True)
    except (OSError, ValueError, Problem):
        return {}
    return {each.filename: each for each in page.files}


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


def write_pages(index: Path) -> IndexContents:
    """List all wheels; pages that do not change are not written.

    Raises:
        StepError: the directory cannot be read or written.
    """
    for folder in (index, index / PROJECT, index / FILES):
        sweep(folder)  # publishers may have been killed
    while True:
        names = _names(index)
        found = examine(index)
        for path, page in pages(found.wheels).items():
            if _content(index / path) != page:
                _place(index / path, [page])
        if _names(index) == names:
            return found


def _content(path: Path) -> bytes | None:
    try:
        return read_file(path, STATE).data
    except OSError:
        return None


def pages(wheels: Iterable[ListedWheel]) -> dict[str, bytes]:
    meta, ordered = {"meta": {"api-version": "1.1"}}, sorted(wheels)
    versions = sorted({parse_wheel_filename(each.filename)[1] for each in ordered})
    links = ((f"{each.url}#sha256={each.hashes.sha256}", each.filename) for each in ordered)
    # The page that add() reads comes first.
    return {
        f"{PROJECT}/index.json": _json(
            {**meta, "name": PROJECT, "versions": [*map(str, versions)], "files": encode(ordered)}
        ),
        f"{PROJECT}/index.html": _page("Links for horovod", links),
        "index.html": _page("Simple index", [(f"{PROJECT}/", PROJECT)]),
        "index.json": _json({**meta, "projects": [{"name": PROJECT}]}),
    }


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def _page(title: str, links: Iterable[tuple[str, str]]) -> bytes:
    lines = [f'<a href="{html.escape(url)}">{html.escape(name)}</a><br>\n' for url, name in links]
    return (
        '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="pypi:repository-version" content="1.1">\n'
        f"<title>{title}</title>\n</head>\n<body>\n{''.join(lines)}</body>\n</html>\n"
    ).encode()
