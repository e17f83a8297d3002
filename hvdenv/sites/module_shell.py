"""The module system of this machine: detects it, lists its modules, and loads a set.

All commands run in a separate bash, in which ``module`` is the same as for users.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from hvdenv.command import Command, Outcome
from hvdenv.errors import IncompatibleError, StepError
from hvdenv.masking import clean
from hvdenv.model.cluster import Modules
from hvdenv.reading import RESULT, read_file, read_text
from hvdenv.runner import Runner, absolute_folders
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
    if not shutil.which("bash"):
        return None
    with _shell(runner, LOAD_SECONDS) as shell:
        lines = (
            "hvdenv_failed=",
            *initialisation(init),
            'test -z "$hvdenv_failed" || exit 0',
            f"module --version > {shell.word('version')} 2>&1",
            *(
                f'printf %s "${{{each.variable}-}}" > {shell.word(each.variable)}'
                for each in BACKENDS
            ),
            f'printf %s "$hvdenv_script" > {shell.word("script")}',
        )
        shell.run(lines)
        if not (shell.folder / "script").exists():
            return None
        output, script = shell.text("version"), shell.text("script")
        used = (each for each in BACKENDS if shell.text(each.variable))
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
        modules: with the user's folders in place of placeholders.
        runner: its cleaned environment is the starting point.

    Raises:
        StepError: a module is missing, hidden, in conflict, or replaced by another one of the
            set, or loading takes too long; names all such modules.
    """
    with _shell(runner, seconds) as shell:
        lines = (
            *shell_lines(modules, phase, cleaned=True),
            "trap - DEBUG",
            f"/usr/bin/env -0 > {shell.word('environment')}",
        )
        outcome = shell.run(lines)
        dump = shell.folder / "environment"
        if not outcome or not dump.exists():
            failure = shell.stopped(outcome)
            try:
                examined = examine(system, modules, phase, runner, seconds=seconds)
            except StepError:
                # The failure precedes the modules, or listing all modules takes too long.
                raise failure from None
            _refuse(examined)
            raise failure
        before = runner.environment(outcome.command)
        after = parse_environment(read_file(dump, RESULT).data)
        if "PATH" in after:
            after["PATH"] = absolute_folders(after["PATH"])
        loaded = compare(before, after)
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
    with _shell(runner, seconds) as shell:
        trials = (
            line
            for number, (module, command) in enumerate(commands)
            for line in _trial_lines(system, shell.word(str(number)), module, command)
        )
        listed = _available(system, bare, trials, shell)
        tried = (_trial(system, shell, number, each) for number, (each, _) in enumerate(commands))
        return judge(tried, listed)


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
    with _shell(runner, seconds) as shell:
        return _available(system, bare, (), shell)


def _available(
    system: ModuleSystem, bare: Modules, further: Iterable[str], shell: _Shell
) -> tuple[str, ...]:
    lines = (
        *shell_lines(bare, "run", cleaned=True),
        *further,
        *system.backend.list_modules(system.version, shell.word("available")),
    )
    outcome = shell.run(lines)
    if not (shell.folder / "available").exists():
        raise shell.stopped(outcome)
    return parse_available(shell.text("available"))


class _Shell(NamedTuple):
    """A bash for commands that write their results to a folder, since modules print to its output."""

    folder: Path
    runner: Runner
    seconds: float

    def word(self, name: str) -> str:
        """A file in the folder, quoted for a shell."""
        return shlex.quote(str(self.folder / name))

    def text(self, name: str) -> str:
        """The content of a file, for people; empty if there is no file."""
        try:
            return clean(read_text(self.folder / name, RESULT, errors="replace"))
        except FileNotFoundError:
            return ""

    def run(self, lines: Iterable[str]) -> Outcome:
        """Run commands, each of which is written to a file before it runs.

        Raises:
            StepError: they take too long.
        """
        trace = f"""printf '%s\\n' "$BASH_COMMAND" >> {self.word("commands")}"""
        script = "\n".join((f"trap {shlex.quote(trace)} DEBUG", *lines))
        # bash would run the script in BASH_ENV first; module systems set it.
        words = ("bash", "--noprofile", "--norc", "-c", script)
        outcome = self.runner.run(Command(words, env=(("BASH_ENV", ""),), timeout=self.seconds))
        if outcome.timed_out:
            raise self.stopped(outcome)
        return outcome

    def stopped(self, outcome: Outcome) -> StepError:
        """The error for a shell that stopped early."""
        done = [line for line in self.text("commands").splitlines() if _OF_MODULES.match(line)]
        last = done[-1] if done else "bash"
        host = os.uname().nodename
        own = _OWN_MESSAGE.findall(outcome.output)
        message = f"the shell ended at `{last}`"
        remedy = (
            f"try it in a shell on {host}, and correct `modules` in the recipe or the site file"
        )
        if outcome.timed_out:
            message = f"`{last}` did not end within {self.seconds:g} s and was killed"
            remedy = (
                f"try it in a shell on {host}: it may wait for a file system or a license server"
                " that does not answer"
            )
        elif own:
            message = f"cannot load modules: {own[-1]}"
            remedy = "correct `modules` in the recipe or the site file"
        detail = _OWN_MESSAGE.sub("", outcome.tail(OUTPUT_LINES)).strip("\n")
        return StepError(message, where=host, detail=detail, remedy=remedy)


@contextmanager
def _shell(runner: Runner, seconds: float) -> Iterator[_Shell]:
    with TemporaryDirectory(prefix="hvdenv-modules-") as folder:
        yield _Shell(Path(folder), runner, seconds)


def _trial_lines(system: ModuleSystem, prefix: str, module: str, command: str) -> Iterator[str]:
    yield f'printf %s "${{LOADEDMODULES-}}" > {prefix}.before'
    yield f"{{ {command}; }} > {prefix}.output 2>&1"
    yield f"printf %s $? > {prefix}.status"
    yield f'printf %s "${{LOADEDMODULES-}}" > {prefix}.after'
    if system.backend.hint:
        hint = system.backend.hint.format(module=shlex.quote(module))
        yield f'test "$(cat {prefix}.status)" = 0 || {hint} > {prefix}.hint 2>&1'


def _trial(system: ModuleSystem, shell: _Shell, number: int, module: str) -> Trial:
    def text(what: str) -> str:
        return shell.text(f"{number}.{what}")

    return Trial(
        module=module,
        status=int(text("status")),
        output=text("output"),
        before=split_loaded(text("before")),
        after=split_loaded(text("after")),
        prerequisites=system.backend.prerequisites(text("hint")),
    )


def _refuse(examined: Sequence[Examined]) -> None:
    """Report all modules of a set that cannot be loaded."""
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
