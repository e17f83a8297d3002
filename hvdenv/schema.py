"""Strict reading of TOML and JSON into typed data, and the JSON Schema of it.

Types are NamedTuples. Supported annotations: str, int, float, bool, Literal, X | None,
tuple[X, ...], dict[str, X], NamedTuples, unions of str with one of these, and
Annotated[str, Pattern(...)]. docs/decisions.md says why this is not a library.
"""

from __future__ import annotations

import math
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Pattern(NamedTuple):
    """A constraint on a string: a regular expression and what to call it."""

    regex: str
    meaning: str


class Problem(Exception):
    """A value does not fit its type.

    Attributes:
        path: keys and indexes that lead to the value.
        message: what is wrong with it.
    """

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(f"{dotted(path)}: {message}" if path else message)
        self.path = path
        self.message = message


def dotted(path: tuple[str | int, ...]) -> str:
    """The path as users write it: ``frameworks.torch.version[1]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def fill(value: T, words: Mapping[str, str]) -> T:
    """The same data with words replaced in every string and path in it."""
    return typing.cast(T, _fill(value, words))


def _fill(value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(word, text)
        return value
    if isinstance(value, PurePath):
        return type(value)(_fill(str(value), words))
    if hasattr(value, "_fields"):
        return type(value)(*(_fill(each, words) for each in value))
    if isinstance(value, dict):
        return {key: _fill(each, words) for key, each in value.items()}
    return tuple(_fill(each, words) for each in value) if isinstance(value, tuple) else value


def decode(kind: type[T], value: object, path: tuple[str | int, ...] = ()) -> T:
    """Turn a parsed document into typed data.

    Args:
        kind: a type as described above.
        value: what a TOML or JSON parser returned.
        path: where the value stands, for messages.

    Raises:
        Problem: the value does not fit; unknown keys name the nearest known one.
    """
    return typing.cast(T, _decode(kind, value, path))


def check_part(kind: Any, value: object) -> None:
    """See that a table fits a type as far as it goes: it may lack what is required.

    Raises:
        Problem: a key is unknown, or its value does not fit.
    """
    _decode(kind, value, (), whole=False)


def _decode(kind: Any, value: object, path: tuple[str | int, ...], *, whole: bool = True) -> object:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        base, pattern = typing.get_args(kind)
        return _matching(_decode(base, value, path, whole=whole), pattern, path)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        # By type as well: to Python, true and 1.0 are equal to 1.
        if not any(value == each and type(value) is type(each) for each in choices):
            meant = _meant(str(value), map(str, choices))
            raise Problem(path, f"expected one of {_quoted(choices)}, found {_shown(value)}{meant}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), value, path, whole)
    if origin is tuple:
        (item, _) = typing.get_args(kind)
        return tuple(
            _decode(item, each, (*path, index))
            for index, each in enumerate(_expect(list, value, path))
        )
    if origin is dict:
        key_kind, item = typing.get_args(kind)
        return {
            _decode(key_kind, key, (*path, key)): _decode(item, each, (*path, key), whole=whole)
            for key, each in _expect(dict, value, path).items()
        }
    if hasattr(kind, "_fields"):
        return _decode_record(kind, _expect(dict, value, path), path, whole)
    if kind is str:
        return _text(_expect(str, value, path), path)
    if kind is float:
        return _number(value, path)
    return _expect(kind, value, path)


def _decode_union(
    kinds: tuple[Any, ...], value: object, path: tuple[str | int, ...], whole: bool
) -> object:
    if value is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) > 1:
        strings = [kind for kind in others if _is_string(kind)]
        wants_string = not isinstance(value, (list, dict))
        others = strings if wants_string else [k for k in others if k not in strings]
    return _decode(others[0], value, path, whole=whole)


def _decode_record(
    kind: Any, table: dict[str, object], path: tuple[str | int, ...], whole: bool
) -> object:
    hints = fields(kind)
    for key in table:
        if key not in hints:
            raise Problem((*path, key), f"unknown key{_nearest(key, hints)}")
    for key in hints:
        if whole and key not in table and key not in kind._field_defaults:
            raise Problem((*path, key), "this key is required and missing")
    found = {
        key: _decode(hints[key], each, (*path, key), whole=whole) for key, each in table.items()
    }
    return kind(**found) if whole else None


@cache
def fields(kind: Any) -> Mapping[str, Any]:
    """Field names and types of a NamedTuple."""
    return typing.get_type_hints(kind, include_extras=True)


def _is_string(kind: Any) -> bool:
    return kind is str or (
        typing.get_origin(kind) is typing.Annotated and typing.get_args(kind)[0] is str
    )


def _expect(kind: type, value: object, path: tuple[str | int, ...]) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        hint = " (put it in quotes)" if kind is str and isinstance(value, (int, float)) else ""
        raise Problem(path, f"expected {_NAMES[kind]}, found {_shown(value)}{hint}")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise Problem(path, "this number is too large: the limit is 2^63")
    return value


_NAMES: dict[type, str] = {
    str: "a string", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "a table",
}  # fmt: skip


# Also those of C1, line separators, and what makes a text look like another (bidi).
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def _text(value: str, path: tuple[str | int, ...]) -> str:
    """No string may hold control characters: a newline can add a batch directive."""
    if _CONTROL.search(value):
        raise Problem(path, f"control characters are not allowed, found {_shown(value)}")
    return value


def _number(value: object, path: tuple[str | int, ...]) -> float:
    """A whole number will do; TOML's inf and nan will not."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = _expect(int if whole else float, value, path)
    if not math.isfinite(number):
        raise Problem(path, f"expected a number, found {_shown(value)}")
    return float(number)


