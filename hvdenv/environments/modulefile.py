"""Modulefiles for an environment: Lua for Lmod, Tcl for Environment Modules.

Pure: the record of a generation in, the text of a file out. All values are quoted for
the language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.contents.record import GenerationRecord
from hvdenv.environments.activation import KINDS, Kind, left_open
from hvdenv.errors import StepError, UsageError
from hvdenv.model.cluster import ModuleName, Modules, VariableName
from hvdenv.model.folders import User, expand
from hvdenv.schema import Problem, decode

# In one of the first lines of each modulefile that hvdenv wrote.
WRITTEN_BY = "Written by hvdenv"


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
    def family(self) -> str:
        """The name without the version."""
        return self.name.rpartition("/")[0]


def from_record(
    record: GenerationRecord, generation: Path, name: str = "", *, user: str, home: str
) -> Entry:
    """What the modulefile of a generation states.

    Args:
        name: of the module; made of the recipe and its variants if empty.
        user: name of the user who built it: {user} in the recipe.
        home: home folder of that user: {home} in the recipe.

    Raises:
        StepError: the record is damaged.
        UsageError: this cannot be the name of a module.
    """
    try:
        built = decode(_Built, _built(record))
    except (Problem, KeyError, AttributeError, TypeError) as error:
        raise StepError(
            f"the record is damaged: {error}",
            where=str(generation),
            remedy="build the environment again",
        ) from error
    return Entry(
        name=_checked(
            name or "-".join((f"horovod/{built.horovod}", built.recipe, *built.variants))
        ),
        environment=generation / built.environment,
        kind=KINDS[built.provider],
        facts={
            "Description": f"Horovod {built.horovod} for {', '.join(built.frameworks)}",
            "Recipe": "+".join((built.recipe, *built.variants)),
            "Built": f"{built.created[:10]} by {user}",
            "Plan": built.plan_digest,
        },
        modules=expand(Modules, built.modules, User(user, home, {}, lenient=True), ("modules",))[0],
        variables=built.variables,
    )


def lua(entry: Entry) -> str:
    """A modulefile for Lmod 7.6 or newer; ``source`` needs 8.6.

    Raises:
        UsageError: a modulefile cannot state this.
    """
    return _render(entry, _LUA, _in_lua)


def tcl(entry: Entry) -> str:
    """A modulefile for Environment Modules 4 or newer; ``source`` needs 4.6.

    Raises:
        UsageError: a modulefile cannot state this.
    """
    return _render(entry, _TCL, _in_tcl)


# The statements of each language; {} stands for a quoted word.
_LUA = {
    "help": f"-- {WRITTEN_BY}.\nhelp({{}})",
    "whatis": "whatis({})",
    "conflict": "conflict({})",
    "require": 'if mode() == "load" and not isDir({}) then\n    LmodError({})\nend',
    "use": 'prepend_path("MODULEPATH", {})',
    "source": 'source_sh("bash", {})',
    "unload": "unload({})",
    "load": "depends_on({})",
    "set": "setenv({}, {})",
    "prepend": "prepend_path({}, {})",
}
_TCL = {
    "help": f"#%Module1.0\n# {WRITTEN_BY}.\nproc ModulesHelp {{{{ }}}} {{{{\n    puts stderr {{}}\n}}}}",
    "whatis": "module-whatis {}",
    "conflict": "conflict {}",
    "require": "if {{[module-info mode load] && ![file isdirectory {}]}} {{\n    error {}\n}}",
    "use": "module use {}",
    "source": "source-sh bash {}",
    "unload": "module unload {}",
    "load": "module load {}",
    "set": "setenv {} {}",
    "prepend": "prepend-path {} {}",
}


def _render(entry: Entry, words: Mapping[str, str], quote: Callable[[str], str]) -> str:
    _refuse_unsayable(entry)
    return "".join(
        words[statement].format(*map(quote, arguments)) + "\n"
        for statement, *arguments in _statements(entry)
    )


def _statements(entry: Entry) -> Iterator[tuple[str, ...]]:
    """What a modulefile states, and what loading it does, in order."""
    modules, environment = entry.modules, str(entry.environment)
    yield "help", _help(entry)
    yield from (("whatis", f"{label}: {fact}") for label, fact in entry.facts.items())
    yield "conflict", entry.family
    if entry.kind != "none":
        gone = (
            f"{environment} is gone, or you may not enter it; "
            f"`module avail {entry.family}` lists other versions"
        )
        yield "require", environment, gone
    # Each is prepended, so the last one comes first.
    yield from (("use", folder) for folder in reversed(modules.use))
    yield from (("source", script) for script in modules.source)
    yield from (("unload", name) for name in modules.unload)
    for swap in modules.swap:
        yield "unload", swap.out
        yield "load", swap.into
    yield from (("load", name) for name in modules.load)
    if entry.kind != "none":
        yield "set", {"venv": "VIRTUAL_ENV", "conda": "CONDA_PREFIX"}[entry.kind], environment
        yield "prepend", "PATH", f"{environment}/bin"
    # Packages in ~/.local would shadow the environment's.
    variables = {"PYTHONNOUSERSITE": "1", **entry.variables}
    yield from (("set", name, value) for name, value in variables.items())


def _refuse_unsayable(entry: Entry) -> None:
    environment = str(entry.environment)
    if environment.startswith("$"):
        raise UsageError(
            "the environment is below a variable that other modules set",
            where=environment,
            remedy="load the modules and source activate.sh of the environment",
        )
    if names := left_open(entry.variables):
        raise UsageError(
            "its value depends on the job, and modules are often loaded outside of jobs",
            where=names[0],
            remedy="source activate.sh of the environment in the job",
        )
    # Lmod and Environment Modules pass a line break to the shell unquoted: the shell would run
    # what follows it as a command.
    for name, value in {"the environment": environment, **entry.variables}.items():
        if re.search(r"[\x00-\x1f\x7f]", value):
            raise UsageError(
                f"no modulefile can hold {value!r}", where=name,
                remedy="remove the control characters, or source activate.sh of the environment in the job",
            )  # fmt: skip


def _help(entry: Entry) -> str:
    lines = [f"{label}: {fact}" for label, fact in entry.facts.items()]
    lines += ["", "Your own PYTHONPATH comes before the packages of the environment: unset it."]
    if entry.kind == "conda":
        lines += ["Scripts in etc/conda/activate.d are not run; source activate.sh for that."]
    return "\n".join(lines)


def _in_lua(text: str) -> str:
    special = r'["\\\x00-\x1f\x7f]'
    return f'"{re.sub(special, lambda found: _escaped(found[0], "03"), text)}"'


def _in_tcl(text: str) -> str:
    """A word of Tcl; braces are escaped too, since it may be inside of braces."""
    special = r'["\\$\[\]{}\x00-\x1f\x7f]'
    return f'"{re.sub(special, lambda found: _escaped(found[0], "03o"), text)}"'


def _escaped(character: str, code: str) -> str:
    """A backslash and the character, or the code of a control character: decimal in Lua,
    octal in Tcl.
    """
    if character == "\n":
        return "\\n"
    printable = " " <= character <= "~"
    return f"\\{character if printable else format(ord(character), code)}"


class _Built(NamedTuple):
    """What a modulefile needs of a record. No string in it holds a control character."""

    recipe: str
    variants: tuple[str, ...]
    created: str
    plan_digest: str
    variables: dict[VariableName, str]
    horovod: str
    frameworks: tuple[str, ...]
    provider: Literal["venv", "conda", "clone", "prefix", "modules"]
    environment: str
    modules: Modules


def _built(record: GenerationRecord) -> dict[str, object]:
    resolved = record.resolved
    compiled = record.wheel.get("frameworks", {})
    return {
        "recipe": record.recipe,
        "variants": list(record.variants),
        "created": record.created,
        "plan_digest": record.plan_digest,
        "variables": record.variables or {},
        "horovod": resolved["horovod"]["version"],
        "frameworks": [
            f"{name} {compiled[name]['built_with']}" if name in compiled else name
            for name in resolved["horovod"]["frameworks"]
        ],
        "provider": resolved["python"].get("provider", "venv"),
        "environment": record.environment,
        "modules": resolved.get("modules") or {},
    }


class _Named(NamedTuple):
    name: ModuleName


def _checked(name: str) -> str:
    """The name of a module, with a version."""
    try:
        decode(_Named, {"name": name})
    except Problem as problem:
        raise UsageError(
            f"cannot be the name of a module: {problem.message}",
            remedy="give a name such as horovod/0.28.1: --name NAME/VERSION",
        ) from problem
    if "/" not in name:
        raise UsageError(f"{name!r} has no version", remedy=f"--name {name}/VERSION")
    return name
