"""Strict reading of TOML and JSON into typed data, and the JSON Schema of it.

Types are NamedTuples. Supported annotations: str, int, float, bool, Literal, X | None,
tuple[X, ...], list[X], dict[str, X], NamedTuples, unions of str with one of these, and
Annotated[str, Pattern(...)]. docs/explanation/decisions.md says why this is not a library.
"""

import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Pattern(NamedTuple):
    """A constraint on a string.

    Attributes:
        regex: matches all of it.
        meaning: what to call it.
        problem: says what else is wrong with a text, unless hvdenv wrote it; empty if nothing is.
    """

    regex: str
    meaning: str
    problem: Callable[[str], str] | None = None


ANY = r"[\s\S]*"


KeyPath = tuple[str | int, ...]

# A parsed TOML or JSON table that no type describes yet: its reader decodes or checks it.
Table = dict[str, Any]

# Further ones are not looked for: to name the nearest key takes time.
MOST_PROBLEMS = 20


class Problem(Exception):
    """A value does not fit its type.

    Attributes:
        all: every problem of the document, this one first; at most MOST_PROBLEMS.
        rest: the document without what is wrong: with defaults, or something of the right type.
    """

    def __init__(self, path: KeyPath, message: str) -> None:
        super().__init__(f"{dotted(path)}: {message}" if path else message)
        self.path = path
        self.message = message
        self.all: tuple[Problem, ...] = (self,)
        self.rest: Any = None


