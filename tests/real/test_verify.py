"""verify on a real installation, and on copies of it that are broken in one way each.

A copy is a thin environment: an interpreter, a copied package horovod in front, and
everything else from the original. Where a case says `fault`, that code stands at the end
of the copy's horovod/torch/__init__.py: it makes the rank do what a bad installation,
a bad node or the kernel's memory killer would make it do.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hvdenv import evidence, ranks
from hvdenv.command import Command
from hvdenv.errors import InterruptedRunError, UsageError
from hvdenv.installation import Expectation, Installation, inspect_prefix
from hvdenv.report import Finding, Report
from hvdenv.runner import TOKEN_VARIABLE, Runner
from hvdenv.verify import DEFAULT_LAUNCHERS, verify
from tests.real.conftest import hear_interrupts

PROBES = Path(evidence.__file__).parent / "probes"
BOTH = Expectation(("torch", "tensorflow"), ("MPI", "Gloo"), ("MPI", "Gloo"))
TORCH = Expectation(("torch",), ("MPI", "Gloo"))
TIMEOUT = 120.0


@pytest.fixture(scope="session")
def original(request: pytest.FixtureRequest) -> Installation:
    """HVDENV_TEST_PREFIX, or else the environment that the tests of build have made."""
    named = os.environ.get("HVDENV_TEST_PREFIX")
    return inspect_prefix(named or str(request.getfixturevalue("local_prefix")))


@pytest.fixture
def copy(original: Installation, tmp_path: Path) -> Callable[..., Installation]:
    """Make a copy of the original that has torch only, with a fault."""

    def make(fault: str = "", *, frameworks: tuple[str, ...] = ("torch",)) -> Installation:
        folder = tmp_path / "env"
        subprocess.run([original.python, "-m", "venv", "--without-pip", str(folder)], check=True)
        packages, there = purelib(folder / "bin" / "python"), purelib(Path(original.python))
        (packages / "original.pth").write_text(f"{there}\n")
        # The extension finds MPI in the lib folder above it.
        for library in there.parents[1].iterdir():
            if not (folder / "lib" / library.name).exists():
                (folder / "lib" / library.name).symlink_to(library)
        shutil.copytree(there / "horovod", packages / "horovod")
        for library in (packages / "horovod").glob("*/mpi_lib*.so"):
            if library.parent.name not in frameworks:
                library.unlink()
        with (packages / "horovod" / "torch" / "__init__.py").open("a") as stream:
            stream.write(f"\nimport os, signal, sys, time\n{fault}\n")
        _, script = Path(original.program("horovodrun")).read_text().split("\n", 1)
        (folder / "bin" / "horovodrun").write_text(f"#!{folder}/bin/python\n{script}")
        (folder / "bin" / "horovodrun").chmod(0o755)
        return Installation(
            str(folder), str(folder / "bin/python"), (str(folder / "bin"), *original.path)
        )

    return make


@pytest.fixture
def runner() -> Iterator[Runner]:
    """A runner of which no process may be left after the test."""
    runner = Runner()
    yield runner
    deadline = time.monotonic() + 10
    while left := marked(runner.token):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def purelib(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-c", code], text=True).strip())


def marked(token: str) -> list[psutil.Process]:
    """Processes that carry a token, or that of a branch of its runner."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN_VARIABLE, "").startswith(token):
                found.append(process)
        except psutil.Error:
            continue
    return found


def run_ranks(
    installation: Installation,
    runner: Runner,
    controller: str,
    *,
    size: int = 2,
    timeout: float = TIMEOUT,
) -> ranks.RankRun:
    mpi = evidence.mpi(installation, runner, timeout)
    run: ranks.RankRun = evidence.rank_run(
        installation, runner, mpi, DEFAULT_LAUNCHERS, size, 2, timeout, "torch", controller
    )
    return run


def found(report: Report, check: str) -> dict[str, Finding]:
    return {f.subject: f for f in report.findings if f.check == check}


def on_rank_1(action: str) -> str:
    """Code that does something on rank 1 before its first allreduce."""
    return (
        "_real = allreduce_async\n"
        "def allreduce_async(tensor, *args, **kwargs):\n"
        f"    if rank() == 1:\n        {action}\n"
        "    return _real(tensor, *args, **kwargs)\n"
    )


