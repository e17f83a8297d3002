"""Real environments, built once for all tests of this layer.

They lie in a temporary directory, or in the directory that HVDENV_TEST_HOME names: then the
next run finds them there, and the tests of everything but the build take minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation, inspect_prefix
from tests.real.doctored import make_copy, marked
from tests.standin import Cluster
from tests.support.modulesystems import cache_folder, install
from tests.support.needs import need
from tests.support.waiting import wait_until
from tests.support.workers import one_at_a_time, session_folder

# `make test` gives each free worker the next file in this order, then by name. While one worker
# compiles `local`, the others run long files that do not need it. Then the longest come first, so
# that all workers end together.
FIRST = (
    "build",
    "job",
    "container",
    "conda",
    "modulesystem",
    "step_programs",
    "publishing",
    "prefix_lock",
    "faults",
    "locks",
    "tutorial",
    "training_programs",
    "verify",
    "neuron",
    "gridengine",
    "seed_clusters",
    "collectives",
    "run",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of `make optin`, and sort the files; the tests of a file keep their order."""
    if "optin" not in config.option.markexpr:
        left = [each for each in items if each.get_closest_marker("optin")]
        config.hook.pytest_deselected(items=left)
        items[:] = [each for each in items if each not in left]
    places = {f"test_{name}": place for place, name in enumerate(FIRST)}
    here = Path(__file__).parent
    items.sort(
        key=lambda item: places.get(item.path.stem, len(FIRST)) if item.path.parent == here else -1
    )


class Result(NamedTuple):
    """What a call of the command line came to."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def hear_interrupts() -> None:
    """Undo what a shell does to its background processes: they ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Cli:
    """The command line as a user has it, with a home of its own."""

    def __init__(self, home: Path, variables: dict[str, str] | None = None) -> None:
        self.home = home
        self.variables = {**os.environ, **(variables or {}), "HVDENV_HOME": str(home)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hvdenv", *words],
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_interrupts,
        )

    def __call__(self, *words: str, code: int | None = 0, timeout: float = 1500) -> Result:
        with self.start(*words) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except BaseException:
                process.send_signal(signal.SIGINT)
                raise
        result = Result(process.returncode, stdout, stderr)
        if code is not None:
            assert process.returncode == code, f"{words}\n{stdout}\n{stderr}"
        return result


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("HVDENV_TEST_HOME")
    return Path(named) if named else session_folder(tmp_path_factory) / "home"


@pytest.fixture(scope="session")
def cli(home: Path) -> Cli:
    return Cli(home)


@pytest.fixture(scope="session")
def local_prefix(cli: Cli, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete environment of the recipe `local`."""
    need("python3-dev")
    built = session_folder(tmp_path_factory) / "local-is-built"
    with one_at_a_time(built):
        if not built.exists():
            cli("build", "local")
            built.touch()
    return home / "envs" / "local"


@pytest.fixture(scope="session")
def original(request: pytest.FixtureRequest) -> Installation:
    """HVDENV_TEST_PREFIX, or else the environment that the tests of build have made."""
    named = os.environ.get("HVDENV_TEST_PREFIX")
    return inspect_prefix(named or str(request.getfixturevalue("local_prefix")))


@pytest.fixture
def copy(original: Installation, tmp_path: Path) -> Callable[..., Installation]:
    """Make a copy of the original with a fault: see doctored.make_copy."""
    return partial(make_copy, original, tmp_path / "env")


@pytest.fixture
def runner() -> Iterator[Runner]:
    """A runner of which no process may be left after the test."""
    runner = Runner()
    yield runner
    wait_until(lambda: not marked(runner.token), 30)


Process = subprocess.Popen[str]
Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes with some variables, and one pipe for both outputs; ends those that still run."""
    processes: list[Process] = []

    def run(*argv: object, cwd: Path | None = None, **variables: object) -> Process:
        process = subprocess.Popen(
            list(map(str, argv)),
            cwd=cwd,
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that have something to do with a directory."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(folder) in words and process.pid != os.getpid():
            found.append(words)
    return found


@pytest.fixture
def no_processes_left() -> Callable[[Path], None]:
    """Call it with a directory: nothing may be running there a few seconds later."""

    def check(folder: Path) -> None:
        wait_until(lambda: not processes_of(folder), 30)

    return check


@pytest.fixture(scope="session")
def cluster(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts with ssh, Slurm and Lmod, which see what the tests of this session make."""
    home.mkdir(parents=True, exist_ok=True)
    python = [Path(sys.prefix), Path(sys.base_prefix)]
    shared = [home, tmp_path_factory.getbasetemp(), *python, Path(__file__).parents[2]]
    if named := os.environ.get("HVDENV_TEST_PREFIX"):
        shared.append(Path(named).parent)
    lmod = install("lmod", cache_folder(tmp_path_factory))
    with Cluster(modules=lmod, shared=shared) as cluster:
        yield cluster
