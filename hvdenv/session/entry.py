"""How programs enter the image of an environment, if they run from one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hvdenv.environments import generations
from hvdenv.environments.generations import IMAGE
from hvdenv.errors import HvdenvError, UsageError
from hvdenv.model.recipe import Recipe
from hvdenv.packing import image
from hvdenv.packing.image import Packed
from hvdenv.session.output import report
from hvdenv.session.request import Request


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


def find_entry(request: Request, prefix: Path, recipe: Recipe | None, job: str = "") -> Entry:
    """How programs of an environment enter the image that is requested, or beside it.

    Args:
        recipe: of the environment; None if hvdenv did not build it.
        job: see image.before().

    Raises:
        HvdenvError: a named image does not fit, or cannot be read.
        UntrustedError: another user could change it.
    """
    environment = generations.at(prefix)
    identity = environment.active()
    if request.image and not (identity and recipe):
        raise UsageError(
            "only an environment that hvdenv built can have an image",
            where=f"--image {request.image}", remedy="omit --image",
        )  # fmt: skip
    # The one of this generation first: others only say that there is an older one.
    found = environment.store.glob(f"*{IMAGE}")
    images = sorted(found, key=lambda each: each != image.default(environment, identity).image)
    if request.image:
        images = [request.image.absolute()]
    if request.no_image or not (identity and recipe and images):
        return Entry()
    packed = Packed(images[0])
    try:
        manifest = image.fitting(packed, environment, identity)
    except HvdenvError as error:
        if request.image:
            raise
        report(f"note: the image beside the environment is not used: {error.message}")
        report("for a new image: hvdenv pack RECIPE")
        return Entry()
    for path in (packed.path, packed.image, packed.program):
        request.gate.refuse_path(path)
    words = image.before(packed, manifest, environment, job)
    return Entry(words, f"hvdenv:{manifest.sha256}", str(packed.image))
