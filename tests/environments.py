"""Environments for tests of what hvdenv does with finished ones."""

from __future__ import annotations

from typing import Any

from hvdenv.environments import generations
from hvdenv.environments.generations import Environment

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
    fields = {"created": generations.now(), "generation": identity, **record}
    path = environment.record(identity)
    generations.write_record(path, generations.decode_record(fields, path))
    return identity
