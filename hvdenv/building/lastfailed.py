"""The last failure on this machine: a step of a build, or a finding of verify."""

import io
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.errors import HvdenvError, StepError
from hvdenv.base.masking import mask
from hvdenv.base.places import Places, write_json
from hvdenv.base.reading import REPORT, STATE, read_json
from hvdenv.base.schema import Problem, decode
from hvdenv.environments import registry
from hvdenv.knowledge.diagnosis import Diagnosis, diagnose, diagnose_step
from hvdenv.reports.report import Report

# In a generation whose build stopped with an error.
_FAILURE = "failure.json"


class LastFailure(NamedTuple):
    """Something that failed.

    Attributes:
        file: path of its log or report.
        evidence: the output, if it is not in a log.
    """

    what: str
    file: str
    messages: tuple[str, ...]
    evidence: str = ""

    def diagnosis(self) -> Diagnosis:
        """The cause, from its output.

        Raises:
            OSError: the log cannot be read.
        """
        if self.evidence:
            return diagnose(io.BytesIO(self.evidence.encode("utf-8", "replace")))
        return diagnose_step(Path(self.file))


def note_failure(generation: Path, prefix: Path, step: str, error: StepError, log: Path) -> None:
    """Write down why a build stopped, if the disk is not full."""
    message = mask(error.message)
    failure = LastFailure(
        what=f"the build of {prefix} stopped at the step {step}",
        file=str(log if log.exists() else generation),
        messages=(message,),
        evidence="" if log.exists() else message,  # what hvdenv itself refuses has no output
    )
    with suppress(HvdenvError):
        write_json(generation / _FAILURE, failure._asdict())


def last_failure(places: Places) -> LastFailure | None:
    """The newest failure that can be read."""
    stores = [listed.environment.store for listed in registry.list_environments(places)]
    builds = [path for store in stores for path in store.glob(f"*/{_FAILURE}")]
    dated = [(path.stat().st_mtime, path) for path in (*builds, *places.reports.glob("*.json"))]
    for _, path in sorted(dated, reverse=True):
        with suppress(OSError, ValueError, RecursionError, Problem):
            if path.name == _FAILURE:
                return decode(LastFailure, read_json(path, STATE), lenient=True)
            if failure := _failed_verify(path):
                return failure
    return None


def _failed_verify(path: Path) -> LastFailure | None:
    """What a report found; None if nothing failed."""
    report = Report.from_json(read_json(path, REPORT))
    bad = [each for each in report.findings if each.status in ("fail", "error")]
    if not bad:
        return None
    messages = tuple(f"{each.check} {each.subject}: {each.message}" for each in bad)
    return LastFailure(
        what=f"verify of {report.prefix} found failures",
        file=str(path),
        messages=messages,
        evidence="\n".join((*(each.evidence for each in bad), *messages)),
    )
