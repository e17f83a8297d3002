"""Verify an environment: collectors first, then checks, then one report."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from hvdenv import __version__
from hvdenv.launch import orphans
from hvdenv.launch.placement import influences
from hvdenv.reports.report import Finding, Measurement, Report
from hvdenv.runner import ENDING, Runner, end_marked, environment, handled
from hvdenv.verification import bench, collectives, training
from hvdenv.verification.checks import REBUILD, damaged, table
from hvdenv.verification.collection import (
    Collection,
    Failed,
    Key,
    Progress,
    Setup,
    Shell,
    bug,
    collected,
    is_of_ranks,
    judge,
)
from hvdenv.verification.collectors import FILES_OF_RANKS, Extension
from hvdenv.verification.datapath import records
from hvdenv.verification.ranks import RankRun, listed

# What ranks do after their allreduces: NAME or NAME=OPTION, see standalone/ranks/rank_work.py.
EXERCISES = (collectives.EXERCISE, training.EXERCISE)
# Three for process sets that overlap; Adasum needs 2, 4, 8 and so on.
_USUAL_RANKS, _RANKS_WITH_ROOM = 3, 4
# Seconds that hosts have to report orphaned processes. A batch system that ends verify does not wait.
_ORPHAN_SECONDS, _HURRIED_SECONDS = 6.0, 1.0


def verify(setup: Setup, on_event: Progress = lambda what, label, detail: None) -> Report:
    """Verify an environment.

    Args:
        setup: without `cores` and `shell`, which are those of this process. The stop() of its
            runner ends this call, as SIGINT and SIGTERM do: the report then holds what was found
            until then.
        on_event: told what runs and what fails, from several threads.
    """
    began = time.monotonic()
    setup = with_this_process(setup)
    with ended_by_signals(setup.runner):
        collection = Collection(setup, on_event)
        collection.run()
        results = collection.results
        found = [*judge(setup, results), *collection.unjudged()]
        findings = _with_first_remedy(found, setup, results)
        try:
            findings += _orphans(setup, results)
        except Exception as error:
            findings.append(bug("orphans", "hosts", error))
    seconds = time.monotonic() - began
    return _report(setup, results, findings, collection.measurements, seconds)


def with_this_process(setup: Setup) -> Setup:
    """The setup with the cores, the user and the variables of this process."""
    cores = len(os.sched_getaffinity(0))
    mine, passed = influences(environment()), influences(setup.runner.given)
    return setup._replace(
        launch=setup.launch._replace(root=os.geteuid() == 0, cores=cores),
        cores=cores,
        shell=Shell(passed, tuple(name for name in mine if name not in passed)),
    )


def _report(
    setup: Setup,
    results: Mapping[Key, Any],
    findings: Sequence[Finding],
    measured: Sequence[Measurement],
    seconds: float,
) -> Report:
    extensions = collected("extension", results)
    runs: dict[tuple[str, str], RankRun | None] = collected("rank_run", results)
    speeds = bench.measurements(collected("bench_run", results), collected("speed_runs", results))
    total = Measurement("verify", round(seconds, 3), "s")
    return Report(
        recipe=setup.installation.recipe,
        prefix=setup.installation.prefix,
        host=socket.gethostname(),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - seconds)),
        seconds=seconds,
        findings=tuple(findings),
        measurements=(*measured, *speeds, total),
        table=()
        if isinstance(extensions, Failed)
        else tuple(table(setup.expectation, extensions, findings)),
        ranks=tuple(record for (name, _), run in runs.items() for record in records(name, run)),
        environment=dict(_environment(setup, results)),
    )


def usual_ranks(cores: int, gpus: int = 0) -> int:
    """How many ranks verify starts by default; two of them cannot share a GPU under NCCL."""
    ranks = _RANKS_WITH_ROOM if cores >= _RANKS_WITH_ROOM else _USUAL_RANKS
    return min(ranks, gpus) if gpus > 1 else ranks


def _environment(setup: Setup, results: Mapping[Key, Any]) -> Iterator[tuple[str, str]]:
    extensions = [each for each in results.values() if isinstance(each, Extension)]
    yield "hvdenv", __version__
    for name, field in (("Python", "python_version"), ("horovod", "version")):
        versions = dict.fromkeys(filter(None, (getattr(each.facts, field) for each in extensions)))
        if versions:
            yield name, ", ".join(versions)
    for each in extensions:
        if each.facts.installed:
            yield each.framework, each.facts.installed
    mpi = results.get(Key("mpi"))
    if mpi and not isinstance(mpi, Failed) and mpi[1]:
        yield "mpirun", mpi[1]
    if setup.installation.generation:
        yield "generation", os.path.basename(setup.installation.generation)
    yield "ranks", str(setup.launch.ranks)
    if setup.launch.hosts:
        yield "hosts", ", ".join(host.name for host in setup.launch.hosts)
    yield "cores", str(setup.cores)
    yield "kernel", os.uname().release


def _orphans(setup: Setup, results: Mapping[Key, Any]) -> Iterator[Finding]:
    """Ends processes that ranks left on their hosts; other hosts are asked only if ranks failed."""
    runner = setup.runner
    runs = [value for key, value in results.items() if key.name == "rank_run"]
    failed = any(isinstance(run, Failed) or (run and run.returncode) for run in runs)
    if not failed and not runner.stopped:
        end_marked(runner.token)  # what a rank may have started
        return
    seconds = _HURRIED_SECONDS if runner.stopped else _ORPHAN_SECONDS
    yield from orphans.end([host.name for host in setup.launch.hosts], runner, seconds)


@contextmanager
def ended_by_signals(runner: Runner) -> Iterator[None]:
    """Stop the runner on a signal that ends programs, and if the block is left by an exception."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        runner.stop()

    main = threading.current_thread() is threading.main_thread()
    try:
        with handled(ENDING if main else (), stop):
            yield
    except BaseException:
        runner.stop()
        raise


def _with_first_remedy(
    findings: list[Finding], setup: Setup, results: Mapping[Key, Any]
) -> list[Finding]:
    """The findings with what to try first: other files, or ranks without the user's variables."""
    changed_files = results.get(Key("changed_files"))
    if isinstance(changed_files, Failed) or not damaged(changed_files or ()):
        return list(map(partial(_with_clean, setup), findings))
    remedy, found = f"files are damaged: {REBUILD}", []
    for each in sorted(findings, key=lambda one: one.check != "files"):
        bad = each.check != "files" and each.status in ("fail", "error")
        found.append(each._replace(remedy=remedy) if bad else each)
    return found


def _with_clean(setup: Setup, finding: Finding) -> Finding:
    """A finding about ranks that failed under variables of the user's shell."""
    passed = [name for name in setup.shell.passed if name not in FILES_OF_RANKS]
    if not passed or finding.status not in ("fail", "error") or not is_of_ranks(finding.check):
        return finding
    first = f"first try without {listed(passed)} of your shell: `{setup.without_shell}`"
    return finding._replace(remedy="; otherwise: ".join(filter(None, (first, finding.remedy))))
