"""What a format of image definitions consists of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.command import Command
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import Plan

FormatName = Literal["singularity", "docker"]

# Where the environment and the script that makes it are in an image.
FOLDER = Path("/opt/horovod")
SCRIPT = "/usr/local/share/horovod/build.sh"


class Build(NamedTuple):
    """What to build an image from, and with what.

    Attributes:
        image: file of the image, or its tag if the tool stores images itself.
        binds: files and folders of this machine for the build, HOST or HOST:IMAGE.
    """

    tool: str
    definition: Path
    image: str
    root: bool
    binds: tuple[str, ...] = ()


class Format(NamedTuple):
    """All that hvdenv knows about one format; hpccm knows its syntax.

    Attributes:
        tools: programs that build images from it; the first on PATH does.
        is_file: whether an image is a file, and not a tag in the tool's own storage.
        runscript: lines that say what the image does when it is run.
        mount_points: lines for a definition that is built with binds.
    """

    tools: tuple[str, ...]
    is_file: bool
    environment: Callable[[Recipe, Plan], str]
    build: Callable[[Build], Command]
    runscript: str = ""
    mount_points: Callable[[tuple[str, ...]], str] = lambda binds: ""


def mpi_variables(recipe: Recipe) -> dict[str, str]:
    """Variables that Open MPI needs in an image.

    Each rank may be in a user namespace of its own, which may not read another's memory.
    """
    if recipe.mpi is None or recipe.mpi.kind != "openmpi":
        return {}
    if (recipe.mpi.version or "").startswith("5."):
        return {"OMPI_MCA_smsc": "^cma"}
    return {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
