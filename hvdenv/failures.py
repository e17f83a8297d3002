"""What the output of a failed step says about its cause."""

from __future__ import annotations

import re
from typing import NamedTuple

LINE_LIMIT = 2000


class Signature(NamedTuple):
    """A text by which a failure is known.

    Attributes:
        pattern: found in one line of the output; its groups fill the texts.
        cause: what happened.
        remedy: what to do.
    """

    pattern: str
    cause: str
    remedy: str


# The first that is found is the cause; the specific stand before the general.
SIGNATURES = (
    Signature(
        r"^problem: (.+)",
        "the wheel is not what was asked for: {0}",
        "the log of the step `wheel`, in the same folder, says what CMake found and compiled",
    ),
    Signature(
        r"No space left on device|Disk quota exceeded",
        "the disk or the quota is full",
        "free space, or name another place with --prefix or HVDENV_HOME, then build again: it goes on from here",
    ),
    Signature(
        r"(?:Killed signal terminated program|internal compiler error: Killed)",
        "the compiler was killed, most likely for want of memory",
        "build where more memory is free; fewer cores compile less at once (taskset -c 0 hvdenv build ...)",
    ),
    Signature(
        r"the text to replace occurs (\d+) times instead of once",
        "a patch does not fit this source",
        "the recipe names another Horovod version than the patch was written for: see hvdenv/patches",
    ),
    Signature(
        r"Could not find a version that satisfies the requirement (\S+) \(from versions: none\)",
        "pip found no package {0}: no index answered, or none has it",
        "look whether the index can be reached from here; a mirror is named by PIP_INDEX_URL or pip.conf, "
        "a folder of wheels by PIP_FIND_LINKS, a proxy by https_proxy",
    ),
    Signature(
        r"(?:No matching distribution found for|Could not find a version that satisfies the requirement) (\S+)",
        "no index has {0} for this Python and machine",
        "name a version that exists for this Python (frameworks.*.version), or another Python (--python)",
    ),
    Signature(
        r"THESE PACKAGES DO NOT MATCH THE HASHES|has sha256 \w+, expected",
        "a package that was fetched is not the one that the recipe names",
        "do not use it: ask who runs the index or mirror; if the recipe's sha256 is wrong, correct it",
    ),
    Signature(
        r"(?:Temporary failure in name resolution|Failed to establish a new connection|"
        r"NewConnectionError|ConnectTimeoutError|Network is unreachable)",
        "the network cannot be reached",
        "a mirror is named by PIP_INDEX_URL or pip.conf, a folder of wheels by PIP_FIND_LINKS, a proxy by https_proxy",
    ),
    Signature(
        r"CMake Error at (\S+)",
        "CMake stopped at {0}",
        "the lines before it say why",
    ),
    Signature(
        r"(\S+:\d+:\d+: (?:fatal )?error: .*)",
        "the compiler stopped: {0}",
        "`hvdenv check RECIPE` lists what is known of this combination of versions",
    ),
)


def explain(output: str) -> Signature | None:
    """The first signature that a line of the output shows, with its texts filled in."""
    # A pattern's time can grow with the square of a line's length.
    lines = [line[:LINE_LIMIT] for line in output.splitlines()]
    for signature in SIGNATURES:
        pattern = re.compile(signature.pattern)
        for line in lines:
            found = pattern.search(line)
            if found:
                groups = [group or "" for group in found.groups()]
                return signature._replace(cause=signature.cause.format(*groups))
    return None
