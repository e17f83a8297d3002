"""Modules of a cluster as text: shell commands that load them, and the output of module systems.

The commands are for sh, bash, dash and zsh, also under ``set -eu``, and for every module system in
module_systems.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from hvdenv.model.cluster import Modules, Swap
from hvdenv.sites.module_systems import BACKENDS

# What a set is loaded for: to run, or to build with ``modules.build`` on top.
Phase = Literal["run", "build"]

# Where sites and distributions have the script that defines `module`.
USUAL_SCRIPTS = tuple(
    script for group in zip(*(each.scripts for each in BACKENDS), strict=True)
    for scripts in group for script in scripts
)  # fmt: skip
_NOT_FOUND = tuple(each.not_found for each in BACKENDS if each.not_found)

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


class Trial(NamedTuple):
    """The result of one module when all are tried, whether or not those before it loaded.

    Attributes:
        status: of ``module load``; 0 is success.
        prerequisites: sets of modules to load first, as the module system reports them.
    """

    module: str
    status: int
    output: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    prerequisites: tuple[str, ...] = ()


class Examined(NamedTuple):
    """Whether one module of a set can be loaded on a machine.

    Attributes:
        state: ``loads``; ``missing``; ``hidden`` until others are loaded (a hierarchy);
            ``fails``, such as by a conflict; ``replaced`` by one that was loaded later.
        said: the output of the module system about it.
        nearest: existing modules with a similar name, the best first.
        first: for ``hidden``: sets of modules to load first; any one of them is enough.
        by: for ``replaced``: the module whose loading did it.
        instead: for ``replaced``: what is loaded in its place.
    """

    module: str
    state: Literal["loads", "missing", "hidden", "fails", "replaced"]
    said: str = ""
    nearest: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    by: str = ""
    instead: tuple[str, ...] = ()


class _Step(NamedTuple):
    """A command.

    Attributes:
        failure: the message if it fails; empty if it may fail.
    """

    shown: str
    command: str
    failure: str = ""


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
        modules: with the user's folders in place of placeholders.
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
        *_silent_failures(module for module, _ in trial_commands(modules, phase)),
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
    """Commands that define ``module``, or set ``hvdenv_failed``.

    They set ``hvdenv_script`` to the script that defined it, or to nothing if it was defined
    already. ``init`` is the recipe's own script.
    """
    scripts = [*([shlex.quote(init)] if init else []), *USUAL_SCRIPTS]
    return (
        "hvdenv_script=",
        "if ! command -v module >/dev/null 2>&1; then\n"
        f"    for hvdenv_script in {' '.join(scripts)}; do\n"
        '        test -r "$hvdenv_script" || continue\n'
        '        . "$hvdenv_script"\n'
        "        ! command -v module >/dev/null 2>&1 || break\n"
        "    done\n"
        "    command -v module >/dev/null 2>&1 ||\n"
        "        hvdenv_failed='there is no module system (no command module;"
        " neither Lmod nor Environment Modules)'\n"
        "fi",
    )


def trial_commands(modules: Modules, phase: Phase) -> tuple[tuple[str, str], ...]:
    """Each module that must be loaded at the end, and the command that loads it."""
    return (
        *((swap.into, _swap_command(swap)) for swap in modules.swap),
        *((module, _load_command(module)) for module in _loads(modules, phase)),
    )


def _loads(modules: Modules, phase: Phase) -> tuple[str, ...]:
    return (*modules.load, *(modules.build if phase == "build" else ()))


def _load_command(module: str) -> str:
    return f"module load {shlex.quote(module)}"


def _swap_command(swap: Swap) -> str:
    """Load a module instead of another, whether or not that is loaded."""
    out, into = shlex.quote(swap.out), shlex.quote(swap.into)
    return (
        f'case ":${{LOADEDMODULES-}}:" in *:{out}:* | *:{out}/*) module swap {out} {into} ;;'
        f" *) module load {into} ;; esac"
    )


def _steps(modules: Modules, phase: Phase, cleaned: bool = False) -> Iterator[_Step]:
    if modules.purge == "yes":
        # It fails if sticky modules stay loaded, which is intended.
        yield _Step("module purge", "module purge")
    elif modules.purge == "force":
        command = "module --force purge"
        yield _Step(command, command, "cannot unload the modules that are loaded")
    if cleaned:
        yield _Step("module reload", 'test -z "${LOADEDMODULES-}" || module reload')
    # Each is prepended, and the recipe's first folder must come first.
    for folder in reversed(modules.use):
        word = shlex.quote(folder)
        command = f"{{ test -d {word} && module use {word}; }}"
        yield _Step(f"module use {word}", command, f"there is no folder of modules {folder}")
    for script in modules.source:
        # Many end with a false test, so their status is ignored.
        word = shlex.quote(script)
        command = f"{{ test -r {word} && {{ . {word} || :; }}; }}"
        yield _Step(f". {word}", command, f"cannot read the script {script}")
    for module in modules.unload:
        command = f"module unload {shlex.quote(module)}"
        yield _Step(command, command, f"cannot unload the module {module}")
    for swap in modules.swap:
        yield _Step(
            f"module swap {shlex.quote(swap.out)} {shlex.quote(swap.into)}",
            _swap_command(swap),
            f"cannot load the module {swap.into} in the place of {swap.out}",
        )
    for module in _loads(modules, phase):
        command = _load_command(module)
        yield _Step(command, command, f"cannot load the module {module}")


def _silent_failures(modules: Iterable[str]) -> Iterator[str]:
    """Checks for systems whose status does not show failures, as of Environment Modules 3."""
    words = " ".join(map(shlex.quote, modules))
    others = "".join(f"${{{each.variable}-}}" for each in BACKENDS)
    if words:
        yield (
            f'if test -z "$hvdenv_failed{others}"; then\n'
            f"    for hvdenv_module in {words}; do\n"
            '        case ":${LOADEDMODULES-}:" in\n'
            '        *":$hvdenv_module:"* | *":$hvdenv_module/"*) ;;\n'
            '        *) hvdenv_failed="cannot load the module $hvdenv_module"; break ;;\n'
            "        esac\n"
            "    done\n"
            "fi"
        )


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

    Folders (as ``gcc/``), headings and messages are omitted.
    """
    found = (_MARKING.sub("", line.rstrip()) for line in text.splitlines())
    return tuple(dict.fromkeys(n for n in found if _NAME.fullmatch(n) and not n.endswith("/")))


