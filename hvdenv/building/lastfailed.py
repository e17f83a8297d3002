"""The last failure on this machine: a step of a build, or a finding of verify."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv.building.state import LOGS
from hvdenv.environments import registry
from hvdenv.errors import HvdenvError, StepError
from hvdenv.knowledge.diagnosis import Diagnosis, diagnose, diagnose_step
from hvdenv.masking import mask
from hvdenv.places import Places, write_json
from hvdenv.reading import REPORT, STATE, read_json
from hvdenv.reports.report import Report
from hvdenv.schema import Problem, decode

# In a generation whose build stopped with an error.
_FAILURE = "failure.json"


class Stopped(NamedTuple):
    """The step at which a build stopped, and the error."""

    step: str
    error: str


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
            return diagnose(io.BytesIO(self.evidence.encode("utf-8", "replace")))
        return diagnose_step(self.file)


def note_failure(generation: Path, step: str, error: StepError) -> None:
    """Write down why a build stopped, if the disk is not full."""
    stopped = Stopped(step, mask(error.message))
    with suppress(HvdenvError):
        write_json(generation / _FAILURE, stopped._asdict())


def last_failure(places: Places) -> Failure | None:
    failures = [*_builds(places), *_reports(places)]
    return max(failures, key=lambda each: each.time, default=None)


def _builds(places: Places) -> Iterator[Failure]:
    for listed in registry.list_environments(places):
        for identity in listed.environment.identities():
            yield from _stopped(listed.environment.generation(identity), listed.prefix)


def _stopped(generation: Path, prefix: str) -> Iterator[Failure]:
    """The failure that ended a build."""
    path = generation / _FAILURE
    try:
        failed = decode(Stopped, read_json(path, STATE), lenient=True)
        time = path.stat().st_mtime
    except (OSError, ValueError, RecursionError, Problem):
        return
    logs = sorted((generation / LOGS).glob(f"[0-9][0-9]-{failed.step}.log"))
    yield Failure(
        time=time,
        what=f"the build of {prefix} stopped at the step {failed.step}",
        file=logs[0] if logs else path,
        messages=(failed.error,),
        evidence="" if logs else failed.error,  # what hvdenv itself refuses has no output
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
