"""Prove hvdenv's GPU path on this node: run it with the Python that has torch.

usage: python3 run.py [OUT]

Requires torch 2.11.0+cu130 on Python 3.12, a driver for CUDA 13 and a GPU; no network and no root.
Creates three environments next to this file, runs the stages below one after the other (each has a
time limit, all take at most 8 minutes), and writes reports and logs to OUT (default: ./reports) and
once more to OUT.tar.gz.
Exit code: 0 if everything was proven; 1 if a stage failed; 2 if the kit cannot run on this node;
7 if nothing failed, but this node cannot prove everything, such as NCCL with one GPU.
"""

import contextlib
import glob
import importlib.util
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import NamedTuple

KIT = Path(__file__).resolve().parent
LIMIT_SECONDS = 480.0
PYTHON, TORCH = "3.12", "2.11.0+cu130"
GRACE_SECONDS = 10
# What a status says for the exit code of the whole kit.
CODES = {"pass": 0, "fail": 1, "unproven": 7}
LEAST_FOR_SETS = 3  # ranks; verify cannot prove process sets with two
# NCCL refuses two ranks on one GPU of a host, but not if they have different host names.
HOSTS = ("kit-a", "kit-b", "kit-c", "kit-d")
ALONE = "right on one rank; NCCL between ranks needs two GPUs, or host names (unshare --uts)"
IN_HOST = "right in the host's memory; there is no GPU here"
NOT_USED = "this node has a GPU, but the tensors were in the host's memory"


class Stage(NamedTuple):
    """One program to run.

    Attributes:
        kind: verify, cases or tests, which print a report of verify, JSON lines, and pytest's words.
        words: the command.
        seconds: its time limit.
        ranks: how many it starts.
    """

    name: str
    kind: str
    words: list[str]
    seconds: int
    ranks: int


def stages(out, gpus, hosts=()):
    """Every stage.

    Args:
        out: where to write reports.
        gpus: the number of GPUs; without one, a single rank takes the part of one.
        hosts: host names under which ranks over NCCL share a single GPU.
    """
    hvdenv = [str(KIT / "envs/hvdenv/bin/hvdenv"), "verify", "--framework", "torch", "--json"]
    cases = str(KIT / "cuda_cases.py")
    program = ["--program-only", "--", "python", str(KIT / "pytorch_mnist.py")]

    def slots(env):
        return ",".join(f"{host}:1" for host in hosts) if env == "nccl" else ""

    def verify(name, env, ranks, *more):
        files = ["--html", f"{out}/{name}.html", "--junit", f"{out}/{name}.xml"]
        # torch may belong to another user; whoever runs this file with it trusts them.
        words = [*hvdenv, "--trust", "--prefix", f"{KIT}/envs/{env}", "-n", str(ranks), *files]
        words += ["--hosts", slots(env)] if slots(env) else []
        return Stage(name, "verify", [*words, *more], 240, ranks)

    def mpirun(name, kind, env, ranks, seconds, *words):
        folder = KIT / "envs" / env / "bin"
        start = [f"{folder}/mpirun", "-np", str(ranks), "--bind-to", "none", "--oversubscribe"]
        start += ["--host", slots(env)] if slots(env) else []
        return Stage(name, kind, [*start, f"{folder}/python", *words], seconds, ranks)

    each, shared = max(gpus, len(hosts), 1), max(gpus, LEAST_FOR_SETS)
    both = ("--controller", "MPI", "--controller", "Gloo")
    yield verify("nccl", "nccl", each, *both, "--operation", "NCCL")
    yield verify("shared-gpu", "host", shared, *both)
    yield mpirun("cases-nccl", "cases", "nccl", each, 60, cases)
    yield mpirun("cases-shared-gpu", "cases", "host", max(2, gpus), 60, cases)
    yield verify("program", "nccl", each, "--controller", "MPI", "--operation", "NCCL", *program)
    yield verify(
        "bench", "nccl", each, "--controller", "MPI", "--quick", "--bench", "--bench-time", "3"
    )
    if (KIT / "test").is_dir():
        chosen = f"({' or '.join((KIT / 'horovod_tests.txt').read_text().split())})"
        # One rank cannot have process sets, has nobody to join, and its batches of one are refused.
        # Several ranks that go on after a failed test would wait for each other.
        more = ["-x"] if each > 1 else []
        chosen += "" if each > 1 else " and not process_sets and not join and not sync_batch_norm"
        # Three ranks: its tests allow no rounding of averages, and NCCL multiplies by 1/3.
        ranks = 2 if each == 3 else each
        words = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-k", chosen, *more]
        words += [str(KIT / "test/parallel/test_torch.py")]
        yield mpirun("horovod-tests", "tests", "nccl", ranks, 120, *words)


