from __future__ import annotations

import io
import time
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.knowledge import diagnosis as diagnosing
from hvdenv.knowledge.diagnosis import (
    ALL_TRIES,
    BLOCK,
    FEW_TRIES,
    NEAR,
    TRIES,
    Diagnosis,
    diagnose,
    diagnose_step,
    explain,
)
from hvdenv.knowledge.rules import all_rules
from hvdenv.knowledge.signatures import Phase, Signature, all_families, all_signatures
from hvdenv.schema import decode, parse_toml

LOGS = Path(__file__).parents[1] / "cases/logs"
EXAMPLES = Path(__file__).parents[1] / "cases/signatures"
SIGNATURES = {signature.id: signature for signature in all_signatures()}


class Case(NamedTuple):
    """A log, and what the diagnosis of it must be.

    Recorded logs are files in tests/cases/logs, with this as a header. Examples, written from the
    source of a signature, are in tests/cases/signatures by its id; those in which nothing may be
    recognised are in unrecognised.toml.

    Attributes:
        phase: of a recorded log; an example is read in each phase of its signature.
        cause: id of the signature that names the cause; empty if the log does not show it.
        symptom: where no cause is known, id of the signature that says where it stopped.
        also: id of a warning or of a consequence that must be found.
        values, where: what fills the placeholders in the signature's cause.
        name: of a header, library or package, which decides the family.
        before: what the lines before say, as in the cause.
        rank: the one that failed first.
        good: nothing failed, so nothing may be found.
    """

    log: str = ""
    about: str = ""
    phase: Phase | None = None
    cause: str = ""
    symptom: str = ""
    also: str = ""
    values: tuple[str, ...] = ()
    where: str = ""
    name: str = ""
    before: str = ""
    rank: str = ""
    good: bool = False

    @property
    def says(self) -> str:
        """The text of the cause, or of the symptom."""
        signature = SIGNATURES.get(self.cause or self.symptom)
        if not signature:
            return ""
        cause = signature.refined_by(self.log, self.log, self.name).cause
        filled = cause.format(*self.values, where=self.where, before=self.before)
        return filled.replace(" ()", "").strip()


def _recorded(path: Path) -> Case:
    header, _, log = path.read_text(encoding="utf-8").partition("+++\n")
    return decode(Case, parse_toml(header))._replace(log=log)


def _example(signature: Signature | None, table: dict[str, Any]) -> Case:
    log = table.pop("log")
    if signature:
        known = "name" in table or "before" in table
        kind = "cause" if known else signature.kind if signature.kind == "symptom" else "also"
        kind = "cause" if signature.kind == "cause" else kind
        table = {**table, kind: signature.id}
    return decode(Case, table)._replace(log=log)


def _examples(path: Path) -> dict[str, Case]:
    document = parse_toml(path.read_text(encoding="utf-8"))
    return {
        f"{name}-{number}": _example(SIGNATURES.get(name), table)
        for name, tables in document.items()
        for number, table in enumerate(tables)
    }


RECORDED = {path.stem: _recorded(path) for path in sorted(LOGS.glob("*.txt"))}
THEMES = {path.stem: _examples(path) for path in sorted(EXAMPLES.glob("*.toml"))}
CASES = RECORDED | {name: case for examples in THEMES.values() for name, case in examples.items()}


def read(log: str | bytes, phase: Phase | None = None) -> Diagnosis:
    return diagnose(io.BytesIO(log if isinstance(log, bytes) else log.encode()), phase)


def check(case: Case) -> None:
    signature = SIGNATURES.get(case.cause or case.symptom or case.also)
    phases = (case.phase,) if case.phase else signature.phases if signature else ()
    for phase in (*phases, None):
        diagnosis = read(case.log, phase)
        assert (diagnosis.root.id if diagnosis.root else "") == case.cause
        assert (diagnosis.best.cause if diagnosis.best else "") == case.says
        assert diagnosis.rank == case.rank
        assert not case.also or case.also in {found.id for found in diagnosis.found}
        assert not case.good or diagnosis.found == ()


@pytest.mark.parametrize("case", RECORDED.values(), ids=RECORDED)
def test_recorded_logs(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("theme", THEMES)
def test_examples(theme: str) -> None:
    for name, case in THEMES[theme].items():
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"{name}: {case.log}") from error


