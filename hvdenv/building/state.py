"""The request and the state of a build, and its result."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv import __version__
from hvdenv.base.errors import LockError
from hvdenv.base.places import Places
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.building import wheelcache
from hvdenv.environments import generations, prefix_lock
from hvdenv.environments.generations import Environment
from hvdenv.locks import compare
from hvdenv.locks.lockfile import MAIN, Locked
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.cluster import Wheels
from hvdenv.model.facts import Facts
from hvdenv.plans.plan import Plan
from hvdenv.plans.step import Progress
from hvdenv.sites.modules import Loaded


class Built(NamedTuple):
    """The result of a build.

    Attributes:
        changed: False when there was nothing to do.
    """

    prefix: Path
    generation: Path
    changed: bool
    seconds: float


def already_built(environment: Environment, plan: Plan) -> Built | None:
    """The generation that the prefix points to, if it is complete and of this plan.

    Raises:
        LockError: it is, but it was made with something else than the lock has.
    """
    active = environment.active()
    if not active or environment.damage(active):
        return None
    found = generations.read_record(environment.record(active))
    if found.plan_digest != plan.digest:
        return None
    if refused := refused_drift(plan.locked, found):
        raise LockError(
            "the environment was not made with what the lock was built with",
            where=str(environment.prefix),
            detail=refused.detail,
            remedy=f"--rebuild makes a new one with what this machine has now; {refused.remedy}",
        )
    return Built(
        prefix=environment.prefix,
        generation=environment.generation(active),
        changed=False,
        seconds=0.0,
    )


def refused_drift(locked: Locked | None, record: GenerationRecord) -> LockError | None:
    """The error if a build differs from the one that filled in the lock."""
    if locked is None or locked.lock.built is None:
        return None
    refused = [*compare.drift(locked.lock.built, compare.built_with(record))]
    if not refused:
        return None
    return LockError(
        "this machine differs from the one that the lock was made on",
        where=str(locked.folder),
        detail="\n".join(f"{each}: {each.reason}" for each in refused),
        remedy="load or name what the lock has; or, to build with what this machine has, remove the"
        f" table [built] from {locked.folder / MAIN}",
    )


LOGS = "logs"

# What the record of a generation has from a step: JSON.
Record = Mapping[str, Any]


class Done(NamedTuple):
    """The result of a step: a note for the user, and what later steps and the record need."""

    note: str = ""
    data: Record = {}


class BuildRequest(NamedTuple):
    """What to build.

    Attributes:
        plan: of no directory yet.
        resolved: the recipe as plain tables, for the record.
        modules: what the recipe's modules set for the build, from try_modules().
    """

    plan: Plan
    resolved: Record
    facts: Facts
    findings: tuple[Mapping[str, str | bool], ...]
    modules: Loaded | None = None
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
        request: BuildRequest,
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
            LockError: it differs.
        """
        if refused := refused_drift(self.plan.locked, record):
            raise refused
