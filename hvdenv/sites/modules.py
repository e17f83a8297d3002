"""Modules of a cluster as text: shell commands that load them, and the output of module systems.

The commands are for sh, bash, dash and zsh, also under ``set -eu``, and for every module system in
``BACKENDS``.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from hvdenv.model.cluster import Modules


class Backend(NamedTuple):
    """A module system.

    Attributes:
        variable: set in shells where it is in use; Environment Modules 3 does not set it.
        modulefile: the language that hvdenv writes modulefiles in.
    """

    name: str
    variable: str
    modulefile: Literal["lua", "tcl"]


# The last one is in use where no other's variable is set.
BACKENDS = (
    Backend("Lmod", "LMOD_CMD", "lua"),
    Backend("Environment Modules", "MODULES_CMD", "tcl"),
)
NO_SYSTEM = "there is no module system (no command module; neither Lmod nor Environment Modules)"
_PREREQUISITES = re.compile(
    r"You will need to load all module\(s\) on any one of the lines below[^\n]{0,200}\n"
    r"[ \t]*\n(?P<lines>([ \t]+[^\s][^\n]*\n)+)"
)

# What a set is loaded for: to run, or to build with ``modules.build`` on top.
Phase = Literal["run", "build"]

# Scripts that define `module`, as shell words: those that a login has named, those of login shells,
# and those of distributions.
USUAL_SCRIPTS = (
    '"${LMOD_PKG-}/init/sh"',
    '"${MODULESHOME-}/init/sh"',
    "/etc/profile.d/lmod.sh",
    "/etc/profile.d/z00_lmod.sh",
    "/etc/profile.d/modules.sh",
    "/usr/share/lmod/lmod/init/sh",
    "/usr/share/modules/init/sh",
)

_VARIABLES = "".join(f"${{{each.variable}-}}" for each in BACKENDS)

# Variables that shells set themselves, and those that only define `module` in other shells.
_OF_THE_SHELL = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "BASH_ENV", "ENV", "FPATH"})
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Marks after names in lists: (default), (@alias), (D), <L>.
_MARKING = re.compile(r"(?<!\s)\s*(\([^()]*\)|<[^<>]*>)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
# Finds by its name what a module offers. open-ce contains both frameworks.
OFFERS = {
    "Horovod": re.compile(r"horovod|(^|/)(open-ce|ibm-wml-ce)/", re.IGNORECASE),
    "PyTorch": re.compile(r"pytorch|(^|/)torch(/|$)|(^|/)(open-ce|ibm-wml-ce)/", re.IGNORECASE),
    "TensorFlow": re.compile(r"tensorflow|(^|/)(open-ce|ibm-wml-ce)/", re.IGNORECASE),
    "MPI": re.compile(
        r"(^|/)(openmpi|mpich|mvapich|cray-mpich|cray-mvapich|intel-?mpi|impi|psmpi"
        r"|parastationmpi|spectrum-mpi|hpcx)",
        re.IGNORECASE,
    ),
    "NCCL": re.compile(r"(^|/)nccl", re.IGNORECASE),
}
NEAREST = 5


class Loaded(NamedTuple):
    """The result of loading a set.

    Attributes:
        loaded: the loaded modules in their order, as the module system names them.
    """

    set: dict[str, str]
    unset: tuple[str, ...]
    loaded: tuple[str, ...]


class _Step(NamedTuple):
    """A command for shells, as it is shown to people.

    Attributes:
        failure: the message if it fails; empty if it may fail.
        module: that it loads and that must be loaded at the end; may be empty.
    """

    shown: str
    command: str
    failure: str = ""
    module: str = ""


def commands(modules: Modules) -> tuple[str, ...]:
    """The commands for people; those for the build only are marked."""
    run = tuple(step.shown for step in _steps(modules, "run"))
    build = tuple(step.shown for step in _steps(modules, "build"))
    return (*run, *(f"{command} (for the build only)" for command in build[len(run) :]))


def shell_lines(modules: Modules, phase: Phase, *, cleaned: bool = False) -> tuple[str, ...]:
    """Commands for a shell that load the set, or return (or exit) with status 1.

    Each is complete, so they can be joined by line breaks or by ``&&``. Failures are reported on
    standard error. Variables named ``hvdenv_…`` are used and unset again.

    Args:
        modules: with the user's directories in place of placeholders.
        cleaned: whether variables of loaded modules may have been removed, so that modules that
            stay loaded must be reloaded.
    """
    return (
        "hvdenv_options=$-",
        # Site scripts and old module functions do not support these.
        "set +eu",
        "hvdenv_failed=",
        *initialisation(modules.init),
        *(
            f'test -n "$hvdenv_failed" || {step.command} || '
            + (f"hvdenv_failed={shlex.quote(step.failure)}" if step.failure else ":")
            for step in _steps(modules, phase, cleaned)
        ),
        # The status of some systems does not show failures, as of Environment Modules 3.
        f'if test -z "$hvdenv_failed{_VARIABLES}"; then\n'
        + each_unloaded(
            modules, phase, ': "${hvdenv_failed:=cannot load the module $hvdenv_module}"'
        )
        + "\nfi",
        "case $hvdenv_options in *u*) set -u ;; esac",
        "case $hvdenv_options in *e*) set -e ;; esac",
        "unset hvdenv_options hvdenv_script hvdenv_module",
        'if test -n "$hvdenv_failed"; then\n'
        """    printf 'hvdenv: on %s: %s\\n' "$(uname -n)" "$hvdenv_failed" >&2\n"""
        "    unset hvdenv_failed\n"
        "    return 1 2>/dev/null || exit 1\n"
        "fi",
        "unset hvdenv_failed",
    )


def initialisation(init: str | None) -> tuple[str, ...]:
    """Commands that define ``module``, or set ``hvdenv_failed``. ``init`` is the recipe's own script."""
    scripts = [*([shlex.quote(init)] if init else []), *USUAL_SCRIPTS]
    return (
        "if ! command -v module >/dev/null 2>&1; then\n"
        f"    for hvdenv_script in {' '.join(scripts)}; do\n"
        '        test -r "$hvdenv_script" || continue\n'
        '        . "$hvdenv_script"\n'
        "        ! command -v module >/dev/null 2>&1 || break\n"
        "    done\n"
        "    command -v module >/dev/null 2>&1 ||\n"
        f"        hvdenv_failed={shlex.quote(NO_SYSTEM)}\n"
        "fi",
    )


