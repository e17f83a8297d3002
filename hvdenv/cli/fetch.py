"""Download everything that a locked build needs, for hosts without internet.

On such a host, build with `hvdenv build RECIPE --locked --offline --fetched DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdenv.base.places import find_places, make_folder, named_folder
from hvdenv.cli.options import add, add_options, give, read_request
from hvdenv.environments import prefix_lock
from hvdenv.locks import lockfile
from hvdenv.session.lock import LOCK, make_resolution, recipe_locks, run_steps
from hvdenv.session.prepare import prepare

EXAMPLES = """\
examples:
  hvdenv fetch local --to /scratch/hvdenv-local
  then, without a network:
  hvdenv build local --locked --offline --fetched /scratch/hvdenv-local
"""


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
    with prefix_lock.scratch_folder(find_places().scratch, "fetching") as work:
        run_steps(request, make_resolution(prepared, work.path).fetch(locked, to), work)
    # Last: a directory with a lock in it is whole.
    lockfile.write_lock(locked._replace(folder=to / LOCK))
    files = [path for path in to.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    give(
        arguments,
        {"directory": str(to), "files": len(files), "bytes": size},
        f"{len(files)} files, {size / 1e9:.2f} GB: {to}",
    )
    return 0
