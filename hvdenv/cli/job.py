"""Write the batch script of a job that runs a command in an environment or image.

With --submit, job submits the script and follows the job to its end. The resources come from
[job] in the recipe; options override them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hvdenv.base.errors import UsageError
from hvdenv.base.masking import mask
from hvdenv.base.places import find_places, named_file, write_text
from hvdenv.cli.options import add, add_options, add_requests, read_request, refuse_without
from hvdenv.model.cluster import JOB_OPTIONS, Job
from hvdenv.model.dialect import Dialect
from hvdenv.model.layers import Resolved
from hvdenv.session.chosen import choose
from hvdenv.session.job import scheduler_of, submit, to_the_end
from hvdenv.session.output import print_json, report
from hvdenv.session.ranks import find_entry, found_program, plan_ranks
from hvdenv.session.recipe import open_recipe
from hvdenv.session.request import Request
from hvdenv.sites import batch, jobs, placement
from hvdenv.sites.allocation import Allocation
from hvdenv.sites.container import start_in_image

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
    add_options(parser, "image")
    add(requests, "--launcher LAUNCHER", "starts the ranks")
    add(requests, "--output FILE", "output file, with the scheduler's placeholders")
    actions = parser.add_argument_group("what to do with the script, instead of printing it")
    one_of = actions.add_mutually_exclusive_group()
    add(one_of, "--to FILE", "write it to a file", type=Path)
    add(one_of, "--submit", "submit it and follow the job")
    add(one_of, "--follow ID", "follow a job that was submitted before")
    add(actions, "--dry-run", "print the script of --submit; submit and write nothing")
    add(actions, "--detach", "do not follow the job")


def run(arguments: argparse.Namespace) -> int:
    _check_usage(arguments)
    quiet = arguments.quiet
    if arguments.follow:
        record = jobs.recall(arguments.follow, find_places())
        return to_the_end(record, quiet=quiet, as_json=arguments.json, withdraw=False)
    printed = not arguments.submit or arguments.dry_run
    request = read_request(arguments, anywhere=printed)
    resolved = open_recipe(request)
    scheduler, dialect = scheduler_of(resolved)
    planned = _batch(arguments, request, resolved, dialect)
    if printed:
        return _give(arguments, batch.script(dialect, planned), planned.job)
    record = submit(scheduler, dialect, planned, quiet=quiet)
    if not arguments.detach:
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
        if arguments.recipe or arguments.program:
            raise UsageError(
                "--follow cannot be combined with a recipe or a command",
                remedy=f"hvdenv job --follow {arguments.follow}",
            )
        return
    if not arguments.recipe:
        raise UsageError("no recipe is named", remedy="`hvdenv recipes` lists them")
    if not arguments.program:
        remedy = "write it after --: hvdenv job RECIPE -- python train.py"
        raise UsageError("no command to run", remedy=remedy)
    refuse_without(arguments, "submit", "detach")


def _batch(
    arguments: argparse.Namespace, request: Request, resolved: Resolved, dialect: Dialect
) -> batch.BatchJob:
    recipe = resolved.recipe
    given = {name: getattr(arguments, name) for name in JOB_OPTIONS}
    job = batch.merge(recipe.job, given)
    options = [name for name, value in given.items() if value is not None]
    partition = batch.check(job, dialect, recipe.partitions, options, resolved.where)
    chosen = choose(request, image=True)
    entry = find_entry(request, chosen, batch.JOB_ID)
    exported = dict.fromkeys(recipe.launch.exports, "")
    allocation = Allocation(scheduler=recipe.scheduler or "", nodes=job.nodes)
    requested = placement.Requested(launcher=arguments.launcher or "")
    recipe = recipe._replace(job=job)
    name, launch = plan_ranks(recipe, chosen, requested, allocation, exported, recipe.name)
    # The hosts are known only in the job.
    no_hostfile = dialect.launch_host or dialect.columns
    launch = launch._replace(
        program=entry.words,
        host_list=batch.HOSTS,
        host_names=batch.HOST_NAMES,
        hostfile=batch.HOSTFILE if dialect.hostfile and not no_hostfile else "",
    )
    # The script runs on the first host of the job.
    start = start_in_image(name, launch, chosen.inside, os.uname().nodename)
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
    secret, file = mask(text) != text, None if arguments.dry_run else arguments.to
    if file:
        write_text(named_file(file), text, 0o700 if secret else 0o777)
    if arguments.json:
        print_json({"text": text, **batch.cost(job)._asdict()})
    elif file:
        print(file)
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
