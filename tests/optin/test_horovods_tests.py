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
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from hvdenv.base.runner import Runner
from hvdenv.base.schema import decode, parse_toml
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
# The packages come after the environment's own. Each rank writes a report.
PYTEST = """
import os, sys
file, packages, reports = sys.argv[1:]
sys.path.append(packages)
import pytest
rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
words = ["-q", "-s", "-p", "no:cacheprovider", "-c", os.devnull, f"--junitxml={reports}/{rank}.xml"]
os.chdir(os.path.dirname(file))
pytest.main([*words, os.path.basename(file)])
"""


class Known(NamedTuple):
    """Tests that fail although nothing is wrong with an installation.

    Attributes:
        tests: the ends of their names, with * for any characters.
        failures: texts of which one must be in what a rank reports; another failure is new.
        why: the reason.
        source: where it is explained.
    """

    tests: tuple[str, ...]
    failures: tuple[str, ...]
    why: str
    source: str

    def explains(self, test: str, failure: str) -> bool:
        named = any(fnmatchcase(test, f"*{name}") for name in self.tests)
        return named and any(text in failure for text in self.failures)


class KnownFailures(NamedTuple):
    known: tuple[Known, ...]


KNOWN = decode(
    KnownFailures, parse_toml(Path(__file__).with_name("horovods_tests.toml").read_text())
).known


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


def check(reports: Path, ranks: int, output: str) -> None:
    """All ranks came to the end, and what failed is known to fail."""
    documents = [ElementTree.parse(path) for path in sorted(reports.iterdir())]
    assert len(documents) == ranks, output
    cases = [case for document in documents for case in document.iter("testcase")]
    assert cases, output
    new = []
    for case in cases:
        test = f"{case.get('classname')}.{case.get('name')}"
        failures = [each.text or "" for each in case if each.tag in ("failure", "error")]
        new += [
            f"{test}\n{failure}"
            for failure in failures
            if not any(each.explains(test, failure) for each in KNOWN)
        ]
    assert not new, "\n".join(new)
    if all(case.find("skipped") is not None for case in cases):
        pytest.skip("they all skip themselves here")


@pytest.mark.parametrize("controller", LAUNCHERS)
@pytest.mark.parametrize("file", OF_RANKS)
def test_on_two_ranks(
    original: Installation,
    cli: Cli,
    tests: Path,
    packages: Path,
    tmp_path: Path,
    file: str,
    controller: str,
) -> None:
    words = ("--prefix", original.prefix, "-n", "2", "--launcher", LAUNCHERS[controller])
    program = ("python", "-c", PYTEST, str(tests / file), str(packages), str(tmp_path))
    done = cli("run", *words, "--", *program, code=None, timeout=SECONDS)
    check(tmp_path, 2, done.stdout + done.stderr)


@pytest.mark.parametrize("file", ALONE)
def test_without_ranks(
    original: Installation, runner: Runner, tests: Path, packages: Path, tmp_path: Path, file: str
) -> None:
    program = ("-c", PYTEST, str(tests / file), str(packages), str(tmp_path))
    done = Setup(original, runner).run((original.python, *program), SECONDS)
    check(tmp_path, 1, done.output)
