"""Verify an environment: find out, start ranks, judge once, report."""

import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import FrameType
from typing import NamedTuple

from hvdenv import __version__
from hvdenv.base.errors import HvdenvError, InterruptedRunError
from hvdenv.base.runner import ENDING, Runner, end_marked, handled
from hvdenv.reports.report import Finding, Measurement, Report, Row
from hvdenv.sites import nodes
from hvdenv.verification import bench, datapath, installation_checks, rank_checks
from hvdenv.verification.evidence import Evidence, found, gather
from hvdenv.verification.inspection import CHECK_BUILD_ROWS, Extensions
from hvdenv.verification.installation_checks import REBUILD, is_damaged
from hvdenv.verification.rank_judgement import Judgement
from hvdenv.verification.rank_start import PAIRS
from hvdenv.verification.setup import CONTROLLERS, FRAMEWORKS, OPERATIONS, Parts, Progress, Setup

# For process sets that overlap.
_USUAL_RANKS = 3
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
    setup = setup.of_this_process()
    with Parts(setup, on_event) as parts, ended_by_signals(setup.runner):
        evidence = gather(setup, parts)
        findings = with_first_remedy([*judge_evidence(setup, evidence)], evidence)
        try:
            findings += _orphans(setup, evidence)
        except Exception as error:
            findings.append(_bug("orphans", "hosts", error))
    seconds = time.monotonic() - began
    return _report(setup, evidence, findings, parts.measurements, seconds)


def usual_ranks(gpus: int = 0) -> int:
    """How many ranks verify starts by default; two of them cannot share a GPU under NCCL."""
    return min(_USUAL_RANKS, gpus) if gpus > 1 else _USUAL_RANKS


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


class Check(NamedTuple):
    """A check of an environment, with the subject of the finding if it cannot be made."""

    name: str
    subject: str
    findings: Callable[[Setup, Evidence], Iterable[Finding]]


_OF_INSTALLATION = (
    Check("check-build", "horovodrun --check-build", installation_checks.check_build),
    Check("files", "manifest", installation_checks.check_files),
    Check("drift", "since the build", installation_checks.check_drift),
    Check("variables", "your shell", installation_checks.check_variables),
    Check("rendezvous", "servers of horovodrun", installation_checks.check_rendezvous),
    Check("frameworks", "any framework", installation_checks.check_any_framework),
    Check("shadowing", "PYTHONPATH", installation_checks.check_shadowing),
)
_OF_ALL_RUNS = (
    Check("mpi", "MPI of the image", rank_checks.check_image_mpi),
    Check("operation", "operations", rank_checks.check_operations),
)