def test_each_signature() -> None:
    """Each is found in a log or an example, a cause as the first, and its rules exist."""
    causes = {case.cause for case in CASES.values()}
    found = {found.id for case in CASES.values() for found in read(case.log).found}
    assert set(SIGNATURES) == found
    assert {signature.id for signature in all_signatures() if signature.kind == "cause"} <= causes
    assert len(SIGNATURES) == len(all_signatures())
    rules = {rule.id for rule in all_rules()}
    assert {rule for signature in all_signatures() for rule in signature.rules} <= rules


def test_enough_real_failures() -> None:
    assert sum(not case.good for case in RECORDED.values()) >= 40


# How logs come: what is put before each line, or done to all of it.
ASCII_CASES = [name for name, case in CASES.items() if case.log.isascii() and not case.rank]


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-11-21T10:00:00.1234567Z ", "[2026-11-21 10:00:00] ", "#12 34.56 ", "##[error]",
        "\x1b[31m", "\x1b]0;title\x07", "[1,0]<stderr>:", "[3]<stderr>:", " 3: ", "[rank3]: ",
        "[prterun-gpu32-100@1,0]<stderr>: ", "Sat Nov 21 10:00:00 2026[3]<stderr>:",
        "      │ ", "  >> 643    ", "[pod/train-worker-0/mpi] ", "<info> [2021-12-07 10:40:07] 30a87832 || ",
        "Nov 23 10:15:30 gpu32 python[812]: ", "worker-0  | ", "[default3]:",
    ],
)  # fmt: skip
def test_prefixes_are_no_obstacle(prefix: str) -> None:
    for name in ASCII_CASES[::5]:
        case = CASES[name]
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
    case = CASES["stall"]
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
    assert diagnosis.root.cause == "CMake 3.10.2 is too old: 3.13 or newer is required"
    assert diagnosis.root.number == log[:-30].count(b"\n") + 1
    assert diagnosis.lines == log.count(b"\n") + 1


def test_a_pattern_is_found_in_its_own_line() -> None:
    found = read("the test failed: no\nncclAllReduce failed: oops\n").best
    assert found is not None
    assert (found.number, found.cause) == (2, "NCCL failed in ncclAllReduce: oops")


def test_causes_stand_above_what_follows_from_them() -> None:
    log = (
        "ERROR: Failed building wheel for horovod\nx.cc:1:2: error: some\n"
        "/usr/bin/ld: cannot find -lfoo\nERROR: No matching distribution found for y\n"
    )
    kinds = [found.kind for found in read(log).found]
    assert kinds == ["cause", "cause", "symptom", "consequence"]
    assert _root(log.encode()) == "library-not-for-linking"


RETRY = "WARNING: Retrying after connection broken by 'NewConnectionError'\n"
FAILED = "ERROR: Could not find a version that satisfies the requirement x (from versions: none)"
MISSING = "ModuleNotFoundError: No module named 'torch'\n"
OLD_PIP = "ERROR: No matching distribution found for torch\nYou are using pip version {}; however"


@pytest.mark.parametrize(
    ("log", "root"),
    [
        # A text needs another one beside it, or must not have it.
        (RETRY, ""),
        (RETRY + FAILED, "network-unreachable"),
        (MISSING, "no-module"),
        (MISSING + "-- Running CMake\n", ""),
        # Numbers are compared.
        (OLD_PIP.format("18.1"), "pip-too-old-for-wheels"),
        (OLD_PIP.format("20.2.4"), "pip-too-old-for-wheels"),
        (OLD_PIP.format("20.3"), "no-such-version"),
        (OLD_PIP.format("x"), "no-such-version"),
        # Programs have several names.
        ("bash: orted: command not found\n", "no-orted"),
        ("bash: prted: command not found\n", "no-orted"),
    ],
)
def test_what_decides(log: str, root: str) -> None:
    assert _root(log.encode()) == root


SHARED = (
    "n1 [0] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fj to 59 bytes\n"
)


