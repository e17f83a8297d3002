"""Programs that build images from definitions: their command lines, and why a build failed."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.base.command import Command, Outcome
from hvdenv.base.errors import IncompatibleError, StepError, UsageError
from hvdenv.knowledge.diagnosis import explain

FormatName = Literal["singularity", "docker"]
# The first one on PATH builds the format.
TOOLS: Mapping[FormatName, tuple[str, ...]] = {
    "singularity": ("apptainer", "singularity"),
    "docker": ("podman", "buildah", "docker"),
}


class Build(NamedTuple):
    """What to build an image from, and with what.

    Attributes:
        image: file of the image, or its tag if the tool stores images itself.
        binds: files and directories of this machine for the build, HOST or HOST:IMAGE.
    """

    tool: str
    definition: Path
    image: str
    root: bool
    binds: tuple[str, ...] = ()


def build_command(build: Build) -> Command:
    """The command that builds an image.

    Raises:
        IncompatibleError: the tool cannot mount directories.
    """
    tool, definition = build.tool, str(build.definition)
    if tool in TOOLS["singularity"]:
        words = [tool, "build", *([] if build.root else ["--fakeroot"])]
        words += [word for bind in build.binds for word in ("--bind", bind)]
        return Command((*words, build.image, definition))
    if tool == "docker" and build.binds:
        raise IncompatibleError(
            "docker cannot mount a directory of this machine in a build",
            remedy="build with podman or buildah, or without --bind",
        )
    verb = "bud" if tool == "buildah" else "build"
    words = [tool, verb, "--tag", build.image, "--file", definition]
    for bind in build.binds:
        source, _, target = bind.partition(":")
        words += ["--volume", f"{source}:{target or source}:ro"]
    return Command((*words, str(build.definition.parent)))


def mount_points(binds: tuple[str, ...]) -> str:
    """The section of a Singularity definition that creates what --bind mounts on.

    Raises:
        UsageError: a path has characters with a meaning in definitions.
    """
    if not binds:
        return ""
    lines = ["%setup", 'root="${APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}"']
    for bind in binds:
        if not re.fullmatch(r"/[^\x00-\x1f{}%:]*(:/[^\x00-\x1f{}%:]*)?", bind):
            raise UsageError(
                f"--bind: {bind!r} is not an absolute path, or has control characters, braces or %",
                remedy="write /HOST or /HOST:/IMAGE",
            )
        source, _, target = bind.partition(":")
        path = Path(target or source)
        folder, name = (f'"$root"{shlex.quote(str(each))}' for each in (path.parent, path))
        lines.append(
            f"if [ -d {shlex.quote(source)} ]; then mkdir -p {name};"
            f" else mkdir -p {folder} && touch {name}; fi"
        )
    return "\n" + "\n    ".join(lines) + "\n"


def failed(build: Build, outcome: Outcome) -> StepError:
    """The error for a build that failed."""
    tail = outcome.tail()
    known = explain(tail)
    return StepError(
        f"{build.tool} could not build the image" + (f": {known.cause}" if known else ""),
        where=build.image,
        detail=tail,
        remedy=known.remedy
        if known
        else "see the last lines above; `hvdenv plan RECIPE --format bash` prints what runs in the"
        " image",
    )
