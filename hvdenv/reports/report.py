"""What verify found: findings, measurements and the verdict, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

Status = Literal["pass", "fail", "unproven", "skip", "error"]
Verdict = Literal["pass", "fail", "unproven", "error"]

SCHEMA = "hvdenv.report/1"

EXIT_CODES: dict[Verdict, int] = {"pass": 0, "fail": 1, "error": 1, "unproven": 7}

T = TypeVar("T")


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

    def to_json(self) -> dict[str, Any]:
        """As an object without the keys that say nothing."""
        return {key: each for key, each in self._asdict().items() if each not in ("", None)}


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
    """Everything that one run of verify has to say.

    Attributes:
        environment: what ran, as pairs of a name and a version or a number.
    """

    recipe: str
    prefix: str
    host: str
    started: str
    seconds: float
    findings: tuple[Finding, ...]
    measurements: tuple[Measurement, ...] = ()
    table: tuple[Row, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def verdict(self) -> Verdict:
        return judge(self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as docs/reference/report.md describes it."""
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
            "measurements": [measurement.to_json() for measurement in self.measurements],
            "environment": dict(self.environment),
        }

    @classmethod
    def from_json(cls, data: object) -> Report:
        """The report that to_json() gave; keys of later versions are passed over.

        Raises:
            ValueError: it is none, with what is wrong.
        """
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"it has no schema {SCHEMA}")
        environment = data.get("environment", {})
        if not isinstance(environment, dict):
            raise ValueError("environment is no object")
        return _read(
            cls,
            {
                **data,
                "findings": _read_all(Finding, data, "findings"),
                "measurements": _read_all(Measurement, data, "measurements"),
                "table": _read_all(Row, data, "table"),
                "environment": tuple((name, str(each)) for name, each in environment.items()),
            },
        )


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


# What JSON has for the annotations of the fields above; what is not here was read before.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "Status": (str,),
    "float": (float, int),
    "bool": (bool,),
    "bool | None": (bool, type(None)),
    "int | None": (int, type(None)),
}
_VAST = 1e18


def _read_all(kind: type[T], data: Mapping[str, Any], key: str) -> tuple[T, ...]:
    items = data.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{key} is no list of objects")
    return tuple(_read(kind, item) for item in items)


def _read(kind: type[T], table: Mapping[str, Any]) -> T:
    """A NamedTuple from a table, each value of the type that its field says."""
    known = {name: each for name, each in table.items() if name in kind.__annotations__}
    for name, each in known.items():
        hint = kind.__annotations__[name].__forward_arg__
        fits = type(each) in _TYPES.get(hint, (tuple,))
        fits = fits and (hint != "Status" or each in get_args(Status))
        # Not a number, infinite, or more than a program can calculate with.
        vast = isinstance(each, int | float) and not abs(each) < _VAST
        if not fits or vast:
            raise ValueError(f"{name} is {each!r:.60}")
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(str(error).partition(" ")[2]) from error
