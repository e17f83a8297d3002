"""Why modules of a set cannot be loaded, from a trial of each of them. Data in, data out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from hvdenv.errors import StepError
from hvdenv.sites.module_systems import BACKENDS
from hvdenv.sites.modules import is_among, module_family, nearest

OUTPUT_LINES = 12
_NOT_FOUND = tuple(each.not_found for each in BACKENDS if each.not_found)
State = Literal["loads", "missing", "hidden", "fails", "replaced"]
_REMEDIES: dict[State, str] = {
    "missing": "name available modules in `modules` of the recipe or the site file (see `module"
    " avail`; the site's support knows what replaced old ones)",
    "hidden": "put the required modules before it in modules.load",
    "fails": "see the output of the module system above, and change `modules` in the recipe or the"
    " site file",
    "replaced": "load it after the module that replaces it, or remove one of the two",
}


class Trial(NamedTuple):
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


def judge(trials: Sequence[Trial], available: Sequence[str]) -> tuple[Examined, ...]:
    """Whether each module of a set can be loaded.

    Args:
        available: names that the module system knows, also those that cannot be loaded yet.
    """
    return tuple(_judge(trial, trials[n + 1 :], available) for n, trial in enumerate(trials))


def _judge(trial: Trial, later: Sequence[Trial], available: Sequence[str]) -> Examined:
    module, output = trial.module, trial.output.strip()
    # Environment Modules 3 has the status 0 also for a module that does not exist. A loaded
    # module may have another name (an alias), or have been loaded by a module before it.
    named = is_among(module, trial.after)
    if trial.status == 0 and (named or trial.after != trial.before or not output):
        why = _replaced(trial, later)
        return Examined(module, "replaced" if why else "loads", why or "available", output)
    first = trial.prerequisites
    if not first and any(each in output for each in _NOT_FOUND) and is_among(module, available):
        # It exists at the end, so a later module has opened its directory.
        first = (" ".join(each.module for each in later if each.status == 0),)
    if first:
        return Examined(module, "hidden", f"first load {', or '.join(first)}", output)
    if is_among(module, available):
        return Examined(module, "fails", "available, but cannot be loaded", output)
    near = ", ".join(nearest(module, available))
    reason = f"not available; similar modules: {near}" if near else "not available"
    return Examined(module, "missing", reason, output)


def _replaced(trial: Trial, later: Sequence[Trial]) -> str:
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
            lines += each.output.splitlines()[-OUTPUT_LINES:]
    return StepError(
        str(failed[0]) if len(failed) == 1 else f"{len(failed)} modules cannot be loaded",
        where=os.uname().nodename,
        detail="\n".join(lines),
        remedy="; ".join(dict.fromkeys(_REMEDIES[each.state] for each in failed)),
    )
