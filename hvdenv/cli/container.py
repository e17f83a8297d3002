"""Write the definition of an image that contains the recipe's environment.

container writes it for Apptainer and Singularity, or as a Dockerfile. It can also build the
image, and check that hosts can run it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from hvdenv.base.errors import UsageError
from hvdenv.base.places import named_file, named_folder, replacing, sweep, sync, write_text
from hvdenv.base.runner import Runner
from hvdenv.cli.options import add, add_options, command_line, read_request, refuse_without
from hvdenv.cli.verify_report import print_report
from hvdenv.knowledge.observables import observables
from hvdenv.knowledge.rules import judge
from hvdenv.model.cluster import Container
from hvdenv.model.layers import Resolved
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import known_recipes, read_layer
from hvdenv.plans import images
from hvdenv.plans.image_tools import TOOLS, Build, build_command, failed, mount_points
from hvdenv.plans.plan import Plan, choose_versions
from hvdenv.reports.report import Report
from hvdenv.session.judge import refuse_blocked
from hvdenv.session.output import print_json, report
from hvdenv.session.recipe import open_recipe
from hvdenv.session.request import Gate
from hvdenv.sites import launchers, nodes
from hvdenv.sites.hosts import parse_hosts
from hvdenv.sites.nodes import ask
from hvdenv.sites.placement import recipe_mpi

EXAMPLES = """\
examples:
  hvdenv container singularity > horovod.def
  hvdenv container singularity --build --image /scratch/me/horovod.sif
  hvdenv container local --variant torch --set container.base=debian:bookworm-slim --format docker
  hvdenv container singularity --preflight --hosts f1:2,f2:2

