"""The last failure on this machine: a step of a build, or a finding of verify."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from hvdenv.building.state import JOURNAL, LOGS
from hvdenv.environments import registry
from hvdenv.environments.journal import FAILED, STARTED, Journal
from hvdenv.errors import HvdenvError
from hvdenv.knowledge.diagnosis import Diagnosis, diagnose, diagnose_step
from hvdenv.places import Places
from hvdenv.reading import REPORT, read_json
from hvdenv.reports.report import Report


class Failure(NamedTuple):
    """Something that failed.

    Attributes:
        time: when, in seconds since 1970.
        file: its log or report.
        evidence: the output, if it is not in a log.
    """

    time: float
    what: str
    file: Path
    messages: tuple[str, ...]
    evidence: str = ""

    def diagnosis(self) -> Diagnosis:
        """The cause, from its output.

        Raises:
            OSError: the log cannot be read.
        """
        if self.evidence:
            return diagnose(io.BytesIO(self.evidence.encode("utf-8", "replace")), "run")
        return diagnose_step(self.file)


def last_failure(places: Places) -> Failure | None:
    failures = [*_builds(places), *_reports(places)]
    return max(failures, key=lambda each: each.time, default=None)


def _builds(places: Places) -> Iterator[Failure]:
    for listed in registry.list_environments(places):
        for identity in listed.environment.identities():
            yield from _stopped(listed.environment.generation(identity), listed.prefix)


def _stopped(generation: Path, prefix: str) -> Iterator[Failure]:
    """The failure that ended a build, if it is not complete."""
    path = generation / JOURNAL
    try:
        events = Journal.read(path).events
    except HvdenvError:
        return
    since = list(takewhile(lambda event: event.event != STARTED, reversed(events)))
    # Later events undo other steps because of it.
    failed = next((event for event in reversed(since) if event.event == FAILED), None)
    if failed is None:
        return
    logs = sorted((generation / LOGS).glob(f"[0-9][0-9]-{failed.step}.log"))
    what = f"the build of {prefix} stopped at the step {failed.step}"
    error = str((failed.data or {}).get("error", ""))
    yield Failure(
        time=path.stat().st_mtime,
        what=what,
        file=logs[0] if logs else path,
        messages=(error,),
        evidence="" if logs else error,  # what hvdenv itself refuses has no output
    )


def _reports(places: Places) -> Iterator[Failure]:
    """The newest report with a failed finding."""
    for path in sorted(places.reports.glob("*.json"), reverse=True):
        try:
            report = Report.from_json(read_json(path, REPORT))
            time = path.stat().st_mtime
        except (OSError, ValueError, RecursionError):
            continue
        bad = [each for each in report.findings if each.status in ("fail", "error")]
        if bad:
            messages = tuple(f"{each.check} {each.subject}: {each.message}" for each in bad)
            yield Failure(
                time=time,
                what=f"verify of {report.prefix} found failures",
                file=path,
                messages=messages,
                evidence="\n".join((*(each.evidence for each in bad), *messages)),
            )
            return
