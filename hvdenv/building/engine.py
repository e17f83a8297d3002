"""Run a plan: it becomes a generation, and the prefix is pointed at that.

If a step fails, what failed is written down for `doctor`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

from hvdenv.base.command import Outcome, spelled_out
from hvdenv.base.errors import HvdenvError, LockError, StepError
from hvdenv.base.masking import mask
from hvdenv.base.places import HOME_VARIABLE, Places, make_folder, reporting, write_json
from hvdenv.base.reading import REPORT, STATE, read_json
from hvdenv.base.runner import end_marked, environment
from hvdenv.base.schema import Problem, decode
from hvdenv.building import copied, effects
from hvdenv.building.run_step import attempt
from hvdenv.building.state import LOGS, BuildRequest, Built, Done, State, refused_drift
from hvdenv.environments import generations, prefix_lock, registry
from hvdenv.environments.generations import Environment
from hvdenv.knowledge.diagnosis import Diagnosis, diagnose, diagnose_step
from hvdenv.locks.lockfile import Locked
from hvdenv.model.observe import space
from hvdenv.plans.plan import Plan
from hvdenv.plans.step import Progress, Step
from hvdenv.reports.report import Report

LOCK_WAIT_SECONDS = 2.0


def build(
    request: BuildRequest,
    environment: Environment,
    places: Places,
    progress: Progress,
    *,
    rebuild: bool = False,
    break_lock: bool = False,
) -> Built:
    """Build an environment that is not already_built().

    What killed or failed builds left is removed first; caches have what they downloaded and
    compiled. ``rebuild`` makes a new generation even if there is a complete one of this plan.

    Raises:
        StepError: a step failed; the environment that was there before is untouched.
        BusyError: another build holds the prefix.
        UsageError: the prefix cannot be used.
    """
    started = time.monotonic()
    generations.claim(environment)
    with prefix_lock.hold(environment.store, wait=LOCK_WAIT_SECONDS, break_lock=break_lock) as held:
        if held.replaced:
            ended = sum(len(end_marked(token)) for token in held.replaced)
            progress.note(f"an earlier build was killed ({ended} orphaned processes ended)")
        damage = "" if rebuild else environment.damage(environment.pointed())
        if damage:
            progress.note(f"files of {environment.prefix} are damaged, so it is rebuilt: {damage}")
        identity = "" if rebuild else _switch_back(request, environment, places, progress)
        if not identity:
            if any(environment.begun(each) for each in environment.identities()):
                progress.note("removing what an unfinished build left; its downloads are in caches")
            for remaining in generations.delete_unfinished(environment):
                progress.note(remaining)
            identity = generations.new_identity(environment, request.plan.digest)
            generation = generations.create(environment, identity)
            with prefix_lock.scratch_folder(_temporary_root(), "build") as temporary:
                plan = request.plan.at(generation, temporary.path)
                state = State(request, plan, environment, places, progress, held)
                _run(state, copies=not rebuild)
    return Built(
        prefix=environment.prefix,
        generation=environment.generation(identity),
        changed=True,
        seconds=time.monotonic() - started,
    )


def _switch_back(
    request: BuildRequest, environment: Environment, places: Places, progress: Progress
) -> str:
    """Point the prefix to a complete generation of this plan, and return it; empty if there is none.

    One with a drift that is refused does not count.
    """
    plan = request.plan
    for identity, found in environment.records().items():
        refused = refused_drift(plan.locked, found)
        if found.plan_digest == plan.digest and not (refused or environment.damage(identity)):
            generations.switch(environment, identity)
            registry.register(places, environment, found.recipe, found.variants)
            progress.note(f"generation {identity} is of this plan: the prefix points to it again")
            return identity
    return ""


def _temporary_root() -> Path:
    """Where to put the TMPDIR of a build. Killed, pip and compilers leave gigabytes in it."""
    with reporting(Path(environment().get("TMPDIR", "/tmp"))):
        return Path(gettempdir())


def _run(state: State, *, copies: bool) -> None:
    """Run the steps of the plan in an empty generation; if ``copies``, packages may be copied."""
    plan = state.plan
    # Before the first step, so that `doctor` finds the build wherever it is if a step fails.
    registry.register(state.places, state.environment, plan.recipe, plan.variants)
    make_folder(plan.generation / LOGS)
    done: tuple[str, ...] = ()
    for number, step in enumerate(plan.steps, 1):
        state.held.check()
        # Without a lock, a step after the first finds out which packages.
        if copies and step.name == copied.REPLACED[0 if plan.locked else 1]:
            done = _copy(state, number, step)
        if step.name not in done:
            _do(state, number, step)


def _copy(state: State, number: int, step: Step) -> tuple[str, ...]:
    """Copy an environment with the packages of the plan. Returns the steps that this replaces."""
    found = state.recorded.get("resolution", {}).get("packages", ())
    source = copied.find_source(state.plan, state.request.resolved, state.places, found)
    if source is None:
        return ()
    started = time.monotonic()
    reason = f"copying the packages from {source}"
    state.progress.step_started(number, step._replace(reason=reason))
    failure = copied.copy(source, state)
    if failure:
        state.progress.note(f"the packages cannot be copied, so hvdenv installs them: {failure}")
    note = "not copied" if failure else f"copied from {source}"
    state.progress.step_done(number, step, note, time.monotonic() - started)
    return () if failure else copied.REPLACED


def _do(state: State, number: int, step: Step) -> None:
    if step.spared_by and state.recorded[step.spared_by].get("wheel"):
        state.progress.step_done(number, step, "not needed: the wheel is in the cache", 0.0)
        return
    started = time.monotonic()
    state.progress.step_started(number, step)
    log = state.plan.generation / LOGS / f"{number:02}-{step.name}.log"
    try:
        output = _execute(state, step, log)
        done = Done()
        if step.effect in EFFECTS:
            state.log = log
            done = EFFECTS[step.effect](state, step, output)
        elif step.report:
            done = Done(data={"packages": effects.installed_packages(step.report)})
    except StepError as error:
        note_failure(state.plan.generation, state.environment.prefix, step.name, error, log)
        raise
    state.recorded[step.name] = done.data
    state.progress.step_done(number, step, done.note, time.monotonic() - started)


def _execute(state: State, step: Step, log: Path) -> str:
    """Write the files of a step and run its commands; what these print."""
    if step.report:
        make_folder(step.report.parent)
    outcome = attempt(step, state.runner, state.progress, log)
    if not outcome and step.effect == "closure":
        raise _not_closed(state.plan.locked, outcome)
    if not outcome:
        raise _failed(step, outcome, log, state)
    return outcome.output


EFFECTS: Mapping[str, Callable[[State, Step, str], Done]] = {
    "modules": effects.load_modules,
    "resolve": effects.resolve,
    "framework-install": effects.record_framework,
    "framework-lookup": effects.look_up,
    "framework-keep": effects.keep_framework,
    "lookup": effects.look_up,
    "keep": effects.keep_horovod,
    "tidy": effects.tidy,
    "manifest": effects.write_manifest,
    "record": effects.write_record,
}


def _not_closed(locked: Locked | None, outcome: Outcome) -> StepError | LockError:
    problem, lines = "the installed packages lack something that they require", outcome.tail(15)
    if locked is None:
        remedy = "request versions that fit together, under `packages` in the recipe"
        return StepError(problem, where="packages", detail=lines, remedy=remedy)
    return LockError(
        problem,
        where=str(locked.folder),
        detail=lines,
        remedy="the lock was edited by hand, or an index had other metadata:"
        " `hvdenv lock --upgrade RECIPE` writes a new one",
    )


def _failed(step: Step, outcome: Outcome, log: Path, state: State) -> StepError:
    known = diagnose_step(log).best
    how = f"exit status {outcome.returncode}"
    if outcome.returncode < 0:
        how = f"ended by signal {-outcome.returncode}"
    remedy = f"{known.remedy}\n" if known else ""
    if known and known.id == "disk-full":
        remedy = _room(state.plan, state.places)
    return StepError(
        f"step {step.name} failed ({how})" + (f": {known.cause}" if known else ""),
        where=str(log),
        detail=outcome.tail(15),
        remedy=f"{remedy}the whole log is {log}\nto repeat the command alone:\n"
        f"  {spelled_out(outcome.command)}",
    )


def _room(plan: Plan, places: Places) -> str:
    """How to use other places than those that a build writes to, with the space that each has."""
    written = {
        plan.generation: "--prefix DIR",
        Path(plan.step_variables.get("TMPDIR", gettempdir())): "TMPDIR=DIR",
        places.cache: f"{HOME_VARIABLE}=DIR",
    }
    lines = ["free space, or build with another place for what is full:"]
    for folder, option in written.items():
        disk, inodes = space(folder)
        free = f"{(disk or 0) / 1e9:.1f} GB" + ("" if inodes is None else f", {inodes} files")
        lines.append(f"  {option}  instead of {folder} ({free} free; see also quota -s)")
    return "\n".join(lines) + "\n"


# In a generation whose build stopped with an error.
_FAILURE = "failure.json"


class LastFailure(NamedTuple):
    """Something that failed.

    Attributes:
        file: path of its log or report.
        evidence: the output, if it is not in a log.
    """

    what: str
    file: str
    messages: tuple[str, ...]
    evidence: str = ""

    def diagnosis(self) -> Diagnosis:
        """The cause, from its output.

        Raises:
            OSError: the log cannot be read.
        """
        if self.evidence:
            return diagnose(io.BytesIO(self.evidence.encode("utf-8", "replace")))
        return diagnose_step(Path(self.file))


def note_failure(generation: Path, prefix: Path, step: str, error: StepError, log: Path) -> None:
    """Write down why a build stopped, if the disk is not full."""
    message = mask(error.message)
    failure = LastFailure(
        what=f"the build of {prefix} stopped at the step {step}",
        file=str(log if log.exists() else generation),
        messages=(message,),
        evidence="" if log.exists() else message,  # what hvdenv itself refuses has no output
    )
    with suppress(HvdenvError):
        write_json(generation / _FAILURE, failure._asdict())


def last_failure(places: Places) -> LastFailure | None:
    """The newest failure that can be read."""
    stores = [listed.environment.store for listed in registry.list_environments(places)]
    builds = [path for store in stores for path in store.glob(f"*/{_FAILURE}")]
    dated = [(path.stat().st_mtime, path) for path in (*builds, *places.reports.glob("*.json"))]
    for _, path in sorted(dated, reverse=True):
        with suppress(OSError, ValueError, RecursionError, Problem):
            if path.name == _FAILURE:
                return decode(LastFailure, read_json(path, STATE), lenient=True)
            if failure := _failed_verify(path):
                return failure
    return None


def _failed_verify(path: Path) -> LastFailure | None:
    """What a report found; None if nothing failed."""
    report = Report.from_json(read_json(path, REPORT))
    bad = [each for each in report.findings if each.status in ("fail", "error")]
    if not bad:
        return None
    messages = tuple(f"{each.check} {each.subject}: {each.message}" for each in bad)
    return LastFailure(
        what=f"verify of {report.prefix} found failures",
        file=str(path),
        messages=messages,
        evidence="\n".join((*(each.evidence for each in bad), *messages)),
    )
