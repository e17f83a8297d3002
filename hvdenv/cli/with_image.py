"""The options --image and --no-image: whether programs run from the image of an environment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from hvdenv.cli.options import add, refuse_foreign_path, report
from hvdenv.environments import generations
from hvdenv.environments.generations import IMAGE
from hvdenv.errors import HvdenvError, UsageError
from hvdenv.model.recipe import Recipe
from hvdenv.packing import image
from hvdenv.packing.image import Packed


class Entry(NamedTuple):
    """How programs enter an image; all are empty without one.

    Attributes:
        words: before the program of each rank.
        source: how the kernel names the mount.
        path: of the image.
    """

    words: tuple[str, ...] = ()
    source: str = ""
    path: str = ""


def add_image(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    add(
        group, "--image FILE",
        "run from this image (default: the one that `hvdenv pack` made beside the environment)",
        type=Path,
    )  # fmt: skip
    add(group, "--no-image", "run from the environment's files, not its image")


def entry_of(
    arguments: argparse.Namespace, prefix: Path, recipe: Recipe | None, job: str = ""
) -> Entry:
    """How programs of an environment enter its image.

    Args:
        recipe: of the environment; None if hvdenv did not build it.
        job: see image.before().

    Raises:
        HvdenvError: a named image does not fit, or cannot be read.
        UntrustedError: another user could change it.
    """
    environment = generations.at(prefix)
    identity = environment.active()
    if arguments.image and not (identity and recipe):
        raise UsageError(
            "only an environment that hvdenv built can have an image",
            where=f"--image {arguments.image}", remedy="omit --image",
        )  # fmt: skip
    # The one of this generation first: others only say that there is an older one.
    found = environment.store.glob(f"*{IMAGE}")
    images = sorted(found, key=lambda each: each != image.default(environment, identity).image)
    if arguments.image:
        images = [arguments.image.absolute()]
    if arguments.no_image or not (identity and recipe and images):
        return Entry()
    packed = Packed(images[0])
    try:
        manifest = image.fitting(packed, environment, identity)
    except HvdenvError as error:
        if arguments.image:
            raise
        report(f"note: the image beside the environment is not used: {error.message}")
        report("for a new image: hvdenv pack RECIPE")
        return Entry()
    for path in (packed.path, packed.image, packed.program):
        refuse_foreign_path(path, arguments)
    words = image.before(packed, manifest, environment, job)
    return Entry(words, f"hvdenv:{manifest.sha256}", str(packed.image))
