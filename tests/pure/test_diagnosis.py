"""What doctor makes of logs: recorded ones, texts of other projects, and how logs come."""

from __future__ import annotations

import io
import os
import re
import time
import tracemalloc
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.base.schema import decode, parse_toml
from hvdenv.knowledge import events, logs
from hvdenv.knowledge.diagnosis import Diagnosis, diagnose, diagnose_step, interpret
from hvdenv.knowledge.events import Reading, read_log
from hvdenv.knowledge.failures import FOLDER, SHORTEST, all_failures, anchor, pattern
from hvdenv.knowledge.logs import BLOCK
from hvdenv.knowledge.rules import all_rules, each_of

CASES = Path(__file__).parents[1] / "cases"
KNOWN = all_failures()
MEANINGS = (*KNOWN.events, *KNOWN.causes)


class Case(NamedTuple):
    """A log, and what the diagnosis of it must be.

    Recorded logs are files in tests/cases/logs, with this as a header; texts of others are in
    tests/cases/failures.

    Attributes:
        cause: id of the cause; empty if the log does not show it.
        symptom: where no cause is known, id of what says where it stopped.
        says: a part of what that says.
        also: id of a warning or of a consequence that must be found.
        rank: the one that failed first.
        good: nothing failed, so nothing may be found.
    """

    log: str = ""
    about: str = ""
    cause: str = ""
    symptom: str = ""
    says: str = ""
    also: str = ""
    rank: str = ""
    good: bool = False


def _recorded(path: Path) -> Case:
    header, _, log = path.read_text(encoding="utf-8").partition("+++\n")
    return decode(Case, parse_toml(header))._replace(log=log)


def _told(path: Path) -> tuple[Case, ...]:
    tables = parse_toml(path.read_text(encoding="utf-8"))["case"]
    return tuple(
        decode(Case, table)._replace(log=log) for table in tables for log in (table.pop("log"),)
    )


RECORDED = {path.stem: _recorded(path) for path in sorted((CASES / "logs").glob("*.txt"))}
TOLD = {path.stem: _told(path) for path in sorted((CASES / "failures").glob("*.toml"))}
ALL = (*RECORDED.values(), *(case for cases in TOLD.values() for case in cases))


def read(log: str | bytes) -> Diagnosis:
    return diagnose(io.BytesIO(log if isinstance(log, bytes) else log.encode()))


# What several tests ask of the same cases.
read_case = cache(read)


def root_of(log: str | bytes) -> str:
    root = read(log).root
    return root.id if root else ""


def check(case: Case) -> None:
    diagnosis = read_case(case.log)
    best = diagnosis.best
    assert (diagnosis.root.id if diagnosis.root else "") == case.cause
    assert not case.symptom or (best and best.id == case.symptom)
    assert not case.says or (best and case.says in best.cause), best
    assert diagnosis.rank == case.rank or not case.rank
    assert not case.also or case.also in {found.id for found in diagnosis.found}
    assert not case.good or diagnosis.found == ()


@pytest.mark.parametrize("case", RECORDED.values(), ids=RECORDED)
def test_recorded_logs(case: Case) -> None:
    check(case)
    assert read_case(case.log).rank == case.rank


def test_texts_of_others_and_each_cause_is_named_by_a_case() -> None:
    for case in chain(*TOLD.values()):
        try:
            check(case)
        except AssertionError as error:
            found = read(case.log).found[:2]
            raise AssertionError(f"{case.cause}: {case.log}\n{found}") from error
    named = {each.id for case in ALL for each in read_case(case.log).found}
    assert [each.id for each in KNOWN.causes if each.id not in named] == []


# --- the data


def test_what_is_known_is_complete() -> None:
    """What causes and wordings refer to exists, and nothing stands for two things."""
    rules = {rule.id for rule in all_rules()}
    contexts = {each.name for each in KNOWN.texts.context}
    families = {each.id for each in KNOWN.families}
    events = {each.id for each in KNOWN.events}
    files = [parse_toml(path.read_text()) for path in FOLDER.glob("wordings/*.toml")]
    assert {name for file in files for name in file["wordings"]} <= events
    for cause in KNOWN.causes:
        assert cause.source and (cause.event or cause.texts), cause.id
        assert set(cause.event) <= events, cause.id
        assert cause.inside.keys() <= contexts
        assert set(cause.rules) <= rules, cause.id
        globs = [glob for each in cause.when.values() for glob in each_of(each)]
        assert {g.lstrip("!")[1:] for g in globs if g.lstrip("!")[:1] == "@"} <= families
    ids = Counter(each.id for each in MEANINGS)
    texts = Counter(text for each in MEANINGS for text in each.texts)
    assert [each for each, count in (ids + texts).items() if count > 1] == []


