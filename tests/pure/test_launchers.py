"""Argument lists of launchers, from the facts that they depend on."""

from __future__ import annotations

import pytest

from hvdenv.errors import IncompatibleError
from hvdenv.launchers import LAUNCHERS, Launch, Mpi, parse_mpi_version

PROGRAM = ("/env/bin/python", "rank.py", "two words", "$HOME;")

VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n": (
        Mpi("Open MPI", "5.0.11")
    ),
    "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n": (
        Mpi("Open MPI", "4.1.4")
    ),
    "mpirun (Open MPI) 3.1.0rc2\n": Mpi("Open MPI", "3.1.0"),
    "mpirun (OpenRTE) 1.10.7\n": Mpi("Open MPI", "1.10.7"),
    "mpirun (IBM Spectrum MPI) 10.3.1.02rtm0\n": Mpi("Spectrum MPI", "10.3.1.02"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.8 Build 20221129 (id: 339ec755a1)\n"
    "Copyright 2003-2022, Intel Corporation.\n": Mpi("Intel MPI", "2021.8"),
    "HYDRA build details:\n    Version:                                 4.1.1\n"
    "    Release Date:                            Wed Feb  1\n": Mpi("Hydra", "4.1.1"),
    "srun: slurm 23.02\n": Mpi("unknown"),
    "": Mpi("unknown"),
}


def launch(mpi: Mpi = Mpi("unknown"), *, ranks: int = 2, root: bool = False) -> Launch:  # noqa: B008
    return Launch(PROGRAM, ranks, 2, root, mpi, ("PATH", "LD_LIBRARY_PATH"), 300)


@pytest.mark.parametrize(("text", "mpi"), VERSIONS.items(), ids=[str(m) for m in VERSIONS.values()])
def test_mpi_version(text: str, mpi: Mpi) -> None:
    assert parse_mpi_version(text) == mpi


@pytest.mark.parametrize(
    ("mpi", "ranks", "between"),
    [
        ("Open MPI 4.1.4", 2, "--bind-to none -x PATH -x LD_LIBRARY_PATH"),
        ("Open MPI 4.1.4", 3, "--bind-to none --oversubscribe -x PATH -x LD_LIBRARY_PATH"),
        ("Open MPI 5.0.11", 2, "--bind-to none -x PATH -x LD_LIBRARY_PATH"),
        (
            "Open MPI 5.0.11", 3,
            "--bind-to none --map-by :OVERSUBSCRIBE -x PATH -x LD_LIBRARY_PATH",
        ),
        ("Spectrum MPI 10.3", 2, "-bind-to none -x PATH -x LD_LIBRARY_PATH"),
        ("Intel MPI 2021.8", 3, "-genvlist PATH,LD_LIBRARY_PATH"),
        ("Hydra 4.1.1", 3, "-genvlist PATH,LD_LIBRARY_PATH"),
        ("unknown ", 3, ""),
    ],
)  # fmt: skip
def test_mpirun(mpi: str, ranks: int, between: str) -> None:
    kind, _, version = mpi.rpartition(" ")
    start = LAUNCHERS["mpirun"].start(launch(Mpi(kind, version), ranks=ranks))  # type: ignore[arg-type]
    assert start.argv == ("mpirun", "-n", str(ranks), *between.split(), *PROGRAM)


@pytest.mark.parametrize(
    ("mpi", "prefixes"),
    [
        (Mpi("Open MPI", "4.1.4"), ["OMPI"]),
        (Mpi("Open MPI", "5.0.11"), ["OMPI", "PRTE"]),
        (Mpi("Hydra", "4.1.1"), []),
    ],
)
def test_root_may_start_ranks(mpi: Mpi, prefixes: list[str]) -> None:
    names = {f"{p}_ALLOW_RUN_AS_ROOT{end}" for p in prefixes for end in ("", "_CONFIRM")}
    as_root = dict(LAUNCHERS["mpirun"].start(launch(mpi, root=True)).env)
    as_user = dict(LAUNCHERS["mpirun"].start(launch(mpi)).env)
    assert as_root.keys() - as_user.keys() == names
    assert not any("ROOT" in name for name in as_user)


def test_horovodrun_gloo() -> None:
    start = LAUNCHERS["horovodrun-gloo"].start(launch(ranks=4))
    words = "horovodrun -np 4 -H localhost:4 --disable-cache --start-timeout 300 --gloo"
    assert start.argv == (*words.split(), *PROGRAM)


def test_horovodrun_mpi_does_not_know_open_mpi_5() -> None:
    four = LAUNCHERS["horovodrun-mpi"].start(launch(Mpi("Open MPI", "4.1.4")))
    assert four.argv[-len(PROGRAM) - 1 :] == ("--mpi", *PROGRAM)
    with pytest.raises(IncompatibleError, match=r"5\.0\.11") as caught:
        LAUNCHERS["horovodrun-mpi"].start(launch(Mpi("Open MPI", "5.0.11")))
    assert "mpirun" in caught.value.remedy


def test_each_launcher_names_its_controller() -> None:
    assert {launcher.controller for launcher in LAUNCHERS.values()} == {"MPI", "Gloo"}
