#!/usr/bin/env python
"""A conda program for tests: as much of ``conda create`` as hvdenv uses.

py-rattler does the work. The program answers as conda does: its answer omits packages that are
in its package directory, and it trusts packages that were unpacked there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

import rattler
from rattler.exceptions import SolverError


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["create"])
    flags = "yes json dry-run offline override-channels"
    for name in flags.split():
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--prefix", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--channel", action="append", default=[])
    parser.add_argument("specs", nargs="*")
    return parser.parse_intermixed_args(words)


def virtual_packages() -> list[rattler.GenericVirtualPackage]:
    prefix = "CONDA_OVERRIDE_"
    found = {n.removeprefix(prefix): v for n, v in os.environ.items() if n.startswith(prefix) and v}
    found.pop("ARCHSPEC", None)
    names = {rattler.PackageName(f"__{name.lower()}"): text for name, text in found.items()}
    build = rattler.BuildString("0")
    return [
        rattler.GenericVirtualPackage(name, rattler.Version(text), build)
        for name, text in names.items()
    ]


def solve(options: argparse.Namespace) -> list[rattler.RepoDataRecord]:
    return asyncio.run(
        rattler.solve(
            options.channel,
            [rattler.MatchSpec(text, strict=False) for text in options.specs],
            platforms=[os.environ.get("CONDA_SUBDIR", "linux-64"), "noarch"],  # type: ignore[list-item]
            virtual_packages=virtual_packages(),
        )
    )


def record_of(record: rattler.RepoDataRecord) -> dict[str, object]:
    own = {"channel": record.url.rsplit("/", 1)[0], "fn": record.file_name, "url": record.url}
    return {**json.loads(record.to_json()), **own}


def fetched(listing: Path, packages: Path) -> list[Path]:
    """Copy the files of an explicit list, as conda does with those of file:// URLs."""
    paths = []
    packages.mkdir(parents=True, exist_ok=True)
    for url in listing.read_text().splitlines()[1:]:
        paths.append(packages / url.rpartition("/")[2])
        with urllib.request.urlopen(url) as answer:
            paths[-1].write_bytes(answer.read())
    return paths


async def install(paths: list[Path], prefix: Path, packages: Path) -> None:
    records = [await rattler.RepoDataRecord.from_package_archive(path) for path in paths]
    await rattler.install(records, prefix, cache_dir=packages / "unpacked", show_progress=False)


def main(words: list[str]) -> None:
    options = arguments(words)
    packages = Path(os.environ.get("CONDA_PKGS_DIRS", str(Path.home() / ".conda-packages")))
    if options.file:
        paths = fetched(options.file, packages)
        asyncio.run(install(paths, options.prefix, packages))
        return
    try:
        records = solve(options)
    except SolverError as error:
        print(json.dumps({"success": False, "message": str(error)}))
        raise SystemExit(1) from None
    linked = [{"name": each.name.normalized, "version": str(each.version)} for each in records]
    missing = [each for each in records if not (packages / each.file_name).exists()]
    actions = {"FETCH": [record_of(each) for each in missing], "LINK": linked}
    print(json.dumps({"success": True, "actions": actions}))


if __name__ == "__main__":
    STATUS: object = 0
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        STATUS = end.code
        if isinstance(STATUS, str):
            print(STATUS, file=sys.stderr)
    sys.stdout.flush()
    os._exit(STATUS if isinstance(STATUS, int) else 1)  # as conda_env.py does
