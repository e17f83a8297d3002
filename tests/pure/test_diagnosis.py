from __future__ import annotations

import io
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.knowledge import diagnosis as diagnosing
from hvdenv.knowledge.diagnosis import (
    ALL_TRIES,
    BLOCK,
    FEW_TRIES,
    TRIES,
    Diagnosis,
    diagnose,
    diagnose_step,
    explain,
)
from hvdenv.knowledge.rules import all_rules
from hvdenv.knowledge.signatures import Phase, Signature, all_signatures
from hvdenv.schema import decode, parse_toml

FOLDER = Path(__file__).parents[1] / "cases/doctor"
SIGNATURES = {signature.id: signature for signature in all_signatures()}


class Case(NamedTuple):
    """The header of a log in tests/cases/doctor.

    Attributes:
        about: what was done.
        origin: a real failure, or written from what a source says.
        cause: id of the true cause; empty where none can be told from the log.
        says: the cause in words, or where it stopped.
        rank: the one that failed first.
        good: nothing failed, so nothing at all may be found.
    """

    about: str
    origin: Literal["recorded", "source"]
    phase: Phase
    cause: str
    says: str
    rank: str = ""
    good: bool = False
    log: str = ""


@cache
def cases() -> dict[str, Case]:
    found = {}
    for path in sorted(FOLDER.glob("*.txt")):
        header, _, log = path.read_text(encoding="utf-8").partition("+++\n")
        found[path.stem] = decode(Case, parse_toml(header))._replace(log=log)
    return found


def read(log: str | bytes, phase: Phase | None = None) -> Diagnosis:
    return diagnose(io.BytesIO(log if isinstance(log, bytes) else log.encode()), phase)


@pytest.mark.parametrize("name", cases())
def test_the_true_cause_comes_first(name: str) -> None:
    case = cases()[name]
    for phase in (case.phase, None):
        diagnosis = read(case.log, phase)
        assert (diagnosis.root.id if diagnosis.root else "") == case.cause
        assert (diagnosis.best.cause if diagnosis.best else "") == case.says
        assert diagnosis.rank == case.rank
    if case.good:
        assert diagnosis.found == ()


@pytest.mark.parametrize("signature", all_signatures(), ids=lambda signature: signature.id)
def test_each_signature(signature: Signature) -> None:
    """It is in a case, and its rules are there."""
    assert signature.certainty
    assert set(signature.rules) <= {rule.id for rule in all_rules()}
    found = [name for name, case in cases().items() if signature.id in _ids(name)]
    assert found
    if signature.kind == "cause":
        assert any(cases()[name].cause == signature.id for name in found)


@cache
def _ids(name: str) -> set[str]:
    return {found.id for found in read(cases()[name].log).found}


def test_ids_are_unique() -> None:
    assert len(SIGNATURES) == len(all_signatures())


def test_enough_real_failures() -> None:
    assert sum(case.origin == "recorded" and not case.good for case in cases().values()) >= 40


# How logs come: what is put before each line, or done to all of it.
ASCII_CASES = [name for name, case in cases().items() if case.log.isascii() and not case.rank]


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-11-21T10:00:00.1234567Z ", "[2026-11-21 10:00:00] ", "#12 34.56 ", "##[error]",
        "\x1b[31m", "\x1b]0;title\x07", "[1,0]<stderr>:", "[3]<stderr>:", " 3: ", "[rank3]: ",
        "[prterun-gpu32-100@1,0]<stderr>: ", "Sat Nov 21 10:00:00 2026[3]<stderr>:",
    ],
)  # fmt: skip
def test_prefixes_are_no_obstacle(prefix: str) -> None:
    for name in ASCII_CASES[::5]:
        case = cases()[name]
        log = "\n".join(prefix + line for line in case.log.split("\n"))
        root = read(log, case.phase).root
        assert (root.id if root else "") == case.cause, name


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[1,3]<stderr>:", "3"), ("[3]<stdout>:", "3"), ("3: ", "3"), ("[rank3]: ", "3"),
        ("2026-11-21T10:00:00Z [1,3]<stderr>: ", "3"), ("[gpu32:100] ", ""), ("", ""),
    ],
)  # fmt: skip
def test_the_first_rank_is_named(prefix: str, rank: str) -> None:
    log = f"[1,0]<stdout>:ready\n{prefix}ImportError: libx.so.1: cannot open shared object file\n"
    assert read(log + "[1,2]<stderr>:RuntimeError: Horovod has been shut down.\n").rank == rank


def test_the_rank_that_tells_of_others_has_not_failed() -> None:
    """Rank 0 says who does not come; who begins a line there is no label of srun's."""
    case = cases()["stall"]
    log = "\n".join("[1,0]<stderr>:" + line for line in case.log.split("\n"))
    waits = read(log).best
    assert waits and (waits.id, waits.rank, read(log).rank) == (case.cause, "", "")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_encodings_and_ends_of_lines(encoding: str, end: str) -> None:
    text = end.join(["größer", "CMake Error at x:1 (message):", "  Could NOT find MPI (x)", ""])
    assert _root(text.encode(encoding)) == "no-mpi"


def _root(log: bytes) -> str:
    root = read(log).root
    return root.id if root else ""


def test_progress_bars_and_garbage_around() -> None:
    bar = b"\r 10% |##   | 1/10" * 5000
    noise = bytes(range(256)) * 700
    line = b"\nfatal error: Python.h: No such file or directory\n"
    assert _root(bar + noise + line + noise) == "no-python-headers"


