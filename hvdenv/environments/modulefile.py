"""Modulefiles for an environment: Lua for Lmod, Tcl for Environment Modules.

What they do is in the two templates beside this module. Every value in them is quoted for the
language, in one place (`_quoted`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from hvdenv.contents.record import GenerationRecord
from hvdenv.environments.activation import KINDS, Kind, left_open
from hvdenv.environments.generations import recorded_recipe
from hvdenv.errors import UsageError
from hvdenv.model.cluster import ModuleName, Modules

# lua: Lmod 7.6 or newer, and 8.6 for `source`. tcl: Environment Modules 4, and 4.6 for `source`.
Language = Literal["lua", "tcl"]


class Entry(NamedTuple):
    """What a modulefile states.

    Attributes:
        name: of the module, such as ``horovod/0.28.1-neuron``.
        facts: what ``module whatis`` and ``module help`` print, by label.
        modules: what is loaded with it: ``use``, ``source``, ``unload``, ``swap`` and ``load``.
            A modulefile cannot purge.
    """

    name: str
    environment: Path
    kind: Kind
    facts: Mapping[str, str]
    modules: Modules = Modules()
    variables: Mapping[str, str] = {}

    @property
    def help(self) -> str:
        lines = [f"{label}: {fact}" for label, fact in self.facts.items()]
        lines += ["", "Your own PYTHONPATH comes before the packages of the environment: unset it."]
        if self.kind == "conda":
            lines += ["Scripts in etc/conda/activate.d are not run; source activate.sh for that."]
        return "\n".join(lines)


def from_record(record: GenerationRecord, generation: Path, name: str, user: str) -> Entry:
    """What the modulefile of a generation that a user built states.

    Raises:
        StepError: the record is damaged.
        UsageError: this cannot be the name of a module.
    """
    recipe = recorded_recipe(record, generation)
    version, built = recipe.horovod.version, record.wheel.get("frameworks", {})
    frameworks = [
        f"{each} {built[each]['built_with']}" if each in built else each
        for each in recipe.horovod.frameworks
    ]
    name = name or "-".join((f"horovod/{version}", record.recipe, *record.variants))
    # Files that begin with a dot configure the directory, as the one named default does.
    last = name.rpartition("/")[2]
    special = last.startswith(".") or last == "default"
    if special or "/" not in name or not re.fullmatch(get_args(ModuleName)[1].regex, name):
        raise UsageError(
            f"this cannot be the name of a module with a version: {name!r}",
            remedy="give a name such as horovod/0.28.1: --name NAME/VERSION",
        )
    return Entry(
        name=name,
        environment=generation / record.environment,
        kind=KINDS[recipe.python.provider],
        facts={
            "Description": f"Horovod {version} for {', '.join(frameworks)}",
            "Recipe": "+".join((record.recipe, *record.variants)),
            "Built": f"{record.created[:10]} by {user}",
            "Plan": record.plan_digest,
        },
        modules=recipe.modules or Modules(),
        variables=record.variables or {},
    )


def render(entry: Entry, language: Language) -> str:
    """The text of a modulefile.

    Raises:
        UsageError: a modulefile cannot state this.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    for where, why in _unsayable(entry):
        remedy = "source activate.sh of the environment instead, which also loads its modules"
        raise UsageError(why, where=where, remedy=remedy)
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        finalize=lambda value: _quoted(str(value), *_SPECIAL[language]),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template(f"modulefile.{language}.jinja").render(entry=entry)


def _unsayable(entry: Entry) -> Iterator[tuple[str, str]]:
    """What a modulefile cannot state, and why."""
    environment = str(entry.environment)
    if environment.startswith("$"):
        yield environment, "the environment is below a variable that other modules set"
    for name in left_open(entry.variables):
        yield name, "its value depends on the job, and modules are often loaded outside of jobs"
    # Lmod and Environment Modules pass a line break to the shell unquoted: the shell would run
    # what follows it as a command.
    for name, value in {"the environment": environment, **entry.variables}.items():
        if re.search(r"[\x00-\x1f\x7f]", value):
            yield name, f"no modulefile can hold {value!r}"


# What a quoted word cannot hold, and the format of its code: decimal in Lua, octal in Tcl. Braces
# of Tcl too, since the word may be inside of braces.
_SPECIAL: Mapping[Language, tuple[re.Pattern[str], str]] = {
    "lua": (re.compile(r'["\\\x00-\x09\x0b-\x1f\x7f]'), "03"),
    "tcl": (re.compile(r'["\\$\[\]{}\x00-\x09\x0b-\x1f\x7f]'), "03o"),
}


def _quoted(text: str, special: re.Pattern[str], code: str) -> str:
    text = special.sub(lambda found: f"\\{ord(found[0]):{code}}", text)
    return '"' + text.replace("\n", "\\n") + '"'