def dotted(path: KeyPath) -> str:
    """The path as users write it: ``frameworks.torch.version[1]``, ``partitions."gpu.a".cores``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (f'"{part}"' if "." in part else part)
    return text


def mapped(value: T, change: Callable[[str], str]) -> T:
    """The same data with every text and path in it changed."""
    kind, found = type(value), typing.cast(Any, value)
    if isinstance(found, str):
        found = change(found)
    elif isinstance(found, PurePath):
        found = kind(change(str(found)))  # type: ignore[call-arg]
    elif isinstance(found, dict):
        found = {key: mapped(each, change) for key, each in found.items()}
    elif isinstance(found, (list, tuple)):
        parts = (mapped(each, change) for each in found)
        found = typing.cast(Any, kind)(*parts if hasattr(found, "_fields") else [parts])
    return typing.cast(T, found)


# Makes another text of one with a pattern, at a path.
Rewriter = Callable[[Pattern, str, KeyPath], str]


def decode(
    kind: type[T],
    value: object,
    path: KeyPath = (),
    *,
    lenient: bool = False,
    rewrite: Rewriter | None = None,
) -> T:
    """Turn a parsed document into typed data.

    Args:
        kind: a type as described above.
        value: what a TOML or JSON parser returned.
        lenient: for files that hvdenv writes, perhaps a later version: unknown keys are
            ignored, and texts may have several lines and other control characters.
        rewrite: what to put in the place of texts with patterns, which they need not fit.

    Raises:
        Problem: the value does not fit, with all that is wrong; unknown keys name the nearest
            known one.
    """
    decoder = _Decoder(lenient=lenient, rewrite=rewrite)
    return typing.cast(T, decoder.document(kind, value, path))


def check_part(kind: Any, value: object, path: KeyPath = ()) -> None:
    """Check tables whose required keys may be missing, such as variants.

    Raises:
        Problem: keys are unknown, or their values do not fit.
    """
    _Decoder(whole=False).document(kind, value, path)


class _TooMany(Exception):
    """There are MOST_PROBLEMS problems."""


class _Decoder:
    """Decodes one document and collects its problems."""

    def __init__(
        self,
        *,
        whole: bool = True,
        lenient: bool = False,
        rewrite: Rewriter | None = None,
    ) -> None:
        self.whole = whole
        self.lenient = lenient
        self.rewrite = rewrite
        self.named: set[KeyPath] = set()  # values under names that users choose
        self.problems: list[Problem] = []

    def document(self, kind: Any, value: object, path: KeyPath) -> object:
        found = None
        with suppress(_TooMany):
            found = self.read(kind, value, path)
        if self.problems:
            first = self.problems[0]
            first.all, first.rest = tuple(self.problems), found
            raise first
        return found

    def refuse(self, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(path, message))
        if len(self.problems) >= MOST_PROBLEMS:
            raise _TooMany

    def read(self, kind: Any, value: object, path: KeyPath) -> Any:
        """The typed value; None where a problem was found."""
        if kind is str:  # as most values are
            return self.text(value, path)
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Annotated:
            return self.matching(self.read(arguments[0], value, path), arguments[1], path)
        if origin is typing.Literal:
            return self.choice(arguments, value, path)
        if origin in (typing.Union, types.UnionType):
            return self.union(arguments, value, path)
        if origin in (tuple, list):
            return self.items(origin, arguments[0], value, path)
        if origin is dict:
            table = self.expect(dict, value, path) or {}
            self.named |= {(*path, key) for key in table}
            read, before = self.read, len(self.problems)
            pairs = [
                (read(arguments[0], key, (*path, key)), read(arguments[1], each, (*path, key)))
                for key, each in table.items()
            ]
            good = len(self.problems) == before
            return dict(pair for pair in pairs if good or None not in pair)
        if hasattr(kind, "_fields"):
            return self.record(kind, value, path)
        if kind is float:
            return self.number(value, path)
        return value if kind is Any else self.expect(kind, value, path)

    def choice(self, choices: tuple[object, ...], value: object, path: KeyPath) -> object:
        # By type as well: to Python, true and 1.0 are equal to 1.
        if not any(value == each and type(value) is type(each) for each in choices):
            hint = nearest(value, map(str, choices)) if isinstance(value, str) else ""
            listed = ", ".join(f'"{choice}"' for choice in choices)
            self.refuse(path, f"expected one of {listed}, found {brief(value)}{hint}")
            return None
        return value

    def union(self, kinds: tuple[Any, ...], value: object, path: KeyPath) -> object:
        if value is None and type(None) in kinds:
            return None
        others = [kind for kind in kinds if kind is not type(None)]
        if len(others) > 1:
            strings = [kind for kind in others if _is_string(kind)]
            wants_string = not isinstance(value, (list, dict))
            others = strings if wants_string else [k for k in others if k not in strings]
        return self.read(others[0], value, path)

    def items(self, origin: Any, kind: Any, value: object, path: KeyPath) -> Any:
        """A list replaces the one of the layer below, so its tables are always whole."""
        before, self.whole = (self.whole, len(self.problems)), True
        values = self.expect(list, value, path) or ()
        found = origin(self.read(kind, each, (*path, index)) for index, each in enumerate(values))
        self.whole, problems = before
        return found if len(self.problems) == problems else None

    def record(self, kind: Any, value: object, path: KeyPath) -> object:
        table = self.expect(dict, value, path)
        if table is None:
            return None
        known, hints = fields(kind) if self.whole else in_files(kind), ""
        found = {}
        for key, each in table.items():
            if key in known:
                found[key] = self.read(known[key], each, (*path, key))
            elif not self.lenient:
                hint = nearest(key, known)
                hints += hint
                hint = (isinstance(each, dict) and self.with_a_dot(path, key)) or hint
                hint = hint or f"; known are {', '.join(sorted(known))}"
                self.refuse((*path, key), f"unknown key{hint}")
        missing = [key for key in known if key not in table and key not in kind._field_defaults]
        for key in missing if self.whole else ():
            if f'"{key}"' in hints:  # a misspelt key is one problem
                continue
            before = len(self.problems)
            if hasattr(known[key], "_fields"):  # a table: its keys say more
                found[key] = self.read(known[key], {}, (*path, key))
            if len(self.problems) == before:
                self.refuse((*path, key), "this key is required and missing")
        if not self.whole or not self.problems:
            return kind(**found) if self.whole else None
        return _blank(kind)._replace(**{k: v for k, v in found.items() if v is not None})

    def expect(self, kind: type, value: object, path: KeyPath) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            hint = " (put it in quotes)" if kind is str and isinstance(value, (int, float)) else ""
            if isinstance(value, dict) and len(value) == 1:
                hint = self.with_a_dot(path, *value)
            self.refuse(path, f"expected {_NAMES[kind]}, found {brief(value)}{hint}")
            return None
        if isinstance(value, int) and abs(value) >= 1 << 63:
            self.refuse(path, "this number is too large: the limit is 2^63")
            return None
        return value

    def with_a_dot(self, path: KeyPath, rest: str) -> str:
        """A hint where TOML split a name at its dot."""
        if path not in self.named:
            return ""
        return f"; a name with a dot needs quotes: {dotted((*path[:-1], f'{path[-1]}.{rest}'))}"

    def text(self, value: object, path: KeyPath) -> str | None:
        """No string may hold control characters: a newline can add a batch directive."""
        found: str | None = self.expect(str, value, path)
        if found and not self.lenient and _CONTROL.search(found):
            self.refuse(path, f"control characters are not allowed, found {brief(value)}")
            return None
        return found

    def number(self, value: object, path: KeyPath) -> float | None:
        """A whole number will do; TOML's inf and nan will not, but programs report them."""
        whole = isinstance(value, int) and not isinstance(value, bool)
        number = self.expect(int if whole else float, value, path)
        if number is not None and not self.lenient and not math.isfinite(number):
            self.refuse(path, f"expected a number, found {brief(value)}")
        return None if number is None else float(number)

    def matching(self, value: object, pattern: Pattern, path: KeyPath) -> object:
        if value is None:
            return None
        if self.rewrite:
            return self.rewrite(pattern, str(value), path)
        if not re.fullmatch(pattern.regex, str(value)):
            self.refuse(path, f"expected {pattern.meaning}, found {brief(value)}")
            return None
        if pattern.problem and not self.lenient and (wrong := pattern.problem(str(value))):
            self.refuse(path, wrong)
            return None
        return value


