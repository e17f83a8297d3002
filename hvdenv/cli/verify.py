"""Prove that an environment works.

verify checks that everything the recipe asks for was built, loads, and computes correct results
on several ranks. With --prefix it also verifies environments that hvdenv did not build."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.cli.options import (
    add_clean,
    add_hosts,
    add_json,
    add_loudness,
    add_prefix,
    add_recipe,
    add_trust,
    add_where,
    environment_of,
    print_json,
    refuse_foreign_names,
    refuse_foreign_path,
    refuse_foreign_prefix,
    requested_hosts,
    resolved_of,
)
from hvdenv.contents.record import GenerationRecord
from hvdenv.errors import InterruptedRunError, UsageError
from hvdenv.masking import print_coloured
from hvdenv.places import environment_name
from hvdenv.reading import REPORT, read_json

if TYPE_CHECKING:
    from hvdenv.environments.installation import Expectation, Installation
    from hvdenv.launch.launchers import Launch
    from hvdenv.launch.placement import Requested
    from hvdenv.model.recipe import Recipe
    from hvdenv.places import Places
    from hvdenv.reports.report import Report
    from hvdenv.runner import Runner
    from hvdenv.verification.bench import Effort

EXAMPLES = """\
examples:
  hvdenv verify                                the environment built last
  hvdenv verify local -n 4
  hvdenv verify neuron --hosts gpu32:2,gpu33:2 --launcher mpirun
  hvdenv verify local --quick                  or --full
  hvdenv verify local --bench --time 30
  hvdenv verify neuron --where compute         in a job, on two nodes
  hvdenv verify --prefix ~/venv --framework torch --controller Gloo
  hvdenv verify local --json > report.json
  hvdenv verify local --junit verify.xml --html verify.html
  hvdenv verify --from report.json --html verify.html    does not verify again

