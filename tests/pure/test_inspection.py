"""What programs of an environment show to verify, what of it has changed since the build, and how verify's parts share time."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv import INSPECT_PROGRAMS
from hvdenv.base.errors import InterruptedRunError, StepError, UsageError
from hvdenv.base.runner import Runner
from hvdenv.base.schema import decode
from hvdenv.environments import generations, manifest
from hvdenv.environments.installation import Installation, inspect_prefix
from hvdenv.locks.record import GenerationRecord
from hvdenv.reports.report import Finding
from hvdenv.sites.launchers import Launch
from hvdenv.verification import inspection
from hvdenv.verification.drift import Module, Observation, compare
from hvdenv.verification.inspection import parse_check_build
from hvdenv.verification.installation_checks import check_drift, check_files
from hvdenv.verification.setup import Parts, Setup
from tests.support.commands import ended
from tests.support.evidence import evidence
from tests.support.files import EXECUTABLE, write
from tests.support.merge import patched
from tests.support.standalone import load

HOROVOD = "venv/lib/python3.11/site-packages/horovod/torch/mpi_ops.py"
LIBMPI = "venv/lib/libmpi.so.40.30.8"
OTHER = "venv/lib/python3.11/site-packages/numpy/version.py"


@pytest.fixture
def generation(tmp_path: Path) -> Path:
    for name in (HOROVOD, LIBMPI, OTHER, "venv/bin/python", generations.MARKER):
        write(tmp_path / name, "as built")
    digest = manifest.write(tmp_path, (generations.RECORD, generations.MARKER)).digest
    generations.write_record(
        tmp_path / generations.RECORD, GenerationRecord(manifest_digest=digest)
    )
    return tmp_path


def changed_files(
    generation: Path, timeout: float = 60, runner: Runner | None = None
) -> list[manifest.ChangedFile]:
    installation = Installation("", "", (), generation=str(generation))
    return inspection.changed_files(Setup(installation, runner or Runner()), timeout)


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        (HOROVOD, "fail", "1 file was changed since the build"),
        (LIBMPI, "pass", "all files of the build are present; 1 changed"),
        (OTHER, "pass", "all files of the build are present"),  # to read gigabytes takes minutes
    ],
)
def test_an_edit_that_leaves_the_size_as_it_was(
    generation: Path, name: str, status: str, message: str
) -> None:
    (generation / name).write_text("as  else")
    changed = changed_files(generation)
    setup = Setup(Installation("", "", ()), Runner())
    (finding,) = check_files(setup, evidence(changed_files=changed))
    assert (finding.status, finding.message) == (status, message)


def test_a_build_whose_record_is_gone_is_not_taken_for_an_environment_of_a_user(
    generation: Path,
) -> None:
    """There would be nothing then that its files are compared with."""
    assert inspect_prefix(str(generation)).generation == str(generation)
    (generation / generations.RECORD).unlink()
    with pytest.raises(StepError, match="the record was removed"):
        inspect_prefix(str(generation))


def test_a_link_to_a_generation_that_is_gone(generation: Path) -> None:
    link = generation / "link"
    link.symlink_to(".link.hvdenv/0123456789ab")
    with pytest.raises(UsageError, match=r"\.link\.hvdenv/0123456789ab does not exist"):
        inspect_prefix(str(link))


def test_files_are_looked_at_no_longer_than_there_is_time(generation: Path) -> None:
    with pytest.raises(StepError, match="not all files could be compared within 0 s"):
        changed_files(generation, timeout=0)
    runner = Runner()
    runner.stop()
    with pytest.raises(InterruptedRunError):
        changed_files(generation, runner=runner)


CASES = Path(__file__).parents[1] / "cases" / "checkbuild"
GOOD = sorted((CASES / "good").glob("*.txt"))
BAD = sorted((CASES / "bad").glob("*.txt"))
# Those with nothing but the table.
PLAIN = [CASES / "good/0.18.2-with-mlsl.txt", CASES / "good/0.28.1.txt"]
REFUSED = "no output|its lines are"


def read(path: Path) -> str:
    return path.read_bytes().decode()


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_known_texts(path: Path) -> None:
    assert parse_check_build(read(path))._asdict() == json.loads(
        path.with_suffix(".json").read_text()
    )


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_anything_else_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        parse_check_build(read(path))


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_cut_text_never_gives_another_table(path: Path) -> None:
    whole = path.read_bytes()
    expected = parse_check_build(whole.decode())
    last_row = whole.rstrip().rfind(b" Gloo") + len(b" Gloo")
    for length in range(len(whole)):
        text = whole[:length].decode(errors="replace")
        if length < last_row:
            with pytest.raises(ValueError, match=REFUSED):
                parse_check_build(text)
        else:
            assert parse_check_build(text) == expected


@given(
    st.sampled_from(PLAIN), st.text(st.characters(exclude_characters="[]:\r")), st.integers(0, 17)
)
def test_other_lines_do_not_matter(path: Path, noise: str, at: int) -> None:
    lines = read(path).splitlines()
    changed = [*lines[:at], *noise.split("\n"), *lines[at:]]
    assert parse_check_build("\n".join(changed)) == parse_check_build(read(path))


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        parse_check_build(text)


def with_program(folder: Path, what: str, text: str, interpreter: str, *words: str) -> Any:
    """standalone/inspect/horovodrun.py has run this script, with the modules of a directory."""
    script = write(folder / "horovodrun", text.format(python=interpreter), EXECUTABLE)
    return ended(
        sys.executable,
        "-s",
        INSPECT_PROGRAMS / "horovodrun.py",
        what,
        script,
        *words,
        check=True,
        env={"PYTHONPATH": str(folder)},
    )


# As Horovod does it: every row imports the framework in a forked process.
HOROVODRUN = """#!{python}
import os, sys
assert sys.argv[1:] == ["--check-build"], sys.argv
for row in range(3):
    if not os.fork():
        import horovod.torch
        print("row", row, horovod.torch.STATE, flush=True)
        os._exit(0)
    os.wait()
