"""Write the batch script of a job that runs a command in an environment or image.

With --submit, job submits the script and follows the job to its end. The resources come from
[job] in the recipe; options override them."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

from hvdenv import PACKAGE
from hvdenv.cli.options import SITE_VARIABLE, add, add_options, print_json, report, resolved_of
from hvdenv.cli.run import activated, add_requests, found_program, with_mpi
from hvdenv.cli.target import choose, named, refuse_missing_image
from hvdenv.cli.with_image import Entry, add_image, entry_of
from hvdenv.environments import last_used
from hvdenv.errors import RecipeError, StepError, UsageError
from hvdenv.launch import placement
from hvdenv.launch.container import start_inside
from hvdenv.masking import mask
from hvdenv.model.cluster import Job
from hvdenv.model.dialect import Dialect
from hvdenv.model.layers import Resolved
from hvdenv.places import HOME_VARIABLE, Places, find_places, make_folder, named_file, write_text
from hvdenv.runner import Runner, environment
from hvdenv.schema import encode
from hvdenv.sites import batch, jobs
from hvdenv.sites.allocation import Allocation
from hvdenv.sites.answers import Status
from hvdenv.sites.job_status import abnormal_end, explained

# Ignores the folder that the job starts in and the variables of its shell. A Python that ignores
# these leaves out the packages of the user, where hvdenv may be.
AS_MODULE = (
    "-I",
    "-c",
    f"import sys; sys.path.append({str(PACKAGE.parent)!r}); del sys.argv[0];"
    " import runpy; runpy.run_module(sys.argv[0], None, '__main__')",
)
OWN = (sys.executable, *AS_MODULE)

EXAMPLES = """\
examples:
  hvdenv job neuron --nodes 2 -- python train.py           prints the script
  hvdenv job neuron --nodes 2 --to train.sh -- python train.py
  hvdenv job neuron --nodes 2 --time 8:00:00 --submit -- python train.py
  hvdenv job neuron --submit --detach -- python train.py   prints the id of the job
  hvdenv job --follow 12345                                follows it again

With --submit and --follow the exit code is that of the job. On a terminal, Ctrl-C asks whether to
cancel the job; otherwise, and if the connection is lost, the job continues.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hvdenv job RECIPE [options] -- CMD\n       hvdenv job --follow ID"
    add_options(parser, "recipe?", "prefix", "json", "trust")
    add(parser, "-q --quiet", "report errors only")
    requests = parser.add_argument_group("what the job requests, instead of the recipe's values")
    add_requests(requests)
    add_image(parser)
    add(requests, "--launcher L", "starts the ranks")
    add(requests, "--output FILE", "output file, with the scheduler's placeholders")
    actions = parser.add_argument_group("what to do with the script, instead of printing it")
    add(actions, "--to FILE", "write it to a file", type=Path)
    add(actions, "--submit", "submit it and follow the job")
    add(actions, "--dry-run", "print the script of --submit instead of submitting it")
    add(actions, "--detach", "do not follow the job")
    add(actions, "--follow ID", "follow a job that was submitted before")


def run(arguments: argparse.Namespace) -> int:
    _check_usage(arguments)
    places, quiet = find_places(), arguments.quiet
    if arguments.follow:
        record = jobs.recall(arguments.follow, places)
        return to_the_end(record, quiet=quiet, as_json=arguments.json, withdraw=False)
    printed = not arguments.submit or arguments.dry_run
    resolved = resolved_of(arguments, anywhere=printed)
    scheduler, dialect = scheduler_of(resolved)
    planned = _batch(arguments, resolved, dialect)
    text = batch.script(dialect, planned)
    if printed:
        return _give(arguments, text, planned.job)
    record = jobs.Submitted(scheduler, dialect, planned.job.name)
    if not quiet:
        report(f"{planned.job.name}: {batch.charged(planned.job)}")
    record = jobs.submit(text, record, Runner(), places)
    if planned.activate:  # an image has none
        last_used.note(places, Path(planned.activate).parent)
    if not arguments.detach:
        if not quiet:
            report(f"submitted job {record.id}")
        return to_the_end(record, quiet=quiet, as_json=arguments.json)
    if arguments.json:
        print_json({"id": record.id, "scheduler": scheduler, "script": record.script})
    else:
        print(record.id)
        if not quiet:
            report(f"follow it with: hvdenv job --follow {record.id}")
    return 0


def _check_usage(arguments: argparse.Namespace) -> None:
    if arguments.follow:
        if arguments.recipe or arguments.program or arguments.submit:
            raise UsageError(
                "--follow cannot be combined with a recipe, a command or --submit",
                remedy=f"hvdenv job --follow {arguments.follow}",
            )
        return
    if not arguments.recipe:
        raise UsageError("no recipe is named", remedy="`hvdenv recipes` lists them")
    if not arguments.program:
        remedy = "write it after --: hvdenv job RECIPE -- python train.py"
        raise UsageError("no command to run", remedy=remedy)
    if arguments.detach and not arguments.submit:
        raise UsageError("--detach needs --submit", remedy="add --submit")
    if arguments.submit and not os.getcwd().isprintable():
        raise UsageError(
            "the name of this folder has characters that cannot be printed, so the output of the"
            " job cannot be followed",
            where=repr(os.getcwd()),
            remedy="change to another folder",
        )
    if arguments.submit and arguments.to:
        raise UsageError(
            "--to and --submit exclude each other",
            remedy="hvdenv keeps submitted scripts in $HVDENV_HOME/jobs",
        )


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


