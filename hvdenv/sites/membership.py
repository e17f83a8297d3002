"""Whether this machine belongs to the cluster that a recipe is for. Runs nothing."""

from __future__ import annotations

import os
import shutil

from hvdenv.model.cluster import Partition
from hvdenv.model.recipe import Recipe
from hvdenv.runner import environment
from hvdenv.sites.modules import BACKENDS, USUAL_SCRIPTS


def job_partition(recipe: Recipe) -> tuple[str, Partition] | None:
    """The partition of the recipe's jobs with its name, or the only one; None if there is none."""
    named = [recipe.job.partition] if recipe.job.partition else [*recipe.partitions]
    found = recipe.partitions.get(named[0]) if len(named) == 1 else None
    return (named[0], found) if found else None


def foreign(recipe: Recipe, machine: str) -> str:
    """Why this machine is none of the cluster's; empty if it may be one."""
    nodes = job_partition(recipe)
    if nodes is None:
        return ""
    name, partition = nodes
    if partition.arch != machine:
        return f"this machine is {machine}, and the nodes of {name} are {partition.arch}"
    if recipe.modules:
        return "" if _has_modules(recipe.modules.init) else "this machine has no module system"
    dialect = recipe.dialect
    if dialect is None or dialect.job_id in environment() or shutil.which(dialect.program):
        return ""
    return f"this machine has no {dialect.program}"


def _has_modules(init: str | None) -> bool:
    """Whether there seems to be a module system."""
    scripts = [*([init] if init else []), *(each for each in USUAL_SCRIPTS if "$" not in each)]
    variables = ("BASH_FUNC_module%%", "MODULESHOME", *(each.variable for each in BACKENDS))
    return any(map(environment().get, variables)) or any(map(os.path.exists, scripts))
