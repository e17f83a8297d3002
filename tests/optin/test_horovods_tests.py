"""Horovod's own tests, run in a real environment.

Not part of `make test`: they take half an hour and are not in this project. Name a checkout of the
Horovod that the environment has:

    git clone --branch v0.28.1 https://github.com/horovod/horovod
    HVDENV_TEST_HOROVOD=horovod python -m pytest tests/optin/test_horovods_tests.py

HVDENV_TEST_PREFIX names the environment; without it, one is built. pytest and what else the tests
import is installed into a temporary directory. docs/explanation/measurements.md has the results.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation
from hvdenv.verification.setup import Setup
from tests.real.conftest import Cli, cli, home, local_prefix, original, runner

__all__ = ["cli", "home", "local_prefix", "original", "runner"]
PACKAGES = ("pytest", "mock", "parameterized", "cloudpickle")
# The files that need neither a GPU nor a cluster.
OF_RANKS = (
    "parallel/test_torch.py",
    "parallel/test_adasum_pytorch.py",
    "parallel/test_tensorflow.py",
    "parallel/test_tensorflow2_keras.py",
    "parallel/test_adasum_tensorflow.py",
)
ALONE = (
    "single/test_run.py",
    "single/test_util.py",
    "single/test_elastic_driver.py",
    "single/test_elastic_discovery.py",
    "single/test_elastic_run.py",
    "single/test_service.py",
    "single/test_task_service.py",
    "single/test_torch_elastic.py",
)
LAUNCHERS = {"MPI": "mpirun", "Gloo": "horovodrun-gloo"}
SECONDS = 3600.0
# They fail although nothing is wrong with an installation.
KNOWN = (
    # They give every optimizer of torch tensors with one dimension, which Muon (torch 2.9 and newer) refuses:
    # https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html
    "test_broadcast_state",
    "test_broadcast_state_options",
    "test_force_allreduce",
    # They use names, arguments and methods of Keras 2, which Keras 3 (TensorFlow 2.16 and newer) does not have:
    # https://keras.io/guides/migrating_to_keras_3/
    "test_horovod_syncbn_cpu",
    "test_partial_distributed_gradient_tape",
    "test_broadcast_global_variables_callback_with_local_vars",
    "test_grad_aggregation_with_inf_grad",
    "test_gradient_aggregation_0",
    "test_gradient_aggregation_1",
    "test_gradient_aggregation_with_local_vars_0",
    "test_gradient_aggregation_with_local_vars_1",
    "test_legacy_optimizer",
    "test_partial_distributed_optimizer",
    "test_sparse_as_dense",
    "test_sparse_as_dense_with_grad_aggregation",
    "test_train_model_lr_schedule",
)
# The packages come after the environment's own.
PYTEST = """
import os, sys
file, packages, *known = sys.argv[1:]
sys.path.append(packages)
import pytest
class Others:
    def pytest_collection_modifyitems(self, items):
        items[:] = [each for each in items if each.name not in known]
os.chdir(os.path.dirname(file))
words = ["-q", "-s", "-p", "no:cacheprovider", "-c", os.devnull, os.path.basename(file)]
sys.exit(pytest.main(words, [Others()]))
"""


@pytest.fixture(scope="session")
def tests() -> Path:
    if not (named := os.environ.get("HVDENV_TEST_HOROVOD")):
        pytest.skip("HVDENV_TEST_HOROVOD names no checkout of Horovod")
    return Path(named).resolve() / "test"


@pytest.fixture(scope="session")
def packages(original: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    pip = (original.python, "-s", "-m", "pip", "install", "--quiet", "--target", str(folder))
    subprocess.run([*pip, *PACKAGES], check=True)
    return folder


@pytest.mark.parametrize("controller", LAUNCHERS)
@pytest.mark.parametrize("file", OF_RANKS)
def test_on_two_ranks(
    original: Installation, cli: Cli, tests: Path, packages: Path, file: str, controller: str
) -> None:
    words = ("--prefix", original.prefix, "-n", "2", "--launcher", LAUNCHERS[controller])
    program = ("python", "-c", PYTEST, str(tests / file), str(packages), *KNOWN)
    cli("run", *words, "--", *program, timeout=SECONDS)


@pytest.mark.parametrize("file", ALONE)
def test_without_ranks(
    original: Installation, runner: Runner, tests: Path, packages: Path, file: str
) -> None:
    program = ("-c", PYTEST, str(tests / file), str(packages))
    done = Setup(original, runner).run((original.python, *program), SECONDS)
    assert done.returncode == 0, done.output
