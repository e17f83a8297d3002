"""The report as data: JSON out and in again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdenv.reports.report import SCHEMA, Finding, Measurement, Report

PASS = Finding("allreduce", "torch over MPI", "pass", "right")
REPORT = Report("local", "/env", "n1", "2026-11-21T13:00:00+0100", 1.5, (PASS,))


def changed(**keys: Any) -> dict[str, Any]:
    return {**REPORT.to_json(), **keys}


def test_measurements_say_only_what_is_known() -> None:
    seconds = Measurement("verify", 1.5, "s")
    speed = Measurement("allreduce latency", 0.0, "us", "MPI alone", 1024, 2)
    assert seconds.to_json() == {"name": "verify", "value": 1.5, "unit": "s"}
    assert speed.to_json() == {
        "name": "allreduce latency", "value": 0.0, "unit": "us", "subject": "MPI alone",
        "size": 1024, "ranks": 2,
    }  # fmt: skip


def test_the_environment_is_an_object() -> None:
    report = REPORT._replace(environment=(("torch", "2.1"), ("MPI", "Open MPI 5.0.11")))
    assert report.to_json()["environment"] == {"torch": "2.1", "MPI": "Open MPI 5.0.11"}
    assert REPORT.to_json()["environment"] == {}


def test_a_report_can_be_read_again(cases: Path) -> None:
    kept = json.loads((cases / "reports" / "everything.json").read_text(encoding="utf-8"))
    report = Report.from_json(kept)
    assert report.to_json() == kept
    assert report.verdict == "fail"
    assert report.measurements[0] == Measurement("extension files", 0.05, "s")


def test_older_and_later_reports_can_be_read() -> None:
    older = {key: each for key, each in REPORT.to_json().items() if key != "environment"}
    assert Report.from_json(older) == REPORT
    later = changed(findings=[{**PASS._asdict(), "severity": 3}], colour="green")
    assert Report.from_json(later) == REPORT


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (["a list"], f"no schema {SCHEMA}"),
        ({}, f"no schema {SCHEMA}"),
        (changed(schema="hvdenv.report/2"), f"no schema {SCHEMA}"),
        ({"schema": SCHEMA}, "missing 5 required"),
        (changed(host=None), "host is None"),
        (changed(seconds="1"), "seconds is '1'"),
        (changed(seconds=float("nan")), "seconds is nan"),
        (changed(findings={}), "findings is no list of objects"),
        (changed(findings=["text"]), "findings is no list of objects"),
        (changed(findings=[{"check": "a"}]), "missing 3 required"),
        (changed(findings=[{**PASS._asdict(), "status": "good"}]), "status is 'good'"),
        (changed(findings=[{**PASS._asdict(), "evidence": 1}]), "evidence is 1"),
        (changed(measurements=[{"name": "n", "value": 10**400, "unit": "s"}]), "value is 1000"),
        (
            changed(measurements=[{"name": "n", "value": 1, "unit": "s", "ranks": True}]),
            "ranks is True",
        ),
        (changed(table=[{"section": "s", "name": "n", "expected": 1}]), "expected is 1"),
        (changed(environment=[]), "environment is no object"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_no_report_is_refused(data: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Report.from_json(data)
