"""Options for all layers of the tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Shared machines stall for seconds. CI looks at the same cases each time, so that what
# is red there is red because of the change.
settings.register_profile("any", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "any")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skip", action="store_true", help="a skipped test is a failure (for CI)")
    parser.addoption(
        "--regenerate", action="store_true", help="write golden files anew instead of comparing"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):  # type: ignore[no-untyped-def]
    """With --no-skip, turn a skip into a failure that names its reason."""
    report = yield
    if report.skipped and item.config.getoption("--no-skip"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skip does not allow: {reason}"
    return report
