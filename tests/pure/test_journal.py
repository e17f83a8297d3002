from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.environments.journal import FAILED, FINISHED, STARTED, Journal, chain
from hvdenv.errors import StepError

EVENTS = st.lists(
    st.tuples(
        st.sampled_from([STARTED, FINISHED, FAILED]),
        st.sampled_from(["a", "b\n", "ü"]),
        st.sampled_from(["k1", "k2", "k3"]),
    ),
    min_size=1,
    max_size=8,
)


def journal(path: Path, *events: tuple[str, str]) -> Journal:
    path.unlink(missing_ok=True)
    written = Journal.read(path)
    for event, key in events:
        written.append(event, f"step {key}", key)
    return written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


def test_no_file_is_an_empty_journal(tmp_path: Path) -> None:
    empty = Journal.read(tmp_path / "journal.jsonl")
    assert (empty.events, empty.damage, empty.finished("k")) == ([], "", None)


def test_what_a_step_recorded_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal(path, (STARTED, "k")).append(FINISHED, "s", "k", seconds=1.5, data={"é": ["\n"]})
    event = Journal.read(path).finished("k")
    assert event is not None
    assert (event.step, event.seconds, event.data) == ("s", 1.5, {"é": ["\n"]})
    times = [json.loads(line)["time"] for line in path.read_text().splitlines()]
    assert all(time.endswith("+00:00") for time in times)


@pytest.mark.parametrize(
    ("events", "done"),
    [
        ([(STARTED, "1")], ""),
        ([(STARTED, "1"), (FINISHED, "1")], "1"),
        ([(STARTED, "1"), (FAILED, "1")], ""),
        ([(FINISHED, "1"), (FINISHED, "2"), (FINISHED, "3")], "123"),
        ([(FINISHED, "1"), (FINISHED, "2"), (FINISHED, "3"), (STARTED, "2")], "1"),
        ([(FINISHED, "1"), (FINISHED, "2"), (STARTED, "1"), (FINISHED, "1")], "1"),
        ([(FINISHED, "1"), (STARTED, "2"), (FAILED, "2"), (STARTED, "2"), (FINISHED, "2")], "12"),
    ],
)
def test_a_step_begun_again_undoes_all_that_stands_upon_it(
    tmp_path: Path, events: list[tuple[str, str]], done: str
) -> None:
    path = tmp_path / "journal.jsonl"
    for one in (journal(path, *events), Journal.read(path)):
        assert "".join(key for key in "123" if one.finished(key)) == done


@given(events=EVENTS, cut=st.floats(0, 1))
def test_a_cut_journal_never_reports_an_unfinished_step(
    folder: Path, events: list[tuple[str, str, str]], cut: float
) -> None:
    path = folder / "cut.jsonl"
    path.unlink(missing_ok=True)
    whole = Journal.read(path)
    ends = [0]
    for event in events:
        whole.append(*event)
        ends.append(path.stat().st_size)
    size = round(cut * ends[-1])
    path.write_bytes(path.read_bytes()[:size])
    survived = sum(end <= size for end in ends) - 1

    read = Journal.read(path)

    assert read.damage == ""
    assert [event[:3] for event in read.events] == events[:survived]
    read.append(STARTED, "next", "k9")
    again = Journal.read(path)
    assert again.damage == ""
    assert [event[:3] for event in again.events] == [*events[:survived], (STARTED, "next", "k9")]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\0\0\0",
        b"not json",
        b"[]",
        b"1",
        b'"text"',
        b"{}",
        b'{"event": "step-finished", "step": "s", "key": "k2"}',
        b'{"event": "finished", "step": "s", "key": "k2", "time": "t"}',
        b'{"event": "step-finished", "step": "s", "key": 2, "time": "t"}',
        b'{"event": "step-finished", "step": "s", "key": "k2", "time": "t", "data": []}',
        b'{"event": "step-finished", "step": "s", "key": "k2", "time": "t", "seconds": "1"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"",
    ],
)
def test_from_garbage_on_nothing_counts_and_it_is_said(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    journal(path, (FINISHED, "k1"), (FINISHED, "k3"))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + garbage + b"\n" + second)

    read = Journal.read(path)

    assert read.finished("k1") is not None
    assert read.finished("k2") is None
    assert read.finished("k3") is None
    assert f"{path}, line 2" in read.damage
    read.append(STARTED, "s", "k4")
    mended = Journal.read(path)
    assert mended.damage == ""
    assert [event.key for event in mended.events] == ["k1", "k4"]


@given(st.text(), st.text(), st.text(), st.text())
def test_a_key_depends_on_the_step_and_all_before_it(a: str, b: str, c: str, d: str) -> None:
    same = chain(chain("", a), b) == chain(chain("", c), d)
    assert same == ((a, b) == (c, d))


def test_a_journal_that_cannot_be_read_or_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="cannot read"):
        Journal.read(tmp_path)
    with pytest.raises(StepError, match="cannot write"):
        Journal.read(tmp_path / "no/journal.jsonl").append(STARTED, "s", "k")


def test_an_event_that_is_no_json_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written = journal(path, (FINISHED, "1"))
    data: dict[str, Any] = {"x": {1, 2}}
    with pytest.raises(TypeError):
        written.append(FINISHED, "s", "2", data=data)
    assert [event.key for event in Journal.read(path).events] == ["1"]
