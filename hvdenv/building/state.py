"""What the parts of a build share: the request, and the state of a run over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv import __version__
from hvdenv.building.finished import refused_drift
from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import prefix_lock
from hvdenv.environments.generations import Environment
from hvdenv.model.cluster import Wheels
from hvdenv.model.facts import Facts
from hvdenv.places import Places
from hvdenv.plans.plan import Plan
from hvdenv.plans.step import Progress
from hvdenv.runner import Runner
from hvdenv.schema import encode
from hvdenv.sites.modules import Loaded
from hvdenv.wheels import wheelcache

LOGS = "logs"

# What the record of a generation has from a step: JSON.
Record = Mapping[str, Any]


class Done(NamedTuple):
    """The result of a step: a note for the user, and what later steps and the record need."""

    note: str = ""
    data: Record = {}


class Request(NamedTuple):
    """What to build.

    Attributes:
        plan: of no directory yet.
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
        recorded: what steps found out, by step name.
        caches: of wheels: the user's own, then shared ones.
        log: of the step that runs.
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
        self.caches = (wheelcache.own(places), *wheelcache.shared(request.wheels))
        self.recorded: dict[str, Record] = {}
        self.log: Path | None = None

    @property
    def plain_runner(self) -> Runner:
        """A runner without the variables of steps and of modules for the build."""
        return Runner(token=self.held.token)

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
        if refused := refused_drift(self.plan.locked, record, self.request.accepted):
            raise refused