def test_texts_name_slots_that_wordings_have() -> None:
    slots = {
        each.id: set(re.findall(r"\{(\w+)(?::[^{}]*)?\}", "\n".join(each.texts)))
        for each in MEANINGS
    }
    for each in MEANINGS:
        inside = (text for texts in each.inside.values() for text in each_of(texts))
        texts = "\n".join((each.says, each.known, *each.remedies, *inside))
        asked = {*re.findall(r"\{(\w+)\}", texts), *each.when}
        have = slots[each.id].union(
            {"family", "where", "interfaces"}, *(slots[name] for name in each.event)
        )
        assert asked <= have, each.id


def test_wordings_are_found_by_rare_texts() -> None:
    named = (*KNOWN.texts.context, *KNOWN.texts.mention)
    texts = [text for each in named for text in each.wordings]
    for text in (*texts, *(text for each in MEANINGS for text in each.texts)):
        assert len(anchor(text)) >= SHORTEST, text
        assert pattern(text)


def test_families_have_names_and_remedies_and_most_remedies_begin_with_a_command() -> None:
    for each in KNOWN.families:
        assert each.headers or each.libraries or each.packages or each.modules, each.about
        assert each.remedies("headers" if each.headers else "libraries", frozenset()), each.about
    first = [each.remedies[0] for each in MEANINGS if each.remedies]
    assert sum(each.startswith("`") for each in first) >= 0.75 * len(first)


# --- whether doctor knows more than the texts that it was written from


def _still_named(reading: Reading, wordings: set[str], cause: str) -> bool:
    """Whether a cause is named without some wordings and one cause."""
    known = KNOWN._replace(causes=tuple(each for each in KNOWN.causes if each.id != cause))
    events = [each for each in reading.events if each.hit.wording not in wordings]
    kept = [e for e in events if not (e.meaning.source and e.meaning.id == cause)]
    return interpret(reading._replace(events=tuple(kept)), known).root is not None


def test_leave_one_out() -> None:
    """A cause is named without what was written for a case.

    Most causes have one case, so that without it hardly a wording of theirs has another.
    """
    readings = [(case, read_log(io.BytesIO(case.log.encode()))) for case in ALL if case.cause]
    used = [{event.hit.wording for event in reading.events} for _, reading in readings]
    uses = Counter(chain(*used))
    named = [
        _still_named(reading, {text for text in texts if uses[text] == 1}, case.cause)
        for (case, reading), texts in zip(readings, used, strict=True)
    ]
    assert sum(named) >= 0.4 * len(named), f"{sum(named)} of {len(named)}"


SLOT = re.compile(r"\{(?P<name>\w*)(?::(?P<shape>[^{}]+))?\}")
FILLED = {"number": "7", "version": "1.2", "path": "zz/9", "text": "some text", "any": "any"}


def _printed(wording: str) -> str:
    """What a program prints that has a wording."""

    def filled(slot: re.Match[str]) -> str:
        shape = slot["shape"] or ("" if slot["name"] else "any")
        return FILLED.get(shape, shape.split("|")[0] if shape else "zz9")

    text = SLOT.sub(filled, wording.removeprefix("^").removesuffix("$"))
    return text.replace("\\n", "\n") + "\n"


def test_each_wording_is_found_where_a_program_prints_it() -> None:
    for meaning in MEANINGS:
        for wording in meaning.texts:
            reading = read_log(io.BytesIO(_printed(wording).encode()))
            assert meaning.id in {each.meaning.id for each in reading.events}, wording


HEADER = "x.c:1:10: fatal error: {}: No such file or directory\n"
LOADED = "python: error while loading shared libraries: {}: cannot open shared object file: No such file or directory\n"
LINKED = "/usr/bin/ld: cannot find -l{}\n"
PACKAGE = "CMake Error at CMakeLists.txt:3 (find_package):\n  Could NOT find {} (missing: X)\n"


# --- how logs come

PLAIN = [case for case in ALL if case.cause and case.log.isascii() and not case.rank]


PREFIXES = (
    "2026-11-21T10:00:00.1234567Z ",
    "[2026-11-21 10:00:00] ",
    "#12 34.56 ",
    "##[error]",
    "\x1b[31m",
    "\x1b]0;title\x07",
    "[1,0]<stderr>:",
    "[3]<stderr>:",
    " 3: ",
    "[rank3]: ",
    "[prterun-gpu32-100@1,0]<stderr>: ",
    "Sat Nov 21 10:00:00 2026[3]<stderr>:",
    "      │ ",
    "  >> 643    ",
    "<info> [2021-12-07 10:40:07] 30a87832 || ",
    "Nov 23 10:15:30 gpu32 python[812]: ",
    "[default3]:",
)


