"""Runs files of Horovod's own tests with pytest, instead of the other work of a rank.

The option is the path of a JSON file with ``tests`` (the folder of Horovod's tests), ``packages`` (a
folder with pytest, looked up after the environment's own packages), ``files`` (below ``tests``),
``done`` (ids of tests to leave out) and ``seconds`` (for each test). Tests start Horovod themselves.
A test that takes too long ends its rank. Runs on Python 3.6 and
newer.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from typing import Any, Dict, List, Set

import events
from context import Context

_TEXT_BYTES = 1500
# How many frames of its stack are reported of a test that takes too long: the innermost ones.
_FRAMES = 8
_LATE_SECONDS = 10


class Reporter:
    """The plugin of pytest that reports each test to hvdenv."""

    def __init__(self, context: Context, done: Set[str], seconds: float) -> None:
        self.context = context
        self.done = done
        self.seconds = seconds
        self.started = 0.0
        self.timer = threading.Timer(seconds, lambda: None)
        self.outcomes: Dict[str, events.TestDone] = {}

    def pytest_collection_modifyitems(self, items: List[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            text = str(report.longrepr)[-_TEXT_BYTES:]
            self.context.report(events.TestDone(report.nodeid, "failed", reason=text))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.started = time.monotonic()
        self.context.stage("suite", nodeid)
        self.timer = threading.Timer(self.seconds, self.give_up, (nodeid,))
        self.timer.daemon = True
        self.timer.start()
        # for code that holds the interpreter's lock
        faulthandler.dump_traceback_later(self.seconds + _LATE_SECONDS, exit=True)

    def give_up(self, test: str) -> None:
        """End this rank, whose test takes too long; called in a thread of its own."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        inner = "".join(traceback.format_stack(frame)[-_FRAMES:])
        text = "E  still running after {:g} s\n{}".format(self.seconds, inner)
        seconds = round(time.monotonic() - self.started, 2)
        self.context.report(events.TestDone(test, "failed", seconds, text[:_TEXT_BYTES]))
        os._exit(1)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst of a test's set-up, call and tear-down."""
        before = self.outcomes.get(report.nodeid)
        if before is not None and before.outcome == "failed":
            return
        if before is None or report.failed or report.skipped:
            why = report.longrepr
            if report.skipped and isinstance(why, tuple):
                why = why[-1]
            text = "" if report.passed else str(why)[-_TEXT_BYTES:]
            outcome = "failed" if report.failed else "skipped" if report.skipped else "passed"
            self.outcomes[report.nodeid] = events.TestDone(report.nodeid, outcome, reason=text)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        outcome = self.outcomes.pop(nodeid, events.TestDone(nodeid, "failed", reason="not run"))
        self.context.report(outcome._replace(seconds=round(time.monotonic() - self.started, 2)))


def run(context: Context, option: str) -> None:
    """Run the files; each test is an event."""
    with open(option, encoding="utf-8") as stream:
        plan = json.load(stream)
    sys.path.append(plan["packages"])
    # Processes that tests spawn would import this program, whose folders are not on their path.
    del sys.modules["__main__"].__file__
    import pytest

    os.chdir(os.path.join(plan["tests"], os.path.dirname(plan["files"][0])))
    words = ["-q", "-s", "-p", "no:cacheprovider", "--rootdir", plan["tests"], "-c", os.devnull]
    names = [os.path.join(plan["tests"], name) for name in plan["files"]]
    code = pytest.main(
        words + names, plugins=[Reporter(context, set(plan["done"]), plan["seconds"])]
    )
    context.report(events.SuiteDone(int(code)))
