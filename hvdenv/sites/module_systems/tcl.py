"""Environment Modules, versions 3 to 5."""

from __future__ import annotations

import re

from hvdenv.sites.module_systems.backend import Backend


def _list_modules(version: str, path: str) -> tuple[str, ...]:
    every = "" if version.startswith("3.") else "--all "
    return (f"module avail {every}-t > {path} 2>&1",)


BACKEND = Backend(
    name="Environment Modules",
    # Version 3 does not set it.
    variable="MODULES_CMD",
    modulefile="tcl",
    scripts=(
        ('"${MODULESHOME-}/init/sh"',),
        ("/etc/profile.d/modules.sh",),
        ("/usr/share/modules/init/sh",),
    ),
    version=re.compile(r"(Modules Release |^VERSION=)(?P<version>\S+)", re.MULTILINE),
    list_modules=_list_modules,
    not_found="Unable to locate a modulefile",
)
