"""Secrets out of, and control sequences off, every text that is shown or kept."""

from __future__ import annotations

import re

_URL_CREDENTIALS = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@'\"]+@")
_NAMED_SECRET = re.compile(
    r"(?i)(?P<name>\b[\w-]*(?:token|password|passwd|secret|api[_-]?key)[\w-]*)(?P<sep>=|: )(?P<value>[^\s&'\"]+)"
)
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


def mask(text: str) -> str:
    """Replace credentials in URLs and values of variables that name a secret."""
    text = _URL_CREDENTIALS.sub(r"\g<scheme>***@", text)
    return _NAMED_SECRET.sub(r"\g<name>\g<sep>***", text)


def plain(text: str) -> str:
    """Drop terminal control sequences; tabs and newlines stay."""
    return _CONTROL.sub("", text)
