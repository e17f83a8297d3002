"""The module system of this machine: lists its modules, and loads a set.

All commands run in a separate bash, in which ``module`` is the same as for users.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from hvdenv.base.command import Command, Outcome
from hvdenv.base.errors import HvdenvError, IncompatibleError, StepError
from hvdenv.base.masking import clean
from hvdenv.base.reading import RESULT, read_file, read_text
from hvdenv.base.runner import Runner, absolute_folders
from hvdenv.model.cluster import Modules
from hvdenv.sites.modules import (
    BACKENDS,
    NO_SYSTEM,
    Loaded,
    Phase,
    compare,
    each_unloaded,
    is_among,
    list_modules,
    load_commands,
    module_family,
    nearest,
    parse_available,
    parse_environment,
    parse_prerequisites,
    shell_lines,
    split_loaded,
)

_OUTPUT_LINES = 12
# In the output of `module --version`: of Lmod, and of Environment Modules 4 and 3.
_VERSION = re.compile(
    r"(Modules based on Lua: Version |Modules Release |^VERSION=)(?P<version>\S+)", re.MULTILINE
)
# What Environment Modules print about a module that does not exist or is hidden.
_NOT_FOUND = "Unable to locate a modulefile"
State = Literal["loads", "missing", "hidden", "fails", "replaced"]
_REMEDIES: dict[State, str] = {
    "missing": "name available modules in `modules` of the recipe or the site file (see `module"
    " avail`; the site's support knows what replaced old ones)",
    "hidden": "put the required modules before it in modules.load",
    "fails": "see the output of the module system above, and change `modules` in the recipe or the"
    " site file",
    "replaced": "load it after the module that replaces it, or remove one of the two",
}


class LoadResult(NamedTuple):
    """The result of one module when all are tried, whether or not those before it loaded.

    Attributes:
        status: of ``module load``; 0 is success.
        before: the loaded modules before it; ``after`` likewise.
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
        reason: of the state, for people.
        output: of the module system about it.
    """

    module: str
    state: State
    reason: str = "available"
    output: str = ""

    def __str__(self) -> str:
        return f"{self.module}: {self.reason}"


def judge(trials: Sequence[LoadResult], available: Sequence[str]) -> tuple[Examined, ...]:
    """Whether each module of a set can be loaded.

    Args:
        available: names that the module system knows, also those that cannot be loaded yet.
    """
    return tuple(_judge(trial, trials[n + 1 :], available) for n, trial in enumerate(trials))


def _judge(trial: LoadResult, later: Sequence[LoadResult], available: Sequence[str]) -> Examined:
    module, output = trial.module, trial.output.strip()
    # Environment Modules 3 has the status 0 also for a module that does not exist. A loaded
    # module may have another name (an alias), or have been loaded by a module before it.
    named = is_among(module, trial.after)
    if trial.status == 0 and (named or trial.after != trial.before or not output):
        why = _replaced(trial, later)
        return Examined(module, "replaced" if why else "loads", why or "available", output)
    first = trial.prerequisites
    if not first and _NOT_FOUND in output and is_among(module, available):
        # It exists at the end, so a later module has opened its directory.
        first = (" ".join(each.module for each in later if each.status == 0),)
    if first:
        return Examined(module, "hidden", f"first load {', or '.join(first)}", output)
    if is_among(module, available):
        return Examined(module, "fails", "available, but cannot be loaded", output)
    near = ", ".join(nearest(module, available))
    reason = f"not available; similar modules: {near}" if near else "not available"
    return Examined(module, "missing", reason, output)


def _replaced(trial: LoadResult, later: Sequence[LoadResult]) -> str:
    """Which later module unloaded one that was loaded; empty if it stays."""
    mine = {name for name in trial.after if is_among(trial.module, [name])}
    mine = mine or set(trial.after) - set(trial.before)
    last = later[-1].after if later else ()
    if not later or not mine or mine & set(last) or is_among(trial.module, last):
        return ""
    culprit = next(each.module for each in later if not mine & set(each.after))
    families = {module_family(name) for name in mine}
    instead = [name for name in last if module_family(name) in families and name != culprit]
    loads = f", which loads {', '.join(instead)}" if instead else ""
    return f"unloaded by {culprit}{loads}"


def refusal(examined: Iterable[Examined]) -> StepError | None:
    """The error that names all modules of a set that cannot be loaded; None without any."""
    failed = [each for each in examined if each.state != "loads"]
    if not failed:
        return None
    lines = [str(each) for each in failed] if len(failed) > 1 else []
    for each in failed:
        if each.state == "fails":
            lines += [f"module system on {each.module}:"]
            lines += each.output.splitlines()[-_OUTPUT_LINES:]
    return StepError(
        str(failed[0]) if len(failed) == 1 else f"{len(failed)} modules cannot be loaded",
        where=os.uname().nodename,
        detail="\n".join(lines),
        remedy="; ".join(dict.fromkeys(_REMEDIES[each.state] for each in failed)),
    )


# Large sites on a slow file system need half a minute.
LOAD_SECONDS = 120.0

# What a shell was doing: loading, unloading, or reading a script.
_OF_MODULES = re.compile(r"(module|\.) ")
_OWN_MESSAGE = re.compile(r"^hvdenv: on \S+: (.+)$", re.MULTILINE)


class Attempt(NamedTuple):
    """The result of loading each module of a set, also after one that cannot be loaded.

    Attributes:
        system: name and version of the module system.
        loaded: what it changed, if all of them loaded.
        available: names of all modules; empty if they were not listed.
    """

    system: str
    loaded: Loaded
    examined: tuple[Examined, ...]
    available: tuple[str, ...]


def load(
    modules: Modules, phase: Phase, runner: Runner, *, seconds: float = LOAD_SECONDS
) -> Loaded:
    """Load a set, and return how it changes the environment.

    Args:
        modules: with the user's directories in place of placeholders.
        runner: its cleaned environment is the starting point.

    Raises:
        IncompatibleError: this machine has no module system.
        StepError: a module is missing, hidden, in conflict, or replaced by another one of the
            set, or loading takes too long; names all such modules.
    """
    attempt = try_out(modules, phase, runner, seconds=seconds)
    if error := refusal(attempt.examined):
        raise error
    return attempt.loaded


def try_out(
    modules: Modules,
    phase: Phase,
    runner: Runner,
    *,
    seconds: float = LOAD_SECONDS,
    listing: bool = False,
) -> Attempt:
    """Load each module of a set; arguments as for load().

    Args:
        listing: list all modules even if every one can be loaded; with Lmod also those deep in
            hierarchies.

    Raises:
        IncompatibleError: this machine has no module system.
        StepError: what precedes the modules fails, such as a missing directory; or it takes too long.
    """
    if not shutil.which("bash"):
        raise _no_system()
    commands = load_commands(modules, phase)
    with TemporaryDirectory(prefix="hvdenv-modules-") as folder:
        shell = _Shell(Path(folder), runner, seconds)
        lines = (
            *shell_lines(modules._replace(load=(), build=()), "run", cleaned=True),
            f"hvdenv_failed={'yes' if listing else ''}",
            f'printf %s "${{LOADEDMODULES-}}" > {shell.word("before")}',
            *(
                line
                for number, (module, command) in enumerate(commands)
                for line in _trial_lines(shell.word(str(number)), module, command)
            ),
            each_unloaded(modules, phase, "hvdenv_failed=yes"),
            "trap - DEBUG",
            f"/usr/bin/env -0 > {shell.word('environment')}",
            f"module --version > {shell.word('version')} 2>&1",
            'test -n "$hvdenv_failed" || exit 0',
            list_modules(shell.word("available")),
        )
        outcome = shell.run(lines)
        if not (shell.folder / "environment").exists():
            raise shell.stopped(outcome)
        after = parse_environment(read_file(shell.folder / "environment", RESULT).data)
        if "PATH" in after:
            after["PATH"] = absolute_folders(after["PATH"])
        loaded = compare(runner.environment(outcome.command), after)
        available = parse_available(shell.text("available"))
        trials = tuple(_trials(shell, [module for module, _ in commands]))
        version = _VERSION.search(shell.text("version"))
    name = next((each.name for each in BACKENDS if after.get(each.variable)), BACKENDS[-1].name)
    system = f"{name} {version['version']}" if version else name
    return Attempt(system, loaded, judge(trials, available), available)


def _no_system() -> IncompatibleError:
    return IncompatibleError(
        "this machine has no module system, and the recipe loads modules",
        where=os.uname().nodename,
        remedy="call hvdenv on the cluster that the recipe is for, or use a recipe without"
        " modules, such as local; if this machine has a module system, set modules.init in the"
        " recipe or site file to the script that defines the command module",
    )


def _trial_lines(prefix: str, module: str, command: str) -> Iterator[str]:
    yield f"{{ {command}; }} > {prefix}.output 2>&1"
    yield f"printf %s $? > {prefix}.status"
    yield f'printf %s "${{LOADEDMODULES-}}" > {prefix}.after'
    # Lmod explains what to load first.
    hint = f'test -z "${{LMOD_CMD-}}" || module spider {shlex.quote(module)} > {prefix}.hint 2>&1'
    yield f'test "$(cat {prefix}.status)" = 0 || {{ hvdenv_failed=yes; {hint}; }}'


def _trials(shell: _Shell, modules: Iterable[str]) -> Iterator[LoadResult]:
    before = split_loaded(shell.text("before"))
    for number, module in enumerate(modules):
        yield LoadResult(
            module=module,
            status=int(shell.text(f"{number}.status")),
            output=shell.text(f"{number}.output"),
            before=before,
            after=(before := split_loaded(shell.text(f"{number}.after"))),
            prerequisites=parse_prerequisites(shell.text(f"{number}.hint")),
        )


class _Shell(NamedTuple):
    """A bash for commands that write their results to a directory, since modules print to its output."""

    folder: Path
    runner: Runner
    seconds: float

    def word(self, name: str) -> str:
        """A file in the directory, quoted for a shell."""
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

    def stopped(self, outcome: Outcome) -> HvdenvError:
        """The error for a shell that stopped early."""
        done = [line for line in self.text("commands").splitlines() if _OF_MODULES.match(line)]
        last = done[-1] if done else "bash"
        own = _OWN_MESSAGE.findall(outcome.output)
        host = os.uname().nodename
        message = f"the shell ended at `{last}`"
        if outcome.timed_out:
            message = f"`{last}` did not end within {self.seconds:g} s and was killed"
        elif own and own[-1] == NO_SYSTEM:
            return _no_system()
        elif own:
            message = f"cannot load modules: {own[-1]}"
        return StepError(
            message,
            where=host,
            detail=_OWN_MESSAGE.sub("", outcome.tail(_OUTPUT_LINES)).strip("\n"),
            remedy=f"try it in a shell on {host}, and correct `modules` in the recipe or the site"
            " file; what hangs may wait for a file system or a license server",
        )
