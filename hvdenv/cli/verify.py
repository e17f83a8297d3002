"""Prove that an environment works.

verify checks that everything the recipe requests was built, loads, and computes correct results
on several ranks. With --prefix it also verifies environments that hvdenv did not build. With
-- python train.py it then runs a training program for some steps, and reports what is wrong with
its distribution."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from typing import get_args

from hvdenv.base.errors import InterruptedRunError, UsageError
from hvdenv.base.places import Places, find_places
from hvdenv.base.runner import Runner, environment
from hvdenv.base.schema import nearest
from hvdenv.cli.options import (
    add,
    add_options,
    command_line,
    read_request,
    refuse_without,
    seconds,
)
from hvdenv.cli.verify_report import add_files, keep, read, refuse_files, show
from hvdenv.environments.installation import (
    PYTHON_PATH,
    Expectation,
    Installation,
    expectation_of,
    with_modules,
)
from hvdenv.model.cluster import LauncherName
from hvdenv.model.observe import gpus
from hvdenv.model.recipe import Recipe
from hvdenv.reports.report import Report
from hvdenv.session.chosen import choose, with_active
from hvdenv.session.job import run_there
from hvdenv.session.output import report
from hvdenv.session.progress import VerifyProgress
from hvdenv.session.ranks import current_allocation, find_entry, requested_ranks
from hvdenv.sites import module_shell
from hvdenv.sites.launchers import LAUNCHERS, Launch
from hvdenv.sites.launchers import named as named_launcher
from hvdenv.sites.placement import Requested, overload, place, shell_variables
from hvdenv.verification import program_start as start
from hvdenv.verification.program import finding, skipped
from hvdenv.verification.setup import (
    CONTROLLERS,
    DEFAULT_LAUNCHERS,
    DEFAULT_TIMEOUT,
    EXERCISES,
    TWO_RANKS,
    Effort,
    Progress,
    Setup,
)
from hvdenv.verification.verify import empty_report, usual_ranks, verify

EXAMPLES = """\
examples:
  hvdenv verify                                the active environment, or the one built last
  hvdenv verify local -n 4
  hvdenv verify neuron --hosts gpu32:2,gpu33:2 --launcher mpirun
  hvdenv verify local --quick
  hvdenv verify local -- python train.py       whether a program trains right on several ranks
  hvdenv verify local --bench --bench-time 30
  hvdenv verify neuron --where compute         in a job, on two nodes
  hvdenv verify --prefix ~/venv --framework torch --controller Gloo
  hvdenv verify local --json > report.json
  hvdenv verify local --junit verify.xml --html verify.html
  hvdenv verify --report report.json --html verify.html    does not verify again

