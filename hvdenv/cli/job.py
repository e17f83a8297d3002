"""Write the batch script of a job that runs a command in an environment or image.

With --submit, job submits the script and follows the job to its end. The resources come from
[job] in the recipe; options override them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.cli.options import (
    add_json,
    add_prefix,
    add_recipe,
    add_trust,
    print_json,
    resolved_of,
)
from hvdenv.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from hvdenv.cli.run import Chosen
    from hvdenv.launch.launchers import Start
    from hvdenv.model.cluster import Job, Scheduler
    from hvdenv.model.layers import Resolved
    from hvdenv.places import Places
    from hvdenv.runner import Runner
    from hvdenv.sites.batch import BatchJob
    from hvdenv.sites.jobstate import Status
    from hvdenv.sites.scheduler import Submitted

# Without modules from the folder that the job starts in, which Python 3.10 cannot be told.
_SAFE = ("-P",) if sys.version_info >= (3, 11) else ()
_OWN = (sys.executable, *_SAFE, "-m", "hvdenv")

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
    add_recipe(parser, optional=True)
    add_prefix(parser)
    add_json(parser)
    add_trust(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    asks = parser.add_argument_group("resources, instead of those of the recipe")
    asks.add_argument("--nodes", type=int, metavar="N")
    asks.add_argument("--ranks-per-node", type=int, metavar="N")
    asks.add_argument("--cpus-per-rank", type=int, metavar="N")
    asks.add_argument("--gpus-per-node", type=int, metavar="N")
    asks.add_argument("--time", metavar="T", help="such as 1:30:00 or 2-00:00:00")
    asks.add_argument("--partition", metavar="P", help="partition or queue")
    asks.add_argument("--account", metavar="A")
    asks.add_argument("--name", metavar="NAME")
    asks.add_argument("--comment", metavar="C")
    asks.add_argument("--launcher", metavar="L", help="launcher that starts the ranks")
    asks.add_argument(
        "--output",
        metavar="FILE",
        help="file for the job's output; the scheduler's placeholders are allowed",
    )
    does = parser.add_argument_group("instead of printing the script")
    does.add_argument("--to", metavar="FILE", type=Path, help="write the script to a file")
    does.add_argument("--submit", action="store_true", help="submit the job and follow it")
    does.add_argument("--detach", action="store_true", help="with --submit: do not follow the job")
    does.add_argument("--follow", metavar="ID", help="follow a job that hvdenv submitted earlier")


def run(arguments: argparse.Namespace) -> int:
    from hvdenv.places import find_places
    from hvdenv.runner import Runner
    from hvdenv.sites.batch import script

    _check_usage(arguments)
    places = find_places()
    if arguments.follow:
        return _follow_again(arguments, places)
    resolved = resolved_of(arguments)
    scheduler = scheduler_of(resolved)
    batch = _batch(arguments, resolved, scheduler)
    text = script(scheduler, batch)
    if not arguments.submit:
        return _give(arguments, text, batch.job)
    from hvdenv.environments import last_used
    from hvdenv.sites.scheduler import submit

    runner = Runner()
    if not arguments.quiet:
        _say(f"{batch.job.name}: {charged(batch.job)}")
    record = submit(text, scheduler, batch.job.name, runner, places)
    if batch.activate:  # none is there in an image
        last_used.note(places, Path(batch.activate).parent)
    if not arguments.detach:
        if not arguments.quiet:
            _say(f"job {record.id} was submitted")
        return to_the_end(record, runner, places, quiet=arguments.quiet, json=arguments.json)
    if arguments.json:
        print_json({"id": record.id, "scheduler": scheduler, "script": record.script})
    else:
        print(record.id)
        if not arguments.quiet:
            _say(f"follow it with: hvdenv job --follow {record.id}")
    return 0


def _check_usage(arguments: argparse.Namespace) -> None:
    if arguments.follow:
        if arguments.recipe or arguments.program or arguments.submit:
            raise UsageError(
                "--follow takes no recipe, command or --submit",
                remedy=f"hvdenv job --follow {arguments.follow}",
            )
        return
    if not arguments.recipe:
        raise UsageError("job needs a recipe", remedy="`hvdenv recipes` lists them")
    if not arguments.program:
        raise UsageError(
            "there is no command to run",
            remedy="write it after --: hvdenv job RECIPE -- python train.py",
        )
    if arguments.detach and not arguments.submit:
        raise UsageError("--detach needs --submit", where="--detach")
    if arguments.submit and not os.getcwd().isprintable():
        raise UsageError(
            "the output of a job from this folder could not be followed: its name has"
            " characters that cannot be printed",
            where=repr(os.getcwd()),
            remedy="go to another folder",
        )
    if arguments.submit and arguments.to:
        raise UsageError(
            "--to and --submit exclude each other",
            remedy="a submitted script is kept under $HVDENV_HOME/jobs",
        )


def scheduler_of(resolved: Resolved) -> Scheduler:
    """The scheduler of a recipe's site.

    Raises:
        RecipeError: it has none.
    """
    if resolved.recipe.scheduler is None:
        raise RecipeError(
            "this recipe is for a machine without a scheduler",
            where=f"{resolved.file}: scheduler",
            remedy='set scheduler = "slurm" (or pbs, cobalt, lsf) and a table [job] in a recipe'
            f' that has extends = "{resolved.recipe.name}"; or run the command without a job',
        )
    return resolved.recipe.scheduler


def _batch(arguments: argparse.Namespace, resolved: Resolved, scheduler: Scheduler) -> BatchJob:
    """What the script does, checked against what the site has."""
    from hvdenv.cli.run import choose, named, refuse_missing_image
    from hvdenv.sites.batch import OPTIONS, BatchJob, check, merge

    recipe = resolved.recipe
    given = {name: getattr(arguments, name) for name in OPTIONS}
    job = merge(recipe.job, scheduler, given)
    options = [name for name, value in given.items() if value is not None]
    partition = check(job, scheduler, recipe.partitions, options)
    chosen = choose(arguments, built=False, image=True)
    activate = "" if chosen.container else chosen.activate
    if arguments.submit and chosen.container:
        refuse_missing_image(chosen.container, named(arguments), os.getcwd())
    elif arguments.submit and not os.path.exists(activate):
        raise UsageError(
            f"there is no environment {chosen.name} at {chosen.prefix}",
            remedy=f"hvdenv build {named(arguments)}",
        )
    start, program = _start(
        chosen, job, scheduler, arguments.launcher or "", tuple(arguments.program)
    )
    return BatchJob(
        job, partition, activate, start.argv, start.env, program, os.getcwd(),
        exports=recipe.launch.exports, modules=chosen.module_lines,
    )  # fmt: skip


def _start(
    chosen: Chosen, job: Job, scheduler: Scheduler, wanted: str, program: tuple[str, ...]
) -> tuple[Start, tuple[str, ...]]:
    """What starts the ranks, and the program; the hosts are known only in the job.

    Raises:
        UsageError, IncompatibleError: the launcher does not work there.
    """
    from hvdenv.cli.run import activated, found_program, with_mpi
    from hvdenv.launch.container import start_inside
    from hvdenv.launch.launchers import LAUNCHERS, Launch
    from hvdenv.launch.placement import START_SECONDS, Requested, choose_launcher, exported, mpi_of
    from hvdenv.sites.batch import HOST_NAMES, HOSTFILE, HOSTS

    recipe = chosen.recipe
    name = choose_launcher(recipe, wanted)
    launcher = LAUNCHERS[name]
    if launcher.schedulers and scheduler not in launcher.schedulers:
        raise UsageError(
            f"{name} works in jobs of {' and '.join(launcher.schedulers)}, not of {scheduler}",
            where="--launcher",
            remedy="take another one, such as --launcher mpirun",
        )
    if name == "torchrun" and job.nodes > 1:
        raise UsageError(
            "torchrun has to be told the names of its hosts, which a script does not know",
            where="--launcher",
            remedy=f"hvdenv shell {recipe.name} --nodes {job.nodes}, and there"
            f" hvdenv run {recipe.name} --launcher torchrun",
        )
    launch = Launch(
        (),
        job.nodes * job.ranks_per_node,
        root=os.geteuid() == 0,
        mpi=mpi_of(recipe),
        exports=exported(
            recipe.launch.exports,
            activated(chosen),
            dict.fromkeys(recipe.launch.exports, ""),
            Requested(),
        ),
        start_timeout=START_SECONDS,
        host_list=HOSTS,
        host_names=HOST_NAMES,
        # LSF lists the host of the script too, which runs no ranks.
        hostfile=HOSTFILE if scheduler in ("pbs", "cobalt") else "",
        ranks_per_node=job.ranks_per_node,
        cpus_per_rank=job.cpus_per_rank or 0,
        gpus_per_node=job.gpus_per_node or 0,
        settings=recipe.launch,
        network=recipe.network,
    )
    launch = with_mpi(launch, chosen)
    program = found_program(name, launch, chosen, program)
    # The script runs on the first of the job's hosts.
    return start_inside(name, launch, chosen.inside, os.uname().nodename), program


def _give(arguments: argparse.Namespace, text: str, job: Job) -> int:
    """Print the script or write it."""
    from hvdenv.places import named_file, write_text
    from hvdenv.sites.batch import cost

    if arguments.to:
        write_text(named_file(arguments.to), text, 0o777)
    if arguments.json:
        print_json({"text": text, **cost(job)._asdict()})
    elif arguments.to:
        print(arguments.to)
    else:
        print(text, end="")
    if not arguments.json and not arguments.quiet:
        _say(f"{job.name}: {charged(job)}")
    return 0


def charged(job: Job) -> str:
    """What a job may use: ``2 nodes for 8:00:00, up to 16 node-hours``."""
    from hvdenv.sites.batch import cost

    used = cost(job)
    nodes = f"{used.nodes} node{'s' if used.nodes > 1 else ''}"
    text = f"{nodes} for {job.time}, up to {used.node_hours:.4g} node-hours"
    return f"{text} and {used.gpu_hours:.4g} GPU-hours" if used.gpu_hours else text


def _follow_again(arguments: argparse.Namespace, places: Places) -> int:
    from hvdenv.runner import Runner
    from hvdenv.sites.scheduler import recall

    record = recall(arguments.follow, places)
    return to_the_end(
        record, Runner(), places, quiet=arguments.quiet, json=arguments.json, withdraw=False
    )


def to_the_end(
    record: Submitted,
    runner: Runner,
    places: Places,
    *,
    quiet: bool = False,
    json: bool = False,
    withdraw: bool = True,
) -> int:
    """Follow a job with its output on standard output and its states on standard error.

    Args:
        record: the job.
        runner: starts the scheduler's programs.
        places: where jobs are noted.
        quiet: say only what went wrong.
        json: the end as JSON on standard output; the job's output goes to standard error.
        withdraw: cancel the job if it can never start.

    Returns:
        The job's exit code; 130 if the user stopped following it.

    Raises:
        StepError: it did not end by itself, with what to do.
    """
    from hvdenv.errors import StepError
    from hvdenv.sites.jobstate import explained, unhappy_end
    from hvdenv.sites.scheduler import Listener, follow

    def line(text: str) -> None:
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    shown = ""

    def told(status: Status) -> None:
        nonlocal shown
        if not quiet and explained(status) != shown:
            shown = explained(status)
            _say(f"job {record.id}: {shown}")

    try:
        status = follow(record, runner, places, Listener(line, told, _say), withdraw=withdraw)
    except KeyboardInterrupt:
        _leave_or_cancel(record, runner)
        return 130
    files = ", ".join(record.files or status.outputs)
    if json:
        ended = {"id": record.id, "state": status.state, "exit_code": status.exit_code}
        print_json({**ended, "outputs": record.files or status.outputs})
    unhappy = unhappy_end(status)
    if unhappy:
        what, remedy = unhappy
        raise StepError(
            f"it {what}", where=f"job {record.id}", detail=f"output: {files}" if files else "",
            remedy=remedy,
        )  # fmt: skip
    code = status.exit_code or 0
    if code:
        _say(f"job {record.id} failed with exit code {code}; output: {files}")
    elif not quiet:
        _say(f"job {record.id} has ended well; output: {files}")
    return code


def _leave_or_cancel(record: Submitted, runner: Runner) -> None:
    """Ask whether to cancel a job, where there is somebody to ask."""
    from hvdenv.sites.scheduler import cancel

    answer = ""
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"\ncancel job {record.id}? [y/N] ", end="", file=sys.stderr, flush=True)
        try:
            answer = sys.stdin.readline()
        except KeyboardInterrupt:
            _say("")
    if answer.strip().lower() in ("y", "yes"):
        cancel(record, runner)
        _say(f"job {record.id} was cancelled")
    else:
        _say(f"job {record.id} goes on; follow it with: hvdenv job --follow {record.id}")


def run_there(arguments: argparse.Namespace, purpose: str, *, nodes: int, time: str = "") -> int:
    """Run this command line in a job, without its ``--where compute``; see run_in_job()."""
    from hvdenv.places import find_places

    resolved = resolved_of(arguments)
    words = [word for word in arguments.words if word != "--where=compute"]
    if "--where" in words:
        at = words.index("--where")
        words = [*words[:at], *words[at + 2 :]]
    return run_in_job(
        resolved, words, find_places(), purpose=purpose, nodes=nodes, time=time,
        quiet=arguments.quiet,
    )  # fmt: skip


def run_in_job(
    resolved: Resolved,
    words: Sequence[str],
    places: Places,
    *,
    purpose: str,
    nodes: int | None = None,
    time: str = "",
    quiet: bool = False,
) -> int:
    """Run a command line of hvdenv itself in a job, once, on its first node.

    A call for the same thing whose job nobody saw the end of takes that job up.

    Args:
        resolved: the recipe; its table `job` says what is asked for.
        words: the command line without ``hvdenv``, such as ``("build", "neuron")``.
        places: where jobs are noted.
        purpose: goes into the job's name: ``build``, ``verify``.
        nodes: how many, if not as many as the recipe says.
        time: how long it may take, if not as long as the recipe says.
        quiet: say only what went wrong.

    Returns:
        The exit code of that command line.

    Raises:
        UsageError, RecipeError, StepError: there is no such job here, or it did not end
            by itself.
    """
    from hvdenv.cli.options import SITE_VARIABLE
    from hvdenv.places import HOME_VARIABLE, make_folder
    from hvdenv.runner import Runner, environment
    from hvdenv.sites.batch import BatchJob, check, script
    from hvdenv.sites.scheduler import submit, unfinished

    recipe, scheduler, runner = resolved.recipe, scheduler_of(resolved), Runner()
    key = _key(resolved, words)
    record = unfinished(key, places)
    if record:
        _say(f"job {record.id} was submitted for this before: taking it up")
        return to_the_end(record, runner, places, quiet=quiet)
    job = recipe.job._replace(
        name=f"hvdenv-{purpose}", nodes=nodes or recipe.job.nodes, time=time or recipe.job.time,
        output="/dev/null", error="/dev/null",
    )  # fmt: skip
    partition = check(job, scheduler, recipe.partitions, ("nodes",) if nodes else ())
    log = make_folder(places.jobs) / f"{job.name}-{os.urandom(6).hex()}.log"
    site = environment().get(SITE_VARIABLE)
    env = ((HOME_VARIABLE, str(places.home)), *(((SITE_VARIABLE, site),) if site else ()))
    batch = BatchJob(
        job, partition, "", (), env, (*_OWN, *words), os.getcwd(),
        log=str(log),
    )  # fmt: skip
    if not quiet:
        _say(f"{job.name}: {charged(job)}")
    record = submit(
        script(scheduler, batch), scheduler, job.name, runner, places, key=key, log=str(log)
    )
    if not quiet:
        _say(f"job {record.id} was submitted")
    return to_the_end(record, runner, places, quiet=quiet)


def _key(resolved: Resolved, words: Sequence[str]) -> str:
    """The same for the same command line, recipe and folder."""
    import hashlib
    import json

    from hvdenv.schema import encode

    what = json.dumps([encode(resolved.recipe), list(words), os.getcwd()], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