def test_good_installation(original: Installation, runner: Runner) -> None:
    events: list[tuple[str, str]] = []
    report = verify(
        original, BOTH, runner, timeout=TIMEOUT, on_event=lambda what, label, _: events.append((what, label))
    )  # fmt: skip
    assert report.verdict == "pass", [f for f in report.findings if f.status != "pass"]
    runs = {f"{f} over {c}" for f in ("torch", "tensorflow") for c in ("MPI", "Gloo")}
    assert found(report, "allreduce").keys() == runs
    assert {("started", run) for run in runs} | {("finished", run) for run in runs} <= set(events)
    assert runs <= {measurement.name for measurement in report.measurements}
    proven = {(row.section, row.name) for row in report.table if row.proven}
    assert proven == {
        ("Frameworks", "TensorFlow"), ("Frameworks", "PyTorch"),
        ("Controllers", "MPI"), ("Controllers", "Gloo"),
        ("Tensor Operations", "MPI"), ("Tensor Operations", "Gloo"),
    }  # fmt: skip
    json.dumps(report.to_json())


def test_more_ranks_than_cores(original: Installation, runner: Runner) -> None:
    cores = len(os.sched_getaffinity(0))
    mpi = evidence.mpi(original, runner, TIMEOUT)
    run = evidence.rank_run(
        original, runner, mpi, DEFAULT_LAUNCHERS, cores + 1, cores, TIMEOUT, "torch", "MPI"
    )
    assert ranks.judge(run).status == "pass", ranks.judge(run).evidence


def test_no_extension_fails_though_the_table_marks_it(
    copy: Callable[..., Installation], runner: Runner
) -> None:
    installation = copy(frameworks=())
    report = verify(installation, Expectation(("torch",)), runner, timeout=TIMEOUT)
    assert report.verdict == "fail"
    assert found(report, "check-build")["horovodrun --check-build"].status == "pass"
    finding = found(report, "extension")["torch"]
    assert finding.status == "fail"
    assert finding.message.startswith("the extension is missing: ")
    assert "HOROVOD_WITH_PYTORCH=1" in finding.remedy
    anything = verify(installation, Expectation(), runner, timeout=TIMEOUT)
    assert anything.verdict == "fail"
    assert found(anything, "frameworks")["any framework"].status == "fail"


def test_framework_replaced_after_the_build(
    copy: Callable[..., Installation], runner: Runner
) -> None:
    installation = copy()
    metadata = purelib(Path(installation.python)) / "horovod" / "metadata.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "pytorch": "1.0.0"}))
    extension = evidence.extension(installation, runner, TIMEOUT, "torch")
    (finding,) = evidence_findings(extension)
    assert finding.status == "fail"
    assert finding.message.startswith("built with torch 1.0.0, but ")


def evidence_findings(extension: evidence.Extension) -> list[Finding]:
    from hvdenv.checks import CHECKS

    return list(CHECKS["extension"](extension=extension, expectation=TORCH, framework="torch"))


def test_an_extension_that_crashes_on_import(
    copy: Callable[..., Installation], runner: Runner
) -> None:
    installation = copy("os.kill(os.getpid(), signal.SIGSEGV)")
    (finding,) = evidence_findings(evidence.extension(installation, runner, TIMEOUT, "torch"))
    assert finding.message == "importing horovod.torch was ended by SIGSEGV"
    assert "horovod/torch/__init__.py" in finding.evidence


def test_a_secret_in_an_import_error_is_hidden(
    copy: Callable[..., Installation], runner: Runner
) -> None:
    installation = copy("raise ImportError('token=\\\"abc\\\" https://me:pw@host failed')")
    (finding,) = evidence_findings(evidence.extension(installation, runner, TIMEOUT, "torch"))
    assert "horovod.torch does not import: ImportError: token=" in finding.message
    assert "https://***@host failed" in finding.message
    assert "pw@" not in finding.evidence