def _matching(value: object, pattern: Pattern, path: tuple[str | int, ...]) -> object:
    if not re.fullmatch(pattern.regex, str(value)):
        raise Problem(path, f"expected {pattern.meaning}, found {_shown(value)}")
    return value


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number that is too large"
    return text if len(text) <= 80 else text[:77] + "..."


def _quoted(choices: tuple[object, ...]) -> str:
    return ", ".join(f'"{choice}"' for choice in choices)


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    return _meant(key, known) or f"; known are {', '.join(sorted(known))}"


def _meant(word: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, list(known), 1)
    return f'; did you mean "{close[0]}"?' if close else ""


def encode(value: object) -> Any:
    """Typed data as plain tables and lists; paths become text, fields that are None are left out."""
    if hasattr(value, "_fields"):
        table = typing.cast(Any, value)._asdict()
        return {key: encode(each) for key, each in table.items() if each is not None}
    if isinstance(value, Mapping):
        return {key: encode(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(each) for each in value]
    return str(value) if isinstance(value, PurePath) else value


def json_schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a type, for editors and other programs."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is typing.Annotated:
        base, pattern = arguments
        return {
            **json_schema(base),
            "pattern": f"^(?:{pattern.regex})$",
            "description": pattern.meaning,
        }
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        kinds = [json_schema(each) for each in arguments if each is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is tuple:
        return {"type": "array", "items": json_schema(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": json_schema(arguments[1])}
    if hasattr(kind, "_fields"):
        required = [name for name in kind._fields if name not in kind._field_defaults]
        return {
            "type": "object",
            "properties": {name: json_schema(each) for name, each in fields(kind).items()},
            "required": required,
            "additionalProperties": False,
        }
    return {
        str: {"type": "string"},
        int: {"type": "integer"},
        float: {"type": "number"},
        bool: {"type": "boolean"},
    }[kind]


def line_of(text: str, path: tuple[str | int, ...]) -> int:
    """The line of a TOML document in which a key, or its nearest parent, is set.

    Args:
        text: a valid TOML document.
        path: keys and indexes, as in Problem.

    Returns:
        A line number from 1; 1 when nothing on the path is in the document.
    """
    best, best_score = 1, (0, False)
    for line, where in _statements(text):
        length = 0
        while length < min(len(path), len(where)) and path[length] == where[length]:
            length += 1
        score = (length, length == len(where))
        if length and score > best_score:
            best, best_score = line, score
    return best


def _statements(text: str) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    """Each statement's first line and the path that it sets."""
    table: tuple[str | int, ...] = ()
    counts: dict[tuple[str | int, ...], int] = {}
    for line, statement in _split(text):
        stripped = statement.strip()
        if not stripped or stripped.startswith("#"):
            continue
        keys = _leading_keys(parse_toml(stripped), table=stripped.startswith("["))
        if stripped.startswith("["):
            keys = _indexed(keys, counts)
        if stripped.startswith("[["):
            counts[keys] = counts.get(keys, -1) + 1
            table = (*keys, counts[keys])
            yield line, table
        elif stripped.startswith("["):
            table = keys
            yield line, table
        else:
            yield line, (*table, *keys)


_MARK = re.compile(r"[\"'#\[\]{}\n]")
# What ends a string that begins so; an escaped character is passed over.
_STRING_END = {
    '"': re.compile(r'\\.|"', re.DOTALL), '"""': re.compile(r'\\.|"{3,5}', re.DOTALL),
    "'": re.compile("'"), "'''": re.compile("'{3,5}"),
}  # fmt: skip


def _split(text: str) -> Iterator[tuple[int, str]]:
    """The statements of a TOML document, each with the line that it begins in."""
    line = first = 1
    begin = at = depth = 0
    while mark := _MARK.search(text, at):
        found, at = mark[0], mark.end()
        if found in "\"'#":
            at = _after(text, mark.start())
            line += text.count("\n", mark.end(), at)
        elif found != "\n":
            depth += 1 if found in "[{" else -1
        else:
            line += 1
            if depth == 0:
                yield first, text[begin:at]
                begin, first = at, line
    yield first, text[begin:]


def _after(text: str, start: int) -> int:
    """Where the string or comment that begins at ``start`` has ended."""
    quote = text[start]
    if quote == "#":
        end = text.find("\n", start)
        return end if end >= 0 else len(text)
    opening = quote * 3 if text.startswith(quote * 3, start) else quote
    for found in _STRING_END[opening].finditer(text, start + len(opening)):
        if found[0][0] == quote:
            return found.end()
    return len(text)


def _indexed(
    keys: tuple[str | int, ...], counts: Mapping[tuple[str | int, ...], int]
) -> tuple[str | int, ...]:
    """The path of a table, with the indexes of the lists of tables that it lies in."""
    path: tuple[str | int, ...] = ()
    for key in keys[:-1]:
        path = (*path, key)
        path = (*path, counts[path]) if path in counts else path
    return (*path, *keys[-1:])


def _leading_keys(parsed: object, *, table: bool) -> tuple[str | int, ...]:
    """Keys of a document of one statement, down to its value."""
    keys: list[str | int] = []
    while isinstance(parsed, dict) and len(parsed) == 1:
        ((key, parsed),) = parsed.items()
        keys.append(key)
        if not table and not isinstance(parsed, dict):
            break
    return tuple(keys)


# Parts of one key. The deepest one of a recipe has seven.
KEY_PARTS = 32


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: the text is not TOML, or is nested too deeply; the message names the line.
    """
    _refuse_long_keys(text)
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return document


def _refuse_long_keys(text: str) -> None:
    """The parser's time and memory grow with the square of a key's parts."""
    if all(line.count(".") < KEY_PARTS for line in text.split("\n")):
        return
    for number, statement in _split(text):
        bare = re.split(r"[=,\[\]{}\n]", _without_strings(statement))
        longest = max(part.count(".") + 1 for part in bare)
        if longest > KEY_PARTS:
            raise ValueError(
                f"a key of {longest} parts; the limit is {KEY_PARTS} (in the statement of line {number})"
            )


def _without_strings(text: str) -> str:
    """A TOML statement with neither strings nor comments."""
    kept, begin, at = [], 0, 0
    while mark := _MARK.search(text, at):
        at = mark.end()
        if mark[0] in "\"'#":
            kept.append(text[begin : mark.start()])
            begin = at = _after(text, mark.start())
    return "".join([*kept, text[begin:]])
