"""The result of a build: whether there is one of a plan already, and its drift from a lock."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
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
    started = time.monotonic()
    active = environment.active()
    if not active or environment.damage(active):
        return None
    found = generations.read_record(environment.record(active))
    if found.plan_digest != plan.digest:
        return None
    refused = refused_drift(plan.locked, found, accepted)
    if refused:
        raise drift_error(
            "the environment was not made with what the lock was built with",
            str(environment.prefix),
            refused,
            "--rebuild makes a new one with what this machine has now",
        )
    return result(environment, active, plan.locked, started, changed=False)


def result(
    environment: Environment, identity: str, locked: Locked | None, started: float, *, changed: bool
) -> Built:
    found = generations.read_record(environment.record(identity)) if locked else GenerationRecord()
    return Built(
        prefix=environment.prefix,
        generation=environment.generation(identity),
        changed=changed,
        seconds=time.monotonic() - started,
        drift=drift(locked, found),
    )


def drift(locked: Locked | None, record: GenerationRecord) -> tuple[compare.Difference, ...]:
    """How a build differs from the one that filled in the lock."""
    if locked is None or locked.lock.built is None:
        return ()
    return lock_built.drift(locked.lock.built, lock_built.built_with(record))


def refused_drift(
    locked: Locked | None, record: GenerationRecord, accepted: Collection[str]
) -> list[compare.Difference]:
    """The differences that a rule makes an error and the user does not accept."""
    return [
        each
        for each in drift(locked, record)
        if each.severity == "error" and each.name not in accepted
    ]


def drift_error(
    message: str, where: str, refused: Sequence[compare.Difference], remedy: str
) -> LockError:
    options = " ".join(f"--accept-drift {each.name}" for each in refused)
    return LockError(
        message,
        where=where,
        detail="\n".join(f"{each}: {each.reason}" for each in refused),
        remedy=f"{remedy}; or accept the differences: {options}",
    )
