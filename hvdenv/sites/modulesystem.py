"""Lmod or Environment Modules on this machine: what it is, what it has, and loading a set.

All of it happens in a bash of its own, in which ``module`` is what it is to users.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from hvdenv.command import Command, Outcome
from hvdenv.errors import IncompatibleError, StepError
from hvdenv.masking import mask, plain
from hvdenv.model.cluster import Modules
from hvdenv.reading import RESULT, read_file, read_text
from hvdenv.runner import Runner
from hvdenv.sites.modules import (
    Examined,
    Loaded,
    Phase,
    Trial,
    compare,
    initialisation,
    is_among,
    judge,
    parse_available,
    parse_environment,
    shell_lines,
    split_loaded,
    told_examined,
    trial_commands,
)

# Large sites on a slow file system need half a minute.
LOAD_SECONDS = 120.0
SAID_LINES = 12

Kind = Literal["Lmod", "Environment Modules"]

_VERSION = re.compile(
    r"(Modules based on Lua: Version |Modules Release |^VERSION=)(?P<version>\S+)", re.MULTILINE
)

# What a shell was doing: loading, unloading, or reading a script.
_OF_MODULES = re.compile(r"(module|\.) ")
_OWN_MESSAGE = re.compile(r"^hvdenv: on \S+: (.+)$", re.MULTILINE)
_REMEDIES = {
    "missing": "name modules that exist here in `modules` of the recipe or the site file"
    " (`module avail`; ask the site's support what took their place)",
    "hidden": "put the modules that must come first in front of it in modules.load",
    "fails": "do what the module system says above, in `modules` of the recipe or the site file",
    "replaced": "load it after the module that takes its place, or leave one of the two out",
}


class ModuleSystem(NamedTuple):
    """The module system of this machine.

    Attributes:
        kind: which one.
        version: as it says; empty if it does not.
        script: that defined ``module``; empty where the shell had it already.
    """

    kind: Kind
    version: str
    script: str


def detect(runner: Runner, init: str | None = None) -> ModuleSystem | None:
    """Look for the module system.

    Args:
        runner: starts the shell.
        init: the recipe's own script that defines ``module``.

    Returns:
        None if there is none.

    Raises:
        StepError: it does not answer in time.
    """
    with _folder() as folder:
        lines = (
            "hvdenv_failed=",
            *initialisation(init),
            'test -z "$hvdenv_failed" || exit 0',
            f"module --version > {_word(folder, 'version')} 2>&1",
            f'printf %s "${{LMOD_CMD-}}" > {_word(folder, "lmod")}',
            f'printf %s "$hvdenv_script" > {_word(folder, "script")}',
        )
        outcome = _bash(lines, folder, runner, LOAD_SECONDS)
        if outcome.timed_out:
            raise _stopped(outcome, folder, LOAD_SECONDS)
        if not (folder / "script").exists():
            return None
        said, script = _text(folder / "version"), _text(folder / "script")
        is_lmod = bool(_text(folder / "lmod"))
    kind: Kind = "Lmod" if is_lmod else "Environment Modules"
    found = _VERSION.search(said)
    return ModuleSystem(kind, found["version"] if found else "", script)


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
            remedy="call hvdenv on the cluster that the recipe is for, or take a recipe without"
            " modules, such as local; if there is a module system here, name the script that"
            " defines the command module: modules.init in the recipe or site file",
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
    """Load a set once, and see what it does to the environment.

    Args:
        system: from find().
        modules: {user} and {home} must have been filled in.
        phase: what it is loaded for.
        runner: its cleaned environment is what the set is loaded on top of.
        seconds: the longest that it may take.

    Raises:
        StepError: a module is missing, hidden, in conflict, replaced by another one of the
            set, or takes too long; all that are amiss are named.
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
                # It comes before the modules, or the site has too many to list in that time.
                raise failure from None
            _refuse(examined)
            raise failure
        before = runner.environment(outcome.command)
        loaded = compare(before, parse_environment(read_file(dump, RESULT).data))
    if not all(is_among(module, loaded.loaded) for module, _ in trial_commands(modules, phase)):
        # Swapped out by another module of the set; or there under another name.
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
    """Try each module of a set, also after one that cannot be loaded.

    Args:
        system: from find().
        modules: {user} and {home} must have been filled in.
        phase: what the set is for.
        runner: its cleaned environment is what the set is loaded on top of.
        seconds: the longest that it may take.

    Raises:
        StepError: what comes before the modules fails, such as a folder that is not there;
            or it takes too long.
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
        return judge((_trial(folder, *each) for each in enumerate(commands)), listed)


def available(
    system: ModuleSystem, modules: Modules, runner: Runner, *, seconds: float = LOAD_SECONDS
) -> tuple[str, ...]:
    """Names of the modules that this machine has; with Lmod also those deep in hierarchies.

    Args:
        system: from find().
        modules: whose folders and scripts are taken into account; nothing is loaded.
        runner: starts the shell.
        seconds: the longest that it may take.

    Raises:
        StepError: what comes before the modules fails, or it takes too long.
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
    """Names of modules after what comes before them and further commands."""
    listed = folder / "available"
    lines = (
        *shell_lines(bare, "run", cleaned=True),
        *further,
        *_listing(system, _word(folder, "available")),
    )
    outcome = _bash(lines, folder, runner, seconds)
    if outcome.timed_out or not listed.exists():
        raise _stopped(outcome, folder, seconds)
    return parse_available(_text(listed))


