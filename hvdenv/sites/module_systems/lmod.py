"""Lmod."""

from __future__ import annotations

import re

from hvdenv.sites.module_systems.backend import Backend

_PREREQUISITES = re.compile(
    r"You will need to load all module\(s\) on any one of the lines below[^\n]{0,200}\n"
    r"[ \t]*\n(?P<lines>([ \t]+[^\s][^\n]*\n)+)"
)


def _prerequisites(text: str) -> tuple[str, ...]:
    """From ``module spider NAME/VERSION``."""
    found = _PREREQUISITES.search(text)
    lines = found["lines"].splitlines() if found else []
    return tuple(" ".join(line.split()) for line in lines)


BACKEND = Backend(
    name="Lmod",
    variable="LMOD_CMD",
    modulefile="lua",
    scripts=(
        ('"${LMOD_PKG-}/init/sh"',),
        ("/etc/profile.d/lmod.sh", "/etc/profile.d/z00_lmod.sh"),
        ("/usr/share/lmod/lmod/init/sh",),
    ),
    version=re.compile(r"Modules based on Lua: Version (?P<version>\S+)"),
    list_modules=lambda version, path: (
        f"module --show_hidden -t avail > {path} 2>&1",
        f"module -t spider >> {path} 2>&1",
    ),
    hint="module spider {module}",
    prerequisites=_prerequisites,
)
