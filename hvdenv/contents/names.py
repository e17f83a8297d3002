"""Names of Python packages."""

from __future__ import annotations

import re


def canonicalize_name(name: str) -> str:
    """The form in which names are compared (PEP 503).

    packaging.utils has the same function, but imports logging and more that light commands do not
    need.
    """
    return re.sub(r"[-_.]+", "-", name).lower()