def judge_evidence(setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """The findings of all checks; an error is one finding, whatever it keeps from being judged."""
    reported: list[Exception] = []
    missed: dict[str, None] = {}
    for check in _checks(evidence):
        try:
            yield from check.findings(setup, evidence)
        except InterruptedRunError:
            missed[check.name] = None
        except Exception as error:
            if not any(error is each for each in reported):
                yield _error(check, error)
            reported.append(error)
    if missed:
        message = f"it was ended before it could judge: {', '.join(missed)}"
        remedy = "run it again and leave it the time that it needs"
        yield Finding("interrupted", "verify", "error", message, remedy=remedy)


def _checks(evidence: Evidence) -> Iterator[Check]:
    """All checks of an environment, in the order of their findings."""
    yield from _OF_INSTALLATION
    for framework in FRAMEWORKS:
        check = partial(installation_checks.check_extension, framework)
        yield Check("extension", framework, check)
    for pair in PAIRS:
        check = partial(rank_checks.check_pair, pair)
        yield Check("allreduce", pair.subject, check)
    yield from _OF_ALL_RUNS
    for pair in evidence.benchmarks:
        check = partial(rank_checks.check_speed, pair)
        yield Check("bench", pair.subject, check)
    yield Check("yardstick", "yardsticks", rank_checks.check_yardsticks)


def _error(check: Check, error: Exception) -> Finding:
    if not isinstance(error, HvdenvError):
        return _bug(check.name, check.subject, error)
    text = f"{error.where}: {error.message}" if error.where else error.message
    judgement = Judgement("error", text, error.detail, error.remedy)
    return Finding(check.name, check.subject, *judgement)


def _bug(check: str, subject: str, error: Exception) -> Finding:
    """The finding for an error in hvdenv itself, which keeps the rest of the report."""
    return Finding(
        check=check,
        subject=subject,
        status="error",
        message=f"the check could not run: {type(error).__name__}: {error}",
        evidence="".join(traceback.format_exception(error)),
        remedy="this is a bug in hvdenv: report it with the evidence",
    )


def with_first_remedy(findings: Sequence[Finding], evidence: Evidence) -> list[Finding]:
    """The findings; if files are damaged, other failures follow from that."""
    changed_files = found(evidence.changed_files)
    if not changed_files or not is_damaged(changed_files):
        return [*findings]
    remedy = f"files are damaged: {REBUILD}"
    return [
        each._replace(remedy=remedy)
        if each.check != "files" and each.status in ("fail", "error")
        else each
        for each in sorted(findings, key=lambda each: each.check != "files")
    ]


def _orphans(setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Ends processes that ranks left on their hosts; other hosts are asked only if ranks failed."""
    runner = setup.runner
    runs = [found(run) for run in evidence.runs.values()]
    failed = any(run is None or run.returncode for run in runs)
    if not failed and not runner.stopped:
        end_marked(runner.token)  # what a rank may have started
        return
    seconds = _HURRIED_SECONDS if runner.stopped else _ORPHAN_SECONDS
    yield from nodes.end_orphans([host.name for host in setup.launch.hosts], runner, seconds)


def empty_report(setup: Setup, seconds: float) -> Report:
    """A report without findings on what took these seconds."""
    return Report(
        recipe=setup.installation.recipe,
        prefix=setup.installation.prefix,
        host=socket.gethostname(),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - seconds)),
        seconds=seconds,
    )


def _report(
    setup: Setup,
    evidence: Evidence,
    findings: Sequence[Finding],
    measured: Sequence[Measurement],
    seconds: float,
) -> Report:
    extensions = {name: each for name, one in evidence.extensions.items() if (each := found(one))}
    whole = Measurement("verify", round(seconds, 3), "s")
    records = [
        datapath.rank_records(pair.framework, run) for pair, run in evidence.started_runs.items()
    ]
    rows = table(setup, extensions, findings) if len(extensions) == len(FRAMEWORKS) else ()
    return empty_report(setup, seconds)._replace(
        findings=tuple(findings),
        measurements=(*measured, *bench.measurements(evidence.done_benchmarks), whole),
        table=tuple(rows),
        ranks=tuple(chain.from_iterable(records)),
        environment=_environment(setup, evidence, extensions),
    )


def table(setup: Setup, extensions: Extensions, findings: Sequence[Finding]) -> Iterator[Row]:
    """What was expected, built and proven, in the rows of Horovod's own table."""
    expectation = setup.expectation
    usable = [extension for extension in extensions.values() if extension.usable]
    sections = (
        ("Frameworks", ("tensorflow", "torch", "mxnet"), expectation.frameworks, "allreduce"),
        ("Controllers", CONTROLLERS, expectation.controllers, "allreduce"),
        ("Tensor Operations", OPERATIONS, expectation.operations, "operation"),
    )
    for section, names, stated, check in sections:
        for name in names:
            built = [each.built(name) for each in usable]
            if name in extensions:
                built = [extensions[name].present]
            elif check == "operation" and name not in (stated or ()) and {*built} <= {None}:
                continue
            expected = None if stated is None else name in stated
            marks = expected, any(built), proven(findings, check, name)
            yield Row(section, CHECK_BUILD_ROWS.get(name, name), *marks)


_ROWS = {*FRAMEWORKS, *CONTROLLERS, *OPERATIONS}
# Checks that take no proof from a row: what ranks did says more.
_ABOUT_NO_ROW = ("check-build", "rendezvous")


def proven(findings: Sequence[Finding], check: str, name: str) -> bool:
    """Whether a row was seen to work by its check, and no failed finding is about it.

    A finding is about the rows that its subject names, or about all if it names none.
    """
    about = [(each, _ROWS.intersection(re.findall(r"\w+", each.subject))) for each in findings]
    tried = {each.status for each, rows in about if each.check == check and name in rows}
    failed = (
        each.status in ("fail", "error") and (name in rows or not rows)
        for each, rows in about
        if each.check not in _ABOUT_NO_ROW
    )
    return tried - {"skip"} == {"pass"} and not any(failed)


def _environment(setup: Setup, evidence: Evidence, extensions: Extensions) -> dict[str, str]:
    """What ran: names with a version or a number."""
    facts = [each.facts for each in extensions.values()]
    mpi = found(evidence.mpi)
    # Runs that repeat what another one proves may have fewer ranks than the others.
    sizes = {run.size for run in evidence.started_runs.values()} or {setup.launch.ranks}
    known = {
        "hvdenv": __version__,
        "Python": _joined(each.python_version for each in facts),
        "horovod": _joined(each.version for each in facts),
        **{name: each.facts.installed for name, each in extensions.items()},
        "mpirun": mpi[1] if mpi else "",
        "generation": os.path.basename(setup.installation.generation),
        "ranks": " or ".join(map(str, sorted(sizes))),
        "hosts": _joined(host.name for host in setup.launch.hosts),
        "cores": str(setup.cores),
        "kernel": os.uname().release,
    }
    return {name: value for name, value in known.items() if value}


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, texts)))