@pytest.mark.parametrize("number", range(len(PREFIXES)), ids=PREFIXES)
def test_prefixes_are_no_obstacle(number: int) -> None:
    """Each case with one of them."""
    for case in PLAIN[number :: len(PREFIXES)]:
        log = "\n".join(PREFIXES[number] + line for line in case.log.split("\n"))
        assert root_of(log) == case.cause, case.log


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[1,3]<stderr>:", "3"),
        ("[rank3]: ", "3"),
        ("2026-11-21T10:00:00Z [1,3]<stderr>: ", "3"),
        ("[gpu32:100] ", ""),
        ("", ""),
    ],
)
def test_the_first_rank_is_named(prefix: str, rank: str) -> None:
    log = f"[1,0]<stdout>:ready\n{prefix}ImportError: libx.so.1: cannot open shared object file\n"
    assert read(log + "[1,2]<stderr>:RuntimeError: Horovod has been shut down.\n").rank == rank


def test_the_first_of_several_ranks_is_not_known_where_memory_ran_out() -> None:
    killed = (
        "slurmstepd: error: Detected 4 oom_kill events in StepId=77.0. Some tasks were killed.\n"
    )
    ended = "srun: error: gpu012: task 5: Exited with exit code 139\n"
    found = read(killed + ended + "srun: error: gpu011: tasks 0-3: Killed\n")
    assert found.rank == ""
    assert found.failed and (found.failed.rank, found.failed.host) == ("5, 0-3", "")
    assert read(killed + ended).rank == "5"
    assert found.of_kind("consequence")[0].cause.endswith("ended: Exited with exit code 139")


def test_the_rank_that_tells_of_others_has_not_failed() -> None:
    """Rank 0 says who does not come; who begins a line there is no label of srun's."""
    case = RECORDED["stall"]
    found = read("\n".join("[1,0]<stderr>:" + line for line in case.log.split("\n")))
    waits = found.best
    assert waits and (waits.id, waits.rank, found.rank) == (case.cause or case.symptom, "", "")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_encodings_and_ends_of_lines(encoding: str, end: str) -> None:
    text = end.join(
        ["größer", "x.c:1:2: fatal error: cudnn.h: No such file or directory", "end", ""]
    )
    assert root_of(text.encode(encoding)) == "missing-header-cudnn"


def test_progress_bars_garbage_and_quotation_marks() -> None:
    bar = b"\r 10% |##   | 1/10" * 5000
    noise = bytes(range(256)) * 700
    line = b"\nfatal error: cudnn.h: No such file or directory\n"
    assert root_of(bar + noise + line + noise) == "missing-header-cudnn"
    for begin, end in ("''", "\u2018\u2019", "`'", '""'):
        said = f"x.cpp:1:10: fatal error: {begin}cudnn.h{end} file not found\n"
        assert root_of(said) == "missing-header-cudnn"


@pytest.mark.parametrize("before", [0, 1, 100, BLOCK - 30, BLOCK - 1, BLOCK, 3 * BLOCK + 17])
@pytest.mark.parametrize("filler", [b"x\n", b"x"])
def test_it_does_not_matter_where_blocks_end(before: int, filler: bytes) -> None:
    log = (filler * before)[:before] + b"\nfatal error: cudnn.h: No such file or directory\nend\n"
    diagnosis = read(log)
    assert diagnosis.root is not None
    assert "cudnn.h" in diagnosis.root.cause
    assert diagnosis.root.number == log[:-5].count(b"\n") + 1
    assert diagnosis.lines == log.count(b"\n")


def test_only_the_last_attempt_of_a_step_counts(tmp_path: Path) -> None:
    """However long lines are before it."""
    log = tmp_path / "01-wheel.log"
    with log.open("wb") as file:
        file.write(b"$ pip wheel\nNo space left on device\n")
        file.seek(100 << 20, 1)
        file.write(b"\n$ pip wheel\nc++: fatal error: Killed signal terminated program cc1plus\n")
    tracemalloc.start()
    root = diagnose_step(log).root
    assert root is not None and root.id == "out-of-memory-in-compiler"
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


# --- what comes first, and what is said where nothing is known


def test_the_first_cause_comes_first_and_what_follows_from_it_last() -> None:
    log = (
        "ERROR: Failed building wheel for horovod\n/usr/bin/ld: cannot find -lcudnn\n"
        "OSError: [Errno 28] No space left on device\nninja: build stopped: subcommand failed.\n"
    )
    found = read(log).found
    (own, *_) = diagnose(io.BytesIO(log.encode()), own=True).found
    # hvdenv sets the variables of pip, uv and conda itself.
    assert own.remedies[0].startswith("`export HVDENV_HOME=DIR TMPDIR=DIR`")
    assert found[0].id == "disk-full"  # a missing library may be one that is only tried
    kinds = [each.kind for each in found]
    assert kinds == sorted(kinds, key=["cause", "symptom", "consequence", "warning"].index)
    assert kinds[-1] == "consequence"


