"""What verify found: findings, measurements and the verdict, as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Status = Literal["pass", "fail", "unproven", "skip", "error"]
Verdict = Literal["pass", "fail", "unproven", "error"]

SCHEMA = "hvdenv.report/1"

EXIT_CODES: dict[Verdict, int] = {"pass": 0, "fail": 1, "error": 1, "unproven": 7}


class Finding(NamedTuple):
    """One judgement.

    Attributes:
        check: the check that made it, such as ``allreduce``.
        subject: what it is about, such as ``torch over MPI``.
        status: ``skip`` does not apply; ``unproven`` was expected and built but
            this host cannot show it; ``error`` says that the check could not run.
        message: one sentence.
        evidence: what was seen, as text.
        remedy: what to do about it.
    """

    check: str
    subject: str
    status: Status
    message: str
    evidence: str = ""
    remedy: str = ""


class Measurement(NamedTuple):
    """A figure with its unit, such as the seconds that a check took."""

    name: str
    value: float
    unit: str


class Row(NamedTuple):
    """One row of the table in the style of ``horovodrun --check-build``.

    Attributes:
        section: ``Frameworks``, ``Controllers`` or ``Tensor Operations``.
        name: as Horovod writes it.
        expected: None where nothing was stated.
        built: whether it is in the installation.
        proven: whether it was seen to work, wherever it was tried.
    """

    section: str
    name: str
    expected: bool | None
    built: bool
    proven: bool


class Report(NamedTuple):
    """Everything that one run of verify has to say."""

    recipe: str
    prefix: str
    host: str
    started: str
    seconds: float
    findings: tuple[Finding, ...]
    measurements: tuple[Measurement, ...] = ()
    table: tuple[Row, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return judge(self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as docs/report.md describes it."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "recipe": self.recipe,
            "prefix": self.prefix,
            "host": self.host,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "table": [row._asdict() for row in self.table],
            "findings": [finding._asdict() for finding in self.findings],
            "measurements": [measurement._asdict() for measurement in self.measurements],
        }


def judge(findings: Sequence[Finding]) -> Verdict:
    """The verdict over all findings: pass needs every expected thing proven."""
    statuses = {finding.status for finding in findings}
    if "fail" in statuses:
        return "fail"
    if "error" in statuses:
        return "error"
    if "unproven" in statuses or "pass" not in statuses:
        return "unproven"
    return "pass"
