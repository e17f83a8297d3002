"""Environments for tests of what hvdenv does with finished ones."""

from __future__ import annotations

from typing import Any

from hvdenv.base.places import find_places
from hvdenv.base.schema import decode
from hvdenv.environments import generations, registry
from hvdenv.environments.generations import Environment
from hvdenv.locks.record import GenerationRecord

ONE, TWO, THREE = "1" * 12, "2" * 12, "3" * 12


def build(environment: Environment, identity: str, /, **record: Any) -> str:
    """Make a generation as a build leaves it.

    Args:
        environment: claimed.
        identity: of the generation.
        record: fields of its record beside the usual ones.

    Returns:
        The identity.
    """
    folder = generations.create(environment, identity)
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text("")
    fields = {"created": generations.timestamp(), "generation": identity, **record}
    generations.write_record(
        environment.record(identity), decode(GenerationRecord, fields, lenient=True)
    )
    return identity


def build_active(environment: Environment, identity: str, /, **record: Any) -> None:
    """Make a generation, and point the prefix to it."""
    generations.switch(environment, build(environment, identity, **record))


def local() -> Environment:
    """The environment `local` in HVDENV_HOME, registered and without generations."""
    places = find_places()
    environment = generations.at(places.envs / "local")
    environment.prefix.parent.mkdir(parents=True)
    generations.claim(environment)
    registry.register(places, environment, "local", [])
    return environment
