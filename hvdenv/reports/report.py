"""The report of verify as data: findings, ranks, measurements and the verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hvdenv.base.schema import Problem, decode, encode

Status = Literal["pass", "fail", "unproven", "skip", "error"]
Verdict = Literal["pass", "fail", "unproven", "error"]

SCHEMA = "hvdenv.report/2"
_READABLE = ("hvdenv.report/1", SCHEMA)

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
    """A figure with its unit, such as the seconds that a check took.

    Attributes:
        name: what was measured, such as ``allreduce bandwidth``.
        value: how much.
        unit: such as ``GB/s``.
        subject: what it was measured on: ``torch over MPI``, or the yardstick beside it,
            ``MPI alone`` or ``NCCL alone``.
        size: bytes of one message.
        ranks: how many took part.
    """

    name: str
    value: float
    unit: str
    subject: str = ""
    size: int | None = None
    ranks: int | None = None

    def to_json(self) -> dict[str, object]:
        """As an object without the keys that say nothing."""
        return {key: each for key, each in self._asdict().items() if each not in ("", None)}


class Row(NamedTuple):
    """One row of the table in the style of ``horovodrun --check-build``.

    Attributes:
        section: ``Frameworks``, ``Controllers`` or ``Tensor Operations``.
        name: as Horovod writes it.
        expected: None where nothing was stated.
        built: whether it is in the installation.
        proven: whether it was seen to work wherever it was tried, and no finding about it failed.
    """

    section: str
    name: str
    expected: bool | None
    built: bool
    proven: bool


class RankRecord(NamedTuple):
    """One rank of one run.

    Attributes:
        rank: its number; None if neither Horovod nor the launcher stated it.
        host: where it ran.
        local_rank: its number on the host; None if it never joined the others.
        pid: of its supervisor, the process that the launcher started.
        device: ``cpu``, or its GPU as the framework names it; empty if unknown.
        framework, controller: what the run was of.
        status: ``fail`` if the rank failed, or the run as a whole.
        cause: why, in words; for a follow-on error, the rank that failed first.
        seconds: from its start to its end; None if its end was not reported.
        data_path: the transports of its data; empty if unknown.
        note: what is odd about it and no failure, such as that it is much slower than the others.
    """

    rank: int | None
    host: str
    local_rank: int | None
    pid: int
    device: str
    framework: str
    controller: str
    status: Literal["pass", "fail"]
    cause: str = ""
    seconds: float | None = None
    data_path: str = ""
    note: str = ""

    @property
    def run(self) -> str:
        """The subject of its run: ``torch over MPI``."""
        return f"{self.framework} over {self.controller}"

    @property
    def name(self) -> str:
        """Such as ``rank 3 on n1``."""
        return f"rank {'unknown' if self.rank is None else self.rank} on {self.host}"


class Report(NamedTuple):
    """The result of one run of verify.

    Attributes:
        recipe: what the environment was built from; empty if unknown.
        prefix: the environment.
        host: where verify ran.
        started: local time with its offset.
        seconds: wall time of the run.
        ranks: those of all runs of ranks; none in reports of schema 1.
        environment: what ran: names with a version or a number.
    """

    recipe: str
    prefix: str
    host: str
    started: str
    seconds: float
    findings: tuple[Finding, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    table: tuple[Row, ...] = ()
    ranks: tuple[RankRecord, ...] = ()
    environment: dict[str, str] = {}

    @property
    def verdict(self) -> Verdict:
        return judge(self.findings)

    def to_json(self) -> dict[str, object]:
        """The report as docs/reference/report.md describes it."""
        written: dict[str, object] = {
            "seconds": round(self.seconds, 3),
            "table": [row._asdict() for row in self.table],
            "ranks": [rank._asdict() for rank in self.ranks],
            "findings": encode(self.findings),
            "measurements": [each.to_json() for each in self.measurements],
        }
        return {"schema": SCHEMA, "verdict": self.verdict, **self._asdict(), **written}

    @classmethod
    def from_json(cls, data: object) -> Report:
        """The report that to_json() gave, of this schema or an older one.

        Raises:
            ValueError: it is not a report; the message names every problem.
        """
        if not isinstance(data, dict) or data.get("schema") not in _READABLE:
            raise ValueError(f"its schema is not one of {', '.join(_READABLE)}")
        try:
            return decode(cls, data, lenient=True)
        except Problem as problem:
            raise ValueError("; ".join(map(str, problem.all))) from problem


def different_ranks(ranks: Sequence[RankRecord]) -> list[tuple[RankRecord, str]]:
    """The ranks that failed, or differ from most others of their run; each with the reason."""
    usual: dict[str, tuple[str, str]] = {}
    for (run, kind), _ in Counter((rank.run, _kind(rank)) for rank in ranks).most_common():
        usual.setdefault(run, kind)
    found = []
    for rank in ranks:
        device, path = usual[rank.run]
        if rank.status == "fail":
            found.append((rank, rank.cause))
        elif rank.note:
            found.append((rank, rank.note))
        elif _kind(rank)[0] != device:
            found.append((rank, f"uses {rank.device or 'no known device'}, most others {device}"))
        elif _kind(rank)[1] != path:
            found.append((rank, f"sends by {rank.data_path or 'unknown transports'}, unlike most"))
    return found


def _kind(rank: RankRecord) -> tuple[str, str]:
    """Device and data path without the numbers of GPUs and adapters.

    Without NCCL's part, too: in a ring, only the ranks at a host's border use the network.
    """
    path = re.sub(r"NCCL [^;]*", "", rank.data_path)
    return rank.device.partition(":")[0], re.sub(r"\d+", "", path)


def causes(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings by their cause: those that did not pass and have one remedy are together."""
    found: dict[tuple[str, str | int], list[Finding]] = {}
    for number, each in enumerate(findings):
        alone = each.status in ("pass", "skip") or not each.remedy
        found.setdefault((each.status, number if alone else each.remedy), []).append(each)
    return list(found.values())


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
