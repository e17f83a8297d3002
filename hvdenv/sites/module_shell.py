"""The module system of this machine: detects it, lists its modules, and loads a set.

All commands run in a separate bash, in which ``module`` is the same as for users.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from hvdenv.command import Command, Outcome
from hvdenv.errors import IncompatibleError, StepError
from hvdenv.masking import mask, plain
from hvdenv.model.cluster import Modules
from hvdenv.reading import RESULT, read_file, read_text
from hvdenv.runner import Runner
from hvdenv.sites.module_systems import BACKENDS
from hvdenv.sites.module_systems.backend import Backend, SystemName
from hvdenv.sites.modules import (
    Examined,
    Loaded,
    Phase,
    Trial,
    compare,
    describe,
    initialisation,
    is_among,
    judge,
    parse_available,
    parse_environment,
    shell_lines,
    split_loaded,
    trial_commands,
)

# Large sites on a slow file system need half a minute.
LOAD_SECONDS = 120.0
OUTPUT_LINES = 12

# What a shell was doing: loading, unloading, or reading a script.
_OF_MODULES = re.compile(r"(module|\.) ")
_OWN_MESSAGE = re.compile(r"^hvdenv: on \S+: (.+)$", re.MULTILINE)
_REMEDIES = {
    "missing": "name available modules in `modules` of the recipe or the site file (see `module"
    " avail`; the site's support knows what replaced old ones)",
    "hidden": "put the required modules before it in modules.load",
    "fails": "see the output of the module system above, and change `modules` in the recipe or the"
    " site file",
    "replaced": "load it after the module that replaces it, or remove one of the two",
}


class ModuleSystem(NamedTuple):
    """The module system of this machine.

    Attributes:
        kind: which one.
        version: as it reports; may be empty.
        script: that defined ``module``; empty if the shell already had it.
    """

    kind: SystemName
    version: str
    script: str

    @property
    def backend(self) -> Backend:
        return next(each for each in BACKENDS if each.name == self.kind)


def detect(runner: Runner, init: str | None = None) -> ModuleSystem | None:
    """The module system; None if there is none. ``init`` is the recipe's script for ``module``.

    Raises:
        StepError: it does not answer in time.
    """
    with _folder() as folder:
        lines = (
            "hvdenv_failed=",
            *initialisation(init),
            'test -z "$hvdenv_failed" || exit 0',
            f"module --version > {_word(folder, 'version')} 2>&1",
            *(
                f'printf %s "${{{each.variable}-}}" > {_word(folder, each.variable)}'
                for each in BACKENDS
            ),
            f'printf %s "$hvdenv_script" > {_word(folder, "script")}',
        )
        outcome = _bash(lines, folder, runner, LOAD_SECONDS)
        if outcome.timed_out:
            raise _stopped(outcome, folder, LOAD_SECONDS)
        if not (folder / "script").exists():
            return None
        output, script = _text(folder / "version"), _text(folder / "script")
        used = (each for each in BACKENDS if _text(folder / each.variable))
        backend = next(used, BACKENDS[-1])
    found = backend.version.search(output)
    return ModuleSystem(backend.name, found["version"] if found else "", script)


def find(runner: Runner, init: str | None = None) -> ModuleSystem:
    """The module system that a recipe with modules needs.

    Raises:
        IncompatibleError: there is none.
        StepError: it does not answer in time.
    """
    system = detect(runner, init)
    if system is None:
        raise IncompatibleError(
            "this machine has no module system, and the recipe loads modules",
            where=os.uname().nodename,
            remedy="call hvdenv on the cluster that the recipe is for, or use a recipe without"
            " modules, such as local; if this machine has a module system, set modules.init in the"
            " recipe or site file to the script that defines the command module",
        )
    return system


def load(
    system: ModuleSystem,
    modules: Modules,
    phase: Phase,
    runner: Runner,
    *,
    seconds: float = LOAD_SECONDS,
) -> Loaded:
    """Load a set, and return how it changes the environment.

    Args:
        modules: from expanded().
        runner: its cleaned environment is the starting point.

    Raises:
        StepError: a module is missing, hidden, in conflict, or replaced by another one of the
            set, or loading takes too long; names all such modules.
    """
    with _folder() as folder:
        lines = (
            *shell_lines(modules, phase, cleaned=True),
            "trap - DEBUG",
            f"/usr/bin/env -0 > {_word(folder, 'environment')}",
        )
        outcome = _bash(lines, folder, runner, seconds)
        dump = folder / "environment"
        if outcome.timed_out:
            raise _stopped(outcome, folder, seconds)
        if not outcome or not dump.exists():
            failure = _stopped(outcome, folder, seconds)
            try:
                examined = examine(system, modules, phase, runner, seconds=seconds)
            except StepError:
                # The failure precedes the modules, or listing all modules takes too long.
                raise failure from None
            _refuse(examined)
            raise failure
        before = runner.environment(outcome.command)
        loaded = compare(before, parse_environment(read_file(dump, RESULT).data))
    if not all(is_among(module, loaded.loaded) for module, _ in trial_commands(modules, phase)):
        # Another module of the set unloaded it, or it has another name.
        _refuse(examine(system, modules, phase, runner, seconds=seconds))
    return loaded


def examine(
    system: ModuleSystem,
    modules: Modules,
    phase: Phase,
    runner: Runner,
    *,
    seconds: float = LOAD_SECONDS,
) -> tuple[Examined, ...]:
    """Try each module of a set, also after one that cannot be loaded; arguments as for load().

    Raises:
        StepError: what precedes the modules fails, such as a missing folder; or it takes too long.
    """
    commands = trial_commands(modules, phase)
    bare = modules._replace(swap=(), load=(), build=())
    with _folder() as folder:
        trials = (
            line
            for number, (module, command) in enumerate(commands)
            for line in _trial_lines(system, _word(folder, str(number)), module, command)
        )
        listed = _available(system, bare, trials, folder, runner, seconds)
        modules_tried = (module for module, _ in commands)
        trials_made = (_trial(system, folder, *each) for each in enumerate(modules_tried))
        return judge(trials_made, listed)


def available(
    system: ModuleSystem, modules: Modules, runner: Runner, *, seconds: float = LOAD_SECONDS
) -> tuple[str, ...]:
    """Names of all modules of this machine; with Lmod also those deep in hierarchies.

    Args:
        modules: whose folders and scripts are used; nothing is loaded.

    Raises:
        StepError: what precedes the modules fails, or it takes too long.
    """
    bare = modules._replace(unload=(), swap=(), load=(), build=())
    with _folder() as folder:
        return _available(system, bare, (), folder, runner, seconds)


def _available(
    system: ModuleSystem,
    bare: Modules,
    further: Iterable[str],
    folder: Path,
    runner: Runner,
    seconds: float,
) -> tuple[str, ...]:
    """Names of the modules that are available after some commands."""
    listed = folder / "available"
    lines = (
        *shell_lines(bare, "run", cleaned=True),
        *further,
        *system.backend.list_modules(system.version, _word(folder, "available")),
    )
    outcome = _bash(lines, folder, runner, seconds)
    if outcome.timed_out or not listed.exists():
        raise _stopped(outcome, folder, seconds)
    return parse_available(_text(listed))


@contextmanager
def _folder() -> Iterator[Path]:
    """For the results of the shell, since modules print to its output."""
    with TemporaryDirectory(prefix="hvdenv-modules-") as folder:
        yield Path(folder)


def _word(folder: Path, name: str) -> str:
    """A file in the folder, quoted for a shell."""
    return shlex.quote(str(folder / name))


def _bash(lines: Iterable[str], folder: Path, runner: Runner, seconds: float) -> Outcome:
    """Run commands in a bash, which writes each to a file before it runs."""
    trace = f"""printf '%s\\n' "$BASH_COMMAND" >> {_word(folder, "commands")}"""
    return runner.run(
        Command(
            (
                "bash",
                "--noprofile",
                "--norc",
                "-c",
                "\n".join((f"trap {shlex.quote(trace)} DEBUG", *lines)),
            ),
            # bash would run the script in it first; module systems set it.
            env=(("BASH_ENV", ""),),
            timeout=seconds,
        )
    )


def _trial_lines(system: ModuleSystem, prefix: str, module: str, command: str) -> Iterator[str]:
    yield f'printf %s "${{LOADEDMODULES-}}" > {prefix}.before'
    yield f"{{ {command}; }} > {prefix}.output 2>&1"
    yield f"printf %s $? > {prefix}.status"
    yield f'printf %s "${{LOADEDMODULES-}}" > {prefix}.after'
    if system.backend.hint:
        hint = system.backend.hint.format(module=shlex.quote(module))
        yield f'test "$(cat {prefix}.status)" = 0 || {hint} > {prefix}.hint 2>&1'


def _trial(system: ModuleSystem, folder: Path, number: int, module: str) -> Trial:
    def text(what: str) -> str:
        return _text(folder / f"{number}.{what}")

    return Trial(
        module=module,
        status=int(text("status")),
        output=text("output"),
        before=split_loaded(text("before")),
        after=split_loaded(text("after")),
        prerequisites=system.backend.prerequisites(text("hint")),
    )


def _text(path: Path) -> str:
    """What the shell has written to a file, for people; empty if there is no file."""
    try:
        return mask(plain(read_text(path, RESULT, errors="replace")))
    except FileNotFoundError:
        return ""


def _stopped(outcome: Outcome, folder: Path, seconds: float) -> StepError:
    """The error for a shell that stopped early."""
    done = [line for line in _text(folder / "commands").splitlines() if _OF_MODULES.match(line)]
    last = done[-1] if done else "bash"
    host = os.uname().nodename
    own = _OWN_MESSAGE.findall(outcome.output)
    detail = _OWN_MESSAGE.sub("", outcome.tail(OUTPUT_LINES)).strip("\n")
    if outcome.timed_out:
        return StepError(
            f"`{last}` did not end within {seconds:g} s and was killed",
            where=host,
            detail=detail,
            remedy=f"try it in a shell on {host}: it may wait for a file system or a license server"
            " that does not answer",
        )
    if own:
        return StepError(
            f"cannot load modules: {own[-1]}",
            where=host,
            detail=detail,
            remedy="correct `modules` in the recipe or the site file",
        )
    return StepError(
        f"the shell ended at `{last}`",
        where=host,
        detail=detail,
        remedy=f"try it in a shell on {host}, and correct `modules` in the recipe or the site file",
    )


def _refuse(examined: Sequence[Examined]) -> None:
    """Report all modules of a set that cannot be loaded.

    Raises:
        StepError: there are such modules.
    """
    failed = [each for each in examined if each.state != "loads"]
    if not failed:
        return
    sentences = [describe(each) for each in failed]
    output = [
        line
        for each in failed
        if each.state == "fails"
        for line in (f"module system on {each.module}:", *each.said.splitlines()[-OUTPUT_LINES:])
    ]
    raise StepError(
        sentences[0] if len(failed) == 1 else f"{len(failed)} modules cannot be loaded",
        where=os.uname().nodename,
        detail="\n".join([*(sentences if len(failed) > 1 else []), *output]),
        remedy="; ".join(dict.fromkeys(_REMEDIES[each.state] for each in failed)),
    )