def load_commands(modules: Modules, phase: Phase) -> tuple[tuple[str, str], ...]:
    """Each module that must be loaded at the end, and the command that loads it."""
    return tuple((each.module, each.command) for each in _steps(modules, phase) if each.module)


def _steps(modules: Modules, phase: Phase, cleaned: bool = False) -> Iterator[_Step]:
    if modules.purge == "yes":
        # It fails if sticky modules stay loaded, which is intended.
        yield _Step("module purge", "module purge")
    elif modules.purge == "force":
        command = "module --force purge"
        yield _Step(command, command, "cannot unload the modules that are loaded")
    if cleaned:
        yield _Step("module reload", 'test -z "${LOADEDMODULES-}" || module reload')
    # Each is prepended, and the recipe's first directory must come first.
    for folder in reversed(modules.use):
        word = shlex.quote(folder)
        command = f"{{ test -d {word} && module use {word}; }}"
        yield _Step(f"module use {word}", command, f"there is no directory of modules {folder}")
    for script in modules.source:
        # Many end with a false test, so their status is ignored.
        word = shlex.quote(script)
        command = f"{{ test -r {word} && {{ . {word} || :; }}; }}"
        yield _Step(f". {word}", command, f"cannot read the script {script}")
    for module in modules.unload:
        command = f"module unload {shlex.quote(module)}"
        yield _Step(command, command, f"cannot unload the module {module}")
    for module in (*modules.load, *(modules.build if phase == "build" else ())):
        command = f"module load {shlex.quote(module)}"
        yield _Step(command, command, f"cannot load the module {module}", module)


