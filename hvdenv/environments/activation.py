"""The script and the modulefiles that activate an environment in a user's shell, without hvdenv.

``activate.sh`` is for sh, bash, dash and zsh, also under ``set -eu``. What modulefiles do is in two
templates beside this module. Every value in them is quoted for their language.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from hvdenv.base.errors import UsageError
from hvdenv.environments.generations import recorded_recipe
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.cluster import ModuleName, Modules
from hvdenv.model.dialect import job_variables

Kind = Literal["venv", "conda", "none"]

# Kind of environment for each provider of a recipe's ``python``.
KINDS: Mapping[str, Kind] = {
    "venv": "venv",
    "conda": "conda",
    "clone": "conda",
    "prefix": "conda",
    "modules": "none",
}

# Variables that name the environment that is active in a shell.
ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")
# What `hvdenv shell` sets to its generation: the shell activates that only after it has started.
SHELL = "HVDENV_SHELL"

# What a value may contain until a program runs.
_TEMPLATE = re.compile(r"\{user\}|\{jobid\}")

# `$?shell` is 1 to csh; to other shells it is the last exit status and the word "shell".
_CSH = (
    """test "$?shell" = 1 && /bin/sh -c 'echo "activate.sh is for sh, bash, dash and zsh,"""
    """ this is csh. Type bash and source it there, or load a module of the environment."""
    """ Nothing was changed." >&2' && exit 1"""
)

_HEAD = """\
# Makes this environment the current one:  . PREFIX/activate.sh
# The function hvdenv_deactivate undoes it. Written by hvdenv, which it does not need.
if [ "${0##*/}" = activate.sh ] && [ "${BASH_SOURCE-$0}" = "$0" ] &&
    [ "${ZSH_EVAL_CONTEXT-toplevel}" = toplevel ]; then
    echo "activate.sh changes the shell that it is sourced in; type:  . $0" >&2
    exit 2
fi
if command -v hvdenv_deactivate >/dev/null; then hvdenv_deactivate quiet; fi
"""

# Scripts of conda packages fail under `set -eu`.
_LENIENT = """\
_hvdenv_lenient() { _hvdenv_options=$-; set +eu; }
_hvdenv_strict() {
    case $_hvdenv_options in *u*) set -u ;; esac
    case $_hvdenv_options in *e*) set -e ;; esac
}
"""

_GONE = """\
if [ ! -d "$_hvdenv_bin" ]; then
    echo "activate.sh: $_hvdenv_bin does not exist, so no environment is active: move it back, or build it here" >&2
    _hvdenv_unclean
    return 1
fi
"""

_WITHOUT = """\
# Takes the environment's programs out of PATH.
_hvdenv_without() {
    PATH=":$PATH:"
    while case $PATH in *":$_hvdenv_bin:"*) ;; *) false ;; esac; do
        PATH="${PATH%%":$_hvdenv_bin:"*}:${PATH#*":$_hvdenv_bin:"}"
    done
    PATH="${PATH#:}"
    PATH="${PATH%:}"
}
"""

_IN_FRONT = """\
_hvdenv_without
export PATH="$_hvdenv_bin${PATH:+:$PATH}"
"""

# The last script first when it is undone, as conda does it.
_SCRIPTS = """\
# Sources what packages have in activate.d or deactivate.d.
_hvdenv_scripts() {
    [ -z "${ZSH_VERSION-}" ] || setopt localoptions nonomatch
    _hvdenv_folder="$CONDA_PREFIX/etc/conda/$1"
    set --
    for _hvdenv_script in "$_hvdenv_folder"/*.sh; do
        case $_hvdenv_folder in
        */activate.d) set -- "$@" "$_hvdenv_script" ;;
        *) set -- "$_hvdenv_script" "$@" ;;
        esac
    done
    for _hvdenv_script in "$@"; do
        [ ! -r "$_hvdenv_script" ] || . "$_hvdenv_script"
    done
}
"""

# These would be searched before the environment's packages. Modules may set them again.
UNSET = ("PYTHONHOME", "PYTHONPATH")
_REMEMBER = """\
_hvdenv_was_PYTHONHOME=${PYTHONHOME-}
_hvdenv_was_PYTHONPATH=${PYTHONPATH-}
"""

