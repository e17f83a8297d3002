"""Templates of directives and command lines, in data files and site files.

``{nodes}`` is the value of a field. ``[[ -d {cpus_per_rank}]]`` is left out if a field in it has no
value. ``{?exclusive}`` and ``{!error}`` print nothing: what they stand in is left out unless the
field has a value, or has none; ``{?gpu_option=gres}`` compares it.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

Values = Mapping[str, "str | int | tuple[str, ...] | None"]

_FIELD = re.compile(r"\{(?P<test>[?!]?)(?P<name>[a-z][a-z_]*)(=(?P<equal>[^{}]*))?\}")
_PART = re.compile(r"\[\[((?:(?!\[\[|\]\]).){0,150})\]\]")
_TEST = re.compile(r"\{[?!][^{}]{1,60}\}")
# Fields of several words.
_LISTS = ("{options}", "{program}", "{exports}")


class Missing(Exception):
    """A field outside of all optional parts has no value; the text is its name."""


class Use(NamedTuple):
    """A field in a template; ``required`` outside of optional parts."""

    name: str
    test: bool
    required: bool


def uses(template: str) -> Iterator[Use]:
    outside = _PART.sub("", template)
    for found in _FIELD.finditer(template):
        tests = bool(found["test"])
        yield Use(found["name"], tests, not tests and found[0] in outside)


def problem(template: str, known: Collection[str], *, words: bool = False) -> str:
    """What is wrong with a template; empty if nothing is.

    Args:
        known: its fields.
        words: whether it is a command line.
    """
    for use in uses(template):
        if use.name not in known:
            return f"unknown field {{{use.name}}}; known are {', '.join(sorted(known))}"
    for found in _FIELD.finditer(template):
        if found["equal"] is not None and not found["test"]:
            return f"{found[0]} does not begin with ? or !, as in {{?nodes=2}}"
    rest = _FIELD.sub("", _PART.sub(r"\1", template))
    if mark := re.search(r"\[\[|\]\]|\{[?!]?[a-z]*", rest):
        return f"{mark[0]} begins neither a field such as {{nodes}} nor a part such as [[...]]"
    return _problem_of_words(template) if words else ""


def _problem_of_words(template: str) -> str:
    """What is wrong with the template of a command line."""
    try:
        shlex.split(_PART.sub(r"\1", template))
    except ValueError as error:
        return f"not a command line: {error}"
    # Without it there would be no command at all.
    if test := _TEST.search(_PART.sub("", template)):
        return f"{test[0]} must be in a part such as [[{test[0]} -v]]"
    for mark in _LISTS:
        if any(mark in word and word != mark for word in split(template)):
            return f"{mark} must be a word of its own"
    return ""


def split(template: str) -> list[str]:
    """The words of a command line, with all optional parts; none if it is not one."""
    try:
        return [_TEST.sub("", word) for word in shlex.split(_PART.sub(r"\1", template))]
    except ValueError:
        return []


def text(template: str, values: Values) -> str | None:
    """A template with its values; None if a field outside of optional parts has none."""
    chosen = _chosen(template, values)
    if chosen is None:
        return None
    return _FIELD.sub(lambda found: _value(found, values), chosen)


def words(template: str, values: Values) -> tuple[str, ...]:
    """The words of a command line. No value becomes more than one word, except those that are lists.

    Raises:
        Missing: a field outside of optional parts has no value.
    """
    chosen = _chosen(template, values)
    if chosen is None:
        lacking = (use.name for use in uses(template) if use.required)
        raise Missing(next(name for name in lacking if values.get(name) is None))
    filled: list[str] = []
    for word in shlex.split(chosen):
        alone = _FIELD.fullmatch(word)
        value = values.get(alone["name"]) if alone else None
        if isinstance(value, tuple):
            filled += value
        elif not (alone and alone["test"]):
            filled.append(_FIELD.sub(lambda found: _value(found, values), word))
    return tuple(filled)


def _chosen(template: str, values: Values) -> str | None:
    kept = _PART.sub(lambda found: found[1] if _holds(found[1], values) else "", template)
    outside = _PART.sub("", template)
    return kept if _holds(outside, values) else None


def _holds(part: str, values: Values) -> bool:
    return all(_true(found, values) for found in _FIELD.finditer(part))


def _true(found: re.Match[str], values: Values) -> bool:
    value = values.get(found["name"])
    if found["equal"] is not None:
        return (str(value) == found["equal"]) is (found["test"] != "!")
    return (value is None) is (found["test"] == "!")


def _value(found: re.Match[str], values: Values) -> str:
    return "" if found["test"] else str(values[found["name"]])
