"""What hvdenv has to know about a module system."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

SystemName = Literal["Lmod", "Environment Modules"]


class Backend(NamedTuple):
    """All that hvdenv knows about one module system.

    Attributes:
        variable: set in shells where it is in use.
        modulefile: the language that hvdenv writes modulefiles in: ``lua`` or ``tcl``.
        scripts: scripts that define ``module``, as shell words: those named by variables,
            of the login shells, and of distributions.
        version: finds the version in the output of ``module --version``.
        list_modules: shell commands that write the names of all modules to a file, from the
            version and the file.
        hint: shell command that explains why ``{module}`` cannot be loaded; may be empty.
        prerequisites: reads from that what to load first: sets of modules such as
            ``GCC/10.2.0 OpenMPI/4.0.5``, any one of which is enough.
        not_found: what it prints about a module that does not exist or is hidden; may be empty.
    """

    name: SystemName
    variable: str
    modulefile: Literal["lua", "tcl"]
    scripts: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    version: re.Pattern[str]
    list_modules: Callable[[str, str], tuple[str, ...]]
    hint: str = ""
    prerequisites: Callable[[str], tuple[str, ...]] = lambda text: ()
    not_found: str = ""
