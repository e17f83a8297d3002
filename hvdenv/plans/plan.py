"""A recipe and facts make a plan: the steps of a build, as plain data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdenv.errors import IncompatibleError
from hvdenv.knowledge.flags import horovod_variables
from hvdenv.knowledge.patches import applicable
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.recipe import ByPython, Recipe, Version
from hvdenv.plans.step import Step, content, digest
from hvdenv.plans.steps import Steps, run_variables

# Most plans are of no lock, and of nothing that a user adds.
if TYPE_CHECKING:
    from hvdenv.locks.lockfile import Locked
    from hvdenv.plans.additions import Additions

# In the place of a generation's folder while the plan's digest is computed.
PLACEHOLDER = Path("/GENERATION")


class Plan(NamedTuple):
    """What a build does.

    Attributes:
        recipe, variants: what it is a plan of.
        python: the interpreter that the environment is made with.
        versions: exact versions that the recipe gives for that Python.
        generation: folder that the steps make.
        environment: the Python environment: in that folder, or the site's.
        wheel: where the compiled wheel lies until it is installed.
        variables: what programs of the environment need at run time.
        steps: in order.
        wheel_inputs: what, beside the stack, decides whether a cached wheel fits.
        digest: identifies what is built, whatever the folder.
        locked: the lock that is built from.
        additions: packages that the user adds.
    """

    recipe: str
    variants: tuple[str, ...]
    python: Interpreter
    versions: dict[str, Version]
    generation: Path
    environment: Path
    wheel: Path
    variables: dict[str, str]
    steps: tuple[Step, ...]
    wheel_inputs: dict[str, Any]
    digest: str
    locked: Locked | None = None
    additions: Additions | None = None


def choose_versions(recipe: Recipe, python: Interpreter) -> dict[str, Version]:
    """Exact versions of Horovod and of its frameworks for a Python.

    Raises:
        IncompatibleError: a framework has no version for it.
    """
    versions = {"horovod": recipe.horovod.version}
    for framework in recipe.horovod.frameworks:
        version = recipe.frameworks[framework].version
        found = version if isinstance(version, str) else _for_python(version, python)
        if found is None:
            raise IncompatibleError(
                f"the recipe has no {framework} version for Python {python.version}",
                where=f"frameworks.{framework}.version",
                remedy=f"name another Python with --python, or a variant without {framework}",
            )
        versions[framework] = found
    return versions


def _for_python(alternatives: tuple[ByPython, ...], python: Interpreter) -> Version | None:
    from packaging.specifiers import SpecifierSet

    return next(
        (each.value for each in alternatives if SpecifierSet(each.python).contains(python.version)),
        None,
    )


def site_python(recipe: Recipe) -> Interpreter | None:
    """The Python that modules, conda or the site's environment bring; None if this machine's.

    Its version is what the recipe says: it is not there yet, or not without its modules.
    """
    python = recipe.python
    if python.provider == "venv" and not python.from_modules:
        return None
    stated = re.search(r"(?:==|~=|>=) ?([0-9]+\.[0-9]+(?:\.[0-9]+)*)", python.version)
    version = stated[1] if stated else "3.0"
    if python.provider == "conda":
        return Interpreter("conda", version)
    folder = python.prefix or ""
    return Interpreter(f"{folder}/bin/python" if folder else "python3", version)


def candidates(recipe: Recipe, facts: Facts) -> tuple[Interpreter, ...]:
    """Interpreters that the recipe allows, best first."""
    from packaging.specifiers import SpecifierSet

    wanted = SpecifierSet(recipe.python.version)
    return tuple(each for each in facts.interpreters if wanted.contains(each.version))


def steps_of(recipe: Recipe, facts: Facts, python: Interpreter, generation: Path) -> Steps:
    """The maker of the steps for one machine.

    Args:
        recipe: the resolved recipe.
        facts: of the machine that builds.
        python: site_python(), or one of candidates().
        generation: folder to build in.
    """
    versions = choose_versions(recipe, python)
    flags = horovod_variables(recipe, facts.machine)
    return Steps(recipe, facts, python, versions, applicable(versions), flags, generation)


def make_plan(
    recipe: Recipe,
    variants: tuple[str, ...],
    facts: Facts,
    python: Interpreter,
    generation: Path,
    *,
    locked: Locked | None = None,
    source_folder: Path | None = None,
    offline: bool = False,
    caches: Path | None = None,
    additions: Additions | None = None,
    alone: bool = False,
) -> Plan:
    """The plan for one machine.

    Args:
        recipe: the resolved recipe.
        variants: names of its variants, sorted.
        facts: of the machine that builds.
        python: site_python(), or one of candidates().
        generation: folder to build in.
        locked: the lock to build from.
        source_folder: with files that were fetched before.
        offline: whether no index is asked.
        caches: folder of files that builds share.
        additions: packages that the user adds.
        alone: whether a script runs it, without hvdenv.
    """
    maker = steps_of(recipe, facts, python, generation)
    maker = maker._replace(
        locked=locked, source_folder=source_folder, offline=offline, caches=caches,
        additions=additions, alone=alone,
    )  # fmt: skip
    reference = maker._replace(generation=PLACEHOLDER).all()
    modules = recipe.modules
    return Plan(
        recipe.name,
        variants,
        python,
        dict(maker.versions),
        generation,
        maker.environment,
        maker.wheel_path,
        run_variables(recipe, maker.environment),
        maker.all(),
        {
            "source": recipe.horovod.sha256,
            "patches": {patch.name: digest(patch.edit) for patch in maker.patches},
            "variables": {**recipe.environment.build, **maker.flags},
            **({"modules": [*modules.load, *modules.build]} if modules else {}),
        },
        digest([content(step) for step in reference]),
        locked,
        additions,
    )
