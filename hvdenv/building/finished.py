"""Generations that are of a plan already, and how they differ from its lock."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.errors import LockError
from hvdenv.locks import built as lock_built
from hvdenv.locks import compare
from hvdenv.locks.lockfile import Locked
from hvdenv.plans.plan import Plan


class Built(NamedTuple):
    """The result of a build.

    Attributes:
        changed: False when there was nothing to do.
    """

    prefix: Path
    generation: Path
    changed: bool
    seconds: float
    drift: tuple[compare.Difference, ...] = ()


def already_built(
    environment: Environment, plan: Plan, accepted: Collection[str] = ()
) -> Built | None:
    """The generation that the prefix points to, if it is complete and of this plan.

    Raises:
        LockError: it is, but it was made with a drift that is not accepted now.
    """
    active = environment.active()
    if not active or environment.damage(active):
        return None
    found = generations.read_record(environment.record(active))
    if found.plan_digest != plan.digest:
        return None
    if refused := refused_drift(plan.locked, found, accepted):
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
        drift=drift(plan.locked, found),
    )


def drift(locked: Locked | None, record: GenerationRecord) -> tuple[compare.Difference, ...]:
    """How a build differs from the one that filled in the lock."""
    if locked is None or locked.lock.built is None:
        return ()
    return lock_built.drift(locked.lock.built, lock_built.built_with(record))


def refused_drift(
    locked: Locked | None, record: GenerationRecord, accepted: Collection[str]
) -> LockError | None:
    """The error if a rule makes a difference an error and the user does not accept it."""
    refused = [
        each
        for each in drift(locked, record)
        if each.severity == "error" and each.name not in accepted
    ]
    if not (locked and refused):
        return None
    options = " ".join(f"--accept-drift {each.name}" for each in refused)
    return LockError(
        "this machine differs from the one that the lock was made on",
        where=str(locked.folder),
        detail="\n".join(f"{each}: {each.reason}" for each in refused),
        remedy=f"load or name what the lock has, or accept the differences: {options}",
    )