CRASHES = [
    ("MPI", "os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
    ("Gloo", "os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
    ("MPI", "os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
    ("Gloo", "print('bad day', flush=True); os._exit(3)", "ended with exit code 3"),
]


@pytest.mark.parametrize(("controller", "action", "message"), CRASHES)
def test_a_rank_that_dies_is_named(
    copy: Callable[..., Installation], runner: Runner, controller: str, action: str, message: str
) -> None:
    judgement = ranks.judge(run_ranks(copy(on_rank_1(action)), runner, controller))
    assert judgement.status == "fail"
    assert f"rank 1 on {os.uname().nodename}" in judgement.message
    assert message in judgement.message
    if "SIGSEGV" in action:
        assert "in allreduce_async" in judgement.evidence
    if "bad day" in action:
        assert "    bad day" in judgement.evidence


def test_a_rank_that_ends_without_a_result(
    copy: Callable[..., Installation], runner: Runner
) -> None:
    # Every rank, since Horovod on the others would notice one that is gone.
    judgement = ranks.judge(run_ranks(copy("init = lambda: os._exit(0)"), runner, "MPI"))
    assert judgement.status == "fail"
    assert "ended without a result" in judgement.message


@pytest.mark.parametrize("controller", ["MPI", "Gloo"])
def test_a_rank_that_hangs_ends_in_time_and_shows_where(
    copy: Callable[..., Installation], runner: Runner, controller: str
) -> None:
    installation = copy(on_rank_1("time.sleep(1000)"))
    began = time.monotonic()
    judgement = ranks.judge(run_ranks(installation, runner, controller, timeout=30))
    assert time.monotonic() - began < 30 + 25
    assert judgement.status == "fail"
    assert "no end within 30 s; results came from no rank" in judgement.message
    assert "in allreduce_async" in judgement.evidence


@pytest.mark.parametrize("controller", ["MPI", "Gloo"])
def test_a_rank_that_prints_garbage_does_no_harm(
    copy: Callable[..., Installation], runner: Runner, controller: str
) -> None:
    noise = (
        "for _ in range(200):\n"
        "    os.write(1, os.urandom(500)); os.write(2, b'\\r\\x1b[31m\\0')\n"
        '    print(\'@hvdenv 0123 00000000 {"event": "result", "size": 1}\', flush=True)\n'
    )
    judgement = ranks.judge(run_ranks(copy(noise), runner, controller))
    assert judgement.status == "pass", judgement


WRONG = [
    ("MPI", "    if rank() == 1: tensor = tensor * 0\n"),  # a sum that lacks a rank
    ("Gloo", "    if rank() == 1: tensor = tensor * 2\n"),  # one that counts a rank twice
    ("Gloo", "    if 'float64' in kwargs['name']: tensor = tensor.float().double()\n"),
]


@pytest.mark.parametrize(("controller", "change"), WRONG)
def test_wrong_sums_are_seen(
    copy: Callable[..., Installation], runner: Runner, controller: str, change: str
) -> None:
    fault = (
        "_real = allreduce_async\n"
        "def allreduce_async(tensor, *args, **kwargs):\n"
        f"{change}"
        "    return _real(tensor, *args, **kwargs)\n"
    )
    judgement = ranks.judge(run_ranks(copy(fault), runner, controller))
    assert judgement.status == "fail"
    assert "allreduce gives wrong values on rank 0" in judgement.message
    assert "wanted" in judgement.evidence


def test_no_wrong_reduction_gives_the_right_values(original: Installation) -> None:
    """What other operations, or sums over other ranks, give differs in every element."""
    code = f"""
import sys, numpy
sys.path.insert(0, {str(PROBES)!r})
import rank_allreduce as probe
for size in (2, 3, 4, 7, 16):
    for shape in probe.SHAPES:
        for dtype in probe.DTYPES:
            inputs = [probe.values(numpy, rank, shape, dtype) for rank in range(size)]
            assert inputs[0].dtype == dtype and inputs[0].shape == shape
            for operation in probe.OPERATIONS:
                want = probe.wanted(numpy, size, shape, dtype, operation)
                bounds = probe.tolerance(numpy, size, dtype, operation)
                total = sum(inputs[1:], inputs[0])
                divide = 1 if operation == "Sum" else size
                right = (total / divide).astype(want.dtype) if divide > 1 else total
                assert probe.compare(numpy, "right", right, want, *bounds) is None
                others = [total - one for one in inputs] + [total + one for one in inputs]
                others += [one * size for one in inputs[:1] if size == 1]
                others += [numpy.maximum.reduce(inputs), numpy.minimum.reduce(inputs)]
                if dtype == "float64":
                    others.append(sum(one.astype("float32") for one in inputs).astype(dtype))
                for number, other in enumerate(others):
                    got = (other / divide).astype(want.dtype) if divide > 1 else other
                    wrong = probe.compare(numpy, "wrong", got, want, *bounds)
                    assert wrong and wrong["elements"] > 0.9 * wrong["of"], (size, dtype, number)
print("done")
"""
    output = subprocess.check_output([original.python, "-c", code], text=True)
    assert output == "done\n"


def test_singletons_are_reported_as_such(
    original: Installation, runner: Runner, tmp_path: Path
) -> None:
    # Stands for the mpirun of an MPI that Horovod was not built with: it starts the
    # processes, and they cannot see that they belong together.
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys\n"
        "if '--version' in sys.argv: sys.exit(print('HYDRA build details:\\n    Version: 4.1.1'))\n"
        "started = [subprocess.Popen(sys.argv[3:]) for _ in range(int(sys.argv[2]))]\n"
        "sys.exit(max(process.wait() for process in started))\n"
    )
    program.chmod(0o755)
    installation = original._replace(path=(str(program.parent), *original.path))
    judgement = ranks.judge(run_ranks(installation, runner, "MPI"))
    assert judgement.status == "fail"
    assert "2 processes were started, but each says that it is alone (size 1)" in judgement.message
    assert f"started by: {program} (Hydra 4.1.1)" in judgement.evidence


def processes_running(runner: Runner, script: str, count: int) -> list[psutil.Process]:
    """Processes of a runner that run a probe, once there are enough of them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        there = []
        for process in marked(runner.token):
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "python" in Path((words or [""])[0]).name and str(PROBES / script) in words:
                there.append(process)
        if len(there) >= count:
            return there
        time.sleep(0.1)
    raise AssertionError(f"{script} did not start")


@pytest.mark.parametrize(
    ("controller", "victim"), [("MPI", "rank.py"), ("Gloo", "rank.py"), ("MPI", "")]
)
def test_no_rank_outlives_who_watches_over_it(
    copy: Callable[..., Installation], runner: Runner, controller: str, victim: str
) -> None:
    """kill -9 of one rank's supervisor, and of the launcher."""
    installation = copy(on_rank_1("time.sleep(1000)"))
    runs: list[ranks.RankRun] = []
    thread = threading.Thread(
        target=lambda: runs.append(run_ranks(installation, runner, controller, timeout=100))
    )
    thread.start()
    work = processes_running(runner, "rank_allreduce.py", 2)
    time.sleep(1)
    if victim:
        killed = processes_running(runner, victim, 2)[0]
    else:
        killed = next(p for p in marked(runner.token) if p.ppid() == os.getpid())
    killed.kill()
    psutil.wait_procs(work, timeout=15)
    assert not [process for process in work if process.is_running()]
    thread.join(30)
    judgement = ranks.judge(runs[0])
    assert judgement.status == "fail"
    assert "was lost without a word" in judgement.message or not victim


DRIVER = """
import sys
from hvdenv.installation import Expectation, inspect_prefix
from hvdenv.errors import InterruptedRunError
from hvdenv.runner import Runner
from hvdenv.verify import verify
try:
    verify(inspect_prefix(sys.argv[1]), Expectation(), Runner(token=sys.argv[2]))
except (InterruptedRunError, KeyboardInterrupt):
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("script", ["extension.py", "rank_allreduce.py"])
def test_an_interrupt_leaves_nothing(
    original: Installation, runner: Runner, number: signal.Signals, script: str
) -> None:
    words = [sys.executable, "-c", DRIVER, original.prefix, runner.token]
    with subprocess.Popen(words, cwd=PROBES.parents[1], preexec_fn=hear_interrupts) as process:
        processes_running(runner, script, 1)
        process.send_signal(number)
        assert process.wait(20) == 130


def test_a_stopped_runner(original: Installation, runner: Runner) -> None:
    threading.Timer(1.0, runner.stop).start()
    with pytest.raises(InterruptedRunError):
        verify(original, BOTH, runner)


def test_ranks_see_only_what_is_listed(original: Installation) -> None:
    runner = Runner({**os.environ, "MY_SECRET": "x", "SLURM_JOB_ID": "1"}).branch(
        evidence._FOR_RANKS
    )
    seen = runner.environment(Command(()))
    assert "MY_SECRET" not in seen
    assert seen["SLURM_JOB_ID"] == "1"
    assert seen["PATH"] == os.environ["PATH"]


def test_prefixes_that_are_no_installation(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Python environment"):
        inspect_prefix(str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    with pytest.raises(UsageError, match="Horovod is not installed"):
        inspect_prefix(str(tmp_path))
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    assert inspect_prefix(str(tmp_path)).python == str(tmp_path / "bin" / "python")


def test_a_generation_of_hvdenv(original: Installation, tmp_path: Path) -> None:
    base = Path(original.python).parents[1]
    (tmp_path / "venv").symlink_to(base)
    assert inspect_prefix(str(tmp_path)).path == (str(tmp_path / "venv" / "bin"),)
