"""Reading what is installed in an environment; nothing of it is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv.contents.packages import (
    Contents,
    Installed,
    Package,
    from_installed,
    from_record,
    hint,
    normal,
)
from hvdenv.environments import generations, registry
from hvdenv.errors import UsageError
from hvdenv.locks import folders
from hvdenv.locks.contents import contents as of_lock
from hvdenv.locks.lockfile import MAIN
from hvdenv.places import Places
from hvdenv.reading import STATE, SYSTEM, read_json, read_text

_DISTRIBUTION = re.compile(r"([^-]+)-([^-]+?)(-py[\d.]+)?\.(dist|egg)-info")


class Named(NamedTuple):
    """An environment as the user named it.

    Attributes:
        label: for people.
        contents: what it is made of.
    """

    label: str
    contents: Contents


def named(text: str, places: Places) -> Named:
    """The contents of ``NAME``, ``PREFIX`` or the folder of a generation or of a lock, or of
    ``…@GENERATION``.

    Args:
        text: a name has no slash; a generation can be cut short.
        places: where environments are registered.

    Raises:
        UsageError: there is no such environment or generation.
        StepError: its record is damaged.
        RecipeError, LockError: a lock is malformed, or its files do not belong together.
    """
    if (Path(text) / MAIN).is_file():
        return Named(text, of_lock(folders.read(Path(text))))
    name, identity = text, ""
    if "@" in text and not Path(text).exists():
        name, _, identity = text.rpartition("@")
    environment = registry.find(places, name)
    if not environment.store.is_dir():
        if identity:
            raise UsageError(
                "there are no generations here: hvdenv did not build it",
                where=str(environment.prefix),
                remedy="`hvdenv envs` lists the environments that it built",
            )
        return Named(name, of_folder(environment.prefix))
    chosen = _generation(environment, identity)
    return Named(f"{name}@{chosen}", of_folder(environment.generation(chosen)))


def _generation(environment: generations.Environment, wanted: str) -> str:
    complete = list(environment.records())
    if not wanted:
        fitting = [environment.active()] if environment.active() else []
    else:
        fitting = [each for each in complete if each == wanted] or [
            each for each in complete if each.startswith(wanted)
        ]
    if len(fitting) != 1:
        what = f"{len(fitting)} generations begin with {wanted}" if fitting else (
            f"no complete generation {wanted}" if wanted else "no active generation"
        )  # fmt: skip
        raise UsageError(
            what,
            where=str(environment.prefix),
            remedy=f"complete are: {', '.join(complete) or 'none'}",
        )
    return fitting[0]


def of_folder(root: Path) -> Contents:
    """The contents of a generation, or of an environment that hvdenv did not build.

    Raises:
        UsageError: it is no Python environment.
        StepError: the record of the generation is damaged.
    """
    if (root / generations.RECORD).exists():
        record = generations.read_record(root / generations.RECORD)
        base = root / record.get("environment", "venv")  # an absolute one stays as it is
        found = installed(base) if base.is_dir() else None
        return from_record(record, found, str(Path.home()))
    if not any((root / each).exists() for each in ("bin/python", "conda-meta")):
        raise UsageError(
            "this is no Python environment: it has neither bin/python nor conda-meta",
            where=str(root),
            remedy="`hvdenv envs` lists those that there are; `hvdenv build RECIPE` makes one",
        )
    return from_installed(installed(root))


def installed(base: Path) -> Installed:
    """What lies in a virtual environment or a conda prefix."""
    records = [_json(path) for path in sorted(base.glob("conda-meta/*.json"))]
    conda = [_conda_package(each) for each in records if "name" in each]
    of_conda = {
        found[1]
        for each in records
        for file in each.get("files", ())
        if (found := re.search(r"site-packages/([^/]+\.(?:dist|egg)-info)(?:/|$)", file))
    }
    python = list(_distributions(base))
    distributions: dict[str, str] = {}
    for name, version, _ in python:
        distributions.setdefault(name, version)
    own = {
        name: _python_package(name, version, folder)
        for name, version, folder in reversed(python)
        if folder.name not in of_conda
    }
    version = next((each.version for each in conda if each.name == "python"), "")
    return Installed(
        (*conda, *own.values()), distributions, version or _of_venv(base / "pyvenv.cfg")
    )


def _distributions(base: Path) -> Iterator[tuple[str, str, Path]]:
    """Name, version and folder of what Python finds there."""
    for folder in sorted(base.glob("lib*/python3*/site-packages")):
        if folder.parent.parent.is_symlink():
            continue
        for path in sorted(folder.iterdir()):
            found = _DISTRIBUTION.fullmatch(path.name)
            if found:
                yield normal(found[1]), found[2], path


def _conda_package(record: dict[str, Any]) -> Package:
    return Package(
        "conda", record["name"], record["version"], record.get("build", ""),
        record.get("sha256") or "", hint(record.get("url", "")),
    )  # fmt: skip


def _python_package(name: str, version: str, folder: Path) -> Package:
    """A Python package; pip notes where it came from only if that was named by its URL."""
    origin = _json(folder / "direct_url.json")
    sha256 = origin.get("archive_info", {}).get("hashes", {}).get("sha256", "")
    commit = origin.get("vcs_info", {}).get("commit_id", "")
    url = origin.get("url", "")
    return Package(
        "pypi", name, version, "", sha256, hint(f"git+{url}@{commit}" if commit else url)
    )


def _json(path: Path) -> dict[str, Any]:
    """A document that another program wrote; empty if there is none to be read."""
    try:
        document = read_json(path, STATE)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _of_venv(path: Path) -> str:
    """The version of Python that a virtual environment was made with."""
    try:
        text = read_text(path, SYSTEM, errors="replace")
    except OSError:
        return ""
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+(?:\.\d+){1,2})", text, re.MULTILINE)
    return found[1] if found else ""
