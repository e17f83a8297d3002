"""Options for all layers of the tests."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from hvdenv.base.masking import forgotten
from tests.support.needs import need

# Shared machines stall for seconds, which also makes cases slow to come by. CI looks at the
# same cases each time, so that what is red there is red because of the change.
PATIENT = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any", PATIENT)
settings.register_profile("ci", PATIENT, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "any")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skip", action="store_true", help="a skipped test is a failure (for CI)")
    parser.addoption(
        "--regenerate", action="store_true", help="write golden files anew instead of comparing"
    )
    parser.addoption("--skips", metavar="FILE", help="append why each test was skipped to a file")


def _for_ranks() -> dict[str, str]:
    """Variables that programs of Horovod listen to."""
    heard = ("CUDA_", "HOROVOD_", "HVDENV_", "NCCL_", "OMPI_")
    return {name: value for name, value in os.environ.items() if name.startswith(heard)}


_AT_START = _for_ranks()


@pytest.fixture(autouse=True)
def _no_variable_is_left_behind() -> Iterator[None]:
    """What one test or its import sets, an hour later the ranks of another have on one host only."""
    yield
    assert _for_ranks() == _AT_START


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    """Otherwise a later test in this process fails, or is killed by a signal."""
    before = _of_process()
    yield
    assert _of_process() == before


def _of_process() -> tuple[object, ...]:
    """Handlers of signals, limit of files' sizes, umask and directory."""
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    os.umask(mask := os.umask(0o077))
    return handlers, resource.getrlimit(resource.RLIMIT_FSIZE), mask, os.getcwd()


@pytest.fixture(autouse=True)
def _no_secret_is_remembered() -> Iterator[None]:
    with forgotten():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test before its fixtures are made if the machine lacks what its markers name."""
    need(*(name for mark in item.iter_markers("needs") for name in mark.args))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):  # type: ignore[no-untyped-def]
    """With --no-skip, turn a skip into a failure that names its reason."""
    report = yield
    if report.skipped and item.config.getoption("--no-skip"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skip does not allow: {reason}"
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    path = config.getoption("--skips")
    if path and not hasattr(config, "workerinput"):  # workers report to the first process
        skipped = terminalreporter.stats.get("skipped", [])
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(report.longrepr[2])}\n" for report in skipped)