# Modules stay loaded, so what they have set since comes first.
_UNCLEAN = """\
_hvdenv_unclean() {
    if [ -n "$_hvdenv_was_PYTHONHOME" ]; then
        export PYTHONHOME="${PYTHONHOME:-$_hvdenv_was_PYTHONHOME}"
    fi
    if [ -n "$_hvdenv_was_PYTHONPATH" ]; then
        case ":$_hvdenv_was_PYTHONPATH:" in
        *":${PYTHONPATH:-$_hvdenv_was_PYTHONPATH}:"*) PYTHONPATH="$_hvdenv_was_PYTHONPATH" ;;
        *) PYTHONPATH="$PYTHONPATH:$_hvdenv_was_PYTHONPATH" ;;
        esac
        export PYTHONPATH
    fi
}
"""

_LOAD = """\
if ! _hvdenv_load; then
    echo "activate.sh: the modules of this environment could not be loaded; it is not active" >&2
    _hvdenv_unclean
    return 1
fi
"""


def activate_script(
    environment: Path,
    *,
    kind: Kind,
    variables: Mapping[str, str],
    module_lines: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> str:
    """The text of ``activate.sh``.

    The script unsets PYTHONHOME and PYTHONPATH, loads the modules, activates the environment and
    sets the variables, in this order.

    Args:
        environment: its directory, which may begin with a variable of the modules ($NAME/DIR);
            unused for the kind ``none``.
        kind: ``venv`` and ``conda`` come first in PATH; ``none`` is provided by modules.
        variables: what programs of the environment need at run time. In a value, {user} and
            {jobid} are replaced when the script is sourced; outside of a job, {jobid} is the
            process id of the shell.
        module_lines: complete commands, also under ``set -eu``, that load the modules. They
            become the body of a function, whose failure means that a module cannot be loaded.
        keep: which of the variables that it unsets stay.
    """
    folder = _quoted_folder(environment)
    named = {"venv": "VIRTUAL_ENV", "conda": "CONDA_PREFIX"}
    settings = {
        **({named[kind]: folder} if kind in named else {}),
        # Packages in ~/.local would shadow the environment's.
        "PYTHONNOUSERSITE": "1",
        **{name: _quoted(value) for name, value in variables.items()},
    }
    unset = " ".join(name for name in UNSET if name not in keep)
    parts = [f"{_CSH}\n", _HEAD, _REMEMBER, f"unset {unset}\n", _UNCLEAN]
    if module_lines:
        parts += ["_hvdenv_load() {\n", " &&\n".join(module_lines), "\n}\n", _LOAD]
    if kind != "none":
        parts += [f"_hvdenv_bin={folder}/bin\n", _GONE]
    parts += [_set(name, value) for name, value in settings.items()]
    if kind != "none":
        parts += [_WITHOUT, _IN_FRONT]
    if kind == "conda":
        parts += [
            _LENIENT,
            _SCRIPTS,
            "_hvdenv_lenient\n_hvdenv_scripts activate.d\n_hvdenv_strict\n",
        ]
    parts += _deactivate(kind, list(settings), bool(module_lines))
    return "".join(parts)


def site_lines(variables: Mapping[str, str], module_lines: Sequence[str]) -> tuple[str, ...]:
    """What activate.sh does where modules provide everything, as the body of a function."""
    settings = {"PYTHONNOUSERSITE": "1", **{n: _quoted(value) for n, value in variables.items()}}
    exports = (f"export {name}={value}" for name, value in settings.items())
    return (f"unset {' '.join(UNSET)}", *exports, *module_lines)


def filled_in(variables: Mapping[str, str], user: str, job: str) -> dict[str, str]:
    """The variables as they are after activate.sh was sourced by this user in this job."""
    values = {"{user}": user, "{jobid}": job}
    return {
        name: _TEMPLATE.sub(lambda found: values[found[0]], value)
        for name, value in variables.items()
    }


def left_open(variables: Mapping[str, str]) -> list[str]:
    """Names of the variables whose value depends on the user or the job."""
    return [name for name, value in variables.items() if _TEMPLATE.search(value)]


def _quoted(value: str) -> str:
    """A value quoted for a shell, in which {user} and {jobid} become expansions."""
    parts = re.split(f"({_TEMPLATE.pattern})", value)
    words = [_expansion(part) or shlex.quote(part) for part in parts if part]
    return "".join(words) or "''"


def _expansion(part: str) -> str:
    """What a shell expands to the user or the job; empty for other text."""
    if part == "{jobid}":
        names = job_variables()
        return '"' + "".join(f"${{{name}:-" for name in names) + "$$" + "}" * len(names) + '"'
    return '"$(id -un)"' if part == "{user}" else ""


def _quoted_folder(folder: Path) -> str:
    head, *rest = folder.parts
    if not head.startswith("$"):
        return shlex.quote(str(folder))
    return "/".join([f'"${{{head[1:]}-}}"', *map(shlex.quote, rest)])


def _set(name: str, value: str) -> str:
    """Set a variable to a quoted value, and remember what it was."""
    return (
        f"_hvdenv_had_{name}=${{{name}+1}} _hvdenv_was_{name}=${{{name}-}}\nexport {name}={value}\n"
    )


def _deactivate(kind: Kind, names: Sequence[str], modules: bool) -> list[str]:
    """The function that undoes everything but the modules."""
    lines = ["hvdenv_deactivate() {\n"]
    if kind == "conda":
        lines += ["    _hvdenv_lenient\n    _hvdenv_scripts deactivate.d\n    _hvdenv_strict\n"]
    if kind != "none":
        lines += ["    _hvdenv_without\n"]
    for name in reversed(names):
        lines += [
            f'    if [ -n "$_hvdenv_had_{name}" ]; then export {name}="$_hvdenv_was_{name}";'
            f" else unset {name}; fi\n"
        ]
    lines += ["    _hvdenv_unclean\n    unset -f hvdenv_deactivate\n"]
    if modules:
        lines += [
            '    [ "${1-}" = quiet ] ||\n'
            '        echo "the modules of the environment are still loaded (module list)" >&2\n'
        ]
    return [*lines, "}\n"]


# lua: Lmod 7.6 or newer, and 8.6 for `source`. tcl: Environment Modules 4, and 4.6 for `source`.
Language = Literal["lua", "tcl"]


class Modulefile(NamedTuple):
    """What a modulefile states.

    Attributes:
        name: of the module, such as ``horovod/0.28.1-neuron``.
        facts: what ``module whatis`` and ``module help`` print, by label.
        modules: what is loaded with it: ``use``, ``source``, ``unload`` and ``load``.
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


def modulefile_of(record: GenerationRecord, generation: Path, name: str, user: str) -> Modulefile:
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
    return Modulefile(
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


def render_modulefile(modulefile: Modulefile, language: Language) -> str:
    """The text of a modulefile.

    Raises:
        UsageError: a modulefile cannot state this.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    for where, why in _unsayable(modulefile):
        remedy = "source activate.sh of the environment instead, which also loads its modules"
        raise UsageError(why, where=where, remedy=remedy)
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        finalize=lambda value: _quoted_for(str(value), *_SPECIAL[language]),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template(f"modulefile.{language}.jinja").render(entry=modulefile)


def _unsayable(modulefile: Modulefile) -> Iterator[tuple[str, str]]:
    """What a modulefile cannot state, and why."""
    environment = str(modulefile.environment)
    if environment.startswith("$"):
        yield environment, "the environment is below a variable that other modules set"
    for name in left_open(modulefile.variables):
        yield name, "its value depends on the job, and modules are often loaded outside of jobs"
    # Lmod and Environment Modules pass a line break to the shell unquoted: the shell would run
    # what follows it as a command.
    for name, value in {"the environment": environment, **modulefile.variables}.items():
        if re.search(r"[\x00-\x1f\x7f]", value):
            yield name, f"no modulefile can hold {value!r}"


# What a quoted word cannot hold, and the format of its code: decimal in Lua, octal in Tcl. Braces
# of Tcl too, since the word may be inside of braces.
_SPECIAL: Mapping[Language, tuple[re.Pattern[str], str]] = {
    "lua": (re.compile(r'["\\\x00-\x09\x0b-\x1f\x7f]'), "03"),
    "tcl": (re.compile(r'["\\$\[\]{}\x00-\x09\x0b-\x1f\x7f]'), "03o"),
}


def _quoted_for(text: str, special: re.Pattern[str], code: str) -> str:
    text = special.sub(lambda found: f"\\{ord(found[0]):{code}}", text)
    return '"' + text.replace("\n", "\\n") + '"'
