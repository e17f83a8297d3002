"""How to install libraries that hvdenv uses and this Python lacks."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress


def install_command(*names: str) -> str:
    """The command that installs libraries beside hvdenv, in the versions that hvdenv accepts.

    It does not name hvdenv: no index has it, so anybody could publish a package of that name.

    Args:
        names: of distributions that hvdenv depends on, with or without an extra.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    bounds = dict.fromkeys(names, "")
    with suppress(metadata.PackageNotFoundError):  # a checkout on PYTHONPATH has no metadata
        for text in metadata.requires("hvdenv") or ():
            requirement = Requirement(text)
            if requirement.name in bounds:
                bounds[requirement.name] = str(requirement.specifier)
    words = [f"{name}{bound}" for name, bound in bounds.items()]
    return shlex.join([sys.executable, "-m", "pip", "install", *words])
