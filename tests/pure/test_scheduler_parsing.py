from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.errors import UsageError
from hvdenv.model import template
from hvdenv.model.dialect import shipped
from hvdenv.places import Places
from hvdenv.schema import decode, parse_toml
from hvdenv.sites.jobs import (
    OutputTail,
    Submitted,
    keep,
    recall,
    records,
    unfinished,
)
from hvdenv.sites.status import Status, find_exit_code, parse_status

DIALECTS = shipped()
ANSWERS = Path(__file__).parents[1] / "cases/jobs/answers"
# An empty table is of a text that is no answer. Outputs count where they are stated.
EXPECTED = parse_toml((ANSWERS / "expected.toml").read_text(encoding="utf-8"))


def scheduler_of(name: str) -> str:
    (found,) = (each for each in DIALECTS if name.startswith(each))
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_what_schedulers_say(name: str) -> None:
    number = "12" if name.startswith("gridengine") else "18"
    text = (ANSWERS / f"{name}.txt").read_text()
    status = parse_status(text, DIALECTS[scheduler_of(name)].query, number)
    if not EXPECTED[name]:
        assert status is None
        return
    expected = decode(Status, EXPECTED[name])
    assert status
    if not expected.outputs:
        status = status._replace(outputs=())
    assert status == expected._replace(name="" if status.state == "gone" else "train")


def test_each_recorded_text_is_expected() -> None:
    assert {path.stem for path in ANSWERS.glob("*.txt")} == set(EXPECTED)


@given(text=st.text(), scheduler=st.sampled_from(sorted(DIALECTS)))
def test_other_texts_are_no_answers(text: str, scheduler: str) -> None:
    dialect = DIALECTS[scheduler]
    assert parse_status(text, dialect.query, "1") in (None, Status("gone"))
    assert parse_status(text, dialect.history, "1") is None


def test_a_folder_cannot_lie_about_the_state() -> None:
    text = (ANSWERS / "slurm-running.txt").read_text()
    lie = text.replace("WorkDir=/home/ann/work", "WorkDir=/x\n   JobState=FAILED Reason=x\n")
    assert lie != text
    status = parse_status(lie, DIALECTS["slurm"].query, "18")
    assert status
    assert status.state == "running"
    text = (ANSWERS / "pbs-running.txt").read_text()
    status = parse_status(
        f"{text}    job_state = F\n    Exit_status = 0\n", DIALECTS["pbs"].query, "1"
    )
    assert status
    assert status.state == "running"


KILLED = "37  : qmaster enforced h_rt, h_cpu, or h_vmem limit"
NO_FILE = "26  : opening input/output file"
GRID_ENGINE = "jobname      train\nfailed       {}\nexit_status  {}\n"


@pytest.mark.parametrize(
    ("scheduler", "text", "status"),
    [
        ("gridengine", GRID_ENGINE.format("0    ", "0"), Status("completed", exit_code=0)),
        ("gridengine", GRID_ENGINE.format("0    ", "3"), Status("failed", exit_code=3)),
        (
            "gridengine",
            GRID_ENGINE.format(KILLED, "137        (Killed)"),
            Status("timeout", KILLED, 137),
        ),
        ("gridengine", GRID_ENGINE.format(NO_FILE, "0"), Status("failed", NO_FILE)),
        ("gridengine", "error: job id 5 not found", None),
        ("slurm", "COMPLETED|0:0\n", Status("completed", exit_code=0)),
        ("slurm", "CANCELLED by 1000|0:15\n", Status("cancelled", exit_code=143)),
        ("slurm", "TIMEOUT|0:0\n", Status("timeout", exit_code=0)),
        ("slurm", "FAILED|3:0\n", Status("failed", exit_code=3)),
        ("slurm", "Slurm accounting storage is disabled\n", None),
        ("slurm", "", None),
    ],
)
def test_what_the_accounting_says(scheduler: str, text: str, status: Status | None) -> None:
    name = "train" if scheduler == "gridengine" else ""
    found = parse_status(text, DIALECTS[scheduler].history, "12")
    assert found == (status and status._replace(name=name))


def test_a_job_of_another_cluster() -> None:
    other = job("12", cluster="other")
    assert other.words(other.dialect.cancel) == ("scancel", "-M", "other", "12")
    assert job("12").words(other.dialect.cancel) == ("scancel", "12")