def host_names():
    """Host names under which ranks share a GPU; none if this user may not set host names."""
    words = ["bash", str(KIT / "hosts/ssh"), HOSTS[0], "uname -n"]
    with contextlib.suppress(OSError):
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.stdout.strip() == HOSTS[0]:
            return HOSTS
    return ()


def why_not_here(torch):
    """Why the kit cannot run on this node, and what to do; empty if it can."""
    python, machine = platform.python_version(), platform.machine()
    wheel = next((KIT / "nccl").glob("horovod-*.whl"), None)
    if not python.startswith(f"{PYTHON}."):
        return f"this is Python {python}: start run.py with Python {PYTHON}"
    if wheel and not wheel.stem.endswith(machine):
        return f"this machine is {machine}, {wheel.name} is not: make the kit on such a machine"
    if not torch:
        return f"{sys.executable} has no torch: start run.py with the Python that has torch {TORCH}"
    if str(torch.__version__) != TORCH:
        return (
            f"{sys.executable} has torch {torch.__version__}: the kit's wheels need torch {TORCH}"
        )
    return ""


def make_environments():
    """One environment for hvdenv, and one for each Horovod, which see torch where it is."""
    # What torch imports may be in other directories than torch. Installed packages come first.
    beside = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    numpy = [] if importlib.util.find_spec("numpy") else wheels("numpy")
    chosen = {"hvdenv": wheels("hvdenv")}
    chosen.update((name, [*wheels("ranks"), *wheels(name), *numpy]) for name in ("nccl", "host"))
    (pip,) = wheels("pip")  # the node's Python may have none
    for name, packages in chosen.items():
        folder = KIT / "envs" / name
        if (folder / "complete").exists():
            continue
        venv.create(folder, symlinks=True, clear=True)
        words = [str(folder / "bin/python"), f"{pip}/pip", "--quiet", "install", "--no-index"]
        subprocess.run([*words, "--no-deps", *packages], env=environment(), check=True)
        if name != "hvdenv":
            target = next(folder.glob("lib/python3*/site-packages"))
            (target / "torch-of-this-node.pth").write_text("\n".join([*beside, ""]))
        (folder / "complete").touch()


def wheels(folder):
    """The wheels in one of the kit's directories."""
    return sorted(map(str, (KIT / folder).glob("*.whl")))


def environment():
    """The variables of every stage: Open MPI as root, nothing for another Python or MPI."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV", "OMPI_", "PMIX_", "PRTE_"))
    }
    kept["PATH"] = f"{KIT / 'hosts'}:{kept.get('PATH', os.defpath)}"
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    own = {"HVDENV_HOME": str(KIT / "home"), "PYTHONNOUSERSITE": "1", "PIP_NO_CACHE_DIR": "1"}
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the node's plugins are for another pytest
    return {**kept, **allowed, **own}


def run_stage(out, stage, seconds):
    """Run one stage; what it prints goes to OUT/NAME.log, a report to OUT/NAME.json.

    verify has no limit of its own: it would divide that among its programs, which is too little
    on a slow node. It reports when it gets SIGTERM, too.

    Returns:
        Its exit code; 124 if its time was over.
    """
    with open(out / f"{stage.name}.log", "w") as log, contextlib.ExitStack() as stack:
        report = log
        if stage.kind != "tests":
            report = stack.enter_context(open(out / f"{stage.name}.json", "w"))
        process = subprocess.Popen(
            stage.words, env=environment(), stdout=report, stderr=log, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
    return 124


def judge(out, stage, code, gpu):
    """The status of a stage that ran, and the reason if it did not pass.

    Args:
        out: where its files are.
        stage: which one.
        code: its exit code.
        gpu: whether this node has a GPU.
    """
    log = (out / f"{stage.name}.log").read_text(errors="replace").split("\n")
    # mpirun prints its own messages between lines of dashes, after the cause.
    log = list(itertools.takewhile(lambda line: not line.startswith("-----"), log))
    log = [line for line in log if line.strip()]
    if code == 124:
        return "fail", f"did not finish in time; last line: {''.join(log[-1:])}"
    try:
        status, why, devices = {"verify": of_verify, "cases": of_cases, "tests": of_tests}[
            stage.kind
        ](out, stage, code, log)
    except (OSError, ValueError, KeyError) as error:
        return "fail", f"no report ({error!r}); exit code {code}; last line: {''.join(log[-1:])}"
    if status == "fail":
        return status, why
    if not gpu:
        return "unproven", why or IN_HOST
    if not all(device.startswith("cuda") for device in devices):
        return "fail", f"{NOT_USED}; {why}".rstrip("; ")
    if stage.ranks < 2:
        return "unproven", why or ALONE
    return status, why


def of_verify(out, stage, code, log):
    """Status, reason and devices of the ranks, by a report of verify."""
    report = json.loads((out / f"{stage.name}.json").read_text())
    status = {0: "pass", 7: "unproven"}.get(code, "fail")
    wrong = ("unproven",) if status == "unproven" else ("fail", "error")
    found = [each for each in report["findings"] if each["status"] in wrong]
    why = "; ".join(f"{each['subject']}: {each['message']}" for each in found)
    # The report of a training program says where its parameters were, and has no ranks.
    own = [each["status"] for each in report["findings"] if each.get("check") == "program-device"]
    devices = [rank["device"] for rank in report["ranks"]]
    return status, why, devices + ["cpu" if each == "skip" else "cuda" for each in own]


def of_cases(out, stage, code, log):
    """The same, by the lines of cuda_cases.py, of which every rank has one for each case."""
    lines = (out / f"{stage.name}.json").read_text().split("\n")
    found = [json.loads(line) for line in lines if line.startswith("{")]
    named = {case: [] for case in dict.fromkeys(each["case"] for each in found)}
    for each in found:
        named[each["case"]].append(each["rank"])
    missing = [case for case, ranks in named.items() if len(ranks) != stage.ranks]
    bad = [each for each in found if each["status"] == "fail"]
    why = [f"{each['case']} on rank {each['rank']}: {each['message']}" for each in bad]
    why += [f"{case}: not reported by all ranks" for case in missing]
    if code or why or not found:
        last = "" if why else f"; last line: {''.join(log[-1:])}"
        return "fail", "; ".join(why) or f"exit code {code}{last}", []
    skipped = {each["case"]: each["message"] for each in found if each["status"] == "skip"}
    status = "unproven" if skipped else "pass"
    why = "; ".join(f"{case}: {message}" for case, message in skipped.items())
    return status, why, [each["device"] for each in found]


def of_tests(out, stage, code, log):
    """The same, by pytest's last lines; its tests choose their device themselves."""
    last = next((line for line in reversed(log) if " passed" in line or " failed" in line), "")
    failed = [line for line in log if line.startswith("FAILED")]
    if code or not last:
        return "fail", "; ".join([*failed, last or f"exit code {code}: {''.join(log[-1:])}"]), []
    return "pass", f"{last.strip('= ')} on {stage.ranks} ranks" if stage.ranks < 2 else "", []


