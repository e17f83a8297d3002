"""The module systems that hvdenv supports. To add one, write a file like lmod.py and enter it."""

from __future__ import annotations

from hvdenv.sites.module_systems import lmod, tcl
from hvdenv.sites.module_systems.backend import Backend

# The last one is in use where no other's variable is set.
BACKENDS: tuple[Backend, ...] = (lmod.BACKEND, tcl.BACKEND)