def each_unloaded(modules: Modules, phase: Phase, command: str) -> str:
    """A loop that runs a command for each module, in $hvdenv_module, that is not loaded."""
    words = " ".join(shlex.quote(module) for module, _ in load_commands(modules, phase))
    return (
        f"for hvdenv_module in {words}\n"
        "do\n"
        '    case ":${LOADEDMODULES-}:" in\n'
        '    *":$hvdenv_module:"* | *":$hvdenv_module/"*) ;;\n'
        f"    *) {command} ;;\n"
        "    esac\n"
        "done"
    )


def list_modules(path: str) -> str:
    """A shell command that writes the names of all modules to a file."""
    # The last command is unknown to Environment Modules 3, whose list has hidden modules.
    return (
        f'if test -n "${{LMOD_CMD-}}"; then module --show_hidden -t avail; module -t spider;'
        f" else module avail -t; module avail --all -t; fi > {path} 2>&1"
    )


def parse_prerequisites(text: str) -> tuple[str, ...]:
    """Sets of modules to load first, any one of which is enough, from ``module spider NAME``."""
    found = _PREREQUISITES.search(text)
    lines = found["lines"].splitlines() if found else []
    return tuple(" ".join(line.split()) for line in lines)


def parse_environment(dump: bytes) -> dict[str, str]:
    text = dump.decode("utf-8", "surrogateescape")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def compare(before: Mapping[str, str], after: Mapping[str, str]) -> Loaded:
    """What modules changed, without what the shell itself changes.

    The module system's own variables are included, since ``module list`` in a later shell needs
    them.
    """

    def counts(name: str) -> bool:
        return _VARIABLE.fullmatch(name) is not None and name not in _OF_THE_SHELL

    return Loaded(
        {n: v for n, v in sorted(after.items()) if counts(n) and before.get(n) != v},
        tuple(n for n in sorted(before) if counts(n) and n not in after),
        split_loaded(after.get("LOADEDMODULES", "")),
    )


def split_loaded(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(":") if name)


def parse_available(text: str) -> tuple[str, ...]:
    """Module names in the output of ``module -t avail`` or ``module -t spider``, in its order.

    Directories (as ``gcc/``), headings and messages are omitted.
    """
    found = (_MARKING.sub("", line.rstrip()) for line in text.splitlines())
    return tuple(dict.fromkeys(n for n in found if _NAME.fullmatch(n) and not n.endswith("/")))


def nearest(module: str, available: Iterable[str]) -> tuple[str, ...]:
    """Similar names: other versions first, then similar spellings."""
    from difflib import get_close_matches

    word, family = module.lower(), module_family(module)
    names = {name.lower(): name for name in available}
    versions = [name for name in names if module_family(name) == family]
    alike = get_close_matches(word, names, NEAREST)
    if "/" not in module:
        families = get_close_matches(family, {module_family(name) for name in names}, NEAREST)
        alike = [name for each in families for name in names if module_family(name) == each]
    found = (*get_close_matches(word, versions, NEAREST, 0), *alike)
    return tuple(names[name] for name in dict.fromkeys(found))[:NEAREST]


def offers(available: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Which modules offer Horovod, PyTorch, TensorFlow, MPI and NCCL, by their names."""
    listed = sorted(set(available), key=str.lower)
    return {what: tuple(filter(pattern.search, listed)) for what, pattern in OFFERS.items()}


def is_among(module: str, loaded: Iterable[str]) -> bool:
    """Whether a module is in a list of full names; without a version, any version counts."""
    return any(name == module or name.startswith(f"{module}/") for name in loaded)


def module_family(module: str) -> str:
    """A module's name without its version, in lower case."""
    return (module.rpartition("/")[0] or module).lower()
