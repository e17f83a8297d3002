"""Write the definition of an image that contains the recipe's environment.

container writes it for Apptainer and Singularity, or as a Dockerfile. It can also build the
image, and check that hosts can run it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.cli.options import (
    add_json,
    add_loudness,
    add_python,
    add_recipe,
    add_trust,
    print_json,
    resolved_of,
)
from hvdenv.errors import StepError, UsageError
from hvdenv.masking import print_coloured

if TYPE_CHECKING:
    from hvdenv.launch.preflight import Answers, Wanted
    from hvdenv.model.layers import Resolved
    from hvdenv.plans.container import Build, Format
    from hvdenv.plans.plan import Plan
    from hvdenv.reports.report import Report
    from hvdenv.runner import Runner

EXAMPLES = """\
examples:
  hvdenv container singularity > horovod.def
  hvdenv container singularity --build --image /scratch/me/horovod.sif
  hvdenv container local --variant torch --set container.base=debian:bookworm-slim --format docker
  hvdenv container singularity --preflight --hosts f1:2,f2:2 --copy

--build uses apptainer or singularity, and for a Dockerfile podman, buildah or docker: the first
that is installed. Exit codes of --preflight: 0 the hosts can run the image, 1 they cannot,
7 not everything could be proven.
"""

# What an image is called where neither the recipe nor an option says it.
_IMAGE = "horovod.sif"
# Lines that say how far a build is: of the tools, of the script in the image, of Ninja.
_PROGRESS = r"\s*(STEP \d|#\d+ \[|INFO: |== |\[\d+/\d+\])"


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_python(parser)
    add_json(parser)
    add_loudness(parser)
    parser.add_argument(
        "--format", choices=("singularity", "docker"), default="singularity",
        help="singularity: a definition file for Apptainer and Singularity (default); docker: a"
" Dockerfile",
    )  # fmt: skip
    parser.add_argument(
        "--to",
        metavar="FILE",
        type=Path,
        help="write the definition to a file instead of standard output",
    )
    parser.add_argument(
        "--image", metavar="FILE",
        help="image file (for docker: tag) to use instead of the recipe's container.image",
    )  # fmt: skip
    parser.add_argument(
        "--allow", metavar="RULE", action="append", default=[],
        help="continue although this rule blocks; may be repeated",
    )  # fmt: skip
    add_trust(parser)
    building = parser.add_argument_group("building")
    building.add_argument("--build", action="store_true", help="build the image")
    building.add_argument(
        "--bind", metavar="HERE[:THERE]", action="append", default=[],
        help="make a file or folder of this machine visible to the build, such as /etc/pip.conf",
    )  # fmt: skip
    hosts = parser.add_argument_group("checking hosts")
    hosts.add_argument(
        "--preflight", action="store_true", help="check that hosts can run the image"
    )
    hosts.add_argument("--hosts", metavar="H1:N,H2:N", help="hosts to check, with their slots")
    hosts.add_argument(
        "--copy", action="store_true", help="copy the image to the hosts that lack it"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.preflight and (arguments.build or arguments.to):
        raise UsageError("--preflight looks at an image that is there: build it first")
    if arguments.preflight and not arguments.hosts:
        raise UsageError("--preflight looks at hosts", remedy="name them: --hosts f1:2,f2:2")
    if (arguments.hosts or arguments.copy) and not arguments.preflight:
        raise UsageError("--hosts and --copy belong to --preflight")
    resolved = resolved_of(arguments, shown=not (arguments.build or arguments.preflight))
    return _preflight(arguments, resolved) if arguments.preflight else _define(arguments, resolved)


def _define(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from hvdenv.plans.container import define

    plan = _plan(arguments, resolved)
    text = define(resolved.recipe, plan, arguments.format)
    if arguments.to:
        _write(arguments.to, text)
    image = _build(arguments, resolved, text) if arguments.build else ""
    if arguments.json:
        print_json(
            {
                "recipe": plan.recipe, "variants": list(plan.variants), "plan": plan.digest,
                "format": arguments.format, "definition": text, "image": image,
            }
        )  # fmt: skip
    elif image:
        print(f"built {image}")
    elif not arguments.to:
        print(text, end="")
    elif not arguments.quiet:
        print(f"wrote {arguments.to}")
    return 0


def _plan(arguments: argparse.Namespace, resolved: Resolved) -> Plan:
    """The plan of the image; known incompatibilities stop here."""
    from hvdenv.cli.check import refuse_blocked
    from hvdenv.knowledge.observables import observables
    from hvdenv.knowledge.rules import judge
    from hvdenv.plans.container import container_of, image_facts, image_plan, image_python
    from hvdenv.plans.plan import choose_versions

    recipe = resolved.recipe
    partition = recipe.partitions.get(recipe.job.partition or "")
    machine = partition.arch if partition else os.uname().machine
    facts = image_facts(container_of(recipe), machine, len(os.sched_getaffinity(0)))
    python = image_python(recipe, facts, arguments.python)
    plan = image_plan(recipe, resolved.variants, facts, python)
    rules = judge(observables(recipe, facts, python, choose_versions(recipe, python)))
    refuse_blocked(rules, arguments.allow, quiet=arguments.quiet)
    return plan


def _write(path: Path, text: str) -> None:
    from hvdenv.places import named_file, write_text

    write_text(named_file(path), text)


def _build(arguments: argparse.Namespace, resolved: Resolved, text: str) -> str:
    """Build the image.

    Returns:
        Its file or tag.
    """
    from tempfile import TemporaryDirectory

    from hvdenv.plans.container import Build, container_of, mount_points

    image = arguments.image or (
        container_of(resolved.recipe).image or _IMAGE
        if arguments.format == "singularity"
        else "localhost/hvdenv:" + "-".join((resolved.recipe.name, *resolved.variants))
    )
    tool = _tool(arguments.format)
    with TemporaryDirectory(prefix="hvdenv-") as folder:
        definition = Path(folder, "definition")
        build = Build(tool, definition, image, os.geteuid() == 0, tuple(arguments.bind))
        if arguments.format == "singularity":
            definition.write_text(text + mount_points(build.binds), encoding="utf-8")
            _build_file(arguments, build)
        else:
            definition.write_text(text, encoding="utf-8")
            _run_build(arguments, build)
    return image


def _tool(form: Format) -> str:
    """The first tool that is here.

    Raises:
        UsageError: none is.
    """
    import shutil

    from hvdenv.plans.container import TOOLS

    for name in TOOLS[form]:
        if shutil.which(name):
            return name
    other: Format = "docker" if form == "singularity" else "singularity"
    there = next((name for name in TOOLS[other] if shutil.which(name)), "")
    raise UsageError(
        f"nothing here builds an image of the format {form}: no {', no '.join(TOOLS[form])}",
        remedy="load its module, or write the definition with --to and build it where there is one"
        + (f"; {there} is here: --format {other}" if there else ""),
    )


def _build_file(arguments: argparse.Namespace, build: Build) -> None:
    """Build a file; under its name there is never a half of it."""
    from hvdenv.places import named_folder, sync

    target = named_folder(Path(build.image), last=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    if target.exists():
        raise UsageError(
            "there is an image already",
            where=str(target),
            remedy="remove it, or name another file with --image: what runs now may use it",
        )
    try:
        _run_build(arguments, build._replace(image=str(part)))
        sync(part)
        os.rename(part, target)
    except OSError as error:
        raise StepError(f"cannot write the image: {error.strerror}", where=str(target)) from error
    finally:
        part.unlink(missing_ok=True)


def _run_build(arguments: argparse.Namespace, build: Build) -> None:
    from hvdenv.plans.container import build_command, failed
    from hvdenv.runner import Runner

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def tell_step(line: str) -> None:
        if arguments.verbose or re.match(_PROGRESS, line):
            tell(line)

    command = build_command(build)
    if not arguments.quiet:
        tell(f"building {build.image} with {build.tool}")
    outcome = Runner().run(command, on_line=None if arguments.quiet else tell_step)
    if not outcome:
        raise failed(build, outcome)


def _preflight(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from hvdenv.launch.preflight import lacking
    from hvdenv.reports.render import render
    from hvdenv.reports.report import EXIT_CODES
    from hvdenv.runner import Runner
    from hvdenv.sites.hosts import parse_hosts

    hosts = tuple(host.name for host in parse_hosts(arguments.hosts))
    wanted, runner = _wanted(arguments, resolved), Runner()
    report, answers = _look(resolved, wanted, hosts, runner)
    if arguments.copy and (without := lacking(answers)[1]):
        _copy(wanted, without, runner, quiet=arguments.quiet)
        report, _ = _look(resolved, wanted, hosts, runner)
    if arguments.json:
        print_json(report.to_json())
    else:
        colour = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
        print_coloured(render(report, colour=colour) + "\n")
    return EXIT_CODES[report.verdict]


def _wanted(arguments: argparse.Namespace, resolved: Resolved) -> Wanted:
    from hvdenv.launch.preflight import Wanted
    from hvdenv.plans.container import container_of
    from hvdenv.runner import environment

    recipe = resolved.recipe
    container = container_of(recipe)
    image = os.path.abspath(arguments.image or container.image or _IMAGE)
    jobs = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID"}
    return Wanted(
        container._replace(image=image),
        recipe.mpi if "mpi" in recipe.horovod.controllers else None,
        recipe.launch.launcher,
        scheduled=bool(jobs & set(environment())),
    )


def _look(
    resolved: Resolved, wanted: Wanted, hosts: tuple[str, ...], runner: Runner
) -> tuple[Report, Answers]:
    """Ask the hosts and judge what they say."""
    import time

    from hvdenv.launch.nodes import ask
    from hvdenv.launch.preflight import judge_nodes
    from hvdenv.reports.report import Report

    began, started = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    image = wanted.image
    answers = ask(hosts, image, runner, ssh=wanted.ssh)
    report = Report(
        recipe="+".join((resolved.recipe.name, *resolved.variants)),
        prefix=image,
        host=os.uname().nodename,
        started=started,
        seconds=time.monotonic() - began,
        findings=judge_nodes(wanted, answers),
    )
    return report, answers


def _copy(wanted: Wanted, hosts: tuple[str, ...], runner: Runner, *, quiet: bool) -> None:
    """Copy the image from here to hosts.

    Raises:
        UsageError: there is none here.
        StepError: a host does not take it.
    """
    from hvdenv.command import spelled_out
    from hvdenv.launch.preflight import copies
    from hvdenv.runner import environment

    image = wanted.image
    if not os.path.isfile(image):
        folder = os.path.isdir(image)
        raise UsageError(
            "this image is a folder, and only files are copied" if folder
            else "there is no image here to copy",
            where=image,
            remedy="put it where all hosts see it, or make a file of it (ch-convert to squashfs)" if folder
            else "build it with --build, or run this on the host that has it",
        )  # fmt: skip
    for command in copies(image, hosts, slurm="SLURM_JOB_ID" in environment()):
        if not quiet:
            print(spelled_out(command), file=sys.stderr, flush=True)
        outcome = runner.run(command)
        if not outcome:
            raise StepError(
                f"copying failed: {spelled_out(command)}",
                where=image,
                detail=outcome.tail(),
                remedy="look at the permissions and the free space there",
            )
