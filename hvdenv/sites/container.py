"""Programs in the image of a recipe: which recipes have one, and how to start programs in it.

The host's launcher starts the ranks, and each of them runs in the image. Nothing is run here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import PurePath

from hvdenv.base.errors import IncompatibleError
from hvdenv.model.cluster import Container
from hvdenv.model.recipe import Recipe
from hvdenv.sites.hosts import short
from hvdenv.sites.launchers import Launch, Start, named

# The directory of the host's Open MPI. The Open MPI of an image would look for its parts there. If
# the image sets one of the two, they differ, and Open MPI 4 hangs in MPI_Init.
_OF_OPEN_MPI = ("OPAL_PREFIX", "PMIX_INSTALL_PREFIX")
# Other variables of the host that take precedence in the image.
_OF_THE_HOST = (*_OF_OPEN_MPI, "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*")


def recipe_image(recipe: Recipe, folder: str) -> Container | None:
    """The recipe's container with the absolute path of its image; None if it names no image.

    Programs of a recipe that names an image run in it. Relative paths start at ``folder``.
    """
    container = recipe.container
    if container is None or container.image is None:
        return None
    return container._replace(image=os.path.normpath(os.path.join(folder, container.image)))


def inside(container: Container, folder: str, binds: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The words before a program that runs in the image.

    Args:
        folder: working directory of the program; / if that does not matter.
        binds: more directories of the host, HOST:IMAGE, mounted read-only.
    """
    return _RUNTIMES[container.runtime](container, folder, binds)


def start_in_image(name: str, launch: Launch, words: tuple[str, ...], host: str) -> Start:
    """How a launcher starts ranks in an image.

    Args:
        words: from inside(); empty without an image.

    Raises:
        IncompatibleError: the launcher is a program of the image, and there are other hosts.
    """
    launcher = named(name, launch.settings.launchers)
    if not words or not launcher.provided:
        return launcher.start(launch._replace(program=(*words, *launch.program)))
    others = [
        each.name for each in launch.hosts if short(each.name) not in ("localhost", short(host))
    ]
    if others or launch.nodes > 1:
        raise IncompatibleError(
            f"{name} is a program of the image, but ranks on other hosts would not be in the image",
            where=f"--launcher {name}",
            remedy="use a launcher of the hosts: --launcher mpirun, or srun in a job of Slurm",
        )
    start = launcher.start(launch)
    return start._replace(argv=(*words, *start.argv))


def launch_here(name: str, launch: Launch, words: tuple[str, ...]) -> Launch:
    """The ranks of one host, on this one, if the launcher is a program of the image."""
    if not words or not named(name, launch.settings.launchers).provided:
        return launch
    return launch._replace(
        ranks=launch.per_node, hosts=(), host_list="", hostfile="", ranks_per_node=0, placed=False
    )


def shown(container: Container, folder: str) -> tuple[str, ...]:
    """The directories of the host that ch-run mounts; ``folder`` is the program's working directory."""
    seen = [each.rpartition(":")[2] for each in (*container.binds, "/tmp")]
    known = folder == "/" or any(PurePath(folder).is_relative_to(each) for each in seen)
    return container.binds if known else (*container.binds, folder)


def _singularity(container: Container, folder: str, binds: tuple[str, ...]) -> tuple[str, ...]:
    """Apptainer and Singularity start in the current directory, which they mount by themselves.

    They replace the host's PATH and LD_LIBRARY_PATH with the image's own.
    """
    without = ("env", *(word for name in _OF_OPEN_MPI for word in ("-u", name)))
    gpu = {"nvidia": ("--nv",), "rocm": ("--rocm",), "none": ()}[container.gpu]
    bound = (*container.binds, *(f"{each}:ro" for each in binds))
    words = (word for each in bound for word in ("--bind", each))
    return (*without, container.runtime, "exec", *gpu, *words, str(container.image))


def _ch_run(container: Container, folder: str, binds: tuple[str, ...]) -> tuple[str, ...]:
    """Charliecloud passes on the host's variables; the image's own are in /ch/environment.

    It mounts /tmp by itself.
    """
    return (
        *("ch-run", *(f"--unset-env={name}" for name in _OF_THE_HOST), "--set-env"),
        *(f"--bind={each}" for each in (*shown(container, folder), *binds)),
        *(f"--cd={folder}", str(container.image), "--"),
    )


_RUNTIMES: Mapping[str, Callable[[Container, str, tuple[str, ...]], tuple[str, ...]]] = {
    "singularity": _singularity,
    "apptainer": _singularity,
    "ch-run": _ch_run,
}
