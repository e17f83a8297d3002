"""Wordings: how a program prints an event, as a line with slots.

``fatal error: {name}: No such file`` has a slot ``name``. In a wording

- ``{name}`` is a word without spaces and quotes, ``{name:text}`` any text up to what follows,
  ``{name:number}`` and ``{name:version}`` what they say, and ``{name:a|b}`` one of these;
- without a name, ``{:number}`` and the like match without being kept; ``{}`` is any text or none,
  ``<a|b>`` one of two texts, of which one may be empty;
- ``\\n`` is the end of a line; a space stands for several, but what the search looks for has one where
  a wording has one, so write two where a program may print more; ``'`` for any quotation mark;
- ``^`` and ``$`` at the ends are those of a line. Upper and lower case are the same.

All of them are bounded, so no log makes a search slow.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

_OF_WORDS = r"""^\s'"`,;()<>"""
_SHAPES = {
    "": rf"[{_OF_WORDS}]{{1,300}}",
    "any": r"[^\n]{0,200}?",
    "text": r"[^\n]{1,300}?",
    "path": r"""[^\n'"`:]{1,300}?""",
    "number": r"\d{1,15}",
    "version": r"v?\d[\w.+]{0,40}",
}
_SPECIAL = re.compile(
    r"\{(?P<name>\w*)(?::(?P<shape>[^{}]+))?\}|<(?P<choice>[^<>|\n]*(?:\|[^<>|\n]*)+)>"
    r"|(?P<end>\\n)|(?P<quote>')|(?P<space> +)"
)
_LOWER = bytes(
    ord("'") if chr(n) in '"`' else ord(chr(n).lower()) if n < 128 else n for n in range(256)
)
_CURLY = tuple((each.encode(), b"'") for each in "\u2018\u2019\u201c\u201d\xb4")
# Texts that are searched for: shorter ones stand in too many lines.
SHORTEST = 4


class Wording(NamedTuple):
    """A wording that can be searched for.

    Attributes:
        text: as written.
        anchor: the longest text of its first line, folded; a line without it is not looked at.
    """

    text: str
    anchor: bytes

    @property
    def pattern(self) -> re.Pattern[str]:
        return _pattern(self.text)


def straight(text: bytes) -> bytes:
    """The text with straight quotation marks for curly ones."""
    if b"\xe2\x80" in text or b"\xc2\xb4" in text:
        for curly, plain in _CURLY:
            text = text.replace(curly, plain)
    return text


def folded(text: bytes) -> bytes:
    """The text as anchors are compared: of the same length, in lower case, with one sort of quotation mark."""
    return text.translate(_LOWER)


@cache
def wording(text: str) -> Wording:
    """Read a wording."""
    first = text.split("\\n")[0].removeprefix("^").removesuffix("$")
    pieces = [b""]
    at = 0
    for special in _SPECIAL.finditer(first):
        pieces[-1] += first[at : special.start()].encode()
        if special["quote"] or special["space"] == " ":
            pieces[-1] += special[0].encode()
        else:
            pieces.append(b"")
        at = special.end()
    pieces[-1] += first[at:].encode()
    return Wording(text, folded(max(pieces, key=lambda each: len(each.strip()))).strip())


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """The pattern of a wording, for lines in which a space stands for several.

    From one slot of any text to the next, the first place where the wording goes on is taken for
    good: `(?=(...))` and a reference to it never try another one. Otherwise, a crafted line would
    be divided among the slots in every way.
    """
    inner = text.removeprefix("^").removesuffix("$")
    parts = [""]
    at = 0
    for special in _SPECIAL.finditer(inner):
        parts[-1] += re.escape(inner[at : special.start()])
        if _is_of_any_text(special):
            parts.append("")
        parts[-1] += _part(special, last=special.end() == len(inner))
        at = special.end()
    parts[-1] += re.escape(inner[at:])
    start, end = "^ ?" if text.startswith("^") else "", " ?$" if text.endswith("$") else ""
    if re.match(r"\{\w*\}", inner):
        start += f"(?<![{_OF_WORDS}])"  # a word is not tried from each of its characters
    first, *others = parts
    taken = [f"(?=(?P<_{n}>{each}))(?P=_{n})" for n, each in enumerate(others)]
    return re.compile(start + first + "".join(taken) + end, re.IGNORECASE | re.MULTILINE)


def _part(special: re.Match[str], *, last: bool) -> str:
    """The pattern of one special part of a wording."""
    if special["quote"]:
        return "['\"`]"
    if special["space"]:
        return " "
    if special["end"]:
        return r" ?\n ?"
    if special["choice"] is not None:
        return f"(?:{'|'.join(map(re.escape, special['choice'].split('|')))})"
    pattern = _shape(_shape_of(special), last=last)
    return f"(?P<{special['name']}>{pattern})" if special["name"] else f"(?:{pattern})"


def _is_of_any_text(special: re.Match[str]) -> bool:
    is_slot = not any(special[each] for each in ("choice", "end", "quote", "space"))
    return is_slot and _shape_of(special) in ("any", "text", "path")


def _shape_of(slot: re.Match[str]) -> str:
    return slot["shape"] or ("" if slot["name"] else "any")


def _shape(shape: str, *, last: bool) -> str:
    """The pattern of what fills a slot; at the end of a wording, as much as there is."""
    if shape in _SHAPES:
        return _SHAPES[shape].removesuffix("?") if last else _SHAPES[shape]
    return "|".join(map(re.escape, shape.split("|")))
