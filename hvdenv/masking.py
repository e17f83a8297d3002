"""Secrets out of, and control sequences off, every text that is shown or kept."""

from __future__ import annotations

import re

# Both take time in proportion to the text, whatever it is: logs hold very long words.
_URL_CREDENTIALS = re.compile(r"://[^/\s'\"]+@")
_NAMED_SECRET = re.compile(
    r"(?i)(?P<name>(?<!/)(?:token|password|passwd|secret|api[_-]?key)[\w-]{0,64}['\"]?(?:=|: )['\"]?)[^\s&'\"]+"
)
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def mask(text: str) -> str:
    """Replace credentials in URLs and values of variables that name a secret."""
    text = _URL_CREDENTIALS.sub("://***@", text)
    return _NAMED_SECRET.sub(r"\g<name>***", text)


def plain(text: str) -> str:
    """Drop terminal control sequences; tabs and newlines stay."""
    return _CONTROL.sub("", text)