@pytest.mark.parametrize("filler", ["", "x" * 1500 + "\n", "x\n" * 3000])
@pytest.mark.parametrize("before", [0, BLOCK - 1700, BLOCK - 100, BLOCK + 5])
def test_what_a_near_line_decides(before: int, filler: str) -> None:
    """A line that is near contradicts, wherever blocks end; one further away does not."""
    contradiction = "n1 [0] NCCL WARN attaching to shared memory segment: Permission denied\n"
    start = "y\n" * (before // 2)
    far = len(filler) > NEAR
    for log in (SHARED + filler + contradiction, contradiction + filler + SHARED):
        found = {each.id for each in read(start + log).found}
        assert ("nccl-shared-memory" in found) is far


@pytest.mark.parametrize("between", range(4))
def test_a_text_in_the_next_two_lines_refines(between: int) -> None:
    log = "[h:1] UCX  ERROR it is raining\n" + "fine\n" * between + "shmat(shmid=1) failed\n"
    [found] = read(log).found
    general = SIGNATURES["ucx-stopped"]
    assert (found.remedy == general.remedy) is (between > 1)
    assert ("shared memory" in found.cause) is (between < 2)


def test_what_programs_say_of_themselves_counts_where_nothing_else_is_found() -> None:
    general, known = "srun: error: it is raining\n", "OSError: [Errno 28] No space left on device\n"
    assert [each.id for each in read(general).found] == ["slurm-reports"]
    assert [each.id for each in read(general + known).found] == ["disk-full"]
    assert [each.id for each in read(known + general).found] == ["disk-full"]


def test_what_a_program_says_of_itself_counts_more_than_what_another_says_of_it() -> None:
    torch = "RuntimeError: NCCL Error 2: unhandled system error\n"
    nccl = "h:1:2 [0] misc/ibvwrap.cc:182 NCCL WARN it is raining\n"
    for log in (torch + nccl, nccl + torch):
        assert [each.id for each in read(log).found] == ["nccl-reports"]
    assert [each.id for each in read(torch).found] == ["torch-nccl-stopped"]


def test_remedies_for_horovod_are_for_logs_that_name_it() -> None:
    log = "CMake Error at x:1 (message):\n  Could NOT find CUDAToolkit (missing: x)\n"
    for before, named in (("", False), ("Building wheel for horovod\n", True)):
        found = read(before + log).best
        assert found and ("HOROVOD_CUDA_HOME" in found.remedy) is named


NO_HEADER = "x.c:1:10: fatal error: {}: No such file or directory\n"
NOT_LOADED = "python: error while loading shared libraries: {}: cannot open shared object file: No such file or directory\n"
NOT_LINKED = "/usr/bin/ld: cannot find -l{}\n"
UNDEFINED = "x.o: undefined reference to `{}'\n"
NO_PACKAGE = (
    "CMake Error at CMakeLists.txt:3 (find_package):\n"
    '  By not providing "Find{0}.cmake" in CMAKE_MODULE_PATH this project has\n'
    '  asked CMake to find a package configuration file provided by "{0}", but\n'
)


@pytest.mark.parametrize(
    ("text", "name", "family", "remedy"),
    [
        (NO_HEADER, "cuda_profiler_api.h", "the CUDA toolkit", "CPATH=$CUDA_HOME/include"),
        (NO_HEADER, "uv.h", "libuv", "libuv1-dev"),
        (NOT_LINKED, "uv", "libuv", "libuv1-dev"),
        (NOT_LOADED, "libuv.so.1", "libuv", "libuv1;"),
        (NOT_LOADED, "libamdhip64.so.6", "ROCm", "/opt/rocm/lib"),
        (UNDEFINED, "uv_loop_init", "libuv", "-luv"),
        (NO_PACKAGE, "libuv", "libuv", "libuv1-dev"),
    ],
)
def test_a_name_of_a_family_is_a_cause_with_its_remedy(
    text: str, name: str, family: str, remedy: str
) -> None:
    """Compilers and linkers want headers and links, programs the libraries alone."""
    root = read(text.format(name)).root
    assert root
    assert family in root.cause and name in root.cause
    assert remedy in root.remedy
    stranger = read(text.format("zzyzx.h" if name.endswith(".h") else "zzyzx")).best
    assert not stranger or family not in stranger.cause


def test_every_family_has_names_and_remedies() -> None:
    families = all_families()
    assert len({each.about for each in families}) == len(families)
    for each in families:
        assert each.headers or each.libraries or each.packages, each.about
        assert each.build, each.about


def test_a_missing_header_steps_back_behind_another_cause() -> None:
    header, full = NO_HEADER.format("uv.h"), "OSError: [Errno 28] No space left on device\n"
    assert read(header).of_kind("cause")
    diagnosis = read(header + full)
    assert [each.id for each in diagnosis.of_kind("cause")] == ["disk-full"]
    assert len(diagnosis.of_kind("symptom")) == 1


def test_what_configure_says_last_decides() -> None:
    log = "configure: WARNING: It is raining.\nconfigure: WARNING: Take an umbrella.\nconfigure: error: Cannot continue\n"
    root = read(log).root
    assert root and "It is raining. Take an umbrella." in root.cause
    assert not read(log.rpartition("configure:")[1] + " error: Cannot continue\n").root


@pytest.mark.parametrize(
    ("before", "first"),
    [
        ("", "Debian and Ubuntu: "), ("(base) /opt/miniforge3/bin/python\n", "conda: "),
        ("kernel 4.18.0-553.el8.x86_64\n", "RHEL: "),
    ],
)  # fmt: skip
def test_the_package_manager_of_the_log_is_named_first(before: str, first: str) -> None:
    found = read(before + NO_HEADER.format("uv.h")).best
    assert found and found.remedies[0].startswith(first)
    assert len(found.remedies) == 3


def test_what_only_concerns_horovod_is_not_for_other_logs() -> None:
    assert diagnosing._without_horovod(["a (for Horovod: b)", "HOROVOD_X=1", "c"]) == ["a", "c"]
    assert diagnosing._without_horovod(["HOROVOD_X=1"]) == ["HOROVOD_X=1"]


def test_lines_that_may_say_why_where_every_error_is_explained() -> None:
    told, hint = "Fatal Python error: Segmentation fault\n", "thing: device 3 not found, going on\n"
    assert [each.line for each in read(hint + told).errors] == [hint.strip(), told.strip()]
    unexplained = "ValueError: nobody has met it\n"
    assert [each.line for each in read(hint + unexplained).errors] == [unexplained.strip()]


def test_steps_of_slurm_are_named_in_several_ways() -> None:
    text = "error: Detected 1 oom_kill event in StepId=321.0. Some of the step tasks have been OOM Killed.\n"
    found = [read(who + text).best for who in ("slurmstepd: ", "slurmstepd-gpu32: ", "[321.0] ")]
    assert len({each and each.id for each in found}) == 1
    assert found[0]


@pytest.mark.parametrize("lines", [3, 300])
def test_what_is_near_refines(lines: int) -> None:
    log = "PackagesNotFoundError: x\n\n  - cudatoolkit\n" + "  - noarch\n" * lines + "/osx-64\n"
    found = read(log).best
    assert found and ("macOS" in found.cause) is (lines < NEAR / 11)


@pytest.mark.parametrize(("call", "names"), [("srun --nodelist=a.b", True), ("srun", False)])
def test_a_text_in_the_line_and_one_near_it_refine_together(call: str, names: bool) -> None:
    rejected = "srun: error: Unable to create step for job 1: Requested node configuration is not available"
    found = read(f"{call}\n{rejected}\n").best
    assert found and ("--nodelist" in found.cause) is names
    found = read(f"{call}\n{rejected.replace('node configuration', 'time limit')}\n").best
    assert found and "--nodelist" not in found.cause


def test_the_ruler_of_a_box_is_not_what_is_quoted() -> None:
    ruler = "-" * 74
    found = read(f"fine\n{ruler}\nThe dog ate the daemon. We cannot\ncontinue.\n{ruler}\n").best
    assert found
    assert (found.number, found.line) == (3, "The dog ate the daemon. We cannot")


def test_versions_and_places_are_picked_out() -> None:
    mentions = read(CASES["cmake-4"].log).mentions
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


def test_lines_of_any_length_in_the_log_of_a_step(tmp_path: Path) -> None:
    log = tmp_path / "01-wheel.log"
    with log.open("wb") as file:
        file.write(b"$ pip wheel\nNo space left on device\n")
        file.seek(100 << 20, 1)
        file.write(b"\n$ pip wheel\nc++: fatal error: Killed signal terminated program x\n")
    tracemalloc.start()
    root = diagnose_step(log).root
    assert root is not None and root.id == "compiler-killed"
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


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
    queries = diagnosing._catalog(None).queries  # of signatures, of what is near them, and others
    assert ALL_TRIES < len(tried) < ALL_TRIES + FEW_TRIES * len(queries)


def test_texts_are_found_without_the_library_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: read(CASES[name].log) for name in list(CASES)[::50]}
    monkeypatch.setattr(diagnosing, "BytesAhoCorasick", None)
    monkeypatch.setattr(diagnosing, "_catalog", diagnosing._catalog.__wrapped__)
    assert {name: read(CASES[name].log) for name in expected} == expected


def test_a_long_log_is_read_in_parts_and_takes_little_time() -> None:
    """Nothing is found in a good one."""

    class Long(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size == BLOCK
            return super().read(size)

    log = CASES["good-build"].log.encode()
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
