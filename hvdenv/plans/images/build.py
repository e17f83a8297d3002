"""Why the build of an image failed, from what its tool printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from hvdenv.command import Outcome
from hvdenv.errors import StepError
from hvdenv.plans.images.formats import Build
from hvdenv.reading import OWN, read_text
from hvdenv.schema import decode, parse_toml


class _Failure(NamedTuple):
    pattern: str
    cause: str
    remedy: str


def failures() -> tuple[_Failure, ...]:
    """The known ones; the first that fits counts."""
    text = read_text(Path(__file__).with_name("failures.toml"), OWN)
    return decode(tuple[_Failure, ...], parse_toml(text)["failure"])


def failed(build: Build, outcome: Outcome) -> StepError:
    """The error for a build that failed."""
    tail = outcome.tail()
    unknown = _Failure(
        "",
        f"{build.tool} could not build the image (exit {outcome.returncode})",
        "see the last lines above; `hvdenv plan RECIPE --format bash` prints what runs in the image",
    )
    fitting = (each for each in failures() if re.search(each.pattern, tail, re.IGNORECASE))
    found = next(fitting, unknown)
    return StepError(found.cause, where=build.image, remedy=found.remedy, detail=tail)
