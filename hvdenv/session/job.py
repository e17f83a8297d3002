"""Jobs of a recipe's scheduler: following one, and running hvdenv itself in one."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence

from hvdenv import PACKAGE
from hvdenv.base.errors import RecipeError, StepError
from hvdenv.base.places import HOME_VARIABLE, find_places
from hvdenv.base.runner import Runner, environment
from hvdenv.base.schema import encode
from hvdenv.model.dialect import Dialect
from hvdenv.model.layers import Resolved
from hvdenv.session.output import print_json, report
from hvdenv.session.recipe import open_recipe
from hvdenv.session.request import SITE_VARIABLE, Request
from hvdenv.sites import batch, jobs
from hvdenv.sites.status import Status

# Ignores the directory that the job starts in and the variables of its shell. A Python that ignores
# these leaves out the packages of the user, where hvdenv may be.
AS_MODULE = (
    "-I",
    "-c",
    f"import sys; sys.path.append({str(PACKAGE.parent)!r}); del sys.argv[0];"
    " import runpy; runpy.run_module(sys.argv[0], None, '__main__')",
)
OWN = (sys.executable, *AS_MODULE)


def scheduler_of(resolved: Resolved) -> tuple[str, Dialect]:
    name, dialect = resolved.recipe.scheduler, resolved.recipe.dialect
    if name is None or dialect is None:
        raise RecipeError(
            "this recipe has no scheduler",
            where=resolved.where("scheduler"),
            remedy="name it: --set scheduler=slurm (known:"
            f" {', '.join(resolved.recipe.dialects)}); for good, set it in a recipe with"
            f' extends = "{resolved.recipe.name}"; without a job: hvdenv run',
        )
    return name, dialect


def submit(
    scheduler: str, dialect: Dialect, planned: batch.BatchJob, *, quiet: bool, key: str = ""
) -> jobs.Submitted:
    """Submit a job, and record it; see jobs.submit()."""
    text, job = batch.script(dialect, planned), planned.job
    if not quiet:
        report(f"{job.name}: {batch.charged(job)}")
    record = jobs.Submitted(scheduler, dialect, job.name, log=planned.log, key=key)
    record = jobs.submit(text, record, Runner(), find_places())
    if not quiet:
        report(f"submitted job {record.id}")
    return record


def to_the_end(
    record: jobs.Submitted, *, quiet: bool = False, as_json: bool = False, withdraw: bool = True
) -> int:
    """Follow a job with its output on standard output and its status on standard error.

    Args:
        as_json: print the end as JSON; the job's output goes to standard error.
        withdraw: cancel the job if it can never start.

    Returns:
        The job's exit code; 130 if the user stopped following it.

    Raises:
        StepError: it did not end by itself.
    """
    status, shown = Status("gone"), ""
    try:
        for event in jobs.Follower(record, Runner(), find_places(), withdraw=withdraw).events():
            if isinstance(event, str):
                print(event, file=sys.stderr if as_json else sys.stdout, flush=True)
            elif isinstance(event, jobs.JobNote):
                report(event.text)
            else:
                status, text = event, event.describe(record.dialect)
                if not quiet and text != shown:
                    shown = text
                    report(f"job {record.id}: {text}")
    except KeyboardInterrupt:
        _leave_or_cancel(record)
        return 130
    outputs = record.files or status.outputs
    if as_json:
        ended = {"id": record.id, "state": status.state, "exit_code": status.exit_code}
        print_json({**ended, "outputs": outputs})
    return _result(record, status, ", ".join(outputs), quiet=quiet)


def _result(record: jobs.Submitted, status: Status, files: str, *, quiet: bool) -> int:
    if abnormal := status.abnormal_end:
        what, remedy = abnormal
        detail = f"output: {files}" if files else ""
        raise StepError(f"it {what}", where=f"job {record.id}", detail=detail, remedy=remedy)
    code = status.exit_code or 0
    if code:
        report(f"job {record.id} failed with exit code {code}; output: {files}")
    elif not quiet:
        report(f"job {record.id} succeeded; output: {files}")
    return code


def _leave_or_cancel(record: jobs.Submitted) -> None:
    answer = ""
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"\ncancel job {record.id}? [y/N] ", end="", file=sys.stderr, flush=True)
        try:
            answer = sys.stdin.readline()
        except KeyboardInterrupt:
            report("")
    if answer.strip().lower() in ("y", "yes"):
        jobs.cancel(record, Runner())
        report(f"cancelled job {record.id}")
    else:
        report(f"job {record.id} is still running; follow it with: hvdenv job --follow {record.id}")


def run_there(
    request: Request, purpose: batch.Purpose, words: Sequence[str], *, dry_run: bool
) -> int:
    """Run a command of hvdenv in a job, once, on its first node.

    If an earlier job for the same has not been seen to end, follow that job instead.

    Args:
        words: the command and its arguments.
        dry_run: print the script instead.

    Returns:
        The exit code of that command.
    """
    resolved, places, quiet = open_recipe(request), find_places(), request.quiet
    same = json.dumps([encode(resolved.recipe), words, os.getcwd()], sort_keys=True)
    key = hashlib.sha256(same.encode()).hexdigest()
    if not dry_run and (record := jobs.unfinished(key, places)):
        report(f"job {record.id} was submitted for this before; following it")
        return to_the_end(record, quiet=quiet)
    scheduler, dialect = scheduler_of(resolved)
    job = batch.own_job(resolved.recipe.job, purpose)
    where = batch.own_where(resolved.recipe.job, purpose, resolved.where)
    partition = batch.check(job, dialect, resolved.recipe.partitions, where=where)
    site = environment().get(SITE_VARIABLE)
    env = ((HOME_VARIABLE, str(places.home)), *(((SITE_VARIABLE, site),) if site else ()))
    log = str(places.jobs / f"{job.name}-{os.urandom(6).hex()}.log")
    planned = batch.BatchJob(job, partition, env=env, command=(*OWN, "hvdenv", *words))
    planned = planned._replace(folder=os.getcwd(), log=log)
    if dry_run:
        report(f"{job.name}: {batch.charged(job)}")
        print(batch.script(dialect, planned), end="", flush=True)
        return 0
    return to_the_end(submit(scheduler, dialect, planned, quiet=quiet, key=key), quiet=quiet)
