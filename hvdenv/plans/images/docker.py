"""Dockerfiles, for Docker, Podman and Buildah."""

from __future__ import annotations

import re

from hvdenv.command import Command
from hvdenv.environments.activation import left_open
from hvdenv.errors import IncompatibleError
from hvdenv.model.recipe import Recipe
from hvdenv.plans.images.formats import Build, Format, mpi_variables
from hvdenv.plans.plan import Plan


def _environment(recipe: Recipe, plan: Plan) -> str:
    if names := left_open(plan.variables):
        raise IncompatibleError(
            "its value depends on the job, but all users of a Dockerfile get the same variables",
            where=f"environment.run.{names[0]}",
            remedy="use --format singularity, or set a value without {user} and {jobid}",
        )
    variables = {**plan.variables, **mpi_variables(recipe)}
    words = [
        f'VIRTUAL_ENV="{plan.environment}"',
        f'PATH="{plan.environment}/bin:$PATH"',
        'PYTHONNOUSERSITE="1"',
        *(f"{name}={_quoted(value)}" for name, value in variables.items()),
    ]
    return "ENV " + " \\\n    ".join(words)


def _quoted(value: str) -> str:
    """A value in which Docker expands no variables."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def _build(build: Build) -> Command:
    verb = "bud" if build.tool == "buildah" else "build"
    words = [build.tool, verb, "--tag", build.image, "--file", str(build.definition)]
    if build.tool == "docker" and build.binds:
        raise IncompatibleError(
            "docker cannot mount a folder of this machine in a build",
            remedy="build with podman or buildah, or without --bind",
        )
    words += [word for bind in build.binds for word in ("--volume", _volume(bind))]
    return Command((*words, str(build.definition.parent)))


def _volume(bind: str) -> str:
    """podman and buildah require both paths."""
    source, _, target = bind.partition(":")
    return f"{source}:{target or source}:ro"


FORMAT = Format(
    tools=("podman", "buildah", "docker"), is_file=False, environment=_environment, build=_build
)
