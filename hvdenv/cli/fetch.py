"""Download everything that a locked build needs, and hvdenv itself, for hosts without internet.

On such a host, build with `hvdenv build RECIPE --locked --offline --fetched DIR`."""

from __future__ import annotations

import argparse
import zipfile
from importlib import metadata
from pathlib import Path

from hvdenv import PACKAGE
from hvdenv.base.places import find_places, make_folder, named_folder
from hvdenv.building import wheelcache
from hvdenv.building.published import add_file
from hvdenv.cli.options import add, add_options, give, read_request
from hvdenv.environments import scratch
from hvdenv.locks import lockfile
from hvdenv.session.lock import LOCK, make_resolution, recipe_locks, run_steps
from hvdenv.session.output import report
from hvdenv.session.prepare import Prepared, prepare

EXAMPLES = """\
examples:
  hvdenv fetch local --to /scratch/hvdenv-local
  then, without a network:
  pip install --no-index --find-links /scratch/hvdenv-local/hvdenv hvdenv
  hvdenv build local --locked --offline --fetched /scratch/hvdenv-local
"""

# Below the directory: hvdenv with what it needs, as wheels.
OWN = "hvdenv"
# Files of a dist-info directory that describe the installation, not the wheel.
_OF_INSTALLERS = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe")
    add(parser, "--to DIR", "directory to download to", type=Path, required=True)
    add_options(parser, "python", "prefix", "lockfiles", "lock", "trust", "json", "loudness")


def run(arguments: argparse.Namespace) -> int:
    request = read_request(arguments)
    prepared = prepare(request, thorough=False)
    locked = recipe_locks(request, prepared).require(request.lock)
    named_folder(arguments.to)
    to = make_folder(arguments.to.absolute())
    with scratch.folder(find_places().scratch, "fetching") as work:
        maker = make_resolution(prepared, work.path)
        run_steps(
            request,
            maker.fetch(locked, to, own=to / OWN, source=own_source(PACKAGE.parent, work.path)),
            work,
        )
        compiled = _carry_wheels(prepared, to)
    # Last: a directory with a lock in it is whole.
    lockfile.write_lock(locked._replace(folder=to / LOCK))
    files = [path for path in to.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    give(
        arguments,
        {"directory": str(to), "files": len(files), "bytes": size, "wheels": compiled},
        f"{len(files)} files, {size / 1e9:.2f} GB: {to}",
        f"compiled wheels of Horovod among them: {compiled or 'none was in the cache'}",
    )
    return 0


def own_source(site: Path, to: Path) -> Path:
    """The checkout of hvdenv, or a wheel made from the files that pip or uv installed.

    No index has hvdenv, and the checkout or wheel that it was installed from may be gone.
    """
    if (site / "pyproject.toml").is_file():
        return site
    (installed,) = metadata.distributions(name="hvdenv", path=[str(site)])
    path = to / f"hvdenv-{installed.version}-py3-none-any.whl"
    described = f"hvdenv-{installed.version}.dist-info"
    rows = []
    with zipfile.ZipFile(path, "w") as wheel:
        for each in installed.files or ():
            name = str(each)
            if each.suffix == ".pyc" or (described in each.parts and each.name in _OF_INSTALLERS):
                continue
            if ".." in each.parts:
                name = f"hvdenv-{installed.version}.data/scripts/{each.name}"
            mode = Path(str(each.locate())).stat().st_mode  # the script is a program
            rows.append(add_file(wheel, name, [each.read_binary()], mode << 16))
        record = "\n".join([*rows, f"{described}/RECORD,,", ""])
        add_file(wheel, f"{described}/RECORD", [record.encode()])
    return path


def _carry_wheels(prepared: Prepared, to: Path) -> int:
    """Put the compiled wheels beside it that builds may be able to take; how many."""
    caches = (
        wheelcache.own(find_places()),
        *wheelcache.shared(prepared.resolved.recipe.places.wheels),
    )
    count, notes = wheelcache.carry(caches, prepared.plan().wheel_inputs, to)
    for note in notes:
        report(note)
    return count
