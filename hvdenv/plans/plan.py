"""A recipe and facts make a plan: the steps of a build, as plain data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet

from hvdenv.errors import IncompatibleError
from hvdenv.knowledge.flags import horovod_variables
from hvdenv.knowledge.patches import applicable
from hvdenv.locks.lockfile import Locked
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.recipe import Recipe, Version
from hvdenv.plans.additions import Additions
from hvdenv.plans.step import Step, content, digest
from hvdenv.plans.steps import GENERATION, Steps, run_variables
from hvdenv.runner import ALWAYS_SET
from hvdenv.schema import fill

# Stands for the directory of temporary files until Plan.at() names one.
TEMPORARY = Path("/\N{LEFT DOUBLE ANGLE BRACKET}temporary\N{RIGHT DOUBLE ANGLE BRACKET}")


class Plan(NamedTuple):
    """What a build does. Make it with make_plan(), once for each command.

    Attributes:
        python: the interpreter that the environment is made with.
        versions: exact versions that the recipe gives for that Python.
        generation: directory that the steps make; GENERATION until at() names one.
        environment: the Python environment: in that directory, or the site's.
        wheel: path of the compiled wheel until it is installed.
        variables: what programs of the environment need at run time.
        step_variables: what every step sees, on top of the cleaned environment.
        wheel_inputs: what, beside the stack, decides whether a cached wheel fits.
        digest: identifies what is built, whatever the directory.
    """

    recipe: str
    variants: tuple[str, ...]
    python: Interpreter
    versions: dict[str, Version]
    generation: Path
    environment: Path
    wheel: Path
    variables: dict[str, str]
    step_variables: dict[str, str]
    steps: tuple[Step, ...]
    wheel_inputs: dict[str, Any]
    digest: str
    locked: Locked | None = None
    additions: Additions | None = None

    def at(self, generation: Path, temporary: Path = TEMPORARY) -> Plan:
        """The same plan in one directory, with the TMPDIR of its steps."""
        words = {str(GENERATION): str(generation), str(TEMPORARY): str(temporary)}
        return self._replace(
            generation=generation,
            environment=fill(self.environment, words),
            wheel=fill(self.wheel, words),
            variables=fill(self.variables, words),
            step_variables=fill(self.step_variables, words),
            steps=fill(self.steps, words),
        )


def choose_versions(recipe: Recipe, python: Interpreter) -> dict[str, Version]:
    """Exact versions of Horovod and of its frameworks for a Python.

    Raises:
        IncompatibleError: a framework has no version for it.
    """
    versions = {"horovod": recipe.horovod.version}
    for framework in recipe.horovod.frameworks:
        found = recipe.frameworks[framework].version
        if not isinstance(found, str):
            fits = (each for each in found if SpecifierSet(each.python).contains(python.version))
            found = next((each.value for each in fits), "")
        if not found:
            raise IncompatibleError(
                f"the recipe has no {framework} version for Python {python.version}",
                where=f"frameworks.{framework}.version",
                remedy=f"name another Python with --python, or a variant without {framework}",
            )
        versions[framework] = found
    return versions


def site_python(recipe: Recipe) -> Interpreter | None:
    """The Python that modules, conda or the site's environment provide; None if this machine's.

    Its version is the recipe's: it does not exist yet, or only with its modules loaded.
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
    allowed = SpecifierSet(recipe.python.version)
    return tuple(each for each in facts.interpreters if allowed.contains(each.version))


def steps_of(
    recipe: Recipe, facts: Facts, python: Interpreter, generation: Path = GENERATION
) -> Steps:
    """The maker of the steps for one machine; ``python`` is site_python() or a candidate."""
    versions = choose_versions(recipe, python)
    return Steps(
        recipe=recipe,
        facts=facts,
        python=python,
        versions=versions,
        patches=applicable(versions),
        flags=horovod_variables(recipe, facts.machine),
        generation=generation,
    )


def make_plan(maker: Steps, variants: tuple[str, ...] = ()) -> Plan:
    """The plan for one machine, of no directory yet; ``variants`` are sorted."""
    recipe, python, steps = maker.recipe, maker.python, maker.all()
    return Plan(
        recipe=recipe.name,
        variants=variants,
        python=python,
        versions=dict(maker.versions),
        generation=maker.generation,
        environment=maker.environment,
        wheel=maker.wheel_path,
        variables=run_variables(recipe, maker.environment),
        step_variables=dict(ALWAYS_SET) | ({} if maker.alone else {"TMPDIR": str(TEMPORARY)}),
        steps=steps,
        wheel_inputs=maker.wheel_inputs,
        digest=digest([content(step) for step in steps]),
        locked=maker.locked,
        additions=maker.additions,
    )
