"""The record of a generation, hvdenv.json: it marks the generation as complete."""

from __future__ import annotations

import os
from pathlib import Path

from hvdenv.building.finished import drift
from hvdenv.building.state import Done, State
from hvdenv.contents.record import GenerationRecord, LockUse
from hvdenv.environments import generations
from hvdenv.environments.installation import recorded as installed
from hvdenv.environments.installation import with_modules
from hvdenv.errors import HvdenvError
from hvdenv.locks import pypi
from hvdenv.locks.lockfile import Locked
from hvdenv.masking import mask
from hvdenv.places import reporting, sync_tree
from hvdenv.plans.step import Step
from hvdenv.reading import RESULT, read_json
from hvdenv.schema import Table, encode
from hvdenv.verification import inspection
from hvdenv.verification.setup import Setup

OBSERVE_SECONDS = 60.0


def write(state: State, _: Step, __: str) -> Done:
    """The effect of the last step: write the record, and point the prefix at the generation."""
    record = _contents(state)
    generation = state.plan.generation
    with reporting(generation, inside=True):
        sync_tree(generation)
    identity = generation.name
    generations.write_record(state.environment.record(identity), record)
    generations.switch(state.environment, identity)
    return Done(str(state.environment.prefix))


def installed_packages(report: Path) -> list[dict[str, str]]:
    """Name, version, address and hash of each conda package in a report."""
    return [{**each, "url": mask(each["url"])} for each in read_json(report, RESULT)]


def _contents(state: State) -> GenerationRecord:
    plan, listed, recorded = state.plan, state.recorded["manifest"], state.recorded
    own = plan.environment.is_relative_to(plan.generation)
    packages = [package for step in recorded.values() for package in step.get("packages", ())]
    if plan.locked:
        # No installer wrote a report of these.
        packages += [each._asdict() for each in pypi.packages(plan.locked)]
    record = state.known()._replace(
        recipe=plan.recipe,
        variants=tuple(plan.variants),
        prefix=str(state.environment.prefix),
        generation=plan.generation.name,
        created=generations.timestamp(),
        plan_digest=plan.digest,
        manifest_digest=listed["digest"],
        files=listed["files"],
        bytes=listed["bytes"],
        variables=dict(plan.variables),
        resolved=dict(state.request.resolved),
        findings=tuple(dict(each) for each in state.request.findings),
        environment=os.path.relpath(plan.environment, plan.generation)
        if own
        else str(plan.environment),
        stack=recorded.get("stack", {}).get("inputs", {}),
        wheel=dict(recorded.get("inspection", {})),
        packages=tuple(packages),
        additions=encode(plan.additions) if plan.additions else {},
    )
    record = record._replace(observed=_observed(state, record))
    if "stack" not in recorded:  # Horovod is the site's: nothing was compared before
        state.refuse_drift(record)
    return record._replace(lock=_lock_use(state, plan.locked, record)) if plan.locked else record


def _lock_use(state: State, locked: Locked, record: GenerationRecord) -> LockUse:
    differences = drift(locked, record)
    for each in differences:
        state.progress.note(f"drift from the lock: {each}")
    return LockUse(
        digest=locked.digest,
        drift=tuple(encode(each) for each in differences),
        accepted=tuple(sorted({each.name for each in differences} & {*state.request.accepted})),
    )


def _observed(state: State, record: GenerationRecord) -> Table | None:
    """What verify will find in the environment, to report later what has changed."""
    # Not the runner of the steps: that one has the modules for the build.
    runner = state.plain_runner
    loaded = state.recorded.get("modules", {}).get("run", {})
    try:
        found = installed(state.plan.generation, record)
        found = with_modules(found, loaded["set"]) if loaded else found
        setup = Setup(found, runner)
        mpi, _ = inspection.host_mpi(setup, OBSERVE_SECONDS)
        observed: Table = encode(inspection.observe(setup, OBSERVE_SECONDS, mpi))
        return observed
    except HvdenvError as error:
        state.progress.note(f"verify cannot report what has changed since: {error.message}")
        return None