@pytest.mark.parametrize("before", [0, 1, 100, BLOCK - 30, BLOCK - 1, BLOCK, 3 * BLOCK + 17])
@pytest.mark.parametrize("filler", [b"x\n", b"x"])
def test_it_does_not_matter_where_blocks_end(before: int, filler: bytes) -> None:
    log = (filler * before)[:before] + b"\nCMake 3.13 or higher is required.  You\n"
    diagnosis = read(log.replace(b"You\n", b"You are running version 3.10.2\nend\n"))
    assert diagnosis.root is not None
    assert diagnosis.root.cause == "CMake 3.10.2 is too old: 3.13 or newer is wanted"
    assert diagnosis.root.number == log[:-30].count(b"\n") + 1
    assert diagnosis.lines == log.count(b"\n") + 1


def test_a_pattern_is_found_in_its_own_line() -> None:
    found = read("the test failed: no\nncclAllReduce failed: oops\n").best
    assert found is not None
    assert (found.number, found.cause) == (2, "NCCL stopped in ncclAllReduce: oops")


def test_causes_stand_above_what_follows_from_them() -> None:
    log = (
        "ERROR: Failed building wheel for horovod\nx.cc:1:2: error: some\n"
        "/usr/bin/ld: cannot find -lfoo\nERROR: No matching distribution found for y\n"
    )
    kinds = [found.kind for found in read(log).found]
    assert kinds == ["cause", "cause", "symptom", "consequence"]
    assert _root(log.encode()) == "library-not-for-linking"


def test_what_is_needed_beside_a_text() -> None:
    retry = "WARNING: Retrying after connection broken by 'NewConnectionError'\n"
    assert _root(retry.encode()) == ""
    failed = (
        "ERROR: Could not find a version that satisfies the requirement x (from versions: none)"
    )
    assert _root((retry + failed).encode()) == "network-unreachable"
    missing = b"ModuleNotFoundError: No module named 'torch'\n"
    assert _root(missing) == "no-module"
    assert _root(missing + b"-- Running CMake\n") == ""


def test_versions_and_places_are_picked_out() -> None:
    mentions = read(cases()["cmake-4"].log).mentions
    assert mentions["Horovod"] == "0.28.1"
    assert mentions["Python"] == "3.11"
    assert mentions["C++ compiler"] == "GNU 12.2.0"
    assert mentions["C++ compiler's path"] == "/usr/bin/c++"


def test_what_to_look_at_where_nothing_is_known() -> None:
    diagnosis = read("fine\n[1]<stderr>:ValueError: nobody has met it\nerror: 2\n")
    assert diagnosis.root is None
    assert [place.number for place in diagnosis.errors] == [2, 3]
    assert diagnosis.rank == "1"


def test_only_the_last_attempt_of_a_step_counts(tmp_path: Path) -> None:
    log = tmp_path / "01-wheel.log"
    full, killed = "No space left on device", "c++: fatal error: Killed signal terminated program x"
    log.write_text(f"$ pip wheel\n{full}\n$ pip wheel\n{killed}\n", encoding="utf-8")
    root = diagnose_step(log).root
    assert root is not None
    assert root.id == "compiler-killed"


def test_phases() -> None:
    assert explain("Duplicate GPU detected", "build") is None
    found = explain("Duplicate GPU detected", "run")
    assert found is not None
    assert found.id == "gpu-twice"
    assert explain("all went well {0}", "run") is None
    assert explain("", "build") is None


def test_a_text_that_never_fits_is_given_up() -> None:
    log = b"the text to replace occurs\n" * (3 * TRIES)
    began = time.process_time()
    assert _root(log) == ""
    assert time.process_time() - began < 3


def test_texts_of_all_signatures_that_never_fit_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(diagnosing, "_look", lambda block, at, pattern: tried.append(at))
    read("".join(f"{text}\n" for each in all_signatures() for text in each.texts) * 400)
    assert ALL_TRIES < len(tried) < ALL_TRIES + FEW_TRIES * len(all_signatures())


def test_texts_are_found_without_the_library_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: read(cases()[name].log) for name in list(cases())[::20]}
    monkeypatch.setitem(sys.modules, "ahocorasick_rs", None)
    monkeypatch.setattr(diagnosing, "_automaton", diagnosing._automaton.__wrapped__)
    assert {name: read(cases()[name].log) for name in expected} == expected


def test_a_long_log_is_read_in_parts_and_takes_little_time() -> None:
    """Nothing is found in a good one."""

    class Long(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size == BLOCK
            return super().read(size)

    log = cases()["good-build"].log.encode()
    began = time.process_time()
    assert diagnose(Long(log * (10_000_000 // len(log)))).found == ()
    assert time.process_time() - began < 5


PIECES: Any = st.sampled_from(
    [*(text for signature in all_signatures() for text in signature.texts[:1]), "\n", "\r", "\x1b[",
     "31m", "{0}", "\udcff", "[1,0]<stderr>:", "3: ", "2026-11-21T10:00:00Z ", ": ", "x" * 2000]
)  # fmt: skip


@settings(max_examples=60)
@given(
    st.binary() | st.lists(PIECES).map(lambda pieces: "".join(pieces).encode("utf-8", "replace"))
)
def test_anything_can_be_read(log: bytes) -> None:
    diagnosis = read(log)
    order = [found.kind for found in diagnosis.found]
    assert order == sorted(order, key=["cause", "symptom", "consequence", "warning"].index)
    lines = [found.number for found in diagnosis.found]
    assert len(lines) == len(set(lines))
    assert all(1 <= number <= log.count(b"\n") + 1 for number in lines)


@settings(max_examples=30)
@given(st.text())
def test_any_text_can_be_explained(text: str) -> None:
    explain(text, "run")
