"""Wordings: how a program prints an event, as a line with slots.

``fatal error: {name}: No such file`` has a slot ``name``. In a wording

- ``{name}`` is a word without spaces and quotes, ``{name:text}`` any text up to what follows,
  ``{name:number}`` and ``{name:version}`` what they say, and ``{name:a|b}`` one of these;
- without a name, ``{:number}`` and the like match without being kept; ``{}`` is any text or none,
  ``<a|b>`` one of two texts, of which one may be empty;
- ``\\n`` is the end of a line; a space stands for several, but what the search looks for has one where
  a wording has one, so write two where a program may print more; ``'`` for any quotation mark;
- ``^`` and ``$`` at the ends are those of a line. Upper and lower case are the same;
- ``mpirun``, ``orted``, ``ORTE`` and ``slurmstepd`` stand for the names of other releases, too.

All of them are bounded, so no log makes a search slow.
"""

from __future__ import annotations

import re
from functools import cache

_OF_WORDS = r"""^\s'"`,;()<>"""
_SHAPES = {
    "": rf"[{_OF_WORDS}]{{1,300}}",
    "any": r"[^\n]{0,200}?",
    "text": r"[^\n]{1,300}?",
    "path": r"""[^\n'"`:]{1,300}?""",
    "number": r"\d{1,15}",
    "version": r"v?\d[\w.+]{0,40}",
}
_OF_ANY_TEXT = ("any", "text", "path")
_SPECIAL = re.compile(
    r"\{(?P<name>\w*)(?::(?P<shape>[^{}]+))?\}|<(?P<choice>[^<>|\n]*(?:\|[^<>|\n]*)+)>|\\n|'| +"
)
# Open MPI 5 and its launcher PRRTE have other names for programs of Open MPI 4, and Slurm 23 and
# newer writes `slurmstepd-HOST`.
_NAMES = {
    "ORTE": "(?:ORTE|PRRTE|PRTE)",
    "orted": "(?:orted|prted)",
    "mpirun": "(?:mpirun|prterun|orterun|mpiexec)",
    "slurmstepd": r"slurmstepd(?:-[\w.-]{1,64})?",
}
_NAME = re.compile(r"\b(?:ORTE|orted|mpirun|slurmstepd)\b")
# What may be printed in several ways, so that no anchor contains it.
_VARYING = re.compile(
    r"\{[^{}]*\}|<[^<>|\n]*(?:\|[^<>|\n]*)+>|  +|\b(?:ORTE|orted|mpirun)\b|(?<=slurmstepd)(?=:)"
)
_LOWER = bytes(
    ord("'") if chr(n) in '"`' else ord(chr(n).lower()) if n < 128 else n for n in range(256)
)
_CURLY = tuple((each.encode(), b"'") for each in "\u2018\u2019\u201c\u201d\xb4")
# Texts that are searched for: shorter ones stand in too many lines.
SHORTEST = 4


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
def anchor(wording: str) -> bytes:
    """The longest text of a wording's first line, folded; a line without it is not looked at."""
    first = wording.split("\\n")[0].removeprefix("^").removesuffix("$")
    return folded(max(map(str.strip, _VARYING.split(first)), key=len).encode())


@cache
def pattern(wording: str) -> re.Pattern[str]:
    """The pattern of a wording, for lines in which a space stands for several.

    From one slot of any text to the next, the first place where the wording goes on is taken for
    good: `(?=(...))` and a reference to it never try another one. Otherwise, a crafted line would
    be divided among the slots in every way.
    """
    inner = wording.removeprefix("^").removesuffix("$")
    parts = [""]
    at = 0
    for special in _SPECIAL.finditer(inner):
        parts[-1] += _literal(inner[at : special.start()])
        if _shape(special) in _OF_ANY_TEXT:
            parts.append("")
        parts[-1] += _part(special, last=special.end() == len(inner))
        at = special.end()
    parts[-1] += _literal(inner[at:])
    start, end = "^ ?" if wording[0] == "^" else "", " ?$" if wording[-1] == "$" else ""
    if re.match(r"\{\w*\}", inner):
        start += f"(?<![{_OF_WORDS}])"  # a word is not tried from each of its characters
    first, *others = parts
    taken = [f"(?=(?P<_{n}>{each}))(?P=_{n})" for n, each in enumerate(others)]
    return re.compile(start + first + "".join(taken) + end, re.IGNORECASE | re.MULTILINE)


def _literal(text: str) -> str:
    return _NAME.sub(lambda name: _NAMES[name[0]], re.escape(text))


def _shape(special: re.Match[str]) -> str | None:
    """The shape of a slot; None for what is no slot."""
    if special["name"] is None:
        return None
    return special["shape"] or ("" if special["name"] else "any")


def _part(special: re.Match[str], *, last: bool) -> str:
    """The pattern of one special part; at the end of a wording, as much as there is."""
    shape = _shape(special)
    if special[0] == "'":
        return "['\"`]"
    if special[0] == "\\n":
        return r" ?\n ?"
    if special[0].isspace():
        return " "
    if shape in _SHAPES:
        one_of = _SHAPES[shape].removesuffix("?" if last else "")
    else:
        one_of = "|".join(map(_literal, (special["choice"] or shape or "").split("|")))
    return f"(?P<{special['name']}>{one_of})" if special["name"] else f"(?:{one_of})"
