"""How programs use the image of an environment: words before the command of each rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from hvdenv import IMAGE_PROGRAMS
from hvdenv.command import Command
from hvdenv.environments.generations import IMAGE, Environment
from hvdenv.environments.installation import inspect_prefix
from hvdenv.errors import StepError, UsageError
from hvdenv.packing.manifest import Packed, default_image, manifest_of, misfit, read
from hvdenv.runner import Runner
from hvdenv.schema import decode

# A Python that starts without the environment, whose files should not be read twice; or else the
# environment's, on hosts without.
_START = 'first=$1; [ -x "$first" ] || first=$2; shift 2; exec "$first" -I -S "$@"'
_SYSTEM_PYTHON = "/usr/bin/python3"


class Host(NamedTuple):
    """What a host has for images (hvdenv/standalone/image/enter.py).

    Attributes:
        squashfuse: path of the program that mounts images; empty if there is none.
    """

    squashfuse: str = ""
    fuse: bool = False
    namespaces: bool = False

    @property
    def lacks(self) -> str:
        """Why it cannot mount images; empty if it can."""
        lacking = (
            (self.squashfuse, "squashfuse (install squashfuse, or load Apptainer's module)"),
            (self.fuse, "access to /dev/fuse"),
            (self.namespaces, "user namespaces for users"),
        )
        return " and ".join(what for there, what in lacking if not there)


def detect(environment: Environment, runner: Runner) -> Host:
    words = (*_python(environment), str(IMAGE_PROGRAMS / "enter.py"), "--detect")
    output = runner.run(Command(words, timeout=60.0)).output
    try:
        return decode(Host, json.loads(output), lenient=True)
    except ValueError:
        return Host()


def find(environment: Environment, identity: str, named: Path | None) -> tuple[Packed | None, str]:
    """The image to use, and why an existing one is not used. A named one must be used.

    Raises:
        UsageError: the named image does not fit this generation.
        StepError: the manifest of the named image cannot be read.
    """
    image = named or default_image(environment, identity)
    if not (named or manifest_of(image).exists()):
        others = sorted(environment.store.glob(f"*{IMAGE}.json"))
        held = " and ".join(each.name.partition(IMAGE)[0] for each in others)
        why = f"it holds generation {held}, and the active one is {identity}; for a new image: hvdenv pack RECIPE"
        return None, why if held else ""
    try:
        packed = read(image.absolute())
    except StepError as error:
        if named:
            raise
        return None, f"{error.message}; for a new image: hvdenv pack RECIPE"
    why = misfit(packed, environment, identity)
    if named and why:
        raise UsageError(
            f"this image does not fit the environment: {why}", where=str(image),
            remedy="make it again: hvdenv pack RECIPE; or use the environment without it: --no-image",
        )  # fmt: skip
    return (None, why) if why else (packed, "")


def words(packed: Packed, environment: Environment, job: str) -> tuple[str, ...]:
    """The words before a program that runs from the image; ``job`` is the same for all ranks."""
    program = str(packed.program)
    return (*_python(environment), program, str(packed.path), packed.digest, job, "--")


def new_job() -> str:
    return os.urandom(8).hex()


def _python(environment: Environment) -> tuple[str, ...]:
    own = os.path.realpath(inspect_prefix(str(environment.prefix)).python)
    return ("sh", "-c", _START, "hvdenv", _SYSTEM_PYTHON, own)
