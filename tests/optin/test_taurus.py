"""The recipe `taurus` built on a stand-in, in a workspace: modules' MPI and torch, Slurm.

Not part of `make test`, since it compiles Horovod once more for five minutes: `python -m pytest
tests/optin/test_taurus.py`. HVDENV_TEST_HOME names a directory with the environment `local`; without
it, one is built. docs/explanation/measurements.md has the result.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.real.conftest import cli, home, local_prefix
from tests.real.test_seed_clusters import HOSTS, Taurus, conda, site, taurus

__all__ = ["cli", "conda", "home", "local_prefix", "site", "taurus"]


def test_taurus_is_built_in_a_workspace(taurus: Taurus) -> None:
    """Horovod against the modules' MPI and the torch of the modules' Python, beside its Horovod."""
    hvdenv = taurus.cli()
    assert "not allocated, or it has expired" in hvdenv("verify", *taurus.recipe, code=2).stderr
    built = hvdenv("build", *taurus.recipe)
    assert (taurus.workspaces / "allocated").read_text() == "python_virtual_environment 30\n"
    (workspace,) = taurus.workspaces.glob("scratch/*-python_virtual_environment")
    prefix = workspace / "taurus-cpu+cpu"
    assert f"{prefix}/activate.sh" in built.stdout
    record = json.loads((prefix / "hvdenv.json").read_text())
    loaded = record["modules"]["run"]["loaded"]
    assert loaded[0] == "modenv/ml" and loaded[-1] == "OpenMPI/3.1.4-gcccuda-2018b"
    assert "OpenMPI/3.1.1-gcccuda-2018b" not in loaded and "modenv/scs5" not in loaded
    assert "CMake/3.11.4-GCCcore-7.3.0" in record["modules"]["build"]["loaded"]
    assert "nothing to do" in hvdenv("build", *taurus.recipe).stdout

    hosts = ",".join(f"{host}:2" for host in HOSTS)
    verified = hvdenv("verify", *taurus.recipe, "--hosts", hosts, "--json")
    extension = next(f for f in verified.json["findings"] if f["check"] == "extension")
    assert (extension["subject"], extension["status"]) == ("torch", "pass")
    assert f"horovod: {prefix.resolve()}/venv/lib" in extension["evidence"]
    run_in_job(taurus, prefix.resolve() / "venv")


def run_in_job(taurus: Taurus, venv: Path) -> None:
    """The batch script loads the modules anew on the nodes; the head has others loaded."""
    ask = "import os, horovod; print(os.uname().nodename, horovod.__file__, os.environ['MODENV'])"
    sizes = ("--nodes", "2", "--set", "job.memory=1G", "--set", "job.cpus_per_rank=1")
    words = (*sizes, "--output", str(taurus.workspaces / "out"))
    job = taurus.cli()(
        "job", *taurus.recipe, *words, "--submit", "--", "python", "-c", ask, timeout=600
    )
    (package,) = venv.glob("lib/python3.*/site-packages/horovod/__init__.py")
    # Among what Lmod says about modules that it swaps.
    lines = [line for line in job.stdout.splitlines() if line.startswith(HOSTS)]
    assert sorted(lines) == [f"{host} {package} ml" for host in HOSTS for _ in range(2)]
