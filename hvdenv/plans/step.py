"""The steps of a build, as plain data, and their digest."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hvdenv.base.command import Command
from hvdenv.model.cluster import Modules

# Variables that change how fast a step runs or where its files come from, but not its result.
_NOT_IN_DIGEST = {
    "CMAKE_BUILD_PARALLEL_LEVEL",
    "MAKEFLAGS",
    "MAX_JOBS",
    "CONDA_OFFLINE",
    "PIP_FIND_LINKS",
    "PIP_NO_INDEX",
    "RATTLER_CACHE_DIR",
    "UV_CACHE_DIR",
}

Effect = Literal[
    "",
    "modules",
    "resolve",
    "closure",
    "framework-lookup",
    "framework-keep",
    "framework-install",
    "lookup",
    "keep",
    "tidy",
    "manifest",
    "record",
]


class TextFile(NamedTuple):
    """A file that a step writes before its commands run."""

    path: Path
    text: str


class Wheel(NamedTuple):
    """A wheel that a cache may have.

    Attributes:
        directory: where it is put, or compiled.
        inputs: what goes into it beside the stack, as JSON values.
    """

    directory: Path
    inputs: Mapping[str, Any]


class RequestedPackages(NamedTuple):
    """Python packages to resolve.

    Attributes:
        sources: where to look besides pip's configuration, as arguments of uv_pip.py.
        cpu: packages that should be CPU builds.
        listed: where to write the files that were found.
        pins: versions to keep, by name.
        alone: whether only these are resolved, without what they require.
    """

    requirements: tuple[str, ...]
    sources: tuple[str, ...]
    cpu: tuple[str, ...]
    listed: Path
    pins: Mapping[str, str] = {}
    alone: bool = False


class Step(NamedTuple):
    """One step of a build.

    Attributes:
        name: short, unique within the plan.
        effect: what hvdenv itself does in this step, after the commands:
            ``modules`` loads them, and all later steps see what they set,
            ``resolve`` finds the files of the packages that are requested,
            ``closure`` reports a failure as one of the lock,
            ``lookup`` looks for a cached wheel of Horovod that fits what the commands print,
            ``keep`` stores the wheel in the cache, ``framework-lookup`` and ``framework-keep``
            do the same for a framework's, ``framework-install`` records it, ``tidy`` removes the build directory,
            ``manifest`` lists every file, ``record`` marks the generation as complete
            and points the prefix at it.
        spared_by: the step that looks for a cached wheel; if it finds one, this step is skipped.
        wheel: for the steps that look for it, and store that of a framework.
    """

    name: str
    reason: str
    commands: tuple[Command, ...] = ()
    files: tuple[TextFile, ...] = ()
    effect: Effect = ""
    spared_by: str = ""
    wheel: Wheel | None = None
    requested: RequestedPackages | None = None
    report: Path | None = None
    modules: Modules | None = None


class Progress(AbstractContextManager["Progress"]):
    """What a build reports while it runs; shows nothing."""

    def __exit__(self, *error: object) -> None: ...

    def step_started(self, number: int, step: Step) -> None: ...

    def step_line(self, line: str) -> None: ...

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None: ...

    def note(self, text: str) -> None: ...


def content(step: Step) -> Any:
    """What a step does, without what does not change the result."""
    commands = [
        [each.argv, [v for v in each.env if v[0] not in _NOT_IN_DIGEST], each.derived, each.cwd]
        for each in step.commands
    ]
    return [
        step.name,
        step.effect,
        commands,
        [[str(file.path), file.text] for file in step.files],
        step.modules,
        step.requested and [*step.requested.sources, *step.requested.pins.items()],
    ]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
