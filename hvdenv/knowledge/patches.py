"""Horovod's releases, and hvdenv's patches of their sources."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from hvdenv.base.errors import UsageError
from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import decode, parse_toml
from hvdenv.model.recipe import Specifier

_RELEASES = Path(__file__).with_name("horovod_releases.toml")


@lru_cache(maxsize=1)
def releases() -> dict[str, str]:
    """The hash of each release's source archive by its version, oldest first."""
    return decode(dict[str, str], parse_toml(read_text(_RELEASES, OWN)))


FOLDER = Path(__file__).parent / "patches"
# The digest of each set of patches so far, one on a line.
SETS = Path(__file__).parent / "patch_sets.txt"


class Edit(NamedTuple):
    """Replaces a text that occurs exactly once in a source file."""

    file: str
    find: str
    replace: str


class Patch(NamedTuple):
    """One change to the source.

    Attributes:
        name: the file's name.
        summary: what it changes.
        reason: why it is needed.
        upstream: the corresponding upstream change, or why there is none.
        proven: what was tested with it.
        horovod, torch, tensorflow: versions that it applies to; all given ones must match, and
            their packages must be installed.
        edit: the replacements.
    """

    name: str
    summary: str
    reason: str
    upstream: str
    proven: str
    horovod: Specifier
    edit: tuple[Edit, ...]
    torch: Specifier | None = None
    tensorflow: Specifier | None = None


def read_patch(path: Path) -> Patch:
    document = parse_toml(read_text(path, OWN))
    # Source text holds line breaks, which decode() refuses in every other string.
    edits = tuple(Edit(**edit) for edit in document.pop("edit"))
    return decode(Patch, {**document, "name": path.stem, "edit": []})._replace(edit=edits)


@lru_cache(maxsize=1)
def all_patches() -> tuple[Patch, ...]:
    """All patches, in the order in which they are applied (by name)."""
    return tuple(read_patch(path) for path in sorted(FOLDER.glob("*.toml")))


def applicable(versions: Mapping[str, str]) -> tuple[Patch, ...]:
    """Patches for these versions of horovod, torch and tensorflow."""
    return tuple(
        patch
        for patch in all_patches()
        if all(
            name in versions and SpecifierSet(wanted).contains(versions[name], prereleases=True)
            for name in ("horovod", "torch", "tensorflow")
            if (wanted := getattr(patch, name))
        )
    )


def set_digest(patches: Iterable[Patch]) -> str:
    """Hash of what patches change, and in which versions."""
    content = [
        (each.name, each.horovod, each.torch, each.tensorflow, each.edit) for each in patches
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def set_number() -> int:
    """The number of this set of patches, which grows with each change of a patch.

    Raises:
        UsageError: the patches were changed and have no number.
    """
    digest, known = set_digest(all_patches()), read_text(SETS, OWN).split()
    if digest not in known:
        raise UsageError(
            "the patches were changed, and this set of them has no number",
            where=str(FOLDER),
            remedy=f"echo {digest} >> {SETS}",
        )
    return known.index(digest) + 1
