"""The command `hvdenv doctor`, and how it finds what failed last."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv.base.errors import StepError
from hvdenv.base.places import Places, find_places
from hvdenv.building.engine import last_failure, note_failure
from hvdenv.building.state import LOGS
from hvdenv.cli import doctor as doctor_command
from hvdenv.environments import generations, registry
from hvdenv.environments.generations import at
from hvdenv.reports.report import Finding, Report, Status
from tests.support.commands import Hvdenv
from tests.support.environments import ONE, TWO
from tests.support.files import write

FULL = "c++: fatal error: x.o: No space left on device\n"


def begin(places: Places, name: str, identity: str, failed: str = "", log: str = "") -> Path:
    """A build that was never complete, with the step that failed and a log of its step `wheel`."""
    places.envs.mkdir(parents=True, exist_ok=True)
    environment = at(places.envs / name)
    generations.claim(environment)
    folder = generations.create(environment, identity)
    if failed:
        file = folder / LOGS / f"06-{failed}.log"
        if log:
            write(file, log)
        note_failure(folder, environment.prefix, failed, StepError(f"step {failed} failed"), file)
    return folder


def report(places: Places, name: str, status: Status, message: str, time: float) -> None:
    evidence = "[1,1]<stderr>:ImportError: libmpi.so.40: cannot open shared object file"
    finding = Finding("allreduce", "torch over MPI", status, message, evidence)
    document = Report("local", "/p", "h", "2026-11-21T10:00:00+0000", 1.0, (finding,)).to_json()
    path = write(places.reports / name, json.dumps(document))
    os.utime(path, (time, time))


@pytest.fixture
def doctor(tmp_path: Path, hvdenv: Hvdenv) -> Callable[..., str]:
    """Gives what doctor says of a log."""

    def told(text: str, *words: str, code: int = 0) -> str:
        (tmp_path / "log").write_text(text)
        return hvdenv("doctor", str(tmp_path / "log"), *words, code=code).out

    return told


CMAKE = "Compatibility with CMake < 3.5 has been removed from CMake.\n"


def test_a_log_is_diagnosed(tmp_path: Path, doctor: Callable[..., str]) -> None:
    said = doctor(f"fine\nCMake Error: {CMAKE}")
    assert said.startswith(f"{tmp_path}/log\ncause: CMake 4 rejects")
    assert "1. `export CMAKE_POLICY_VERSION_MINIMUM=3.5`" in said
    assert "cmake-4-rejects-horovod" not in said
    said = doctor(f"hvdenv build x\nCMake Error: {CMAKE}")
    assert "cmake-4-rejects-horovod" in said


@pytest.mark.parametrize(
    ("log", "first", "also"),
    [
        (
            "Fatal Python error: Segmentation fault",
            "it stopped here: a process crashed",
            "PYTHONFAULTHANDLER",
        ),
        (
            "/dev/x7 not found\nFatal Python error: Segmentation fault",
            "it stopped here: ",
            "lines that may say why:\n  line 1: /dev/x7",
        ),
        (
            "Horovod has been shut down. This was caused by an exception on one of the ranks",
            "follow-on error: ",
            "look for the first error",
        ),
        (
            "[gpu32:00100] Read -1, expected 131072, errno = 1",
            "only a warning, harmless in most logs: ",
            "line 1",
        ),
        ("all is well", "not recognised", "2>&1"),
        (
            "[2]<stderr>:ValueError: https://me:secret@host/ is odd\x1b[31m",
            "it stopped here: the program stopped with ValueError",
            "line 1: [2]<stderr>:ValueError: https://***@host/ is odd",
        ),
    ],
)
def test_how_much_is_known_comes_first(
    log: str, first: str, also: str, doctor: Callable[..., str]
) -> None:
    """Only a cause is a success."""
    told = doctor(log, code=1)
    assert "secret" not in told + doctor(log, "--json", code=1)
    assert told.split("\n", 1)[1].removeprefix("no cause found; ").startswith(first)
    assert also in told


NO_SPACE = "gpu1:12:40 [0] NCCL WARN Call to posix_fallocate failed : No space left on device\n"
NO_MPI = "CMake Error at x:1 (message):\n  Could NOT find MPI (x)\n"
USING = "n1:1:2 [0] NCCL INFO NET/Socket : Using [0]ib0:10.1.0.1<0> [1]eno1:192.168.0.1<0>\n"
REFUSED = "n1:1:2 [0] misc/socket.cc:483 NCCL WARN Connect to 192.168.0.2<45123> failed : No route to host\n"


@pytest.mark.parametrize(
    ("log", "remedy"),
    [
        (NO_MPI, "  1. `mpicxx -show`"),
        (f"module load gcc\n{NO_MPI}", "  1. `module avail mpi`"),
        (f"docker run x\n{NO_MPI}", "  1. `apt-get update"),
        (f"hvdenv build x\n{NO_MPI}", "  1. set `modules.load`"),
        (NO_SPACE, "  1. `df -h /dev/shm"),
        (f"docker run x\n{NO_SPACE}", "  1. `docker run"),
        (USING + REFUSED, "NCCL now uses ib0, eno1)"),
        (REFUSED, "NCCL now uses those that it finds first)"),
    ],
)
def test_remedies_fit_the_reader(log: str, remedy: str, doctor: Callable[..., str]) -> None:
    """No recipes for those who only have a log."""
    said = doctor(log)
    assert remedy in said
    assert ("hvdenv check RECIPE" in said) is ("hvdenv build" in log)


def test_standard_input_and_json(monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv) -> None:
    text = (
        f"{FULL}ninja: build stopped: subcommand failed.\nUsing horovod==0.28.1 with TOKEN=hush\n"
    )
    stream = io.TextIOWrapper(io.BufferedReader(io.BytesIO(text.encode())))
    monkeypatch.setattr(sys, "stdin", stream)
    said = hvdenv("doctor", "-", "--json")
    found = json.loads(said.out)
    assert found["schema"] == "hvdenv.diagnosis/1"
    assert found["recognised"] is True
    assert [(each["id"], each["number"]) for each in found["causes"]] == [("disk-full", 1)]
    assert [each["id"] for each in found["consequences"]] == ["aborted"]
    assert found["versions"] == {"Horovod": "0.28.1"}
    assert found["lines"] == 3
    assert said.err == ""


def test_a_log_in_a_pipe_is_read_and_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    """An empty pipe, as batch systems may give, is no log; that of `ssh HOST hvdenv doctor` stays open."""
    for text, code, said in ((FULL, 0, "standard input\ncause: the disk"), ("", 2, "")):
        reading, writing = os.pipe()
        with open(reading) as pipe:
            os.write(writing, text.encode())
            os.close(writing)
            monkeypatch.setattr(sys, "stdin", pipe)
            assert hvdenv("doctor", code=code).out.startswith(said)
    monkeypatch.setattr(doctor_command, "_WAIT_SECONDS", 0.01)
    reading, writing = os.pipe()

    def write_late() -> None:
        with open(writing, "w") as log:
            log.write(FULL)

    late = threading.Timer(0.3, write_late)
    late.start()
    with open(reading) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        waited = hvdenv("doctor")
    late.join()
    assert "waiting for a log on standard input" in waited.err and "cause: the disk" in waited.out


def test_the_rest_of_a_script_is_no_log(
    monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv, tmp_path: Path
) -> None:
    """A shell that executes its standard input has read some of it."""
    for offset, code in ((0, 0), (1, 2)):
        with write(tmp_path / "log", FULL).open() as file:
            os.lseek(file.fileno(), offset, os.SEEK_SET)
            monkeypatch.setattr(sys, "stdin", file)
            hvdenv("doctor", code=code)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (FULL.encode("utf-16"), ""),
        (gzip.compress(FULL.encode() * 1000), "zcat LOG.gz | hvdenv doctor"),
        (Path(sys.executable).read_bytes()[:5000], "it is a binary file"),
        (None, "cannot read it"),
    ],
    ids=["UTF-16", "compressed", "program", "folder"],
)
def test_what_is_no_log(content: bytes | None, error: str, hvdenv: Hvdenv, tmp_path: Path) -> None:
    file = tmp_path / "log" if content else tmp_path
    if content:
        file.write_bytes(content)
    said = hvdenv("doctor", str(file), code=2 if error else 0)
    assert error in said.err if error else "cause: the disk or the quota is full" in said.out


@pytest.mark.parametrize(
    "log",
    [
        "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-21T10:00:00 DUE TO TIME LIMIT ***\n"
        "srun: error: n1: task 3: Killed\n",
        "srun: error: n1: task 3: Terminated\n",
        "[rank3]: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)\n"
        "Process 3 exit with status code -6.\n",
    ],
    ids=["time limit", "ended", "watchdog"],
)
def test_a_rank_that_was_ended_has_not_failed(log: str, doctor: Callable[..., str]) -> None:
    said = doctor(log, code=0 if "LIMIT" in log else 1)
    assert "failed first: " not in said
    assert "memory ran out" not in said or "follow-on errors" in said


@pytest.mark.parametrize(
    ("log", "said", "ranks"),
    [
        ("srun: error: n1: task 3: Segmentation fault\n", "first: 3 on n1", ("3", "3", "n1")),
        (
            "srun: error: n1: tasks 0-1: Exited with exit code 1\n",
            "0-1 on n1 failed; which",
            ("", "0-1", "n1"),
        ),
        ("[1,2]<stderr>:ValueError: odd\n", "first: 2\n", ("2", "2", "")),
        (
            "MPT ERROR: Rank 3(g:3) received signal SIGSEGV(11).\n\tProcess ID: 1, Host: r1i2, Program: /a\n",
            "first: 3 on r1i2",
            ("3", "3", "r1i2"),
        ),
    ],
    ids=["task", "tasks", "prefix", "MPT"],
)
def test_ranks_and_hosts_are_those_that_the_log_states(
    log: str, said: str, ranks: tuple[str, str, str], doctor: Callable[..., str]
) -> None:
    assert said in doctor(log, code=1)
    document = json.loads(doctor(log, "--json", code=1))
    assert (document["rank"], document["ranks"], document["host"]) == ranks


def test_the_last_failed_build(hvdenv: Hvdenv) -> None:
    assert "name a log" in hvdenv("doctor", code=2).err
    places = find_places()
    log = f"$ pip\nNo module named 'setuptools'\n$ pip\n{FULL}"
    begin(places, "local", ONE, "wheel", log)
    said = hvdenv("doctor").out
    assert f"the build of {places.envs / 'local'} stopped at the step wheel" in said
    assert "06-wheel.log" in said
    assert "cause: the disk or the quota is full" in said
    assert "setuptools" not in said


def test_what_has_not_failed_is_passed_over_and_what_hvdenv_refuses_has_no_log(
    hvdenv: Hvdenv,
) -> None:
    places = find_places()
    begin(places, "killed", ONE)
    (begin(places, "damaged", ONE, "wheel") / "failure.json").write_text("[]")
    report(places, "1.json", "pass", "fine", 1e9)
    (places.reports / "2.json").write_text("{", encoding="utf-8")
    assert last_failure(places) is None
    begin(places, "local", TWO, "stack")
    assert "step stack failed" in hvdenv("doctor", code=1).out


@pytest.mark.parametrize(("age", "expected"), [(-1000, "build"), (1000, "verify")])
def test_the_newer_of_build_and_verify(age: float, expected: str, hvdenv: Hvdenv) -> None:
    places = find_places()
    folder = begin(places, "local", ONE, "wheel", f"$ x\n{FULL}")
    time = (folder / "failure.json").stat().st_mtime
    report(places, "1.json", "fail", "older", time - 5000)
    report(places, "2.json", "fail", "rank 1 ended", time + age)
    said = hvdenv("doctor").out
    assert said.startswith("the build of" if expected == "build" else "verify of /p found failures")
    if expected == "verify":
        assert "allreduce torch over MPI: rank 1 ended" in said
        assert "cause: libmpi.so.40, a library of MPI, is not found" in said


def test_builds_elsewhere_are_found(tmp_path: Path) -> None:
    places, elsewhere = find_places(), Places(tmp_path / "other")
    folder = begin(elsewhere, "mine", ONE, "wheel", FULL)
    assert last_failure(places) is None
    registry.register(places, at(elsewhere.envs / "mine"), "local", ())
    failure = last_failure(places)
    assert failure is not None
    assert Path(failure.file).is_relative_to(folder)
