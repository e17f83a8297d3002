"""What is wrong with a recipe as a whole: what several of its values together show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from hvdenv.base.masking import has_password, holds_secret
from hvdenv.base.schema import Problem, nearest
from hvdenv.model import template
from hvdenv.model.cluster import LauncherName
from hvdenv.model.dialect import SHIPPED
from hvdenv.model.dialect import problems as problems_of_schedulers
from hvdenv.model.recipe import Recipe

Problems = Iterator[Problem]


def problems(recipe: Recipe) -> Problems:
    """All that is wrong, with the path of the key to change."""
    yield from _problems_of_horovod(recipe)
    yield from _problems_of_python(recipe)
    yield from _problems_of_names(recipe)
    for key in ("nodes", "ranks_per_node"):
        if getattr(recipe.job, key) < 1:
            yield _problem(f"job.{key}", "a job has at least one: state how many")
    yield from _secrets(recipe)
    yield from problems_of_schedulers(recipe.schedulers)
    yield from _problems_of_launchers(recipe)


def _problem(key: str, message: str) -> Problem:
    return Problem(tuple(key.split(".")), message)


def _problems_of_horovod(recipe: Recipe) -> Problems:
    horovod, mpi = recipe.horovod, recipe.mpi
    if not horovod.frameworks:
        yield _problem("horovod.frameworks", "at least one framework is needed")
    if not horovod.controllers:
        yield _problem(
            "horovod.controllers",
            "at least one controller is needed: without MPI and Gloo, Horovod compiles, but its"
            " ranks cannot communicate",
        )
    if horovod.provider == "source" and not horovod.sha256:
        needed = 'the provider "source" needs the sha256 of Horovod\'s source archive'
        yield _problem("horovod.sha256", needed)
    if horovod.provider == "source" and recipe.python.provider in ("prefix", "modules"):
        yield _problem(
            "horovod.provider",
            "hvdenv does not install into an environment of the site: use a venv over it"
            ' (python.system_site_packages) or the provider "clone", or set this to "present"',
        )
    if "mpi" in horovod.controllers and not mpi:
        yield _problem("mpi", 'horovod.controllers has "mpi", so the recipe needs a table [mpi]')
    if mpi and mpi.package and not mpi.version:
        yield _problem("mpi.version", "a package from the index needs a version")
    if mpi and mpi.package and mpi.package != mpi.kind:
        yield _problem(
            "mpi.kind",
            f'the package {mpi.package} is not {mpi.kind}: set this to "{mpi.package}", or remove mpi.package',
        )


def _problems_of_python(recipe: Recipe) -> Problems:
    python, frameworks = recipe.python, recipe.frameworks
    if python.provider in ("prefix", "clone") and not python.prefix:
        needed = f'the provider "{python.provider}" needs the directory of the site\'s environment'
        yield _problem("python.prefix", needed)
    if python.provider == "conda" and not recipe.conda:
        yield _problem("conda", 'the provider "conda" needs a table [conda] with channels')
    if (python.from_modules or python.provider == "modules") and not recipe.modules:
        needed = "the Python comes from modules, so the recipe needs a table [modules]"
        yield _problem("modules", needed)
    for name in (each for each in recipe.horovod.frameworks if each not in frameworks):
        needed = f'horovod.frameworks has "{name}", so the recipe needs [frameworks.{name}]'
        yield _problem(f"frameworks.{name}", needed)
    for name, package in frameworks.items():
        if package.provider == "source" and not package.source:
            needed = f'the provider "source" needs a table [frameworks.{name}.source]'
            yield _problem(f"frameworks.{name}.source", needed)


def _problems_of_names(recipe: Recipe) -> Problems:
    """Names of a scheduler, launcher or partition that nothing has."""
    scheduler, launcher = recipe.scheduler, recipe.launch.launcher
    schedulers = (*recipe.schedulers, *SHIPPED)
    launchers = (*get_args(LauncherName), *recipe.launch.launchers)
    if scheduler and scheduler not in schedulers:
        adds = "[schedulers.NAME] adds one"
        yield _problem("scheduler", _unknown("scheduler", scheduler, schedulers, adds))
    if launcher not in launchers:
        adds = "[launch.launchers.NAME] adds one"
        yield _problem("launch.launcher", _unknown("launcher", launcher, launchers, adds))
    partition, partitions = recipe.job.partition, recipe.partitions
    if partition and partition not in partitions:
        near, quote = nearest(partition, partitions), '"' * ("." in partition)
        yield _problem("job.partition", f"there is no [partitions.{quote}{partition}{quote}]{near}")


def _unknown(what: str, name: str, known: tuple[str, ...], adds: str) -> str:
    near = nearest(name, known)
    return f"there is no {what} {name}{near}; known are {', '.join(known)}, and {adds}"


def _secrets(recipe: Recipe) -> Problems:
    """Variables that are secret, by their names or by a password in a URL."""
    build, run = recipe.environment.build, recipe.environment.run
    tables = {"environment.build": build, "environment.run": run}
    for name, package in recipe.frameworks.items():
        if package.source:
            tables[f"frameworks.{name}.source.build"] = package.source.build
    for table, variables in tables.items():
        for variable, value in variables.items():
            if holds_secret(variable, value) or has_password(value):
                yield _problem(
                    f"{table}.{variable}",
                    "other users read recipes and the records of environments, so neither may contain"
                    f" a secret or a password: remove {variable} here, and export it in your shell",
                )


def _problems_of_launchers(recipe: Recipe) -> Problems:
    for name, own in recipe.launch.launchers.items():
        path = ("launch", "launchers", name)
        if name in get_args(LauncherName):
            yield Problem(path, f"hvdenv has a launcher {name}: give this one another name")
        words = template.split(own.command)
        if "{program}" not in words:
            yield Problem((*path, "command"), "it must contain {program}, which the ranks run")
        for mark in ("{hosts}", "{host_names}", "{hostfile}"):
            if any(mark in word and word != mark for word in words):
                yield Problem((*path, "command"), f"{mark} must be a word of its own")
