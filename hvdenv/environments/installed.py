"""Reads the contents of environments from disk; runs nothing in them."""

import base64
import csv
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.places import Places, home_folder
from hvdenv.base.reading import MANIFEST, STATE, open_file, read_json
from hvdenv.base.schema import Table
from hvdenv.environments import generations, registry
from hvdenv.locks.packages import (
    Contents,
    Installed,
    Package,
    canonicalize_name,
    from_record,
    hint,
)

_DISTRIBUTION = re.compile(r"([^-]+)-([^-]+?)(-py[\d.]+)?\.(dist|egg)-info")


class NamedContents(NamedTuple):
    label: str
    contents: Contents


def named_contents(text: str, places: Places) -> NamedContents:
    """The contents of an environment that the user names.

    Args:
        text: a name or a prefix; @ and the beginning of a generation may follow. The default
            is the active one.

    Raises:
        UsageError: there is no such environment or generation.
        StepError: its record is damaged.
    """
    name, identity = text, ""
    if "@" in text and not Path(text).exists():
        name, _, identity = text.rpartition("@")
    environment = registry.find(places, name)
    generations.require(environment)
    complete, wanted = list(environment.records()), identity or environment.active()
    chosen = generations.begins(environment, complete, wanted, "no active generation")
    return NamedContents(f"{name}@{chosen}", contents_of_folder(environment.generation(chosen)))


def contents_of_folder(root: Path) -> Contents:
    """The contents of a generation.

    Raises:
        StepError: its record is damaged.
    """
    record = generations.read_record(root / generations.RECORD)
    base = root / record.environment  # an absolute one stays as it is
    found = installed_packages(base) if base.is_dir() else None
    return from_record(record, found, str(home_folder()))


def installed_packages(base: Path) -> Installed:
    """What is installed in a virtual environment or a conda prefix."""
    records = [_json(path) for path in sorted(base.glob("conda-meta/*.json"))]
    packages = [_conda_package(each) for each in records if "name" in each]
    files = "\n".join(file for each in records for file in each.get("files", ()))
    of_conda = set(re.findall(r"site-packages/([^/\n]+\.(?:dist|egg)-info)", files))
    distributions: dict[str, str] = {}
    for name, version, folder in _distributions(base):
        if name not in distributions and folder.name not in of_conda:
            packages.append(Package("pypi", name, version))
        distributions.setdefault(name, version)
    return Installed(tuple(packages), distributions)


def _distributions(base: Path) -> Iterator[tuple[str, str, Path]]:
    """Name, version and metadata directory of each Python package."""
    for folder in sorted(base.glob("lib*/python3*/site-packages")):
        for path in () if folder.parent.parent.is_symlink() else sorted(folder.iterdir()):
            if found := _DISTRIBUTION.fullmatch(path.name):
                yield canonicalize_name(found[1]), found[2], path


def _conda_package(record: Table) -> Package:
    return Package(
        kind="conda",
        name=record["name"],
        version=record["version"],
        build=record.get("build", ""),
        sha256=record.get("sha256") or "",
        url=hint(record.get("url", "")),
    )


def _json(path: Path) -> Table:
    """A document that another program wrote; empty if it cannot be read."""
    try:
        document = read_json(path, STATE)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def damaged_files(site_packages: Path, hashes: Mapping[str, str]) -> list[str]:
    """One sentence for each file that is not what the RECORD of its package states.

    Packages can share files; the package installed last determines the content then.

    Args:
        hashes: sha256 of files by their absolute path; links have none.

    Raises:
        OSError: a RECORD cannot be read.
    """
    # Some packages of conda have empty metadata.
    of_conda = (site_packages.parents[2] / "conda-meta").is_dir()
    problems: list[str] = []
    stated: dict[str, tuple[str, set[str]]] = {}
    for info in sorted(site_packages.glob("*.dist-info")):
        for name in ("METADATA", "RECORD"):
            known = (info / name).exists()
            if not known or not (of_conda or (info / name).stat().st_size):
                problems.append(
                    f"{info.stem}: {info.name}/{name} is {'empty' if known else 'missing'}"
                )
        try:
            for path, sha256 in _listed(info / "RECORD"):
                # METADATA was edited after the RECORD was written (torch 1.12.0). Programs name
                # the prefix: conda and copies of environments rewrite them.
                if path != f"{info.name}/METADATA" and not path.startswith("../"):
                    inside = os.path.normpath(site_packages / path)
                    _, fitting = stated.setdefault(inside, (f"{info.stem}: {path}", set()))
                    fitting.add(sha256)
        except (ValueError, csv.Error) as error:
            problems.append(f"{info.stem}: {info.name}/RECORD is damaged ({error})")
    for inside, (name, fitting) in sorted(stated.items()):
        # conda makes links for libraries with several names.
        found = hashes.get(os.path.realpath(inside) if os.path.islink(inside) else inside)
        if not os.path.exists(inside):
            problems.append(f"{name} is missing")
        elif found and "" not in fitting and found not in fitting:
            problems.append(f"{name} has other content than its RECORD states")
    return problems


def _listed(record: Path) -> Iterator[tuple[str, str]]:
    """The files that a RECORD lists with their sha256, if it has one, without bytecode."""
    if not record.exists():
        return
    with open_file(record, MANIFEST) as raw:
        text = io.TextIOWrapper(raw, "utf-8", errors="surrogateescape", newline="")
        for path, digest, size in csv.reader(text):
            if size and "__pycache__/" not in path:
                algorithm, _, value = digest.partition("=")
                padded = value + "=" * (-len(value) % 4) if algorithm == "sha256" else ""
                yield path, base64.urlsafe_b64decode(padded).hex()