def nearest(module: str, available: Iterable[str]) -> tuple[str, ...]:
    """Similar names: other versions first, then similar spellings."""
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(b=module.lower(), autojunk=False)
    family = family_of(module)
    scored = []
    for name in available:
        matcher.set_seq1(name.lower() if "/" in module else family_of(name))
        same = family_of(name) == family
        if same or (matcher.quick_ratio() > 0.6 and matcher.ratio() > 0.6):
            scored.append((same, matcher.ratio(), name))
    scored.sort(key=lambda each: (not each[0], -each[1], each[2]))
    return tuple(name for _, _, name in scored[:NEAREST])


def offers(available: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Which modules offer Horovod, PyTorch, TensorFlow, MPI and NCCL, by their names."""
    listed = sorted(set(available), key=str.lower)
    return {
        what: tuple(name for name in listed if pattern.search(name))
        for what, pattern in OFFERS.items()
    }


def describe_offers(offered: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Lines for people from offers()."""
    return tuple(
        f"modules that offer {what}: {', '.join(modules) or 'none'}"
        for what, modules in offered.items()
    )


def judge(trials: Iterable[Trial], available: Iterable[str]) -> tuple[Examined, ...]:
    """Whether each module of a set can be loaded.

    Args:
        available: names that the module system knows, also those that cannot be loaded yet.
    """
    tried, listed = tuple(trials), tuple(available)
    return tuple(_judge(trial, tried[number + 1 :], listed) for number, trial in enumerate(tried))


def is_among(module: str, loaded: Iterable[str]) -> bool:
    """Whether a module is in a list of full names; without a version, any version counts."""
    return any(name == module or name.startswith(f"{module}/") for name in loaded)


def _judge(trial: Trial, later: tuple[Trial, ...], available: tuple[str, ...]) -> Examined:
    module, output = trial.module, trial.output.strip()
    named = is_among(module, trial.after)
    # Environment Modules 3 has the status 0 also for a module that does not exist. A loaded
    # module may have another name (an alias), or have been loaded by a module before it.
    if trial.status == 0 and (named or trial.after != trial.before or not output):
        return _replaced(trial, named, later) or Examined(module, "loads", output)
    first = trial.prerequisites
    if not first and any(each in output for each in _NOT_FOUND) and is_among(module, available):
        # It exists at the end, so a later module has opened its folder.
        first = (" ".join(each.module for each in later if each.status == 0),)
    if first:
        return Examined(module, "hidden", output, first=first)
    if is_among(module, available):
        return Examined(module, "fails", output)
    return Examined(module, "missing", output, nearest(module, available))


def _replaced(trial: Trial, named: bool, later: tuple[Trial, ...]) -> Examined | None:
    """A module that was loaded, but not at the end."""
    new = set(trial.after) - set(trial.before)
    mine = {name for name in trial.after if is_among(trial.module, [name])} if named else new
    last = later[-1].after if later else ()
    if not later or not mine or mine & set(last) or is_among(trial.module, last):
        return None
    culprit = next(each for each in later if not mine & set(each.after))
    families = {family_of(name) for name in mine}
    instead = tuple(name for name in last if family_of(name) in families)
    return Examined(
        trial.module, "replaced", trial.output.strip(), by=culprit.module, instead=instead
    )


def describe(examined: Examined) -> str:
    """The result for a module, in one sentence."""
    module = examined.module
    if examined.state == "loads":
        return f"{module}: available"
    if examined.state == "missing":
        near = ", ".join(examined.nearest)
        return f"{module}: not available" + (f"; similar modules: {near}" if near else "")
    if examined.state == "hidden":
        return f"{module}: first load " + ", or ".join(examined.first)
    if examined.state == "replaced":
        instead = ", ".join(name for name in examined.instead if name != examined.by)
        loads = f", which loads {instead}" if instead else ""
        return f"{module}: unloaded by {examined.by}{loads}"
    return f"{module}: available, but cannot be loaded"


def family_of(module: str) -> str:
    """A module's name without its version, in lower case."""
    return (module.rpartition("/")[0] or module).lower()