def _batch(arguments: argparse.Namespace, resolved: Resolved, dialect: Dialect) -> batch.BatchJob:
    recipe = resolved.recipe
    given = {name: getattr(arguments, name) for name in batch.OPTIONS}
    job = batch.merge(recipe.job, dialect, given)
    options = [name for name, value in given.items() if value is not None]
    partition = batch.check(job, dialect, recipe.partitions, options, resolved.where)
    chosen = choose(arguments, built=False, image=True)
    submits = arguments.submit and not arguments.dry_run
    if submits and chosen.container:
        refuse_missing_image(chosen.container, named(arguments), os.getcwd())
    elif submits and not chosen.there:
        raise UsageError(
            f"there is no environment {chosen.name} at {chosen.prefix}",
            remedy=f"hvdenv build {named(arguments)}",
        )
    entry = entry_of(arguments, chosen.prefix, recipe, batch.JOB_ID) if chosen.record else Entry()
    name = placement.choose_launcher(recipe, arguments.launcher or "")
    placement.refuse_unfit(
        name, recipe, placement.Requested(), recipe.scheduler, job.nodes, recipe.name
    )
    launch = placement.place(
        recipe._replace(job=job), entry.words, placement.Requested(), Allocation(nodes=job.nodes),
        root=os.geteuid() == 0,
    )  # fmt: skip
    # The hosts are known only in the job.
    no_hostfile = dialect.launch_host or dialect.columns
    launch = launch._replace(
        exports=placement.exported(
            recipe.launch.exports, activated(chosen), dict.fromkeys(recipe.launch.exports, ""),
            placement.Requested(),
        ),
        host_list=batch.HOSTS,
        host_names=batch.HOST_NAMES,
        hostfile=batch.HOSTFILE if dialect.hostfile and not no_hostfile else "",
    )  # fmt: skip
    launch = with_mpi(launch, chosen)
    # The script runs on the first host of the job.
    start = start_inside(name, launch, chosen.inside, os.uname().nodename)
    return batch.BatchJob(
        job=job,
        partition=partition,
        activate=chosen.activate,
        launch=start.argv,
        env=start.env,
        command=found_program(name, launch, chosen, tuple(arguments.program)),
        folder=os.getcwd(),
        exports=recipe.launch.exports,
        modules=chosen.module_lines,
        image=entry.path,
    )


def _give(arguments: argparse.Namespace, text: str, job: Job) -> int:
    secret = mask(text) != text
    if arguments.to:
        write_text(named_file(arguments.to), text, 0o700 if secret else 0o777)
    if arguments.json:
        print_json({"text": text, **batch.cost(job)._asdict()})
    elif arguments.to:
        print(arguments.to)
    else:
        print(text, end="", flush=True)
    if not arguments.json and not arguments.quiet:
        report(f"{job.name}: {batch.charged(job)}")
    if secret:
        report(
            "note: the script contains a secret, shown as ***; --to writes it whole, into a file"
            " that only you can read"
        )
    return 0


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
        for event in jobs.follow(record, Runner(), find_places(), withdraw=withdraw):
            if isinstance(event, str):
                print(event, file=sys.stderr if as_json else sys.stdout, flush=True)
            elif isinstance(event, jobs.Note):
                report(event.text)
            else:
                status, text = event, explained(event, record.dialect)
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
    if abnormal := abnormal_end(status):
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
        report(f"job {record.id} goes on; follow it with: hvdenv job --follow {record.id}")


def run_there(arguments: argparse.Namespace, purpose: batch.Purpose) -> int:
    """Run this command line in a job, once, on its first node, without its ``--where compute``.

    If an earlier job for the same has not been seen to end, follow that job instead.

    Returns:
        The exit code of that command line.
    """
    words = [word for word in arguments.words if word not in ("--where=compute", "--dry-run")]
    if "--where" in words:
        at = words.index("--where")
        words = [*words[:at], *words[at + 2 :]]
    words += ["--", *arguments.program] if arguments.program else []
    resolved, places, quiet = resolved_of(arguments), find_places(), arguments.quiet
    same = json.dumps([encode(resolved.recipe), words, os.getcwd()], sort_keys=True)
    key = hashlib.sha256(same.encode()).hexdigest()
    if not arguments.dry_run and (record := jobs.unfinished(key, places)):
        report(f"job {record.id} was submitted for this before; following it")
        return to_the_end(record, quiet=quiet)
    scheduler, dialect = scheduler_of(resolved)
    job = batch.own_job(resolved.recipe.job, purpose)
    partition = batch.check(job, dialect, resolved.recipe.partitions, where=resolved.where)
    site = environment().get(SITE_VARIABLE)
    env = ((HOME_VARIABLE, str(places.home)), *(((SITE_VARIABLE, site),) if site else ()))
    planned = batch.BatchJob(job, partition, env=env, command=(*OWN, "hvdenv", *words))
    text, record = own_script(scheduler, dialect, planned, places)
    if arguments.dry_run or not quiet:
        report(f"{job.name}: {batch.charged(job)}")
    if arguments.dry_run:
        print(text, end="", flush=True)
        return 0
    make_folder(places.jobs)
    record = jobs.submit(text, record._replace(key=key), Runner(), places)
    if not quiet:
        report(f"submitted job {record.id}")
    return to_the_end(record, quiet=quiet)


def own_script(
    scheduler: str, dialect: Dialect, planned: batch.BatchJob, places: Places
) -> tuple[str, jobs.Submitted]:
    """The script of a job of hvdenv itself, in this folder, with a log of its own."""
    name = planned.job.name
    log = str(places.jobs / f"{name}-{os.urandom(6).hex()}.log")
    text = batch.script(dialect, planned._replace(folder=os.getcwd(), log=log))
    return text, jobs.Submitted(scheduler, dialect, name, log=log)
