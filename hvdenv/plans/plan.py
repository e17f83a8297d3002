"""A recipe and facts make a plan: the steps of a build, as plain data."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet

from hvdenv.base.command import OWN_PYTHON, Command
from hvdenv.base.errors import IncompatibleError
from hvdenv.base.places import environment_name
from hvdenv.base.runner import ALWAYS_SET, CLEANED_PATTERN, LISTS_OF_PIP, PATHS_OF_PIP
from hvdenv.base.schema import mapped
from hvdenv.environments.generations import UNFIT_IN_BASH
from hvdenv.knowledge.flags import horovod_variables
from hvdenv.knowledge.patches import applicable
from hvdenv.locks.lockfile import Locked
from hvdenv.locks.record import Additions
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.recipe import Recipe, Version
from hvdenv.plans.step import Step, TextFile, content, digest
from hvdenv.plans.steps import GENERATION, Steps, run_variables
from hvdenv.sites.modules import shell_lines

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

        def placed(text: str) -> str:
            found = text.replace(str(GENERATION), str(generation))
            return found.replace(str(TEMPORARY), str(temporary))

        return self._replace(
            generation=generation,
            environment=mapped(self.environment, placed),
            wheel=mapped(self.wheel, placed),
            variables=mapped(self.variables, placed),
            step_variables=mapped(self.step_variables, placed),
            steps=mapped(self.steps, placed),
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


_WITHOUT_HVDENV = {
    "manifest": "hvdenv lists every file here; this script does not",
    "record": "hvdenv marks the environment as complete here; this script does not",
}

# Reports what was compiled, not that it works: only ranks show that.
_CHECK = """bash -c '. "$0/activate.sh" && horovodrun --check-build' "$folder\""""

_CLEANING = """\
# Variables of the shell that a build must not see.
for name in $(compgen -e); do
    if [[ $name =~ ^({pattern})$ ]]; then unset "$name"; fi
done
"""


def render_bash(plan: Plan, folder: Path) -> str:
    """The script; ``folder`` is where it makes the environment by default."""
    lines = [
        "#!/usr/bin/env bash",
        f"# Makes the Horovod environment {environment_name(plan.recipe, plan.variants)}"
        " without hvdenv.",
        f"# Plan {plan.digest[:12]}. Usage: bash SCRIPT [DIR]",
        "set -euo pipefail",
        f"folder={shlex.quote(str(folder))}",
        'folder=$(realpath -m -- "${1:-$folder}")',
        'if [[ -e $folder ]]; then echo "$folder exists already" >&2; exit 2; fi',
        f"unfit={shlex.quote(UNFIT_IN_BASH)}",
        "if [[ ${1-} == -* || $folder =~ $unfit ]]; then",
        '    echo "$folder: name a directory without spaces and special characters: bash $0 [DIR]" >&2',
        "    exit 2",
        "fi",
        'mkdir -p -- "$folder/build/wheel"',
        f"for name in {' '.join((*PATHS_OF_PIP, *LISTS_OF_PIP))}; do",
        '    if [[ -e ${!name-} ]]; then export "$name=$(realpath -- "${!name}")"; fi',
        "done",
        "cd /  # Python imports from the current directory, which may be anybody's",
        "",
        _CLEANING.format(pattern=CLEANED_PATTERN).rstrip(),
        *(f"export {name}={shlex.quote(value)}" for name, value in plan.step_variables.items()),
    ]
    for number, step in enumerate(plan.steps, 1):
        # A reason names paths of the machine: a line break would end the comment.
        reason = " ".join(step.reason.splitlines())
        lines += ["", f"# {number}. {step.name}: {reason}", *_step(plan, step)]
    lines += ["", 'echo "done: . $folder/activate.sh"', ""]
    return "\n".join(lines)


def _step(plan: Plan, step: Step) -> list[str]:
    if step.effect in _WITHOUT_HVDENV:
        check = [_CHECK] if step.effect == "record" else []
        return [f"# ({_WITHOUT_HVDENV[step.effect]})", *check]
    if step.effect == "tidy":
        return ['rm -rf -- "$folder/build"']
    return [
        f"echo {shlex.quote(f'== {step.name}')}",
        *(shell_lines(step.modules, "build", cleaned=True) if step.modules else ()),
        *(line for file in step.files for line in _file(plan, file)),
        *(_command(plan, command) for command in step.commands),
    ]


def _file(plan: Plan, file: TextFile) -> list[str]:
    """A here-document; the shell replaces the directory in its text."""
    path = _argument(plan, str(file.path))
    if str(plan.generation) not in file.text:
        return [f"cat > {path} <<'END_OF_FILE'", file.text.rstrip("\n"), "END_OF_FILE"]
    text = file.text.rstrip("\n").replace(str(plan.generation), "\0")
    text = text.replace("\\", "\\\\").replace("$", "\\$").replace("`", "\\`")
    return [f"cat > {path} <<END_OF_FILE", text.replace("\0", "$folder"), "END_OF_FILE"]


def _command(plan: Plan, command: Command) -> str:
    variables = " ".join(
        [
            *(f"{name}={_argument(plan, value)}" for name, value in command.env),
            *(f"{name}={_derived(plan, value)}" for name, value in command.derived),
        ]
    )
    words = " ".join(
        '"${HVDENV_PYTHON:-python3}"' if word == OWN_PYTHON else _argument(plan, word)
        for word in command.argv
    )
    return f"{variables} \\\n    {words}" if variables else words


def _derived(plan: Plan, value: str) -> str:
    """A value with variables; the recipe's format allows nothing else that needs quoting."""
    return '"' + value.replace(str(plan.generation), "$folder") + '"'


def _argument(plan: Plan, text: str) -> str:
    """A word for the shell, with the generation's directory as a variable."""
    parts = text.split(str(plan.generation))
    return '"$folder"'.join(shlex.quote(part) if part else "" for part in parts) or "''"