--build uses apptainer or singularity, and for a Dockerfile podman, buildah or docker: the first
that is installed. Exit codes of --preflight: 0 the hosts can run the image, 1 they cannot,
7 not everything could be proven.
"""

# Lines that show the progress of a build: of the tools, of the script in the image, of Ninja.
_PROGRESS = r"\s*(STEP \d|#\d+ \[|INFO: |== |\[\d+/\d+\])"


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "python", "json", "loudness")
    add(
        parser,
        "--format",
        "singularity: a definition file for Apptainer and Singularity (default); docker: a"
        " Dockerfile",
        choices=tuple(TOOLS),
        default="singularity",
    )
    add(parser, "--to FILE", "write the definition to a file instead of standard output", type=Path)
    add(
        parser,
        "--image FILE",
        "image file (for docker: tag) to use instead of the recipe's container.image",
    )
    add_options(parser, "allow", "trust")
    add(
        parser,
        "--dry-run",
        "build nothing: show the definition and the tool",
    )
    building = parser.add_argument_group("building")
    add(building, "--build", "build the image")
    add(
        building,
        "--bind HOST[:IMAGE]",
        "make a file or directory of this machine visible to the build, such as /etc/pip.conf",
        action="append",
        default=[],
    )
    hosts = parser.add_argument_group("checking hosts")
    add(hosts, "--preflight", "check that hosts can run the image")
    add(hosts, "--hosts HOST:SLOTS,...", "hosts to check, with their slots")


def run(arguments: argparse.Namespace) -> int:
    if command_line(arguments) == ("container",):
        return _list()
    if not arguments.recipe:
        raise UsageError(
            "no recipe is named", remedy="`hvdenv container` lists those with an image"
        )
    if arguments.preflight and (arguments.build or arguments.to):
        raise UsageError(
            "--preflight checks an existing image, and cannot be combined with --build and --to",
            remedy=f"build it first: hvdenv container {read_request(arguments).named} --build",
        )
    refuse_without(arguments, "hosts", "preflight", remedy="name them: --hosts f1:2,f2:2")
    refuse_without(arguments, "preflight", "hosts")
    refuse_without(arguments, "build", "bind")
    request = read_request(arguments)
    if not (arguments.build or arguments.preflight):  # the definition executes nothing
        request = request._replace(gate=Gate(trusted=True), anywhere=True)
    resolved = open_recipe(request)
    return _preflight(arguments, resolved) if arguments.preflight else _define(arguments, resolved)


def _list() -> int:
    for name, path in known_recipes().items():
        base = read_layer("recipe", path).values.get("container", {}).get("base")
        if base:
            print(f"hvdenv container {name}   from {base}")
    print("For other recipes, name an image: hvdenv container RECIPE --set container.base=IMAGE")
    return 0


def _define(arguments: argparse.Namespace, resolved: Resolved) -> int:
    plan = _plan(arguments, resolved)
    text = images.define(resolved.recipe, plan, arguments.format)
    if arguments.to:
        write_text(named_file(arguments.to), text)
    image = _build(arguments, resolved, text) if arguments.build else ""
    if arguments.json:
        print_json(
            {
                "recipe": plan.recipe,
                "variants": list(plan.variants),
                "plan": plan.digest,
                "format": arguments.format,
                "definition": text,
                "image": image,
            }
        )
    elif image:
        print(f"built {image}")
    elif not arguments.to:
        print(text, end="")
    elif not arguments.quiet:
        print(f"wrote {arguments.to}")
    return 0


def _plan(arguments: argparse.Namespace, resolved: Resolved) -> Plan:
    recipe = resolved.recipe
    partition = recipe.partition
    machine = partition.arch if partition else os.uname().machine
    facts = images.image_facts(recipe.container, machine, len(os.sched_getaffinity(0)))
    python = images.image_python(recipe, facts, arguments.python)
    plan = images.image_plan(recipe, resolved.variants, facts, python)
    rules = judge(observables(recipe, facts, python, choose_versions(recipe, python)))
    refuse_blocked(rules, arguments.allow, resolved, quiet=arguments.quiet)
    return plan


def _build(arguments: argparse.Namespace, resolved: Resolved, text: str) -> str:
    """Build the image; returns its file or tag, or nothing with --dry-run."""
    is_file = arguments.format == "singularity"
    tag = "localhost/hvdenv:" + "-".join((resolved.recipe.name, *resolved.variants))
    image = arguments.image or (_image_file(resolved.recipe) if is_file else tag)
    tool = next(filter(shutil.which, TOOLS[arguments.format]), "")
    none = ", no ".join(TOOLS[arguments.format])
    missing = f"no tool on PATH builds the format {arguments.format}: no {none}"
    if arguments.dry_run:
        report(f"would build {image}{f' with {tool}' if tool else f'; {missing}'}")
        return ""
    if not tool:
        raise UsageError(
            missing,
            remedy="load its module, choose the other --format, or write the definition with --to"
            " and build it elsewhere",
        )
    with TemporaryDirectory(prefix="hvdenv-") as folder:
        build = Build(
            tool=tool,
            definition=Path(folder, "definition"),
            image=image,
            root=os.geteuid() == 0,
            binds=tuple(arguments.bind),
        )
        section = mount_points(build.binds) if is_file else ""
        build.definition.write_text(text + section, encoding="utf-8")
        (_build_file if is_file else _run_build)(arguments, build)
    return image


def _image_file(recipe: Recipe) -> str:
    return (recipe.container and recipe.container.image) or "horovod.sif"


def _build_file(arguments: argparse.Namespace, build: Build) -> None:
    """Build a file, which gets its name only when it is complete."""
    target = named_folder(Path(build.image), last=True)
    if target.exists():
        raise UsageError(
            "this image already exists",
            where=str(target),
            remedy="choose another file with --image, or remove this one if no program uses it",
        )
    sweep(target.parent, target.name)
    with replacing(target) as part:
        _run_build(arguments, build._replace(image=str(part)))
        sync(part)


def _run_build(arguments: argparse.Namespace, build: Build) -> None:
    def report_progress(line: str) -> None:
        if arguments.verbose or re.match(_PROGRESS, line):
            report(line)

    if not arguments.quiet:
        report(f"building {build.image} with {build.tool}")
    outcome = Runner().run(
        build_command(build), on_line=None if arguments.quiet else report_progress
    )
    if not outcome:
        raise failed(build, outcome)


def _preflight(arguments: argparse.Namespace, resolved: Resolved) -> int:
    hosts = tuple(host.name for host in parse_hosts(arguments.hosts))
    required = _requirements(arguments, resolved.recipe)
    began, started = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    queries = {host: nodes.node_query(host, required) for host in hosts}
    answers = {host: nodes.parse_node(each) for host, each in ask(queries, Runner()).items()}
    found = Report(
        recipe="+".join((resolved.recipe.name, *resolved.variants)),
        prefix=required.image,
        host=os.uname().nodename,
        started=started,
        seconds=time.monotonic() - began,
        findings=tuple(nodes.judge_nodes(required, answers)),
    )
    return print_report(found, arguments)


def _requirements(arguments: argparse.Namespace, recipe: Recipe) -> nodes.Requirements:
    image = os.path.abspath(arguments.image or _image_file(recipe))
    launcher = launchers.named(recipe.launch.launcher, recipe.launch.launchers)
    return nodes.Requirements(
        container=(recipe.container or Container())._replace(image=image),
        mpi=recipe_mpi(recipe) if recipe.mpi and launcher.controller == "MPI" else None,
        launcher=recipe.launch.launcher if launcher.schedulers else "",
    )
