"""Reads the contents of environments from disk; runs nothing in them."""

import base64
import csv
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.errors import UsageError
from hvdenv.base.places import Places, home_folder
from hvdenv.base.reading import MANIFEST, STATE, open_file, read_json
from hvdenv.base.schema import Table
from hvdenv.environments import generations, installation, registry
from hvdenv.locks.packages import (
    Contents,
    Installed,
    Package,
    canonicalize_name,
    from_record,
    hint,
)
from hvdenv.locks.record import GenerationRecord

_DISTRIBUTION = re.compile(r"([^-]+)-([^-]+?)(-py[\d.]+)?\.(dist|egg)-info")


class NamedContents(NamedTuple):
    label: str
    contents: Contents


def named_contents(text: str, places: Places) -> NamedContents:
    """The contents of an environment that the user names.

    Args:
        text: a name, a prefix, or the directory of a generation. The first two may be
            followed by @ and the beginning of a generation; the default is the active one.

    Raises:
        UsageError: there is no such environment or generation.
        StepError: its record is damaged.
    """
    name, identity = text, ""
    if "@" in text and not Path(text).exists():
        name, _, identity = text.rpartition("@")
    environment = registry.find(places, name)
    if not environment.store.is_dir():
        if identity:
            raise UsageError(
                "there are no generations here: hvdenv did not build it",
                where=str(environment.prefix),
                remedy="list the environments that hvdenv built: hvdenv envs",
            )
        return NamedContents(name, contents_of_folder(environment.prefix))
    complete, wanted = list(environment.records()), identity or environment.active()
    chosen = generations.begins(environment, complete, wanted, "no active generation")
    return NamedContents(f"{name}@{chosen}", contents_of_folder(environment.generation(chosen)))


def contents_of_folder(root: Path) -> Contents:
    """The contents of a generation, or of an environment that hvdenv did not build.

    Raises:
        UsageError: it is not a Python environment.
        StepError: the record of the generation is damaged.
    """
    if (root / generations.RECORD).exists():
        record = generations.read_record(root / generations.RECORD)
        base = root / record.environment  # an absolute one stays as it is
        found = installed_packages(base) if base.is_dir() else None
        return from_record(record, found, str(home_folder()))
    if not any((root / each).exists() for each in ("bin/python", "conda-meta")):
        raise UsageError(
            "this is not a Python environment: "
            + ("it has no bin/python or conda-meta" if root.exists() else "it does not exist"),
            where=str(root),
            remedy="list environments with `hvdenv envs`, or build one: hvdenv build RECIPE",
        )
    contents = from_record(GenerationRecord(), installed_packages(root), "")
    return contents._replace(toolchain={})  # packages alone do not say what Horovod was built with


def installed_packages(base: Path) -> Installed:
    """What is installed in a virtual environment or a conda prefix."""
    records = [_json(path) for path in sorted(base.glob("conda-meta/*.json"))]
    packages = [_conda_package(each) for each in records if "name" in each]
    python = next((each.version for each in packages if each.name == "python"), "")
    files = "\n".join(file for each in records for file in each.get("files", ()))
    of_conda = set(re.findall(r"site-packages/([^/\n]+\.(?:dist|egg)-info)", files))
    distributions: dict[str, str] = {}
    for name, version, folder in _distributions(base):
        if name not in distributions and folder.name not in of_conda:
            packages.append(_python_package(name, version, folder))
        distributions.setdefault(name, version)
    settings = installation.venv_settings(base)
    stated = settings.get("version") or settings.get("version_info", "")
    created_with = re.match(r"\d+(\.\d+){1,2}", stated)
    python = python or (created_with[0] if created_with else "")
    return Installed(tuple(packages), distributions, python)


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


def _python_package(name: str, version: str, folder: Path) -> Package:
    """A Python package; pip records its origin only if it was installed from a URL."""
    origin = _json(folder / "direct_url.json")
    sha256 = origin.get("archive_info", {}).get("hashes", {}).get("sha256", "")
    commit = origin.get("vcs_info", {}).get("commit_id", "")
    url = f"git+{origin['url']}@{commit}" if commit else origin.get("url", "")
    return Package(kind="pypi", name=name, version=version, sha256=sha256, url=hint(url))


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