NAMES = "$HOME a|sh a&b x$(id) -rf a;b a\\ `id` a'b ~/$x git+http://h/x"


@pytest.mark.parametrize("name", NAMES.split())
def test_a_command_does_nothing_else_with_a_name_of_the_log(name: str) -> None:
    """Anybody may have written a log; what does not fit is left out of what can be pasted."""
    host = "ssh: Could not resolve hostname {}: Name or service not known\n"
    command = "/bin/sh: line 1: {}: command not found\n"
    module = "ModuleNotFoundError: No module named '{}'\n"
    for text in (HEADER, LOADED, LINKED, PACKAGE, host, command, module):
        for found in read(text.format(name)).found:
            for command in re.findall("`[^`]*`", found.remedy):
                assert name not in command, command


def test_the_package_manager_is_that_of_the_log() -> None:
    conda, el8 = "(base) /opt/miniforge3/bin/x\n", "4.18.0-553.el8.x86_64\n"
    for before, command in ((conda, "`conda"), (el8, "`sudo dnf")):
        root = read(before + HEADER.format("uv.h")).root
        assert root
        first = next(each for each in root.remedies if " install " in each)
        assert first.startswith(command)


def test_what_is_said_where_nothing_is_known() -> None:
    diagnosis = read("fine\n[1]<stderr>:error: nobody has met it before\nerror: 2\n")
    assert diagnosis.root is None
    assert [place.number for place in diagnosis.errors] == [2, 3]
    assert diagnosis.rank == "1"
    # Lines that may say why, where every error is explained.
    told, hint = "Fatal Python error: Segmentation fault\n", "thing: device 3 not found, going on\n"
    assert [each.line for each in read(hint + told).errors] == [hint.strip(), told.strip()]
    # The ruler of a box is not what is quoted.
    ruler = "-" * 74
    found = read(f"fine\n{ruler}\nOpen MPI detected that the dog\nate it.\n{ruler}\n").found
    assert all(set(each.line) != {"-"} for each in found)


@pytest.mark.parametrize("number", [1, 5, 11, 12, 13, 17, 22, 24, 28, 104, 110, 111, 113, 122])
def test_an_errno_is_never_taken_for_another(number: int) -> None:
    """What shared memory, sockets and files say with an errno does not depend on what it was tried for."""
    text = os.strerror(number)
    full = "disk-full" if number in (28, 122) else ""
    for line in (
        f"OSError: [Errno {number}] {text}: '/dev/shm/torch_123'",
        f"x.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-x to 9637892 bytes, error: {text} ({number})",
        f"mmap failed: {text} (errno {number})",
    ):
        cause = " ".join(each.cause + each.remedy for each in read(line).of_kind("cause"))
        assert full or "disk or the quota is full" not in cause, line
        assert number in (12, 11) or "memory ran out" not in cause, line
        assert number in (1, 13) or "permission denied" not in cause.lower(), line


# --- time


def test_a_text_that_never_fits_is_given_up() -> None:
    log = b"fatal error: no such file or directory occurs\n" * 6000
    began = time.process_time()
    read(log)
    assert time.process_time() - began < 5


def test_texts_are_found_without_the_library_too(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [case.log for case in ALL[::50]]
    expected = [read_case(log) for log in some]
    monkeypatch.setattr(logs, "BytesAhoCorasick", None)
    monkeypatch.setattr(events, "_finder", cache(events._finder.__wrapped__))
    assert [read(log) for log in some] == expected


def test_a_long_log_is_read_in_parts_and_takes_little_time() -> None:
    """Nothing is found in a good one."""

    class Long(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size == BLOCK
            return super().read(size)

    log = RECORDED["good-build"].log.encode()
    began = time.process_time()
    assert diagnose(Long(log * (10_000_000 // len(log)))).found == ()
    assert time.process_time() - began < 5


PREFIXED = ("[1,0]<stderr>:", "3: ", "2026-11-21T10:00:00Z ", ": ")
ODD = ("\n", "\r", "\x1b[", "31m", "{0}", "\udcff", "x" * 2000)
PIECES: Any = st.sampled_from([*(m.texts[0] for m in MEANINGS if m.texts), *PREFIXED, *ODD])


@settings(max_examples=60, deadline=None)
@given(
    st.binary() | st.lists(PIECES).map(lambda pieces: "".join(pieces).encode("utf-8", "replace"))
)
def test_anything_can_be_read(log: bytes) -> None:
    diagnosis = read(log)
    order = [found.kind for found in diagnosis.found]
    assert order == sorted(order, key=["cause", "symptom", "consequence", "warning"].index)
    assert all(1 <= found.number <= log.count(b"\n") + 2 for found in diagnosis.found)
