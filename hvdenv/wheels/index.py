"""A static index of published wheels, for pip and every other installer of Python packages.

    DIR/index.html, index.json                     the projects: horovod
    DIR/horovod/index.html, index.json             its files (PEP 503 and 691)
    DIR/files/NAME.whl, NAME.whl.metadata          wheels and their metadata (PEP 658 and 714)
    DIR/files/NAME.whl.provenance.json             what each was made from

Files of a good wheel never change, and a wheel is listed when all of its files are there. Pages are
replaced atomically, so readers need no lock. Publishers write a page again if it lacks a file
that another publisher has added meanwhile.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from hvdenv.errors import UsageError
from hvdenv.masking import shown
from hvdenv.model.recipe import Sha256
from hvdenv.places import blocked, make_folder, named_folder, reporting, sweep, write_bytes
from hvdenv.reading import MIB, STATE, WHEEL, hash_file, open_file, read_file, read_json
from hvdenv.schema import Problem, Table, decode, encode
from hvdenv.wheels.published import CompiledFor, Published, Source, compiled_for, make, name_of
from hvdenv.wheels.wheelcache import WheelName

FILES, PROJECT = "files", "horovod"
METADATA, PROVENANCE = ".metadata", ".provenance.json"


class Cached(NamedTuple):
    key: Sha256
    sha256: Sha256
    created: str


class Provenance(NamedTuple):
    """What a published wheel was made from.

    Attributes:
        file, sha256, bytes: of the wheel.
        cached: the entry of the cache, whose wheel was rewritten.
        inputs: all that went into that wheel: source, patches, flags, modules, compiler, MPI.
    """

    format: Literal[1]
    file: WheelName
    sha256: Sha256
    bytes: int
    metadata_sha256: Sha256
    requires_python: str
    compiled_for: CompiledFor
    cached: Cached
    inputs: Table


class Found(NamedTuple):
    """What is in an index: the wheels that are listed, and what is wrong with others."""

    listed: tuple[Provenance, ...]
    problems: tuple[str, ...]


def prepare(folder: Path) -> Path:
    """The folder of an index, created if missing.

    Raises:
        UsageError: it contains something else.
        StepError: it cannot be written, or another user could have made a link in it.
    """
    folder = named_folder(folder)
    make_folder(folder)
    with reporting(folder):
        others = [name for name in os.listdir(folder) if not name.startswith(".")]
        if others and not (folder / FILES).is_dir():
            raise UsageError(
                "this folder contains other files", where=str(folder),
                remedy="name a new folder, an empty one or an index",
            )  # fmt: skip
        for name in (FILES, PROJECT):
            named_folder(folder / name, last=True)
            # With the permissions of the folder, whatever the umask.
            if not (folder / name).exists():
                (folder / name).mkdir(0o700)
                (folder / name).chmod(stat.S_IMODE(folder.stat().st_mode))
    return folder


def add(index: Path, source: Source) -> tuple[str, bool]:
    """Add a wheel to an index; returns its name, and whether it is new.

    The next write_pages() lists it.

    Args:
        source: a checked entry of a cache.

    Raises:
        Unpublished: hvdenv cannot tell what it was compiled for, or has other patches.
        StepError: the folder cannot be written.
    """
    facts = compiled_for(source)
    name = name_of(source, facts)
    if isinstance(_examined(index, name), Provenance):
        return name, False
    path = index / FILES / name
    with TemporaryDirectory() as folder:
        wheel = Path(folder) / "wheel"
        made = make(source, facts, wheel)
        about = _provenance(source, facts, made)
        for suffix, text in ((METADATA, made.metadata), (PROVENANCE, about)):
            _place(path.with_name(name + suffix), [text])
        # The wheel comes last: what has no wheel is not listed.
        with open_file(wheel, WHEEL) as stream:
            _place(path, iter(lambda: stream.read(MIB), b""))
    return name, True


def _provenance(source: Source, facts: CompiledFor, made: Published) -> bytes:
    python = re.search(r"^Requires-Python: (.*)$", made.metadata.decode(), re.MULTILINE)
    record = source.record
    document = Provenance(
        format=1,
        file=name_of(source, facts),
        sha256=made.sha256,
        bytes=made.size,
        metadata_sha256=hashlib.sha256(made.metadata).hexdigest(),
        requires_python=python[1] if python else "",
        compiled_for=facts,
        cached=Cached(record.key, record.sha256, record.created),
        inputs={**record.inputs, "variables": _masked(record.inputs.get("variables"))},
    )
    return _json(encode(document))


def _masked(variables: object) -> Mapping[str, str]:
    """The variables of a recipe without secrets: whoever reads the index reads them."""
    known = decode(dict[str, str], variables)
    return {name: shown(name, value) for name, value in known.items()}


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def _place(path: Path, content: Iterable[bytes]) -> None:
    """Write a file atomically; those who may read its folder may read it, whatever the umask."""
    mode = stat.S_IMODE(path.parent.stat().st_mode) & 0o044 | 0o600
    write_bytes(path, content, lambda descriptor: os.fchmod(descriptor, mode), 0o600)


def examine(index: Path) -> Found:
    """Check every wheel of an index: hashes, name, metadata.

    Raises:
        StepError: the folder cannot be read.
        UsageError: it is not an index.
    """
    found = {name: _examined(index, name) for name in _wheels(index)}
    return Found(
        tuple(each for each in found.values() if isinstance(each, Provenance)),
        tuple(f"{name}: {each}" for name, each in found.items() if isinstance(each, str)),
    )


def _wheels(index: Path) -> list[str]:
    try:
        names = {name for name in os.listdir(index / FILES) if not name.startswith(".")}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            "this is not an index of wheels: it has no folder `files`", where=str(index),
            remedy=f"hvdenv wheels publish {index} creates one",
        ) from error  # fmt: skip
    except OSError as error:
        raise blocked(index / FILES, error, "read") from error
    return sorted(name for name in names if name.endswith(".whl"))


def _examined(index: Path, name: str) -> Provenance | str:
    """The provenance of a wheel if it is good, or what is wrong with it."""
    path = index / FILES / name
    try:
        document = read_json(path.with_name(name + PROVENANCE), STATE)
        about = decode(Provenance, document, lenient=True)
        metadata = read_file(path.with_name(name + METADATA), STATE).data
        version = Version(about.compiled_for.version)
        compared = (
            ("hash of the wheel", hash_file(path, WHEEL)[0], about.sha256),
            ("hash of the metadata file", hashlib.sha256(metadata).hexdigest(), about.metadata_sha256),
            ("name in its provenance", about.file, name),
            ("version in its provenance", version, parse_wheel_filename(name)[1]),
        )  # fmt: skip
    except OSError as error:
        return f"cannot read {Path(error.filename or path).name}: {error.strerror}"
    except (ValueError, Problem) as error:
        return f"its name or provenance is malformed: {error}"
    wrong = (each for each in compared if each[1] != each[2])
    return next(
        (f"the {what} is {found}, expected {wanted}" for what, found, wanted in wrong), about
    )


def write_pages(index: Path) -> Found:
    """List all good wheels; pages that do not change are not written.

    Raises:
        StepError: the folder cannot be read or written.
    """
    for folder in (index, index / PROJECT, index / FILES):
        sweep(folder)  # publishers may have been killed
    while True:
        names = _wheels(index)
        found = examine(index)
        for path in outdated(index, found):
            _place(index / path, [pages(found.listed)[path]])
        if _wheels(index) == names:
            return found


def outdated(index: Path, found: Found) -> list[str]:
    """Pages that do not list exactly the good wheels."""
    return [name for name, text in pages(found.listed).items() if _content(index / name) != text]


def _content(path: Path) -> bytes | None:
    try:
        return read_file(path, STATE).data
    except OSError:
        return None


def pages(listed: Sequence[Provenance]) -> dict[str, bytes]:
    meta = {"meta": {"api-version": "1.1"}}
    ordered = sorted(listed, key=lambda each: each.file)
    versions = sorted({each.compiled_for.version for each in ordered}, key=Version)
    links = "".join(
        f"<a {_attributes(each)}>{html.escape(each.file)}</a><br>\n" for each in ordered
    )
    return {
        f"{PROJECT}/index.html": _page("Links for horovod", links),
        f"{PROJECT}/index.json": _json(
            {**meta, "name": PROJECT, "versions": versions, "files": [*map(_file, ordered)]}
        ),
        "index.html": _page("Simple index", f'<a href="{PROJECT}/">{PROJECT}</a><br>\n'),
        "index.json": _json({**meta, "projects": [{"name": PROJECT}]}),
    }


def _page(title: str, body: str) -> bytes:
    return (
        '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="pypi:repository-version" content="1.1">\n'
        f"<title>{title}</title>\n</head>\n<body>\n{body}</body>\n</html>\n"
    ).encode()


def _url(about: Provenance) -> str:
    return f"../{FILES}/{quote(about.file)}"


def _attributes(about: Provenance) -> str:
    values = {
        "href": f"{_url(about)}#sha256={about.sha256}",
        "data-requires-python": about.requires_python,
        "data-core-metadata": f"sha256={about.metadata_sha256}",
        # The name of the attribute before PEP 714, for older installers.
        "data-dist-info-metadata": f"sha256={about.metadata_sha256}",
    }
    return " ".join(f'{name}="{html.escape(value)}"' for name, value in values.items() if value)


def _file(about: Provenance) -> Mapping[str, Any]:
    hashes = {"sha256": about.metadata_sha256}
    return {
        "filename": about.file,
        "url": _url(about),
        "hashes": {"sha256": about.sha256},
        "size": about.bytes,
        "requires-python": about.requires_python or None,
        "core-metadata": hashes,
        "dist-info-metadata": hashes,
        # Keys with an underscore are private: the format is not that of PEP 740.
        "_provenance": f"{_url(about)}{PROVENANCE}",
    }
