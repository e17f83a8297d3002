"""Definitions for Apptainer and Singularity."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hvdenv.command import Command
from hvdenv.errors import UsageError
from hvdenv.model.recipe import Recipe
from hvdenv.plans.images.formats import FOLDER, Build, Format, mpi_variables
from hvdenv.plans.plan import Plan


def _environment(recipe: Recipe, plan: Plan) -> str:
    """The section %environment, which overrides what the host's mpirun or modules pass on.

    Apptainer passes on the host's value of a variable that is unset here. Open MPI and Python
    treat empty variables as unset, so these are set to the empty string.
    """
    lines = [
        "%environment",
        "unset OPAL_PREFIX",
        f". {FOLDER}/activate.sh",
        *(f'export {name}="${{{name}-}}"' for name in ("OPAL_PREFIX", "PYTHONHOME", "PYTHONPATH")),
        # Set by the host's mpirun; Open MPI 4 hangs if the two differ.
        'export PMIX_INSTALL_PREFIX="$OPAL_PREFIX"',
        *(f"export {name}={shlex.quote(value)}" for name, value in mpi_variables(recipe).items()),
    ]
    return "\n    ".join(lines)


def _build(build: Build) -> Command:
    words = [build.tool, "build", *([] if build.root else ["--fakeroot"])]
    words += [word for bind in build.binds for word in ("--bind", bind)]
    return Command((*words, build.image, str(build.definition)))


def mount_points(binds: tuple[str, ...]) -> str:
    """A section that creates the paths in the image that --bind mounts on.

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


FORMAT = Format(
    tools=("apptainer", "singularity"),
    is_file=True,
    environment=_environment,
    runscript='%runscript\n    [ $# -gt 0 ] || set -- python\n    exec "$@"',
    build=_build,
    mount_points=mount_points,
)