@contextmanager
def _folder() -> Iterator[Path]:
    """Where the shell leaves what it found: its output is full of what modules print."""
    with TemporaryDirectory(prefix="hvdenv-modules-") as folder:
        yield Path(folder)


def _word(folder: Path, name: str) -> str:
    """A file there, quoted for a shell."""
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
            # It names a script that would run first; module systems set it.
            env=(("BASH_ENV", ""),),
            timeout=seconds,
        )
    )


def _trial_lines(system: ModuleSystem, prefix: str, module: str, command: str) -> Iterator[str]:
    yield f'printf %s "${{LOADEDMODULES-}}" > {prefix}.before'
    yield f"{{ {command}; }} > {prefix}.said 2>&1"
    yield f"printf %s $? > {prefix}.status"
    yield f'printf %s "${{LOADEDMODULES-}}" > {prefix}.after'
    if system.kind == "Lmod":
        spider = f"module spider {shlex.quote(module)} > {prefix}.spider 2>&1"
        yield f'test "$(cat {prefix}.status)" = 0 || {spider}'


def _trial(folder: Path, number: int, command: tuple[str, str]) -> Trial:
    def text(what: str) -> str:
        return _text(folder / f"{number}.{what}")

    before, after = split_loaded(text("before")), split_loaded(text("after"))
    return Trial(command[0], int(text("status")), text("said"), before, after, text("spider"))


def _listing(system: ModuleSystem, path: str) -> tuple[str, ...]:
    """Commands that write the names of all modules to a file."""
    if system.kind == "Lmod":
        return (f"module --show_hidden -t avail > {path} 2>&1", f"module -t spider >> {path} 2>&1")
    every = "" if system.version.startswith("3.") else "--all "
    return (f"module avail {every}-t > {path} 2>&1",)


def _text(path: Path) -> str:
    """What the shell has written to a file, for people; nothing if it did not come to that."""
    try:
        return mask(plain(read_text(path, RESULT, errors="replace")))
    except FileNotFoundError:
        return ""


def _stopped(outcome: Outcome, folder: Path, seconds: float) -> StepError:
    """The error for a shell that did not come to its end."""
    done = [line for line in _text(folder / "commands").splitlines() if _OF_MODULES.match(line)]
    last = done[-1] if done else "bash"
    host = os.uname().nodename
    said = _OWN_MESSAGE.findall(outcome.output)
    detail = _OWN_MESSAGE.sub("", outcome.tail(SAID_LINES)).strip("\n")
    if outcome.timed_out:
        return StepError(
            f"`{last}` did not end within {seconds:g} s; it was ended",
            where=host,
            detail=detail,
            remedy=f"type it in a shell on {host}: it may wait for a file system or a licence"
            " server that does not answer",
        )
    if said:
        return StepError(
            f"cannot load modules: {said[-1]}",
            where=host,
            detail=detail,
            remedy="correct `modules` in the recipe or the site file",
        )
    return StepError(
        f"the shell ended at `{last}`",
        where=host,
        detail=detail,
        remedy=f"type it in a shell on {host}, and correct `modules` in the recipe or the site file",
    )


def _refuse(examined: Sequence[Examined]) -> None:
    """Say what is amiss with the modules of a set, all of it.

    Raises:
        StepError: something is.
    """
    amiss = [each for each in examined if each.state != "loads"]
    if not amiss:
        return
    sentences = [told_examined(each) for each in amiss]
    said = [
        line
        for each in amiss
        if each.state == "fails"
        for line in (
            f"{each.module}, says the module system:",
            *each.said.splitlines()[-SAID_LINES:],
        )
    ]
    first = sentences[0] if len(amiss) == 1 else f"{len(amiss)} modules cannot be loaded"
    raise StepError(
        first,
        where=os.uname().nodename,
        detail="\n".join([*(sentences if len(amiss) > 1 else []), *said]),
        remedy="; ".join(dict.fromkeys(_REMEDIES[each.state] for each in amiss)),
    )
