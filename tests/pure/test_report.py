"""The report as data: JSON out and in again."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hvdenv.reports import page
from hvdenv.reports.report import SCHEMA, Finding, Measurement, RankRecord, Report, different_ranks
from hvdenv.schema import encode

PASS = Finding("allreduce", "torch over MPI", "pass", "right")
REPORT = Report("local", "/env", "n1", "2026-11-21T13:00:00+0100", 1.5, (PASS,))


def changed(**keys: Any) -> dict[str, Any]:
    return {**REPORT.to_json(), **keys}


def test_measurements_say_only_what_is_known() -> None:
    known = {"name": "allreduce latency", "value": 0.0, "unit": "us"}
    assert Measurement("allreduce latency", 0.0, "us").to_json() == known


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_not_written_and_is_refused(value: float) -> None:
    figures = (Measurement("training speed", value, "samples/s"), Measurement("verify", 1.0, "s"))
    report = REPORT._replace(measurements=figures, ranks=(RANK._replace(seconds=value),))
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert Report.from_json(document).measurements == figures[1:]
    assert document["ranks"][0]["seconds"] is None
    foreign = ({"seconds": value}, {"measurements": [{**FIGURE, "value": value}]})
    for keys in foreign:
        with pytest.raises(ValueError, match="infinite or NaN"):
            Report.from_json(changed(**keys))
    assert "Other measurements" in page.render(report)


def test_older_and_later_reports_can_be_read() -> None:
    document = REPORT.to_json()
    older = {key: document[key] for key in document if key not in ("environment", "ranks")}
    assert Report.from_json({**older, "schema": "hvdenv.report/1"}) == REPORT
    later = changed(findings=[{**GOOD, "severity": 3}], colour="green")
    assert Report.from_json(later) == REPORT


PATH = "pml ucx, rc_mlx5/mlx5_0:1"
RANK = RankRecord(0, "n1", 0, 100, "cuda:0", "torch", "MPI", "pass", data_path=PATH)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cuda:1", "data_path": "pml ucx, rc_mlx5/mlx5_3:1"}, None),
        ({"status": "fail", "cause": "hangs"}, "hangs"),
        ({"note": "took 9 times as long"}, "took 9 times as long"),
        ({"device": "cpu"}, "uses cpu, most others cuda"),
        ({"data_path": "pml ob1, btl tcp"}, "sends by pml ob1, btl tcp, unlike most"),
        ({"device": "cpu", "controller": "Gloo"}, None),
    ],
)
def test_ranks_that_failed_or_differ(changes: dict[str, Any], why: str | None) -> None:
    other = RANK._replace(rank=2, **changes)
    ranks = (RANK, RANK._replace(rank=1), other)
    assert different_ranks(ranks) == ([(other, why)] if why else [])


GOOD = encode(PASS)
FIGURE = {"name": "n", "value": 1, "unit": "s"}


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("schema", "hvdenv.report/3", f"its schema is not one of hvdenv.report/1, {SCHEMA}"),
        ("host", None, "host: expected a string, found None"),
        ("findings", ["text"], "findings.0.: expected a table, found 'text'"),
        ("findings", [{"check": "a"}], "findings.0..subject: this key is required"),
        ("findings", [{**GOOD, "status": "good"}], "findings.0..status: expected one of"),
        (
            "measurements",
            [{**FIGURE, "ranks": True}],
            "measurements.0..ranks: expected a whole number, found true",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_no_report_is_refused(key: str, value: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Report.from_json(changed(**{key: value}))
    others: tuple[object, ...] = (["a list"], {})
    for other in others:
        with pytest.raises(ValueError, match="its schema is not one of"):
            Report.from_json(other)
    with pytest.raises(ValueError, match="recipe: this key is required and missing; prefix: this"):
        Report.from_json({"schema": SCHEMA})