exit codes: 0 everything expected is proven, 1 something failed, 7 nothing failed, but
this host cannot prove everything (such as NCCL without a GPU)
"""

# How long each of the programs measures that benchmarks start, and how many these may be.
BENCH_SECONDS, BENCH_PROGRAMS = 10.0, 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hvdenv verify [RECIPE] [options] [-- python train.py ARG ...]"
    add_options(parser, "recipe?", "prefix", "json", "loudness", "where")
    add(
        parser, "--dry-run", "with --where compute: print the script of the job, and submit nothing"
    )
    add_options(parser, "trust")
    add(
        parser,
        "-n --ranks N",
        "number of ranks (default: those of the allocation; otherwise 3, or 4 with four or"
        " more cores; at most one per GPU if NCCL is expected; 2 with --quick)",
        type=int,
    )
    add_options(parser, "hosts")
    add(
        parser,
        "--timeout SECONDS",
        "limit for the whole command (default: 600; more with --bench)",
        type=seconds,
    )
    add(
        parser,
        "--launcher LAUNCHER",
        f"{', '.join(get_args(LauncherName))}; may be repeated, one for each controller"
        " (default: the recipe's, and horovodrun-gloo)",
        action="append",
    )
    add_options(parser, "clean", "image")
    add(parser, "--quick", "test allreduce only: no other operations, no training")
    add(parser, "--bench", "measure allreduce, and compare with MPI or NCCL alone")
    add(
        parser,
        "--bench-time SECONDS",
        f"how long each program of --bench measures (default: {BENCH_SECONDS:g})",
        type=seconds,
    )
    add_files(parser)
    program = parser.add_argument_group("a training program, after --")
    add(
        program,
        "--steps N",
        f"how many training steps are observed (default: {start.DEFAULT_STEPS})",
        type=int,
    )
    add(program, "--program-only", "do not verify the environment before the program")
    stated = parser.add_argument_group("what to expect of an environment without a recipe")
    add(stated, "--framework", action="append", choices=("torch", "tensorflow", "mxnet"))
    add(stated, "--controller", action="append", choices=CONTROLLERS)
    add(stated, "--operation", action="append", choices=("NCCL", "DDL", "CCL", "MPI", "Gloo"))


def run(arguments: argparse.Namespace) -> int:
    refuse_files(arguments)
    if arguments.kept:
        return show(read(arguments), arguments)
    if arguments.where == "compute":
        return _in_a_job(arguments)
    if arguments.dry_run:
        raise UsageError(
            "--dry-run needs --where compute: verify changes nothing here",
            remedy="leave out --dry-run, or add --where compute",
        )
    places = find_places()
    runner = Runner(shell_variables(environment(), clean=arguments.clean))
    found = _verified(arguments, places, runner)
    kept = keep(found, places)
    code = show(found, arguments)
    if not (arguments.quiet or arguments.json):
        report(kept)
    if runner.stopped:
        raise InterruptedRunError
    return code


def _verified(arguments: argparse.Namespace, places: Places, runner: Runner) -> Report:
    refuse_without(arguments, "bench", "bench-time")
    effort, timeout = None, DEFAULT_TIMEOUT
    if arguments.bench:
        effort = Effort(arguments.bench_time or BENCH_SECONDS, str(places.home))
        timeout += BENCH_PROGRAMS * effort.seconds
    request = _program(arguments)
    _requested(arguments)  # refuses what is malformed, before the environment is looked for
    wanted = with_active(read_request(arguments))
    chosen = choose(wanted, image=True, judged=True)
    # Only the recipe of a known environment states what to expect.
    recipe = chosen.recipe if chosen.name else None
    installation = chosen.inspect(runner.given.get(PYTHON_PATH, ""))
    expectation = _expected(arguments, recipe)
    if recipe:
        installation = _with_modules(installation, recipe, runner)
    entry = find_entry(wanted, chosen)
    installation = installation._replace(image=entry.words, mount=entry.source)
    launch, launchers = _launched(arguments, chosen.recipe, expectation)
    if not arguments.quiet:
        report(f"verifying {installation.prefix}")
    setup = Setup(
        installation=installation,
        runner=runner,
        expectation=expectation,
        launch=launch,
        two_for_repeats=not (launch.hosts or arguments.ranks or _may_use_gpus(expectation)),
        launchers=launchers,
        exercises=() if arguments.quick else EXERCISES,
        effort=effort,
        seconds=arguments.timeout or timeout,
    )
    with VerifyProgress(quiet=arguments.quiet) as parts:
        if request is None:
            return verify(setup, parts.tell)
        return _proven(request, setup, parts.tell, only=arguments.program_only)


def _program(arguments: argparse.Namespace) -> start.ProgramRequest | None:
    """The training program to prove; None without one.

    Raises:
        UsageError: an option needs a program, or the program cannot be observed.
    """
    if not arguments.program:
        if arguments.steps or arguments.program_only:
            raise UsageError(
                "--steps and --program-only need a training program",
                remedy="write it after --: hvdenv verify RECIPE -- python train.py",
            )
        return None
    steps = start.DEFAULT_STEPS if arguments.steps is None else arguments.steps
    if steps < 2:
        raise UsageError(f"{steps} steps", where="--steps", remedy="give 2 or more")
    return start.read_command(arguments.program, steps)


def _proven(request: start.ProgramRequest, setup: Setup, tell: Progress, *, only: bool) -> Report:
    """The report of the environment, unless it is of the program only, and of a program."""
    began = time.monotonic()
    found = empty_report(setup, 0.0) if only else verify(setup, tell)
    if found.verdict in ("fail", "error") or setup.runner.stopped:
        message = "the environment failed, so the program was not started"
        last = finding(request.name, "", skipped(message))
        return found._replace(findings=(*found.findings, last))
    tell("started", request.name, "")
    findings = start.prove(setup, request)
    tell("finished", request.name, "")
    return found._replace(findings=(*found.findings, *findings), seconds=time.monotonic() - began)


def _in_a_job(arguments: argparse.Namespace) -> int:
    if not arguments.recipe:
        raise UsageError(
            "--where compute needs a recipe, which describes the job",
            remedy="name the recipe that the environment was built from",
        )
    request = read_request(arguments)
    if not arguments.dry_run:
        choose(request, image=True, judged=True)
    words = command_line(arguments, where="here", dry_run=False)
    return run_there(request, "verify", words, dry_run=arguments.dry_run)


def _launched(
    arguments: argparse.Namespace, recipe: Recipe, expectation: Expectation
) -> tuple[Launch, tuple[str, ...]]:
    requested = _requested(arguments)
    _refuse_unknown(arguments.launcher or (), recipe)
    allocation = current_allocation(recipe)
    if allocation.hosts or allocation.nodes or requested.hosts:
        launch = place(recipe, requested, allocation)
        if full := overload(launch, allocation):
            report(f"warning: {full}")
    else:
        launch = TWO_RANKS._replace(
            ranks=requested.ranks or _usual_ranks(arguments, expectation),
            settings=recipe.launch,
            network=recipe.network,
        )
    if arguments.launcher:
        return launch, tuple(arguments.launcher)
    usual = recipe.launch.launcher
    schedulers = named_launcher(usual, recipe.launch.launchers).schedulers
    fits = not schedulers or allocation.scheduler in schedulers
    return launch, (usual if fits else DEFAULT_LAUNCHERS[0], *DEFAULT_LAUNCHERS)


def _refuse_unknown(names: Sequence[str], recipe: Recipe) -> None:
    known = [name for name, launcher in LAUNCHERS.items() if launcher.controller]
    known += recipe.launch.launchers
    for name in names:
        if name not in known:
            raise UsageError(
                f"unknown launcher {name}{nearest(name, known)}",
                where="--launcher",
                remedy=f"use one of {', '.join(known)}",
            )


def _usual_ranks(arguments: argparse.Namespace, expectation: Expectation) -> int:
    """Two for --quick; the other operations need more."""
    if arguments.quick:
        return TWO_RANKS.ranks
    return usual_ranks(_may_use_gpus(expectation))


def _may_use_gpus(expectation: Expectation) -> int:
    """How many GPUs of this host ranks may use."""
    wanted = expectation.operations is None or "NCCL" in expectation.operations
    return len(gpus()) if wanted else 0


def _requested(arguments: argparse.Namespace) -> Requested:
    return requested_ranks(arguments.ranks, arguments.hosts, arguments.hostfile)


def _expected(arguments: argparse.Namespace, recipe: Recipe | None) -> Expectation:
    expected = expectation_of(recipe) if recipe else Expectation()
    if arguments.framework:
        expected = expected._replace(frameworks=tuple(arguments.framework))
    if arguments.controller:
        others = {*CONTROLLERS} - {*arguments.controller}  # each reduces under its own only
        kept = tuple(name for name in expected.operations or () if name not in others)
        expected = expected._replace(
            controllers=tuple(arguments.controller),
            operations=kept if expected.operations else None,
        )
    if arguments.operation:
        expected = expected._replace(operations=tuple(arguments.operation))
    return expected


def _with_modules(installation: Installation, recipe: Recipe, runner: Runner) -> Installation:
    """The installation after the recipe's modules are loaded, as for a run."""
    if recipe.modules:
        loaded = module_shell.load(recipe.modules, "run", runner)
        installation = with_modules(installation, loaded.set)
    if installation.inside and recipe.container:
        _refuse_without_runtime(installation, recipe.container.runtime)
    return installation


def _refuse_without_runtime(installation: Installation, runtime: str) -> None:
    if not shutil.which(runtime, path=dict(installation.env).get("PATH")):
        raise UsageError(
            f"this host has no {runtime}, which runs the image",
            where=installation.prefix,
            remedy="load its module (modules.load in the recipe), or name another program with"
            " --set container.runtime=...",
        )
