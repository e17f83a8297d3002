"""The status of a job in words: why it waits, how it ended, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdenv.model.dialect import Dialect, State
from hvdenv.sites.answers import Status
from hvdenv.sites.batch import EXIT_LINE

_ENDS: Mapping[State, tuple[str, str]] = {
    "timeout": (
        "reached its time limit",
        "request more time (--time), or have the program write checkpoints",
    ),
    "cancelled": ("was cancelled", "if you did not cancel it, contact the site's support"),
    "node failure": (
        "ended because a node failed or could not start it",
        "submit it again; if that fails again, report its nodes to the site's support",
    ),
    "out of memory": (
        "used more memory than it was given",
        "set job.memory, start fewer ranks on each node, or use smaller batches",
    ),
    "preempted": (
        "was preempted by another job",
        "submit it again, or to a queue whose jobs are not preempted",
    ),
    "gone": (
        "is not known to the scheduler, and its output does not say how it ended",
        "look at the end of its output",
    ),
}


def exit_code_in(output: str, job: str) -> int | None:
    """The exit code that a job's script wrote as its last line; None if it did not get there."""
    pattern = re.escape(EXIT_LINE).replace(r"\{id\}", r"(\S+)") + r" ([0-9]+)$"
    found = re.findall(pattern, output, re.MULTILINE)
    if found and number_of(found[-1][0]) == number_of(job):
        return int(found[-1][1])
    return None


def number_of(job: str) -> str:
    """A job's id without the name of a server or cluster."""
    return re.split("[.;]", job)[0]


def never_starts(status: Status, dialect: Dialect) -> str:
    """Why a waiting job can never start as submitted; empty if it can."""
    if status.state != "waiting":
        return ""
    return _meaning(dialect.hopeless, status.reason)


def explained(status: Status, dialect: Dialect) -> str:
    """A status as a person reads it: ``waiting (Priority: other jobs come first)``."""
    if status.state == "running":
        return f"running on {status.hosts}" if status.hosts else "running"
    reason = "" if status.reason in ("NonZeroExitCode", "(null)") else status.reason
    if not reason:
        return status.state
    known = dialect.waiting if status.state == "waiting" else {}
    meaning = _meaning(known, reason)
    return f"{status.state} ({reason}: {meaning})" if meaning else f"{status.state} ({reason})"


def _meaning(known: Mapping[str, str], reason: str) -> str:
    """What is known about a reason, by what it begins with before a comma or colon."""
    return known.get(reason) or known.get(re.split("[,:]", reason)[0], "")


def abnormal_end(status: Status) -> tuple[str, str] | None:
    """What happened to a job that did not end by itself, and what to do; None if it did."""
    if status.state == "failed" and status.exit_code is None:
        return "failed, and the scheduler does not report how", "look at the end of its output"
    return _ENDS.get(status.state)
