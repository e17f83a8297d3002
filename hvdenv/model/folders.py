"""Directories as recipes write them, with the user's names and variables in place of placeholders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar, get_args

from hvdenv.errors import UsageError
from hvdenv.model.cluster import FileName, Folder
from hvdenv.schema import Path, decode, dotted, encode

T = TypeVar("T")

_PLACEHOLDER = re.compile(r"\{(user|home)\}")
_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
# What may be in place of a variable: it goes into scripts, links and lists such as MODULEPATH.
_FOLDER = re.compile(r"/[A-Za-z0-9._+@/-]{1,1000}")
# In place of {user} and {home}.
_NAME = re.compile(r"(?!\.\.?$)[^/:\s'\"`$\x00-\x1f\x7f]{1,64}")
_HOME = re.compile(r"/[^:\n'\"`$\x00-\x1f\x7f]{0,1000}")


class User(NamedTuple):
    """The user who runs hvdenv.

    Attributes:
        name, home: in place of {user} and {home}.
        variables: in place of $NAME at the start of a directory.
        lenient: leave a variable that is not set as it is, where nothing uses the directory.
    """

    name: str
    home: str
    variables: Mapping[str, str]
    lenient: bool = False


def expand(kind: type[T], value: T, user: User, above: Path = ()) -> tuple[T, dict[str, str]]:
    """The same data with all directories and file names expanded.

    Variables for programs are left alone: those are filled in where and when programs run.

    Returns:
        The data, and by dotted key the text of each directory that began with a variable.

    Raises:
        UsageError: a variable is not set, or is not a directory; the message names the key.
    """
    written: dict[str, str] = {}

    def folder(text: str, path: Path) -> str:
        if found := _VARIABLE.match(text):
            written[dotted(path)] = text
            text = _variable_value(found[1], dotted(path), user) + text[found.end() :]
        return named(text, path)

    def named(text: str, path: Path) -> str:
        return _PLACEHOLDER.sub(lambda found: _user_value(found[1], dotted(path), user), text)

    rewriters = {get_args(Folder)[1]: folder, get_args(FileName)[1]: named}
    return decode(kind, encode(value), above, rewriters=rewriters), written


def _user_value(placeholder: str, key: str, user: User) -> str:
    """The user's name or home, which variables such as LOGNAME and HOME decide."""
    value, fitting = {"user": (user.name, _NAME), "home": (user.home, _HOME)}[placeholder]
    if fitting.fullmatch(value):
        return value
    raise UsageError(
        f"{{{placeholder}}} stands for {value[:200]!r}, which is no part of a directory",
        where=key,
        remedy="check the variables LOGNAME, USER and HOME, or name a directory without it",
    )


def unset_variable(text: str, user: User) -> str:
    """The variable that a directory begins with and the user has not set, such as ``$WORK``; or empty."""
    found = _VARIABLE.match(text)
    return found[0] if found and not _value(found[1], user) else ""


def _value(name: str, user: User) -> str:
    return user.variables.get(name, "").rstrip("/")


def _variable_value(name: str, key: str, user: User) -> str:
    value = _value(name, user)
    if _FOLDER.fullmatch(value):
        return value
    if not value and user.lenient:
        return f"${name}"
    wrong = f"${name} is {value[:200]!r}, which is not a directory without spaces and special characters"
    raise UsageError(
        wrong if value else f"${name} is not set",
        where=key,
        remedy=f"set it (export {name}=/...), or name a directory in the recipe or a site file",
    )