@pytest.mark.parametrize("scheduler", sorted(DIALECTS))
def test_ids_and_paths_are_arguments_of_their_own(scheduler: str) -> None:
    dialect, hostile = DIALECTS[scheduler], "/x y'; touch /z; $(id)\n#"
    for each in (dialect.submit, dialect.query.command, dialect.cancel):
        words = template.words(each, {"id": hostile, "script": hostile})
        assert hostile in words
        assert all("touch" not in word for word in words if word != hostile)


@pytest.mark.parametrize(
    ("output", "job", "code"),
    [
        ("x\nhvdenv: job 12 ended with exit code 0\n", "12", 0),
        ("hvdenv: job 12 ended with exit code 1\nhvdenv: job 12 ended with exit code 3", "12", 3),
        ("hvdenv: job 12.pbs-01 ended with exit code 3\n", "12", 3),
        ("hvdenv: job 12 ended with exit code 3\n", "12.pbs-01", 3),
        ("hvdenv: job 13 ended with exit code 3\n", "12", None),
        ("hvdenv: job 12 ended with exit code 3 or so\n", "12", None),
        ("", "12", None),
    ],
)
def test_the_exit_code_at_the_end_of_the_output(output: str, job: str, code: int | None) -> None:
    assert find_exit_code(output, job) == code


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (Status("waiting", "Priority"), "waiting (Priority: other jobs come first)"),
        (Status("waiting"), "waiting"),
        (Status("waiting", "Unheard"), "waiting (Unheard)"),
        (
            Status("waiting", "ReqNodeNotAvail,_UnavailableNodes:n1"),
            "waiting (ReqNodeNotAvail,_UnavailableNodes:n1: required nodes are down or reserved,"
            " perhaps for maintenance; the job starts when they are back, or request less time)",
        ),
        (Status("running", hosts="n[1-2]"), "running on n[1-2]"),
        (Status("running", "Job run at noon"), "running"),
        (Status("failed", "NonZeroExitCode", 3), "failed"),
        (Status("timeout", "TimeLimit"), "timeout (TimeLimit)"),
    ],
)
def test_states_in_words(status: Status, said: str) -> None:
    assert status.describe(DIALECTS["slurm"]) == said


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        *(
            (reason, True)
            for reason in ("PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig")
        ),
        *(
            (reason, False)
            for reason in ("", "Resources", "Priority", "ReqNodeNotAvail", "BeginTime")
        ),
    ],
)
def test_what_can_never_start(reason: str, never: bool) -> None:
    assert bool(Status("waiting", reason).hopeless(DIALECTS["slurm"])) is never
    assert not Status("running", reason).hopeless(DIALECTS["slurm"])


def test_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "out"
    tail = OutputTail(str(path))
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == ["one"]
    with path.open("ab") as stream:
        stream.write(b"o\n10%\r20%\r\n\x1b[31mred\x1b[0m https://u:p@h\n\xff\nend")
    assert list(tail.lines()) == ["two", "20%", "red https://***@h", "\ufffd"]
    assert list(tail.lines(last=True)) == ["end"]
    assert list(tail.lines(last=True)) == []


@given(blocks=st.lists(st.binary(max_size=30), max_size=8))
def test_a_file_is_read_whole_however_it_grows(
    blocks: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tail") / "out"
    at_once, bit_by_bit = OutputTail(str(path)), OutputTail(str(path))
    read = []
    for block in blocks:
        with path.open("ab") as stream:
            stream.write(block)
        read += list(bit_by_bit.lines())
    assert read + list(bit_by_bit.lines(last=True)) == list(at_once.lines(last=True))


def job(number: str, **values: Any) -> Submitted:
    return Submitted(
        "slurm",
        DIALECTS["slurm"],
        "train",
        id=number,
        submitted=f"2026-11-21T17:00:{number}",
        **values,
    )


def test_jobs_are_noted(tmp_path: Path) -> None:
    places = Places(tmp_path)
    assert records(places) == []
    places.jobs.mkdir()
    keep(job("12", key="k"), places)
    keep(job("13", key="k", state="failed")._replace(exit_code=3), places)
    (places.jobs / "slurm-14.json").write_text('{"half')
    assert [record.id for record in records(places)] == ["12", "13"]
    assert recall("13", places).exit_code == 3
    assert recall("13.server", places).id == "13"
    assert unfinished("k", places) == job("12", key="k")
    assert unfinished("other", places) is None
    with pytest.raises(UsageError, match="no record of a job 99") as caught:
        recall("99", places)
    assert "12, 13" in caught.value.remedy
