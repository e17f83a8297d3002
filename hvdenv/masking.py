"""Removes secrets and control sequences from text that hvdenv prints or stores."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

# Every pattern is linear in the length of the text: logs contain very long words.
_URL_CREDENTIALS = re.compile(r"://[^/\s'\"]+@")
# Not the words of text processing: tokenize, tokenizer, tokenisation.
_WORD = r"(?:token(?!i[sz](?:e|at|in))|pass(?:word|wd|phrase)|secret|(?:api|rendezvous)[_-]?key)[\w-]{0,64}['\"]?"
_IS = r"(?:[ \t]{0,2}=[ \t]{0,2}(?!=)|: |:(?=['\"]))"
# After a slash, only what looks like a variable: /etc/passwd: is a file. Quotes may hold spaces.
_NAMED_SECRET = re.compile(
    rf"(?i)(?P<name>(?:(?<!/){_WORD}{_IS}|(?<=/){_WORD}=)['\"]?)(?:(?<=['\"])[^'\"\n]+|[^\s&'\"]+)"
)
_OPTION = re.compile(
    rf"(?i)(?P<name>--(?:[a-z]{{1,16}}-)?{_WORD}[ \t]{{1,4}}['\"]?)[^\s'\"-][^\s'\"]*"
)
_KNOWN = re.compile(
    r"\b(?P<name>gh[a-z]_|github_pat_|glpat-|hf_)(?:[A-Za-z0-9]{30,}|(?<=t[_-])[\w-]{20,})"
)
_AUTHORIZATION = re.compile(
    r"(?i)(?P<name>authorization['\"]?[ \t]{0,4}[:=][ \t]{0,4}['\"]?"
    r"(?:(?:bearer|basic|digest|negotiate|token|apikey)[ \t]{1,4})?)[^\s'\"]+"
)
_BEARER = re.compile(r"(?i)(?P<name>bearer[ \t]{1,4})[\w.~+/=-]{16,}")
# Terminal sequences, control characters (C0 and C1), and characters that change the order of
# text (bidi) or break lines.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def mask(text: str) -> str:
    """Replace credentials in URLs and headers, and values of variables that name a secret."""
    text = _URL_CREDENTIALS.sub("://***@", text)
    for secret in (_AUTHORIZATION, _BEARER, _NAMED_SECRET, _OPTION, _KNOWN):
        text = secret.sub(r"\g<name>***", text)
    return text


def plain(text: str) -> str:
    """Remove control sequences and characters, including C1 and bidi; keep tabs and newlines."""
    return _CONTROL.sub("", text)


def clean(text: str) -> str:
    """Foreign text without control characters and credentials."""
    return mask(plain(text))


class PlainStream:
    """A stream for people. Text printed to it cannot control their terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        self.unfiltered.write(plain(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextmanager
def plain_output() -> Iterator[None]:
    """Filter all output of this Python process; programs that it runs print directly."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", PlainStream(each)) for each in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def print_coloured(text: str) -> None:
    """Print text with colours. The caller has filtered the foreign parts of it."""
    print(text, end="", file=getattr(sys.stdout, "unfiltered", sys.stdout))
