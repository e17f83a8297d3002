"""A plan as a stand-alone bash script that makes an equivalent environment without hvdenv."""

from __future__ import annotations

import shlex
from pathlib import Path

from hvdenv.command import OWN_PYTHON, Command
from hvdenv.environments.generations import UNFIT_IN_BASH
from hvdenv.places import environment_name
from hvdenv.plans.plan import Plan
from hvdenv.plans.step import Step, TextFile
from hvdenv.runner import CLEANED_PATTERN
from hvdenv.sites.modules import shell_lines

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
        "if [[ $folder =~ $unfit ]]; then",
        '    echo "$folder: name a directory without spaces and special characters" >&2; exit 2',
        "fi",
        'mkdir -p -- "$folder/build/wheel"',
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
