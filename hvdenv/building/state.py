"""What the parts of a build share: the request, and the state of a run over its steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from hvdenv import __version__
from hvdenv.building.finished import drift_error, refused_drift
from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import prefix_lock
from hvdenv.environments.generations import Environment
from hvdenv.environments.journal import FAILED, Journal, chain
from hvdenv.masking import mask
from hvdenv.model.cluster import Wheels
from hvdenv.model.facts import Facts
from hvdenv.places import Places, reporting, sync_tree
from hvdenv.plans.plan import Plan
from hvdenv.plans.step import Progress, Step, identity
from hvdenv.runner import Runner
from hvdenv.schema import encode
from hvdenv.sites.modules import Loaded
from hvdenv.wheels import wheelcache

LOGS = "logs"
JOURNAL = "journal.jsonl"

# What a step records in the journal: JSON.
Record = Mapping[str, Any]


class Done(NamedTuple):
    """The result of a step: a note for the user, and what the journal records."""

    note: str = ""
    data: Record = {}


class Request(NamedTuple):
    """What to build.

    Attributes:
        plan: of no folder yet.
        resolved: the recipe as plain tables, for the record.
        modules: what the recipe's modules set for the build, from try_modules().
        accepted: drifts from the lock that the user accepts although they are errors.
    """

    plan: Plan
    resolved: Record
    facts: Facts
    findings: tuple[Mapping[str, str | bool], ...]
    modules: Loaded | None = None
    accepted: tuple[str, ...] = ()
    wheels: Wheels = Wheels()


class State:
    """The state of one run over the steps of a plan.

    Attributes:
        runner: runs the commands of steps; sees what modules set once they are loaded.
        keys: the key of each step in the journal, by its name, in order.
        recorded: what steps recorded, by step name: in this run or in an earlier one.
        caches: of wheels: the user's own, then shared ones.
    """

    def __init__(
        self,
        request: Request,
        plan: Plan,
        environment: Environment,
        places: Places,
        progress: Progress,
        held: prefix_lock.Held,
    ) -> None:
        self.request = request
        self.plan = plan
        self.environment = environment
        self.places = places
        self.progress = progress
        self.held = held
        self.runner = self.plain_runner.changed(plan.step_variables)
        self.journal = Journal.read(plan.generation / JOURNAL)
        self.caches = (wheelcache.own(places), *wheelcache.shared(request.wheels))
        # When all of the generation was on disk, by the clock that dates its files.
        self._synced = 0.0
        self.recorded: dict[str, Record] = {}
        self.keys: dict[str, str] = {}
        key = ""
        for step in plan.steps:
            key = self.keys[step.name] = chain(key, identity(step))

    @property
    def plain_runner(self) -> Runner:
        """A runner without the variables of steps and of modules for the build."""
        return Runner(token=self.held.token)

    def undo(self, step: str, reason: str = "") -> None:
        """Mark a step as failed in the journal, so that it and those after it run again."""
        data = {"error": mask(reason)} if reason else None
        self.journal.append(FAILED, step, self.keys[step], data=data)

    def sync_all(self) -> None:
        """Write the whole generation to disk."""
        generation = self.plan.generation
        with reporting(generation, inside=True):
            os.utime(generation)
            now = generation.stat().st_mtime
            sync_tree(generation, self._synced)
            self._synced = now

    def finished(self) -> list[Step]:
        """The steps that the journal reports as finished."""
        return [step for step in self.plan.steps if self.journal.finished(self.keys[step.name])]

    def known(self) -> GenerationRecord:
        """What of the record is known before anything is compiled."""
        return GenerationRecord(
            hvdenv=__version__,
            python=self.plan.python._asdict(),
            facts=encode(self.request.facts),
            modules=dict(self.recorded.get("modules", {})),
        )

    def refuse_drift(self, record: GenerationRecord) -> None:
        """Stop if this build, as far as it is known, differs from the one that filled in the lock.

        Raises:
            LockError: a rule makes a difference an error, and the user does not accept it.
        """
        refused = refused_drift(self.plan.locked, record, self.request.accepted)
        if self.plan.locked and refused:
            raise drift_error(
                "this machine differs from the one that the lock was made on",
                str(self.plan.locked.folder),
                refused,
                "load or name what the lock has",
            )
