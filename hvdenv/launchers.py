"""How each launcher starts N ranks: facts in, an argument list out.

To add a launcher, write one function and enter it in LAUNCHERS.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from hvdenv.errors import IncompatibleError

Kind = Literal["Open MPI", "Spectrum MPI", "Intel MPI", "Hydra", "unknown"]

_VERSIONS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("Spectrum MPI", re.compile(r"\(IBM Spectrum MPI\) (?P<version>[\d.]+)")),
    ("Open MPI", re.compile(r"\((?:Open MPI|OpenRTE)\) (?P<version>[\d.]+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version (?P<version>[\d.]+)")),
    ("Hydra", re.compile(r"HYDRA build details:\s+Version:\s+(?P<version>[\d.]+)")),
)


class Mpi(NamedTuple):
    """An MPI implementation as its mpirun names itself; the version may be empty."""

    kind: Kind
    version: str = ""

    @property
    def major(self) -> int:
        """The first number of the version; 0 if it is not known."""
        return int(self.version.split(".")[0] or 0)


class Launch(NamedTuple):
    """What a launcher has to know.

    Attributes:
        program: what each rank runs.
        ranks: how many.
        cores: how many cores there are for them.
        root: whether root starts them.
        mpi: the MPI implementation; only what starts ranks by MPI looks at it.
        exports: names of variables that every rank needs.
        start_timeout: seconds that the launcher may take for its own preparations.
    """

    program: tuple[str, ...]
    ranks: int
    cores: int
    root: bool
    mpi: Mpi = Mpi("unknown")
    exports: tuple[str, ...] = ()
    start_timeout: int = 60


class Start(NamedTuple):
    """How to start it: the arguments, and variables for the launcher itself."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


class Launcher(NamedTuple):
    """A way to start ranks, and the controller that Horovod should use under it."""

    controller: str
    start: Callable[[Launch], Start]


def parse_mpi_version(text: str) -> Mpi:
    """The implementation in the output of ``mpirun --version``."""
    for kind, pattern in _VERSIONS:
        if found := pattern.search(text):
            return Mpi(kind, found["version"].strip("."))
    return Mpi("unknown")


def mpirun(launch: Launch) -> Start:
    """Ranks started by the MPI's own mpirun."""
    argv: tuple[str, ...] = ("mpirun", "-n", str(launch.ranks))
    if launch.mpi.kind == "Open MPI":
        argv += ("--bind-to", "none", *_crowded(launch))
        argv += tuple(word for name in launch.exports for word in ("-x", name))
    elif launch.mpi.kind == "Spectrum MPI":
        argv += ("-bind-to", "none")
        argv += tuple(word for name in launch.exports for word in ("-x", name))
    elif launch.mpi.kind in ("Intel MPI", "Hydra") and launch.exports:
        argv += ("-genvlist", ",".join(launch.exports))
    return Start((*argv, *launch.program), _open_mpi_environment(launch))


def horovodrun_gloo(launch: Launch) -> Start:
    """Ranks started by Horovod's launcher, over Gloo."""
    return Start((*_horovodrun(launch), "--gloo", *launch.program))


def horovodrun_mpi(launch: Launch) -> Start:
    """Ranks started by Horovod's launcher, which starts mpirun.

    Raises:
        IncompatibleError: Open MPI 5 takes none of the arguments that Horovod writes.
    """
    if launch.mpi.kind == "Open MPI" and launch.mpi.major >= 5:
        raise IncompatibleError(
            f"horovodrun --mpi cannot start anything with Open MPI {launch.mpi.version}:"
            " it passes `-bind-to` with one dash, which Open MPI 5 no longer reads",
            remedy="use the launcher mpirun, or Open MPI 4.1",
        )
    return Start((*_horovodrun(launch), "--mpi", *launch.program), _open_mpi_environment(launch))


LAUNCHERS: dict[str, Launcher] = {
    "mpirun": Launcher("MPI", mpirun),
    "horovodrun-gloo": Launcher("Gloo", horovodrun_gloo),
    "horovodrun-mpi": Launcher("MPI", horovodrun_mpi),
}


def _horovodrun(launch: Launch) -> tuple[str, ...]:
    # Its cache lies in ~/.horovod and keeps answers of another installation for an hour.
    return (
        "horovodrun",
        "-np",
        str(launch.ranks),
        "-H",
        f"localhost:{launch.ranks}",
        "--disable-cache",
        "--start-timeout",
        str(launch.start_timeout),
    )


def _crowded(launch: Launch) -> tuple[str, ...]:
    if launch.ranks <= launch.cores:
        return ()
    return ("--map-by", ":OVERSUBSCRIBE") if launch.mpi.major >= 5 else ("--oversubscribe",)


def _open_mpi_environment(launch: Launch) -> tuple[tuple[str, str], ...]:
    """Ranks that wait give way to others, and root may start them at all."""
    if launch.mpi.kind != "Open MPI":
        return ()
    names = ["OMPI_MCA_mpi_yield_when_idle"]
    if launch.root:
        prefixes = ("OMPI", "PRTE") if launch.mpi.major >= 5 else ("OMPI",)
        for prefix in prefixes:
            names += [f"{prefix}_ALLOW_RUN_AS_ROOT", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"]
    return tuple((name, "1") for name in names)
