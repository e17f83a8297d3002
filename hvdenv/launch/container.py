"""Programs in the image of a recipe: which recipes have theirs there, and how they start.

The host's launcher starts ranks, and each of them runs in the image. Nothing is run here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import PurePath

from hvdenv.errors import IncompatibleError
from hvdenv.launch.launchers import LAUNCHERS, Launch, Start
from hvdenv.model.cluster import Container
from hvdenv.model.recipe import Recipe
from hvdenv.sites.hosts import short

# Where the host's Open MPI lies. That of an image would look for its parts there; and if
# the two differ, since the image sets one of them, Open MPI 4 waits for ever in MPI_Init.
_OF_OPEN_MPI = ("OPAL_PREFIX", "PMIX_INSTALL_PREFIX")
# What else of the host would be found in the image first.
_OF_THE_HOST = (*_OF_OPEN_MPI, "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*")


def image_of(recipe: Recipe, folder: str) -> Container | None:
    """The recipe's container if its programs run in the image: where it names one.

    Args:
        recipe: the resolved recipe.
        folder: that a relative path is below.

    Returns:
        The table with the absolute path of the image; None if programs run on the host.
    """
    container = recipe.container
    if container is None or container.image is None:
        return None
    return container._replace(image=os.path.normpath(os.path.join(folder, container.image)))


def inside(container: Container, folder: str, binds: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The words before a program that runs in the image.

    Args:
        container: from image_of().
        folder: where the program starts; / if that does not matter.
        binds: further folders of the host, HERE:THERE, that it only reads.
    """
    return _RUNTIMES[container.runtime](container, folder, binds)


def start_inside(name: str, launch: Launch, words: tuple[str, ...], here: str) -> Start:
    """How a launcher starts ranks in an image.

    Args:
        name: of the launcher.
        launch: what is started.
        words: from inside(); empty where there is no image.
        here: the name of this host.

    Raises:
        IncompatibleError: the launcher is a program of the image, and there are other hosts.
    """
    launcher = LAUNCHERS[name]
    if not words or not launcher.brought:
        return launcher.start(launch._replace(program=(*words, *launch.program)))
    others = [
        host.name for host in launch.hosts if short(host.name) not in ("localhost", short(here))
    ]
    if others or launch.nodes > 1:
        raise IncompatibleError(
            f"{name} is a program of the image: what it starts on other hosts would not be in it",
            where=f"--launcher {name}",
            remedy="take a launcher of the hosts: --launcher mpirun, or srun in a job of Slurm",
        )
    start = launcher.start(launch)
    return start._replace(argv=(*words, *start.argv))


def on_this_host(name: str, launch: Launch, words: tuple[str, ...]) -> Launch:
    """As many ranks as one host has, on this one, where the launcher starts no others.

    Args:
        name: of the launcher.
        launch: what would be started.
        words: from inside(); empty where there is no image.
    """
    if not words or not LAUNCHERS[name].brought:
        return launch
    return launch._replace(
        ranks=launch.per_node, hosts=(), host_list="", hostfile="", ranks_per_node=0, placed=False
    )


def shown(container: Container, folder: str) -> tuple[str, ...]:
    """The folders of the host that ch-run is told to show in an image.

    Args:
        container: from image_of().
        folder: where a program starts; / if that does not matter.
    """
    seen = [each.rpartition(":")[2] for each in (*container.binds, "/tmp")]
    known = folder == "/" or any(PurePath(folder).is_relative_to(each) for each in seen)
    return container.binds if known else (*container.binds, folder)


def _singularity(container: Container, folder: str, binds: tuple[str, ...]) -> tuple[str, ...]:
    """Apptainer and Singularity start in the current folder, which they bind by themselves.

    They put the image's own PATH and LD_LIBRARY_PATH in the place of the host's.
    """
    without = ("env", *(word for name in _OF_OPEN_MPI for word in ("-u", name)))
    gpu = {"nvidia": ("--nv",), "rocm": ("--rocm",), "none": ()}[container.gpu]
    bound = (*container.binds, *(f"{each}:ro" for each in binds))
    words = (word for each in bound for word in ("--bind", each))
    return (*without, container.runtime, "exec", *gpu, *words, str(container.image))


def _ch_run(container: Container, folder: str, binds: tuple[str, ...]) -> tuple[str, ...]:
    """Charliecloud hands on the host's variables; the image's own stand in /ch/environment.

    /tmp is the host's by itself.
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
