"""Copies of an installation that are broken in one way each, and what tests ask of them.

A copy is a thin environment: an interpreter, a copied package horovod in front, and
everything else from the original. A `fault` is code that stands at the end of the copy's
horovod/torch/__init__.py: it makes the rank do what a bad installation, a bad node or the
kernel's memory killer would make it do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from hvdenv import RANK_PROGRAMS
from hvdenv.base.runner import TOKEN_VARIABLE, Runner
from hvdenv.environments.installation import Installation
from hvdenv.reports.report import Finding, Report
from hvdenv.sites.launchers import Launch
from hvdenv.verification import inspection, rank_run, rank_start
from hvdenv.verification.setup import Setup
from tests.support.waiting import wait_until

# How much longer than on an idle machine things take: what hangs is told from it by waiting.
PATIENCE = float(os.environ.get("HVDENV_TEST_PATIENCE", "1"))
TIMEOUT = 120.0 * PATIENCE


def make_copy(
    original: Installation,
    folder: Path,
    fault: str = "",
    *,
    frameworks: tuple[str, ...] = ("torch",),
) -> Installation:
    """A copy of an installation in a new directory, with a fault.

    Args:
        original: stays as it is.
        folder: must not exist yet.
        fault: code at the end of horovod/torch/__init__.py; os, signal, sys, time are there.
        frameworks: extensions of others are left out.
    """
    subprocess.run([original.python, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages, there = purelib(folder / "bin" / "python"), purelib(Path(original.python))
    (packages / "original.pth").write_text(f"{there}\n")
    # The extension finds MPI in the lib directory above it.
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


def compiled(source: str, path: Path, *options: str) -> Path:
    """A library from a text in C."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(path), *options]
    subprocess.run(words, input=source, text=True, check=True)
    return path


def without_check_build(installation: Installation) -> Installation:
    """Let its horovodrun fail where it would take its time to tell nothing that matters."""
    program = Path(installation.prefix) / "bin" / "horovodrun"
    real = program.rename(program.with_name("horovodrun-itself"))
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *--check-build*) exit 1;; esac\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    return installation


def purelib(python: Path) -> Path:
    """The directory of an interpreter's packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-c", code], text=True).strip())


def on_rank_1(action: str) -> str:
    """A fault: code that rank 1 runs before each of its allreduces."""
    return (
        "_real = allreduce_async\n"
        "def allreduce_async(tensor, *args, **kwargs):\n"
        f"    if rank() == 1:\n        {action}\n"
        "    return _real(tensor, *args, **kwargs)\n"
    )


def run_ranks(
    installation: Installation,
    runner: Runner,
    controller: str,
    *,
    size: int = 2,
    timeout: float = TIMEOUT,
    exercises: tuple[str, ...] = (),
    framework: str = "torch",
) -> rank_run.RankRun:
    """Ranks as verify starts them; nothing else is looked at."""
    setup = Setup(
        installation,
        runner,
        launch=Launch((), size, os.geteuid() == 0),
        exercises=exercises,
    )
    mpi = inspection.host_mpi(setup, timeout)
    return rank_start.start_ranks(setup, timeout, mpi, framework, controller)


def found(report: Report, check: str) -> Mapping[str, Finding]:
    """A check's findings by their subjects."""
    return {f.subject: f for f in report.findings if f.check == check}


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


def processes_running(runner: Runner, script: str, count: int) -> list[psutil.Process]:
    """Processes of a runner that run a probe, once there are enough of them."""

    def runs_it(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            words = process.cmdline() or [""]
            return "python" in Path(words[0]).name and str(RANK_PROGRAMS / script) in words
        return False

    there: list[psutil.Process] = []

    def enough() -> bool:
        there[:] = filter(runs_it, marked(runner.token))
        return len(there) >= count

    wait_until(enough, 60 * PATIENCE)
    return there
