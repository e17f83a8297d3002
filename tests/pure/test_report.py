"""The report as data: JSON out and in again, and the files that verify writes of it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hvdenv.base import places
from hvdenv.base.errors import StepError
from hvdenv.base.masking import mask
from hvdenv.base.schema import encode, mapped
from hvdenv.cli import verify_report
from hvdenv.reports.report import SCHEMA, Finding, Measurement, RankRecord, Report, different_ranks
from tests.support.commands import Hvdenv

PASS = Finding("allreduce", "torch over MPI", "pass", "right")
REPORT = Report("local", "/env", "n1", "2026-11-21T13:00:00+0100", 1.5, (PASS,))


def changed(**keys: Any) -> dict[str, Any]:
    return {**REPORT.to_json(), **keys}


def test_older_and_later_reports_can_be_read() -> None:
    known = {"name": "allreduce latency", "value": 0.0, "unit": "us"}
    assert Measurement("allreduce latency", 0.0, "us").to_json() == known
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


@pytest.fixture
def kept(cases: Path) -> str:
    """A report that verify kept, whose verdict is fail."""
    return str(cases / "reports" / "everything.json")


@pytest.fixture
def good(tmp_path: Path) -> str:
    """One whose verdict is pass."""
    path = tmp_path / "good.json"
    path.write_text(json.dumps(REPORT.to_json()))
    return str(path)


def test_both_files_of_what_failed(kept: str, tmp_path: Path, hvdenv: Hvdenv) -> None:
    xml, page = tmp_path / "verify.xml", tmp_path / "verify.html"
    said = hvdenv("verify", "--report", kept, "--junit", str(xml), "--html", str(page), code=1)
    assert ElementTree.parse(xml).getroot().get("failures") == "1"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(page.stat().st_mode) & 0o600 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["verify.html", "verify.xml"]
    assert "verdict: fail" in said.out and said.err == ""
    # A file that is there is replaced where it lies.
    link = tmp_path / "link.html"
    page.write_text("old")
    link.symlink_to(page)
    hvdenv("verify", "--report", kept, "--html", str(link), code=1)
    assert link.is_symlink() and "<!DOCTYPE html>" in page.read_text()


def test_quiet_says_what_did_not_pass_and_nothing_else(
    kept: str, good: str, hvdenv: Hvdenv
) -> None:
    assert hvdenv("verify", "--report", good, "--quiet").out == ""
    said = hvdenv("verify", "--report", kept, "--quiet", code=1).out
    assert "expected  built  proven" not in said and "what to do" not in said
    assert "Failed (1):\n    allreduce: torch over MPI: rank 1 on gpu33: was ended" in said
    assert "verdict: fail" in said


def test_json_comes_out_as_it_went_in(kept: str, tmp_path: Path, hvdenv: Hvdenv) -> None:
    words = ["verify", "--report", kept, "--json", "--html", str(tmp_path / "verify.html")]
    said = hvdenv(*words, code=1)
    assert json.loads(said.out) == mapped(json.loads(Path(kept).read_text()), mask)
    assert said.err == ""


def test_the_verdict_is_not_lost(
    kept: str, good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    """The disk is full when the XML is written, and has room again for the page."""
    write = places.write_text

    def full(path: Path, text: str) -> None:
        if path.suffix == ".xml":
            raise StepError("cannot write: No space left on device", where=str(path))
        write(path, text)

    monkeypatch.setattr(verify_report, "write_text", full)
    xml, page = tmp_path / "verify.xml", tmp_path / "verify.html"
    files = ["--junit", str(xml), "--html", str(page)]
    for report, code, verdict in ((kept, 1, "fail"), (good, 5, "pass")):
        page.unlink(missing_ok=True)
        said = hvdenv("verify", "--report", report, *files, code=code)
        assert f"verdict: {verdict}" in said.out
        assert f"error: --junit {xml}: cannot write: No space left on device" in said.err
        assert "what to do: `hvdenv verify --report FILE --junit FILE`" in said.err
        assert page.exists() and not xml.exists()


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("missing/verify.html", "there is no such directory"),
        ("verify.html", "this directory is not writable"),
        (".", "this is not a regular file"),
        ("/dev/null", "this is not a regular file"),
    ],
)
@pytest.mark.parametrize("option", ["--junit", "--html"])
def test_what_could_not_be_written_is_said_first(
    option: str,
    file: str,
    problem: str,
    tmp_path: Path,
    hvdenv: Hvdenv,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "writable" in problem:  # root may anything
        monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    said = hvdenv("verify", "--prefix", "/nowhere", option, str(tmp_path / file), code=2)
    assert said.out == ""
    assert said.err.startswith(f"error: {option} /") and problem in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "Expecting value"),
        (["a list"], "its schema is not one of"),
        ({"schema": "hvdenv.report/3"}, f"its schema is not one of hvdenv.report/1, {SCHEMA}"),
        ({"schema": SCHEMA}, "recipe: this key is"),
        ("[" * 100000, ""),
        ("\xff", ""),
        (changed(host=None), "host: expected a string, found None"),
        (changed(findings=["text"]), "findings[0]: expected a table, found 'text'"),
        (changed(findings=[{"check": "a"}]), "findings[0].subject: this key is required"),
        (changed(findings=[{**GOOD, "status": "good"}]), "findings[0].status: expected one of"),
        (changed(measurements=[{**FIGURE, "ranks": True}]), "measurements[0].ranks: expected a"),
    ],
)
def test_what_is_no_report(content: object, problem: str, tmp_path: Path, hvdenv: Hvdenv) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    path = tmp_path / "report.json"
    path.write_bytes(text.encode("latin-1"))
    said = hvdenv("verify", "--report", str(path), code=2).err
    assert f"error: --report {path}: this is not a report of verify: {problem}" in said


@pytest.mark.parametrize("words", ["local", "--prefix /env", "--where compute"])
def test_a_kept_report_is_of_no_other_environment(words: str, kept: str, hvdenv: Hvdenv) -> None:
    assert "verifies nothing" in hvdenv("verify", *words.split(), "--report", kept, code=2).err
