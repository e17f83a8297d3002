"""Prove hvdenv's GPU path on this node: run it with the Python that has torch.

usage: python3 run.py [OUT]

Needs torch 2.11.0+cu130 on Python 3.12, a driver for CUDA 13 and a GPU; no network and no root.
Creates three environments next to this file, runs the stages below one after the other (each has a
time limit, all take at most 8 minutes), and writes reports and logs to OUT (default: ./reports).
Exit code: 0 if all stages passed, otherwise 1.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

KIT = Path(__file__).resolve().parent
LIMIT_SECONDS = 480.0
# Exit codes of verify: everything was proven; nothing failed, but something could not be proven.
# One GPU cannot prove NCCL between ranks, and two cannot prove process sets.
PROVEN, UNPROVEN = 0, 7
LEAST_FOR_SETS = 3


def stages(out, gpus):
    """Every stage: its name, arguments, seconds, and the exit codes that are right."""
    hvdenv = [str(KIT / "envs/hvdenv/bin/hvdenv"), "verify", "--framework", "torch"]

    def verify(name, env, ranks, right, *more):
        files = ["--html", f"{out}/{name}.html", "--junit", f"{out}/{name}.xml", "--json"]
        words = [*hvdenv, "--prefix", f"{KIT}/envs/{env}", "-n", str(ranks), *files, *more]
        return name, words, 150, right

    def ranks(env, count, *words):
        folder = KIT / "envs" / env / "bin"
        mpirun = [f"{folder}/mpirun", "-np", str(count), "--bind-to", "none", "--oversubscribe"]
        return [*mpirun, f"{folder}/python", *words]

    both = ("--controller", "MPI", "--controller", "Gloo")
    nccl = (PROVEN,) if gpus >= LEAST_FOR_SETS else (PROVEN, UNPROVEN)
    cases = str(KIT / "cuda_cases.py")
    yield verify("nccl", "nccl", gpus, nccl, *both, "--operation", "NCCL")
    yield verify("shared-gpu", "host", max(LEAST_FOR_SETS, gpus), (PROVEN,), *both)
    yield "cases-nccl", ranks("nccl", gpus, cases), 60, (0,)
    yield "cases-shared-gpu", ranks("host", max(2, gpus), cases), 60, (0,)
    yield verify(
        "bench", "nccl", gpus, nccl, "--controller", "MPI", "--quick", "--bench", "--time", "3"
    )
    if (KIT / "test").is_dir():
        named = [line for line in (KIT / "horovod_tests.txt").read_text().split() if line]
        words = ["-m", "pytest", "-q", "-x", str(KIT / "test/parallel/test_torch.py")]
        yield "horovod-tests", ranks("nccl", gpus, *words, "-k", " or ".join(named)), 120, (0,)


def make_environments():
    """One environment for hvdenv, and one for each Horovod, which see torch where it is."""
    import torch

    beside = str(Path(torch.__file__).parents[1])
    numpy = [] if importlib.util.find_spec("numpy") else wheels("numpy")
    pip = [str(KIT / "envs/hvdenv/bin/python"), "-m", "pip", "--quiet"]
    for name in ("hvdenv", "nccl", "host"):
        folder = KIT / "envs" / name
        if (folder / "complete").exists():
            continue
        venv.create(folder, with_pip=name == "hvdenv", clear=True)
        horovod = [] if name == "hvdenv" else [*wheels(name), *numpy]
        words = ["install", "--no-index", "--no-deps", *wheels("wheels"), *horovod]
        subprocess.run([*pip, "--python", str(folder / "bin/python"), *words], check=True)
        if horovod:
            packages = next(folder.glob("lib/python3*/site-packages"))
            (packages / "torch-of-this-node.pth").write_text(beside + "\n")
        (folder / "complete").touch()


def wheels(folder):
    """The wheels in one of the kit's folders."""
    return sorted(map(str, (KIT / folder).glob("*.whl")))


def environment():
    """The variables of every stage: Open MPI as root, and nothing of the caller's Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **allowed, "HVDENV_HOME": str(KIT / "home"), "PYTHONNOUSERSITE": "1"}


def run_stage(out, name, words, seconds):
    """Run one stage; what it prints goes to OUT/NAME.log, a report to OUT/NAME.json.

    Returns:
        Its exit code; 124 where its time was over.
    """
    with open(out / f"{name}.log", "w") as log, open(out / f"{name}.json", "w") as report:
        try:
            return subprocess.run(
                words, env=environment(), stdout=report, stderr=log, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return 124


def is_right(code, right, report, gpus):
    """Whether a stage did what it must; with two GPUs, only process sets may be unproven."""
    if code not in right or code == PROVEN or gpus < 2:
        return code in right
    findings = json.loads(report.read_text())["findings"]
    unproven = [each["subject"] for each in findings if each["status"] == "unproven"]
    return all(subject.startswith("process sets") for subject in unproven)


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    make_environments()
    import torch

    gpus = torch.cuda.device_count()
    results = []
    print(
        f"torch {torch.__version__}, {gpus} GPUs; environments made in {time.monotonic() - begun:.0f} s"
    )
    for name, words, seconds, right in stages(out, max(gpus, 1)):
        left = LIMIT_SECONDS - (time.monotonic() - begun)
        started = time.monotonic()
        code = run_stage(out, name, words, min(seconds, left)) if left > 5 else 124
        took = round(time.monotonic() - started, 1)
        good = is_right(code, right, out / f"{name}.json", gpus)
        results.append({"stage": name, "code": code, "right": good, "seconds": took})
        print(f"{name}: {'right' if good else 'WRONG'} (exit code {code}, {took} s)", flush=True)
    facts = {"torch": str(torch.__version__), "gpus": gpus, "stages": results}
    (out / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if all(each["right"] for each in results) else 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "reports").resolve()))