def describe(torch):
    """What this node is."""
    query = ["--query-gpu=name,driver_version,memory.total,compute_mode", "--format=csv,noheader"]
    listed = ""
    if program := shutil.which("nvidia-smi"):
        listed = subprocess.run([program, *query], capture_output=True, text=True).stdout
    return {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cores": len(os.sched_getaffinity(0)),
        # Not by torch's other functions: they would occupy the GPU.
        "gpus": torch.cuda.device_count(),
        "devices": sorted(glob.glob("/dev/nvidia[0-9]*")),
        "nvidia-smi": listed.splitlines(),
    }


def main(out):
    """Run all stages, and return the exit code."""
    begun = time.monotonic()
    torch = None
    with contextlib.suppress(ImportError):
        import torch
    if why := why_not_here(torch):
        print(f"error: {why}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    try:
        make_environments()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: no environment in {KIT / 'envs'}: {error}", file=sys.stderr)
        return 2
    facts = describe(torch)
    facts["environments"] = round(time.monotonic() - begun, 1)
    print(json.dumps(facts, indent=1), flush=True)
    results = []
    # Several ranks on one GPU: only where NCCL could not run between ranks otherwise.
    hosts = host_names() if facts["gpus"] == 1 else ()
    for stage in stages(out, facts["gpus"], hosts):
        left = LIMIT_SECONDS - (time.monotonic() - begun)
        started = time.monotonic()
        if left > GRACE_SECONDS:
            code = run_stage(out, stage, min(stage.seconds, left))
            status, why = judge(out, stage, code, bool(facts["gpus"] or facts["devices"]))
        else:
            code, status, why = None, "unproven", f"not run: {LIMIT_SECONDS:.0f} s were over"
        took = round(time.monotonic() - started, 1)
        found = {"stage": stage.name, "status": status, "why": why, "code": code, "seconds": took}
        results.append(found)
        print(f"{stage.name}: {status} ({took} s)" + (f": {why}" if why else ""), flush=True)
    facts.update(seconds=round(time.monotonic() - begun, 1), stages=results)
    (out / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")
    shutil.make_archive(str(out), "gztar", out.parent, out.name)
    statuses = {each["status"] for each in results}
    worst = next((each for each in ("fail", "unproven") if each in statuses), "pass")
    print(f"{worst}: {facts['seconds']} s, reports in {out} and {out}.tar.gz")
    return CODES[worst]


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "reports").resolve()))
