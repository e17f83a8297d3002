"""The variant of `local` with Open MPI 5, compiled and verified over MPI and Gloo (six minutes)."""

from __future__ import annotations

from pathlib import Path

from tests.real.conftest import Cli


def test_open_mpi_5(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home")
    words = ("local", "--variant", "torch", "--variant", "openmpi5")
    cli("build", *words)
    assert cli("verify", *words, "--json").json["verdict"] == "pass"
