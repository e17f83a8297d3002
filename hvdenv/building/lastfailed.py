"""What failed last here: a step of a build, or what verify judged."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from hvdenv.building.state import JOURNAL, LOGS
from hvdenv.environments import generations, registry
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
        what: in words.
        file: its log or report.
        said: what hvdenv said of it then, and what to do.
        evidence: the output, where it is not in a log.
    """

    time: float
    what: str
    file: Path
    said: tuple[str, ...]
    evidence: str = ""

    def diagnosis(self) -> Diagnosis:
        """What its output says.

        Raises:
            OSError: the log cannot be read.
        """
        if self.evidence:
            return diagnose(io.BytesIO(self.evidence.encode("utf-8", "replace")), "run")
        return diagnose_step(self.file)


def last_failure(places: Places) -> Failure | None:
    """The newest of the builds that stopped at a step, and of the reports that failed."""
    failures = [*_builds(places), *_reports(places)]
    return max(failures, key=lambda each: each.time, default=None)


def _builds(places: Places) -> Iterator[Failure]:
    for listed in registry.list_environments(places):
        environment = generations.at(Path(listed.prefix))
        for identity in environment.identities():
            yield from _stopped(environment.generation(identity), listed.prefix)


def _stopped(generation: Path, prefix: str) -> Iterator[Failure]:
    """How a build that was never complete ended, if it was at a failure."""
    path = generation / JOURNAL
    try:
        events = Journal.read(path).events
    except HvdenvError:
        return
    since = list(takewhile(lambda event: event.event != STARTED, reversed(events)))
    # What comes after it is undone because of it.
    failed = next((event for event in reversed(since) if event.event == FAILED), None)
    if failed is None:
        return
    logs = sorted((generation / LOGS).glob(f"[0-9][0-9]-{failed.step}.log"))
    what = f"the build of {prefix} stopped at the step {failed.step}"
    error = str((failed.data or {}).get("error", ""))
    # What hvdenv refuses by itself has no output.
    yield Failure(
        path.stat().st_mtime, what, *((logs[0], (error,)) if logs else (path, (error,), error))
    )


def _reports(places: Places) -> Iterator[Failure]:
    """The newest report whose verdict is not good."""
    for path in sorted(places.reports.glob("*.json"), reverse=True):
        try:
            report = Report.from_json(read_json(path, REPORT))
            time = path.stat().st_mtime
        except (OSError, ValueError, RecursionError):
            continue
        bad = [each for each in report.findings if each.status in ("fail", "error")]
        if bad:
            said = tuple(f"{each.check} {each.subject}: {each.message}" for each in bad)
            evidence = "\n".join((*(each.evidence for each in bad), *said))
            yield Failure(
                time=time,
                what=f"verify of {report.prefix} found failures",
                file=path,
                said=said,
                evidence=evidence,
            )
            return