exit codes: 0 everything expected is proven, 1 something failed, 7 nothing failed, but
this host cannot prove everything (such as NCCL without a GPU)
"""

# Two hosts are what shows the network; a long job would wait long.
JOB_NODES, JOB_TIME = 2, "00:30:00"
# How long each of the programs measures that benchmarks start, and how many these may be.
BENCH_SECONDS, BENCH_PROGRAMS = 10.0, 60
# Timers of programs end earlier; a number that is none is not less.
_FOREVER = 365 * 86400.0
_FILES = ("junit", "html")
_WRITE_AGAIN = (
    "what to do: `hvdenv verify --from REPORT --{option} FILE` writes it elsewhere, from the report"
    " that verify keeps"
)
_CONTROLLERS = {"mpi": "MPI", "gloo": "Gloo"}


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, optional=True)
    add_prefix(parser)
    add_json(parser)
    add_loudness(parser)
    add_where(parser)
    add_trust(parser)
    parser.add_argument(
        "-n", "--ranks", type=int, metavar="N",
        help="number of ranks (default: those of the allocation; otherwise 3, or 4 with four or"
        " more cores; at most one per GPU if NCCL is expected; 2 with --quick)",
    )  # fmt: skip
    add_hosts(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="limit for the whole command (default: 600; more with --bench)",
    )
    parser.add_argument(
        "--launcher", action="append", metavar="L",
        help="srun, mpirun, mpiexec, horovodrun-mpi, horovodrun-gloo, aprun or jsrun; may be"
        " repeated, one for each controller (default: the recipe's, and horovodrun-gloo)",
    )  # fmt: skip
    add_clean(parser)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", action="store_true",
        help="test allreduce only: no other operations, no training",
    )  # fmt: skip
    extent.add_argument(
        "--full", action="store_true",
        help="test every operation with every type and shape, and tensors above the fusion"
        " threshold (takes a minute more per framework and controller)",
    )  # fmt: skip
    parser.add_argument(
        "--bench", action="store_true",
        help="measure allreduce and training, and compare with MPI or NCCL alone and with the"
        " recipe's references",
    )  # fmt: skip
    parser.add_argument(
        "--time", type=float, metavar="SECONDS",
        help=f"how long each program of --bench measures (default: {BENCH_SECONDS:g})",
    )  # fmt: skip
    _add_files(parser)
    stated = parser.add_argument_group("what to expect of an environment without a recipe")
    stated.add_argument("--framework", action="append", choices=("torch", "tensorflow", "mxnet"))
    stated.add_argument("--controller", action="append", choices=("MPI", "Gloo"))
    stated.add_argument(
        "--operation", action="append", choices=("NCCL", "DDL", "CCL", "MPI", "Gloo")
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("write the report to files, whatever the verdict")
    group.add_argument("--junit", metavar="FILE", type=Path, help="write it as JUnit XML")
    group.add_argument(
        "--html", metavar="FILE", type=Path, help="write it as a self-contained HTML page"
    )
    group.add_argument(
        "--from", dest="kept", metavar="REPORT", type=Path,
        help="read the report from a JSON file that verify wrote, instead of verifying",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    from hvdenv.environments import last_used
    from hvdenv.launch.launchers import LAUNCHERS
    from hvdenv.launch.placement import of_shell
    from hvdenv.places import find_places
    from hvdenv.runner import Runner, environment
    from hvdenv.verification.verify import DEFAULT_EXERCISES, FULL_EXERCISES, verify

    _refuse_files(arguments)
    if arguments.kept:
        return _show(_read(arguments), arguments)
    if arguments.where == "compute":
        return _in_a_job(arguments)
    known = [name for name, launcher in LAUNCHERS.items() if launcher.controller]
    if unknown := [name for name in arguments.launcher or () if name not in known]:
        raise UsageError(f"unknown launcher {unknown[0]}", remedy=f"known are {', '.join(known)}")
    places = find_places()
    effort = _effort(arguments, places)
    timeout = _timeout(arguments, effort)
    runner = Runner(of_shell(environment(), clean=arguments.clean))
    installation, expectation, recipe = _chosen(arguments, places)
    last_used.note(places, Path(installation.prefix))
    installation = _with_modules(installation, recipe, runner)
    launch, launchers = _launched(arguments, recipe, expectation)
    quiet = arguments.quiet
    exercises = FULL_EXERCISES if arguments.full else () if arguments.quick else DEFAULT_EXERCISES

    def tell(what: str, label: str, seconds: float) -> None:
        if what == "finished" and not quiet:
            print(f"  {label} ({seconds:.1f} s)", file=sys.stderr, flush=True)

    if not quiet:
        print(f"verifying {installation.prefix}", file=sys.stderr, flush=True)
    report = verify(
        installation, expectation, runner, launch=launch, timeout=timeout,
        launchers=launchers, exercises=exercises, effort=effort, on_event=tell,
    )  # fmt: skip
    kept = _keep(report, places)
    code = _show(report, arguments)
    if not (quiet or arguments.json):
        print(kept, file=sys.stderr)
    return InterruptedRunError.exit_code if runner.stopped else code


def _show(report: Report, arguments: argparse.Namespace) -> int:
    """Print a report, then write the files that were asked for.

    Returns:
        The exit code of the verdict; where that is good, of a file that was not written.
    """
    from hvdenv.reports.report import EXIT_CODES

    if arguments.json:
        print_json(report.to_json())
    else:
        from hvdenv.reports.render import render

        colour = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
        print_coloured(render(report, colour=colour) + "\n")
    written = _write_files(report, arguments)
    return EXIT_CODES[report.verdict] or written


def _write_files(report: Report, arguments: argparse.Namespace) -> int:
    """Write what can be written; returns 0, or the exit code for what could not."""
    from hvdenv.errors import StepError
    from hvdenv.places import named_file, write_text

    code = 0
    for option in _FILES:
        path = getattr(arguments, option)
        if path is None:
            continue
        if option == "junit":
            from hvdenv.reports.junit import render
        else:
            from hvdenv.reports.page import render
        try:
            write_text(named_file(path), render(report))
        except StepError as error:
            print(f"error: --{option} {path}: {error.message}", file=sys.stderr)
            print(_WRITE_AGAIN.format(option=option), file=sys.stderr)
            code = StepError.exit_code
    return code


def _refuse_files(arguments: argparse.Namespace) -> None:
    """Say before minutes of work what could not be written after them.

    Raises:
        UsageError: a file could not be written.
    """
    from hvdenv.errors import StepError
    from hvdenv.places import named_file

    for option in _FILES:
        path = getattr(arguments, option)
        if path is None:
            continue
        try:
            folder = named_file(path).parent
        except StepError as error:
            raise UsageError(
                error.message, where=f"--{option} {error.where}", remedy=error.remedy
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            why = "nothing can be written there" if folder.is_dir() else "there is no such folder"
            raise UsageError(why, where=f"--{option} {folder}", remedy="name another place")


def _read(arguments: argparse.Namespace) -> Report:
    """The report of --from.

    Raises:
        UsageError: it cannot be read, or more was asked for than to show it.
    """
    from hvdenv.reports.report import Report

    where = f"--from {arguments.kept}"
    if arguments.recipe or arguments.prefix or arguments.where == "compute":
        raise UsageError("a report is shown as it is", where=where, remedy="name no environment")
    try:
        return Report.from_json(read_json(arguments.kept, REPORT))
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=where) from error
    except ValueError as error:
        raise UsageError(
            f"this is no report of verify: {error}",
            where=where,
            remedy="name what --json printed, or a file in `reports` under HVDENV_HOME",
        ) from error


def _effort(arguments: argparse.Namespace, places: Places) -> Effort | None:
    """What benchmarks may take; None if none are asked for."""
    from hvdenv.verification.bench import Effort

    if arguments.time is not None and not (arguments.bench and 0 < arguments.time < _FOREVER):
        raise UsageError("it has to be above zero, and is for --bench", where="--time")
    if not arguments.bench:
        return None
    return Effort(arguments.time or BENCH_SECONDS, str(places.home))


def _timeout(arguments: argparse.Namespace, effort: Effort | None) -> float:
    from hvdenv.verification.collection import DEFAULT_TIMEOUT

    if arguments.timeout is not None and not 0 < arguments.timeout < _FOREVER:
        raise UsageError("it has to be above zero, and less than a year", where="--timeout")
    usual = DEFAULT_TIMEOUT + (BENCH_PROGRAMS * effort.seconds if effort else 0)
    return arguments.timeout or usual


def _in_a_job(arguments: argparse.Namespace) -> int:
    from hvdenv.cli.job import run_there

    if not arguments.recipe:
        raise UsageError(
            "--where compute needs a recipe: it says what a job asks for",
            remedy="name the recipe that the environment was built from",
        )
    nodes = min(resolved_of(arguments).recipe.job.nodes, JOB_NODES)
    return run_there(arguments, "verify", nodes=nodes, time=JOB_TIME)


def _launched(
    arguments: argparse.Namespace, recipe: Recipe | None, expectation: Expectation
) -> tuple[Launch, tuple[str, ...]]:
    """How many ranks there are and where, and the launchers for each controller."""
    from hvdenv.cli.run import current_allocation
    from hvdenv.launch.launchers import LAUNCHERS
    from hvdenv.launch.placement import Requested, place
    from hvdenv.verification.collection import DEFAULT_LAUNCHERS, TWO_RANKS

    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"{arguments.ranks} ranks are none", where="-n", remedy="take 1 or more")
    allocation = current_allocation()
    named = str(arguments.hostfile.absolute()) if arguments.hostfile else ""
    requested = Requested(arguments.ranks, requested_hosts(arguments), named)
    if recipe is None and requested.hosts:
        launch = _on_hosts(requested)
    elif recipe is None or not (allocation.hosts or allocation.nodes or requested.hosts):
        launch = TWO_RANKS._replace(ranks=requested.ranks or _usual_ranks(arguments, expectation))
        if recipe:
            launch = launch._replace(settings=recipe.launch, network=recipe.network)
    else:
        launch = place(recipe, (), requested, allocation)
    if arguments.launcher:
        return launch, tuple(arguments.launcher)
    usual = recipe.launch.launcher if recipe else DEFAULT_LAUNCHERS[0]
    schedulers = LAUNCHERS[usual].schedulers
    fits = not schedulers or allocation.scheduler in schedulers
    return launch, (usual if fits else DEFAULT_LAUNCHERS[0], *DEFAULT_LAUNCHERS)


def _usual_ranks(arguments: argparse.Namespace, expectation: Expectation) -> int:
    """Two for allreduces alone; operations need more."""
    from hvdenv.model.observe import gpus
    from hvdenv.verification.collection import TWO_RANKS
    from hvdenv.verification.verify import usual_ranks

    if arguments.quick:
        return TWO_RANKS.ranks
    wanted = expectation.operations is None or "NCCL" in expectation.operations
    return usual_ranks(len(os.sched_getaffinity(0)), len(gpus()) if wanted else 0)


def _on_hosts(requested: Requested) -> Launch:
    """Ranks on the hosts that are requested, as evenly as their slots allow."""
    from hvdenv.sites.hosts import distribute
    from hvdenv.verification.collection import TWO_RANKS

    ranks = requested.ranks or sum(host.slots or 1 for host in requested.hosts)
    each = -(-ranks // len(requested.hosts))
    hosts = (host._replace(slots=host.slots or each) for host in requested.hosts)
    return TWO_RANKS._replace(ranks=ranks, hosts=distribute(hosts, ranks))


def _chosen(
    arguments: argparse.Namespace, places: Places
) -> tuple[Installation, Expectation, Recipe | None]:
    """The environment to judge, what it should have, and the recipe that says so."""
    from hvdenv.cli.run import elsewhere, named, refuse_missing_image
    from hvdenv.environments import generations
    from hvdenv.environments.installation import in_image, inspect_prefix
    from hvdenv.launch.container import image_of

    recipe: Recipe | None = None
    if arguments.recipe:
        resolved = resolved_of(arguments)
        recipe = resolved.recipe
        name = environment_name(recipe.name, resolved.variants)
        container = None if arguments.prefix else image_of(recipe, os.getcwd())
        if container:
            refuse_missing_image(container, named(arguments), "/")
            refuse_foreign_path(str(container.image), arguments)
            return in_image(container)._replace(recipe=name), _expected(arguments, recipe), recipe
        prefix = environment_of(arguments, resolved, places).prefix
        if not os.path.lexists(prefix):
            raise UsageError(
                f"{name} was not built: there is no {prefix}",
                remedy=f"hvdenv build {named(arguments)}",
            )
    elif arguments.prefix:
        prefix, name = arguments.prefix, ""
    else:
        prefix, name = _last_built(places)
    environment = generations.at(prefix)
    active = environment.active()
    folder = environment.generation(active) if active else Path(prefix)
    record = generations.read_record(environment.record(active)) if active else None
    refuse_foreign_prefix(prefix, arguments, whole=True, also=elsewhere(record))
    if recipe is None and record:
        recipe, name = _recorded(record.resolved), _name(record)
        refuse_foreign_names(recipe, arguments, str(prefix))
    installation = inspect_prefix(str(folder))._replace(prefix=str(prefix), recipe=name)
    return installation, _expected(arguments, recipe), recipe


def _last_built(places: Places) -> tuple[Path, str]:
    from hvdenv.environments import registry

    known = [each for each in registry.list_environments(places) if each.state == "complete"]
    if not known:
        raise UsageError(
            "no environment was built yet",
            remedy="hvdenv build local; or name an environment with --prefix",
        )
    last = max(known, key=lambda each: each.created)
    return Path(last.prefix), environment_name(last.recipe, last.variants)


def _name(record: GenerationRecord) -> str:
    return environment_name(record.recipe, record.variants)


def _expected(arguments: argparse.Namespace, recipe: Recipe | None) -> Expectation:
    """Options say more than the recipe."""
    from hvdenv.environments.installation import Expectation
    from hvdenv.knowledge.flags import operations as asked_operations

    frameworks = recipe.horovod.frameworks if recipe else None
    controllers = tuple(_CONTROLLERS[c] for c in recipe.horovod.controllers) if recipe else None
    operations = asked_operations(recipe) if recipe else None
    if arguments.controller:
        controllers = tuple(arguments.controller)
        others = {*_CONTROLLERS.values()} - {*controllers}  # each reduces under its own only
        operations = (
            tuple(name for name in operations if name not in others) if operations else None
        )
    return Expectation(
        frameworks=tuple(arguments.framework) if arguments.framework else frameworks,
        controllers=controllers,
        operations=tuple(arguments.operation) if arguments.operation else operations,
        versions=_versions(recipe) if recipe else {},
        references=recipe.references if recipe else (),
    )


def _versions(recipe: Recipe) -> dict[str, str]:
    """What the recipe says of packages that the site brings; others were installed as it says."""
    found: dict[str, str] = {
        name: wanted.version
        for name, wanted in recipe.frameworks.items()
        if wanted.provider == "present" and isinstance(wanted.version, str)
    }
    if recipe.horovod.provider == "present":
        found["horovod"] = recipe.horovod.version
    return found


def _recorded(resolved: dict[str, object]) -> Recipe:
    """The recipe that a generation was built from, from its record."""
    from hvdenv.model.recipe import Recipe
    from hvdenv.schema import decode

    return decode(Recipe, resolved)


def _with_modules(
    installation: Installation, recipe: Recipe | None, runner: Runner
) -> Installation:
    """What programs see once the modules of the recipe are loaded, as for a run."""
    if recipe is not None and recipe.modules is not None:
        from hvdenv.environments.installation import with_modules
        from hvdenv.sites import module_shell

        system = module_shell.find(runner, recipe.modules.init)
        loaded = module_shell.load(system, recipe.modules, "run", runner)
        installation = with_modules(installation, loaded.set)
    if recipe is not None and installation.inside:
        _refuse_without_runtime(installation, recipe)
    return installation


def _refuse_without_runtime(installation: Installation, recipe: Recipe) -> None:
    """See that the image can be run here at all.

    Raises:
        UsageError: it cannot.
    """
    import shutil

    assert recipe.container
    runtime = recipe.container.runtime
    if not shutil.which(runtime, path=dict(installation.env).get("PATH")):
        raise UsageError(
            f"there is no {runtime} here, which runs the image",
            where=installation.prefix,
            remedy="load its module (modules.load in the recipe), or name another program that is"
            " here: --set container.runtime=...",
        )


def _keep(report: Report, places: Places) -> str:
    """Keep a report under HVDENV_HOME: nothing is written into the environment.

    Returns:
        Where it lies, or why it does not: a full disk takes nobody's verdict away.
    """
    from hvdenv.errors import StepError
    from hvdenv.places import make_folder, write_json

    stamp = report.started.replace(":", "").replace("+", "_")
    try:
        path = make_folder(places.reports) / f"{stamp}-{os.getpid()}.json"
        write_json(path, report.to_json())
    except StepError as error:
        return f"the report was not kept: {error}"
    return f"report: {path}"
