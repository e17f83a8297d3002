"""The manifest of an image: what the image holds, where it is mounted, and its hash.

The image of a generation is beside it in the store, so that `envs prune` removes both. The
manifest has the name of the image and ``.json``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from hvdenv.contents.record import GenerationRecord
from hvdenv.environments.generations import IMAGE, Environment, read_record
from hvdenv.environments.installation import recorded
from hvdenv.errors import StepError
from hvdenv.places import blocked, reporting
from hvdenv.reading import OWN, STATE, hash_file, read_file
from hvdenv.schema import Problem, decode

FORMAT = 1
# Folders in which every host has its own Python.
_OF_THE_SYSTEM = ("/usr", "/usr/local", "/")


class Mounted(NamedTuple):
    """A folder of an image, and the path at which it is mounted."""

    folder: str
    at: str


class Manifest(NamedTuple):
    """What is known of an image.

    Attributes:
        record_sha256: of the generation's record, which vouches for the rest of it.
        outside: what programs of the environment use and the image does not hold.
        copy_to: folder on each host to which the image is copied first; $NAME is replaced there.
    """

    recipe: str
    variants: tuple[str, ...]
    generation: str
    record_sha256: str
    mounts: tuple[Mounted, ...]
    outside: tuple[str, ...]
    sha256: str
    bytes: int
    files: int
    unpacked_bytes: int
    copy_to: str
    made_by: str
    program_sha256: str


class Packed(NamedTuple):
    """A manifest and its file; ``data`` is what was read from it."""

    path: Path
    data: bytes
    manifest: Manifest

    @property
    def image(self) -> Path:
        return self.path.with_suffix("")

    @property
    def program(self) -> Path:
        """The program that runs others from the image, which needs no hvdenv."""
        return program_of(self.image)

    @property
    def source(self) -> str:
        """How /proc/self/mountinfo names the mount of the image."""
        return f"hvdenv:{self.manifest.sha256}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def default_image(environment: Environment, identity: str) -> Path:
    """Where `hvdenv pack` puts the image of a generation."""
    return environment.store / f"{identity}{IMAGE}"


def manifest_of(image: Path) -> Path:
    return image.with_name(f"{image.name}.json")


def program_of(image: Path) -> Path:
    return image.with_name(f"{image.name}.enter.py")


def contents(
    generation: Path, record: GenerationRecord
) -> tuple[tuple[Mounted, ...], tuple[str, ...]]:
    """What an image holds, and what its programs use outside of it.

    Of an interpreter that is not the system's, the image holds the standard library, which Python
    reads at every start. The program itself and libpython are two files.
    """
    here = generation.resolve()
    mounts = (Mounted(here.name, str(here)),)
    python = Path(recorded(generation, record).python).resolve()
    if python.is_relative_to(here):
        return mounts, ()
    base = python.parent.parent
    library = base / "lib" / python.name
    if str(base) in _OF_THE_SYSTEM or not (library / "os.py").is_file():
        return mounts, (str(python),)
    return (*mounts, Mounted(library.name, str(library))), (str(python),)


def read(image: Path) -> Packed:
    """Read the manifest of an image.

    Raises:
        StepError: there is none, or it is malformed.
    """
    path = manifest_of(image)
    try:
        data = read_file(path, STATE).data
        document = json.loads(data)
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ValueError(f"it does not have format {FORMAT}")
        return Packed(path, data, decode(Manifest, document))
    except OSError as error:
        raise blocked(path, error, "read") from error
    except (ValueError, RecursionError, Problem) as error:
        raise StepError(
            f"this manifest of an image is malformed: {error}", where=str(path),
            remedy="make the image again (hvdenv pack RECIPE), or use the environment without it:"
            " --no-image",
        ) from error  # fmt: skip


def record_digest(environment: Environment, identity: str) -> str:
    """The SHA-256 of the record of a generation.

    Raises:
        StepError: it cannot be read.
    """
    path = environment.record(identity)
    with reporting(path, "read"):
        return hash_file(path, STATE)[0]


def misfit(packed: Packed, environment: Environment, identity: str) -> str:
    """Why an image is not one of this generation at this path; empty if it is."""
    manifest = packed.manifest
    if manifest.generation != identity:
        return f"it holds generation {manifest.generation}, and the active one is {identity}"
    record = read_record(environment.record(identity))
    mounts, _ = contents(environment.generation(identity), record)
    if manifest.mounts != mounts:
        return f"it was packed for {_listed(manifest.mounts)}, and the generation uses {_listed(mounts)}"
    if manifest.record_sha256 != record_digest(environment, identity):
        return "the record of the generation differs from the one that was packed"
    try:
        size = packed.image.stat().st_size
    except OSError as error:
        return f"the image cannot be read: {error.strerror}"
    try:
        if hash_file(packed.program, OWN)[0] != manifest.program_sha256:
            return f"{packed.program} differs from the one that was packed"
    except OSError as error:
        return f"{packed.program} cannot be read: {error.strerror}"
    return "" if size == manifest.bytes else f"it has {size} bytes instead of {manifest.bytes}"


def _listed(mounts: tuple[Mounted, ...]) -> str:
    return " and ".join(each.at for each in mounts) or "no folder"