"""
COUNT = "import os\nos.write(2, b'imported ')\nSTATE = 'fine'\n"
THREAD = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(1,), daemon=True).start()"
)
ONLY_ALONE = "import sys\nassert 'horovodrun.py' not in repr(sys.modules['__main__'])\n"


@pytest.mark.parametrize(
    ("fault", "interpreter", "imports"),
    [
        pytest.param("", sys.executable, 1, id="once"),
        pytest.param(THREAD, sys.executable, 4, id="a-thread-when-imported"),
        pytest.param(ONLY_ALONE, sys.executable, 4, id="imports-in-a-new-process-only"),
        pytest.param("", f"/usr/bin/env {sys.executable}", 3, id="a-script-by-another-program"),
    ],
)
def test_each_row_has_its_framework(
    tmp_path: Path, fault: str, interpreter: str, imports: int
) -> None:
    """How many rows are printed, and how often the framework is imported."""
    write(tmp_path / "horovod/__init__.py", "")
    write(tmp_path / "horovod/torch/__init__.py", COUNT + fault)
    done = with_program(tmp_path, "check", HOROVODRUN, interpreter, "torch")
    assert (done.stdout.count("fine"), done.stderr.count("imported")) == (3, imports)


# ---------------------------------------------------------------- what has changed since the build

DRIFT = Path(__file__).parents[1] / "cases/drift"
BUILT = json.loads((DRIFT / "built.json").read_text(encoding="utf-8"))
CHANGES = json.loads((DRIFT / "cases.json").read_text(encoding="utf-8"))


def observation(document: dict[str, Any]) -> Observation:
    return decode(Observation, document, lenient=True)


def case(name: str) -> tuple[Observation, Observation]:
    (found,) = [each for each in CHANGES if each["name"] == name]
    was = patched(BUILT, found.get("was", {}))
    return observation(was), observation(patched(was, found.get("now", {})))


def judged(*observed: Observation) -> list[Finding]:
    setup = Setup(Installation("", "", ()), Runner())
    return list(check_drift(setup, evidence(observed=observed or None)))


@pytest.mark.parametrize("wanted", CHANGES, ids=lambda each: each["name"])
def test_each_change_is_judged(wanted: dict[str, Any]) -> None:
    changes = compare(*case(wanted["name"]))
    for kind, matters in (("matters", True), ("harmless", False)):
        found = {change.subject: change for change in changes if change.matters is matters}
        assert found.keys() == wanted.get(kind, {}).keys()
        for subject, told in wanted.get(kind, {}).items():
            assert told in f"{found[subject].what}: {found[subject].why}"
    assert all(bool(change.remedy) is change.matters for change in changes)
    assert len({change.subject for change in changes}) == len(changes)


def test_modules_that_differ_are_named_where_they_may_be_the_cause() -> None:
    was, now = case("mpirun of another MPI")
    (change,) = compare(was, now)
    assert "modules differ" not in change.remedy
    now = now._replace(modules=(*now.modules[:1], Module("OpenMPI/5.0.2")))
    changed = (
        "modules differ: the module openmpi is OpenMPI/5.0.2 now and was OpenMPI/4.1.4-GCC-11.3.0"
    )
    assert changed in compare(was, now)[0].remedy


def test_the_check_fails_for_each_change_that_matters_and_tells_all() -> None:
    was, now = case("another series of the MPI, all of it")
    findings = judged(was, now._replace(driver="550.54.14"))
    failed = [("fail", "mpirun"), ("fail", "libmpi.so.40")]
    assert [(each.status, each.subject) for each in findings] == failed
    message = "Horovod was built with Open MPI v4.1.4, and this is Open MPI v5.0.2"
    assert findings[1].message.endswith(message)
    assert "--rebuild" in findings[0].remedy
    assert "built on login1, now on login1\n" in findings[0].evidence
    assert "NVIDIA's kernel driver is 550.54.14 now" in findings[0].evidence


def test_the_check_passes_with_a_note_of_what_does_no_harm() -> None:
    was = observation(BUILT)
    (finding,) = judged(was, was)
    assert (finding.status, finding.message) == ("pass", "nothing has changed")
    (finding,) = judged(*case("numpy was upgraded, one package added and one removed"))
    assert finding.status == "pass"
    assert finding.message.count("; ") == 2
    packages = {f"p{number}": "1" for number in range(5)}
    (finding,) = judged(was, was._replace(packages={**was.packages, **packages}))
    assert finding.message.endswith("p2 is 1 now and was missing; 2 more harmless changes")
    assert "p4 is 1 now and was missing" in finding.evidence


def test_a_record_of_another_hvdenv() -> None:
    assert observation({**BUILT, "added later": 1}) == observation(BUILT)
    assert observation({key: BUILT[key] for key in ("host", "python")}).packages == {}


def test_a_framework_without_its_usual_directories_is_observed(tmp_path: Path) -> None:
    library = tmp_path / "mpi_lib.so"
    library.write_bytes(b"\0libfoo.so\0")
    found = load("observe_env").Environment(str(tmp_path)).linked(str(library), "torch", "/nowhere")
    assert found["libraries"] == {}


# ---------------------------------------------------------------- how parts share cores and time

SETUP = Setup(Installation("/env", "python", ()), Runner(), cores=4)


def parts_of(setup: Setup) -> Parts:
    return Parts(setup, lambda *event: None)


@pytest.mark.parametrize(("ranks", "together"), [(4, 2), (64, 2), (2, 4)])
def test_as_many_run_at_a_time_as_there_are_cores_for_their_ranks(
    ranks: int, together: int
) -> None:
    all_there, running, most = threading.Barrier(together), set[int](), [0]

    def part(setup: Setup, timeout: float) -> None:
        running.add(threading.get_ident())
        most[0] = max(most[0], len(running))
        all_there.wait(20)
        running.discard(threading.get_ident())
        all_there.wait(20)

    with parts_of(SETUP._replace(launch=Launch((), ranks))) as parts:
        for number in range(together * 2):
            parts.start(str(number), part)
    assert most == [together]


def test_runs_of_ranks_share_the_time() -> None:
    shares: list[float] = []
    with parts_of(SETUP._replace(cores=1, seconds=300.0)) as parts:
        hold = threading.Event()
        parts.start("hold", lambda setup, timeout: hold.wait(20))
        for label, runs in zip("abc", (3, 2, 1), strict=True):
            parts.start(label, lambda setup, timeout: shares.append(timeout), runs=runs)
        facts = parts.start("facts", lambda setup, timeout: timeout)
        hold.set()
    first, *others = shares
    assert 75 < first < 90 and all(share > first for share in others)
    assert facts.result() > 250


def test_where_no_time_is_left_ranks_are_not_started_and_facts_are_still_found() -> None:
    with parts_of(SETUP._replace(seconds=0.5)) as parts:
        run = parts.start("run", lambda setup, timeout: None, runs=1)
        facts = parts.start("facts", lambda setup, timeout: timeout)
    assert isinstance(run.exception(), StepError)
    assert facts.result() == 2.0


def test_after_the_runner_is_stopped_nothing_starts() -> None:
    runner = Runner()

    def part(setup: Setup, timeout: float) -> None:
        runner.stop()
        raise InterruptedRunError

    with parts_of(SETUP._replace(runner=runner, cores=1)) as parts:
        first = parts.start("torch over MPI", part)
        second = parts.start("second", lambda setup, timeout: None)
    assert isinstance(first.exception(), InterruptedRunError)
    assert isinstance(second.exception(), InterruptedRunError)