@cache
def fields(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def in_files(kind: Any) -> Mapping[str, Any]:
    """Fields, and keys of a part of a document that merging it removes."""
    return {**fields(kind), **getattr(kind, "only_in_files", dict)()}


def _blank(kind: Any) -> Any:
    """Something of a type, in place of what is wrong or missing."""
    arguments = typing.get_args(kind)
    if hasattr(kind, "_fields"):
        known, defaults = fields(kind), kind._field_defaults
        return kind(**{key: _blank(known[key]) for key in known if key not in defaults})
    if typing.get_origin(kind) is typing.Literal:
        return arguments[0]
    if typing.get_origin(kind) in (tuple, list, dict):
        return typing.get_origin(kind)()
    return _blank(arguments[0]) if arguments else kind()


def _is_string(kind: Any) -> bool:
    return kind is str or (
        typing.get_origin(kind) is typing.Annotated and typing.get_args(kind)[0] is str
    )


_NAMES: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


# Also those of C1, line separators, and what makes a text look like another (bidi).
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def brief(value: object) -> str:
    """A value for a message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number that is too large"
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(word: str, known: Iterable[str]) -> str:
    """What to add to a message about an unknown word: the nearest known one, or nothing."""
    close = closest(word, known)
    return f'; did you mean "{close}"?' if close else ""


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that an unknown one is most like; empty if none is."""
    import difflib

    lower = {each.lower(): each for each in known}
    return lower.get(next(iter(difflib.get_close_matches(word.lower(), list(lower), 1)), ""), "")


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


def json_schema(kind: Any, *, whole: bool = True) -> Table:
    """The JSON Schema (2020-12) of a type, for editors and other programs.

    Args:
        whole: otherwise as for check_part().
    """
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
        given = (each for each in arguments if each is not type(None))
        kinds = [json_schema(each, whole=whole) for each in given]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is tuple:
        return {"type": "array", "items": json_schema(arguments[0])}
    if origin is dict:
        values = json_schema(arguments[1], whole=whole)
        return {"type": "object", "additionalProperties": values}
    if hasattr(kind, "_fields"):
        known = fields(kind) if whole else in_files(kind)
        required = [name for name in kind._fields if name not in kind._field_defaults]
        return {
            "type": "object",
            "properties": {name: json_schema(each, whole=whole) for name, each in known.items()},
            **({"required": required} if whole else {}),
            "additionalProperties": False,
        }
    return {
        str: {"type": "string"},
        int: {"type": "integer"},
        float: {"type": "number"},
        bool: {"type": "boolean"},
    }[kind]


def parse_toml(text: str) -> Table:
    """Parse TOML.

    Raises:
        ValueError: the text is not TOML, or is nested too deeply; the message names the line.
    """
    import tomli  # light commands parse no TOML

    try:
        document: Table = tomli.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return document


def line_of(text: str, path: KeyPath) -> int:
    """The line of a TOML document in which a key, or its nearest parent, is set.

    Returns:
        A line number from 1; 1 when nothing on the path is in the document.
    """
    best, best_score = 1, (0, False)
    for line, where in _lines(text):
        length = 0
        while length < min(len(path), len(where)) and path[length] == where[length]:
            length += 1
        score = (length, length == len(where))
        if length and score > best_score:
            best, best_score = line, score
    return best


@lru_cache(maxsize=4)
def _lines(text: str) -> list[tuple[int, KeyPath]]:
    """Each statement's first line and the path that it sets."""
    table: KeyPath = ()
    counts: dict[KeyPath, int] = {}
    found: list[tuple[int, KeyPath]] = []
    for line, statement in _statements(text):
        keys = _keys(statement)
        if keys and statement.startswith("["):
            table = ()
            for key in keys:  # with the indexes of the lists of tables that it is in
                table += (counts[table], key) if table in counts else (key,)
            if statement.startswith("[["):
                counts[table] = counts.get(table, -1) + 1
                table += (counts[table],)
            found.append((line, table))
        elif keys:
            found.append((line, (*table, *keys)))
    return found


# Strings and comments, in which the rest means nothing; and what begins or ends a statement.
_TOKEN = re.compile(
    r'''"""(?:\\.?|[^\\])*?(?:"{3,5}|\Z)|"(?:\\.?|[^"\\\n])*"?'''
    r"""|'{3}.*?(?:'{3,5}|\Z)|'[^'\n]*'?|#[^\n]*|[\[\]{}\n]""",
    re.DOTALL,
)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The statements of a TOML document, each with the line that it begins in."""
    line, begin, depth = 1, 0, 0
    for found in _TOKEN.finditer(text + "\n"):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if found[0] == "\n" and depth == 0:
            statement = text[begin : found.start()]
            yield line, statement.strip()
            line += statement.count("\n") + 1
            begin = found.end()


def _keys(statement: str) -> KeyPath:
    """The keys of a statement, down to its value; none of a comment."""
    keys: list[str] = []
    value: object = parse_toml(statement)
    while isinstance(value, dict) and len(value) == 1:
        ((key, value),) = value.items()
        keys.append(key)
    return tuple(keys)
