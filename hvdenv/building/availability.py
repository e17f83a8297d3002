"""What package indexes and channels offer for a recipe; lookup.py asks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Availability(NamedTuple):
    """What indexes and channels answer.

    Attributes:
        wrong: what cannot be installed, by the observable that rules ask about.
        looked_up: what was looked up, with the result.
        not_looked_up: what was not, with the reason.
    """

    wrong: Mapping[str, frozenset[str]] = {}
    looked_up: tuple[str, ...] = ()
    not_looked_up: tuple[str, ...] = ()

    def __or__(self, other: Availability) -> Availability:
        return Availability(
            {**self.wrong, **other.wrong},
            (*self.looked_up, *other.looked_up),
            (*self.not_looked_up, *other.not_looked_up),
        )
