"""The options --image and --no-image: whether programs run from the image of an environment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from hvdenv.cli.options import add, refuse_foreign_path, report
from hvdenv.environments import generations
from hvdenv.errors import UsageError
from hvdenv.model.recipe import Recipe
from hvdenv.packing import use


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
        job: see use.words(); by default a new name.

    Raises:
        UsageError: a named image does not fit.
        UntrustedError: another user could change it.
    """
    environment = generations.at(prefix)
    identity = environment.active()
    if arguments.no_image or not (identity and recipe):
        if arguments.image:
            raise UsageError(
                "only an environment that hvdenv built can have an image",
                where=f"--image {arguments.image}", remedy="omit --image",
            )  # fmt: skip
        return Entry()
    packed, why = use.find(environment, identity, arguments.image)
    if why:
        report(f"note: the image beside the environment is not used: {why}")
    if packed is None:
        return Entry()
    for path in (packed.path, packed.image, packed.program):
        refuse_foreign_path(path, arguments)
    words = use.words(packed, environment, job or use.new_job())
    return Entry(words, packed.source, str(packed.image))
