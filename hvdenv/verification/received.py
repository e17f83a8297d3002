"""Reads the events of ranks from a launcher's output (hvdenv/standalone/ranks/events.py)."""

from __future__ import annotations

import base64
import json
import re
import typing
import zlib
from typing import NamedTuple

from hvdenv.schema import Problem, decode
from hvdenv.standalone.ranks.events import RankEvent

_LINE = re.compile(
    r"@hvdenv (?P<token>\w+) (?P<crc>[0-9a-f]{8}) (?P<rest>(?P<source>[0-9A-F]+)"
    r"\.(?P<event>\d{1,9})\.(?P<part>\d{1,9})\.(?P<parts>\d{1,9})\.(?P<payload>[A-Za-z0-9+/]+))"
)
_KINDS: dict[str, type[RankEvent]] = {kind.__name__: kind for kind in typing.get_args(RankEvent)}


class Received(NamedTuple):
    """An event, and the process that reported it."""

    host: str
    pid: int
    event: RankEvent


def read(text: str, token: str) -> list[Received]:
    """The complete events of a token in a launcher's output.

    Everything else is ignored, also an event that does not fit its type: the other events of
    its rank show what is missing.
    """
    parts: dict[tuple[str, str], dict[int, str]] = {}
    whole: dict[tuple[str, str], str] = {}
    for found in _LINE.finditer(text):
        if found["token"] != token or int(found["crc"], 16) != zlib.crc32(found["rest"].encode()):
            continue
        key = found["source"], found["event"]
        parts.setdefault(key, {})[int(found["part"])] = found["payload"]
        if len(parts[key]) == int(found["parts"]):
            whole[key] = "".join(parts[key][number] for number in sorted(parts[key]))
    return [each for each in map(_received, whole.values()) if each]


def _received(payload: str) -> Received | None:
    try:
        return from_table(json.loads(base64.b64decode(payload + "=" * (-len(payload) % 4))))
    except (Problem, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def from_table(table: dict[str, object]) -> Received:
    """The event of a JSON object.

    Raises:
        Problem: a field does not fit its type.
        LookupError: there is no such type, or no host or process.
    """
    host, pid = decode(str, table.pop("host")), decode(int, table.pop("pid"))
    kind = _KINDS[str(table.pop("event"))]
    return Received(host, pid, decode(kind, table, lenient=True))
