"""Makes the image of a generation with mksquashfs.

The same generation gives the same bytes: mksquashfs sorts the names, files belong to the owner of
the generation, and nothing in the image depends on the time or the host. The times of files stay,
since Python compares those of a module and of its bytecode.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hvdenv import IMAGE_PROGRAMS
from hvdenv.command import Command
from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.errors import StepError
from hvdenv.packing.manifest import (
    FORMAT,
    Manifest,
    Mounted,
    Packed,
    contents,
    manifest_of,
    program_of,
    read,
    record_digest,
)
from hvdenv.places import replacing, sweep, sync, write_json, write_text
from hvdenv.reading import GIB, OWN, Kind, hash_file, read_text
from hvdenv.runner import Runner
from hvdenv.schema import encode

FILE = Kind("an image", 1024 * GIB)
# Level 6 takes three times as long and saves a few per cent.
LEVEL = 3
_PROGRAM = IMAGE_PROGRAMS / "enter.py"


def make(
    environment: Environment,
    identity: str,
    to: Path,
    runner: Runner,
    *,
    cores: int,
    copy_to: str = "",
) -> Packed:
    """Make the image of a generation, and the manifest beside it.

    Args:
        to: file of the image; replaced if it exists.

    Raises:
        StepError: mksquashfs is missing or fails, or the file cannot be written.
    """
    record = generations.read_record(environment.record(identity))
    mounts, outside = contents(environment.generation(identity), record)
    sweep(to.parent, to.name)
    with replacing(to) as temporary:
        made_by = _squash(mounts, temporary, runner, cores)
        digest, size = hash_file(temporary, FILE)
        sync(temporary)
        manifest = Manifest(
            recipe=record.recipe,
            variants=record.variants,
            generation=identity,
            record_sha256=record_digest(environment, identity),
            mounts=mounts,
            outside=outside,
            sha256=digest,
            bytes=size,
            files=record.files,
            unpacked_bytes=record.bytes,
            copy_to=copy_to,
            made_by=made_by,
            program_sha256=hash_file(_PROGRAM, OWN)[0],
        )
    # The manifest comes last: without it, nothing uses the image.
    write_text(program_of(to), read_text(_PROGRAM, OWN))
    write_json(manifest_of(to), {"format": FORMAT, **encode(manifest)})
    return read(to)


def _squash(mounts: tuple[Mounted, ...], to: Path, runner: Runner, cores: int) -> str:
    """Run mksquashfs; returns its version."""
    program = shutil.which("mksquashfs")
    if not program:
        raise StepError(
            "this host has no mksquashfs",
            remedy="install squashfs-tools, or pack the environment on a host that has it",
        )
    owner = os.stat(mounts[0].at)
    words = (
        # It takes times from this variable.
        *("env", "-u", "SOURCE_DATE_EPOCH", program, *(each.at for each in mounts), str(to)),
        *("-comp", "zstd", "-Xcompression-level", str(LEVEL), "-mkfs-time", "0", "-no-xattrs"),
        *("-root-mode", "755", "-root-time", "0", "-keep-as-directory", "-noappend"),
        *("-force-uid", str(owner.st_uid), "-force-gid", str(owner.st_gid)),
        *("-processors", str(cores), "-no-progress", "-quiet"),
        # By default, a file that cannot be read is empty in the image.
        "-exit-on-error",
    )
    outcome = runner.run(Command(words))
    if not outcome:
        raise StepError(
            "mksquashfs failed", where=str(to), detail=outcome.tail(5),
            remedy="it needs version 4.5 or newer with zstd, and permission to read all files;"
            " or pack on another host",
        )  # fmt: skip
    version = runner.run(Command((program, "-version"))).output.splitlines()
    return version[0] if version else ""
