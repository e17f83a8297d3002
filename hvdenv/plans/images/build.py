"""Why the build of an image failed, from what its tool printed."""

from __future__ import annotations

import re

from hvdenv.command import Outcome
from hvdenv.errors import StepError
from hvdenv.plans.images.formats import Build

# What tools print last if they may not build or cannot, the cause, and what helps.
_REFUSALS = (
    (
        r"could not use fakeroot|You must be the root user"
        r"|(not enough IDs|insufficient UIDs or GIDs) available in .{0,200}namespace"
        r"|creating \S{0,200}/dev/null: operation not permitted|set(groups|egid|euid) \d+ failed"
        r"|/\.singularity\.d/libs/fake(d|root)",
        "you may not be root in an image on this machine (fakeroot): /etc/subuid and /etc/subgid"
        " have no range for you",
        "ask an administrator for one (`usermod --add-subuids 100000-165535 --add-subgids"
        " 100000-165535 USER`), or build where you are root and copy the image to this machine",
    ),
    (
        r"Failed to create \S+ namespaces?|no user namespace available|cannot clone: Operation not permitted"
        r"|user namespaces? (is|are) (disabled|not)",
        "this machine does not let you create user namespaces",
        "build on another machine or as root, and copy the image to this machine",
    ),
    (
        r"Cannot connect to the Docker daemon|permission denied .{0,80}docker\S{0,2} daemon",
        "the Docker daemon does not run, or you may not use it",
        "start it, join its group, or install podman or buildah, which need no daemon",
    ),
    (
        r"No space left on device|disk quota exceeded",
        "the file system that the image is built on is full",
        "use another one: set APPTAINER_TMPDIR and APPTAINER_CACHEDIR for apptainer, TMPDIR for"
        " the other tools",
    ),
    (
        r"no such host|dial tcp|Temporary failure (in name resolution|resolving)|connection refused",
        "this machine cannot reach a registry or a package server",
        "build on a machine that can, or set https_proxy; give files of this machine that the"
        " build needs (pip.conf, a folder of packages) with --bind",
    ),
    (
        r"manifest unknown|unexpected status code 40[13]|access to the resource is denied",
        "the registry does not provide the base image",
        "check that its name and tag exist: container.base",
    ),
)


def failed(build: Build, outcome: Outcome) -> StepError:
    """The error for a build that failed."""
    tail = outcome.tail()
    known = (
        (cause, remedy)
        for pattern, cause, remedy in _REFUSALS
        if re.search(pattern, tail, re.IGNORECASE)
    )
    unknown = (
        f"{build.tool} could not build the image (exit {outcome.returncode})",
        "see the last lines above; `hvdenv plan RECIPE --format bash` prints what runs in the image",
    )
    cause, remedy = next(known, unknown)
    return StepError(cause, where=build.image, remedy=remedy, detail=tail)
