"""Images of environments: made by mksquashfs, and used by hvdenv/standalone/image/enter.py.

The image of a generation is beside it in the store, so that `envs prune` removes both. The same
generation gives the same bytes: mksquashfs sorts the names, files belong to the owner of the
generation, and nothing in the image depends on the time or the host. The times of files stay, since
Python compares those of a module and of its bytecode."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from hvdenv import IMAGE_PROGRAMS
from hvdenv.base.command import Command
from hvdenv.base.errors import StepError, UsageError
from hvdenv.base.places import replacing, sweep, sync, write_json, write_text
from hvdenv.base.reading import GIB, OWN, STATE, Kind, hash_file, read_json, read_text
from hvdenv.base.runner import Runner
from hvdenv.base.schema import Problem, decode, encode
from hvdenv.environments.generations import IMAGE, Environment, read_record
from hvdenv.environments.installation import inspect_prefix, recorded
from hvdenv.locks.record import GenerationRecord

FILE = Kind("an image", 1024 * GIB)
_PROGRAM = IMAGE_PROGRAMS / "enter.py"
# Level 6 takes three times as long and saves a few per cent.
_LEVEL = 3
# Directories in which every host has its own Python.
_OF_THE_SYSTEM = ("/usr", "/usr/local", "/")
# A Python that starts without the environment, whose files should not be read twice; or else the
# environment's, on hosts without.
_START = 'first=$1; [ -x "$first" ] || first=$2; shift 2; exec "$first" -I -S "$@"'
_SYSTEM_PYTHON = "/usr/bin/python3"


class ImageManifest(NamedTuple):
    """What is known of an image.

    Attributes:
        built: when the build of the generation finished.
        mounts: the directories that the image holds, each under its last name.
    """

    generation: str
    built: str
    mounts: tuple[str, ...]
    sha256: str
    bytes: int


class Packed(NamedTuple):
    """An image, and the two files beside it."""

    image: Path

    @property
    def path(self) -> Path:
        """The manifest."""
        return self.image.with_name(f"{self.image.name}.json")

    @property
    def program(self) -> Path:
        """The program that runs others from the image, which needs no hvdenv."""
        return self.image.with_name(f"{self.image.name}.enter.py")

    def manifest(self) -> ImageManifest:
        """Read the manifest.

        Raises:
            StepError: there is none, or it is malformed.
        """
        try:
            return decode(ImageManifest, read_json(self.path, STATE), lenient=True)
        except (OSError, ValueError, RecursionError, Problem) as error:
            what = "cannot be read" if isinstance(error, OSError) else "is malformed"
            raise StepError(
                f"this manifest of an image {what}: {getattr(error, 'strerror', None) or error}",
                where=str(self.path),
                remedy="make the image again: hvdenv pack RECIPE; or omit it: --no-image",
            ) from error


def default(environment: Environment, identity: str) -> Packed:
    """Where `hvdenv pack` puts the image of a generation."""
    return Packed(environment.store / f"{identity}{IMAGE}")


def contents(environment: Environment, record: GenerationRecord) -> tuple[str, ...]:
    """The directories that the image of a generation holds.

    Of an interpreter that is not the system's, it holds the standard library, which Python reads
    at every start. The program itself and libpython are two files.
    """
    here = environment.generation(record.generation).resolve()
    python = Path(recorded(here, record).python).resolve()
    base = python.parent.parent
    library = base / "lib" / python.name
    own = python.is_relative_to(here) or str(base) in _OF_THE_SYSTEM
    return (str(here),) if own or not (library / "os.py").is_file() else (str(here), str(library))


def make(
    environment: Environment, record: GenerationRecord, to: Path, runner: Runner
) -> ImageManifest:
    """Make the image of a generation, and the manifest beside it.

    Args:
        to: file of the image; replaced if it exists.

    Raises:
        StepError: mksquashfs is missing or fails, or the file cannot be written.
    """
    mounts = contents(environment, record)
    sweep(to.parent, to.name)
    with replacing(to) as temporary:
        _squash(mounts, temporary, runner)
        digest, size = hash_file(temporary, FILE)
        sync(temporary)
    manifest = ImageManifest(
        generation=record.generation,
        built=record.created,
        mounts=mounts,
        sha256=digest,
        bytes=size,
    )
    # The manifest comes last: without it, nothing uses the image.
    write_text(Packed(to).program, read_text(_PROGRAM, OWN))
    write_json(Packed(to).path, encode(manifest))
    return manifest


def _squash(mounts: tuple[str, ...], to: Path, runner: Runner) -> None:
    if not shutil.which("mksquashfs"):
        raise StepError(
            "this host has no mksquashfs",
            remedy="install squashfs-tools, or pack the environment on a host that has it",
        )
    owner = os.stat(mounts[0])
    words = (
        # It takes times from this variable.
        *("env", "-u", "SOURCE_DATE_EPOCH", "mksquashfs", *mounts, str(to)),
        *("-comp", "zstd", "-Xcompression-level", str(_LEVEL), "-mkfs-time", "0", "-no-xattrs"),
        *("-root-mode", "755", "-root-time", "0", "-keep-as-directory", "-noappend"),
        *("-force-uid", str(owner.st_uid), "-force-gid", str(owner.st_gid)),
        *("-processors", str(len(os.sched_getaffinity(0))), "-no-progress", "-quiet"),
        # By default, a file that cannot be read is empty in the image.
        "-exit-on-error",
    )
    outcome = runner.run(Command(words))
    if not outcome:
        raise StepError(
            "mksquashfs failed",
            where=str(to.parent),
            detail=outcome.tail(5),
            remedy="see what it says: it needs space there (or --to FILE elsewhere), permission to"
            " read all files, and version 4.5 or newer with zstd",
        )


def fitting(packed: Packed, environment: Environment, identity: str) -> ImageManifest:
    """The manifest of an image, if it is one of this generation at this path.

    Raises:
        StepError: the manifest cannot be read.
        UsageError: it is of something else.
    """
    manifest, record = packed.manifest(), read_record(environment.record(identity))
    there = packed.image.exists() and packed.program.exists()
    for what, found, expected in (
        ("generation", manifest.generation, identity),
        ("mount points", manifest.mounts, contents(environment, record)),
        ("time of the build", manifest.built, record.created),
        ("size", packed.image.stat().st_size if there else 0, manifest.bytes),
    ):
        if found != expected:
            raise UsageError(
                f"the {what} of this image is {found}, expected {expected}",
                where=str(packed.image),
                remedy="make it again: hvdenv pack RECIPE; or omit it: --no-image",
            )
    return manifest


def before(
    packed: Packed, manifest: ImageManifest, environment: Environment, job: str = ""
) -> tuple[str, ...]:
    """The words before a program that runs from the image.

    Args:
        job: the same for all ranks; by default a new name.
    """
    own = os.path.realpath(inspect_prefix(str(environment.prefix)).python)
    start = ("sh", "-c", _START, "hvdenv", _SYSTEM_PYTHON, own, str(packed.program))
    image = (str(packed.image), manifest.sha256)
    return (*start, *image, job or os.urandom(8).hex(), *manifest.mounts, "--")
