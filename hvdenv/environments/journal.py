"""The journal of a build: one line of JSON for each event, only appended to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from hvdenv.environments.generations import timestamp
from hvdenv.places import blocked, reporting
from hvdenv.reading import STATE, read_file
from hvdenv.schema import Pattern, Problem, Table, decode

STARTED, FINISHED, FAILED = "step-started", "step-finished", "step-failed"
Kind = Annotated[str, Pattern(f"{STARTED}|{FINISHED}|{FAILED}", "an event of a step")]


class Event(NamedTuple):
    """An event of a step.

    Attributes:
        key: identifies the step and all before it; see chain().
        time: in UTC.
    """

    event: Kind
    step: str
    key: str
    time: str
    seconds: float | None = None
    data: Table | None = None


def chain(previous: str, rendered: str) -> str:
    """The key of a step, from the key of the step before and the step as text."""
    return hashlib.sha256(f"{previous}\n{rendered}".encode("utf-8", "surrogateescape")).hexdigest()


class Journal:
    """The events of one generation, from read().

    Attributes:
        events: up to the first line that is not an event.
        damage: what is wrong with the file, for the user; or empty. An incomplete last line is no
            damage: the build was killed while writing it.
    """

    def __init__(self, path: Path, events: list[Event], size: int, damage: str) -> None:
        self.path = path
        self.events = events
        self.damage = damage
        self._size = size
        self._finished: dict[str, Event] = {}
        for event in events:
            self._apply(event)

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read a journal; a missing file is an empty one.

        Raises:
            StepError: the file cannot be read.
        """
        try:
            content = read_file(path, STATE).data
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise blocked(path, error, "read") from error
        events: list[Event] = []
        size = 0
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            event = _parse(line)
            if event is None:
                damage = (
                    f"{path}, line {number}: not an event of a build; "
                    "the steps recorded from there on are repeated"
                )
                return cls(path, events, size, damage)
            events.append(event)
            size += len(line) + 1
        return cls(path, events, size, "")

    def finished(self, key: str) -> Event | None:
        """The event by which the step with this key finished, unless that was undone."""
        return self._finished.get(key)

    def append(
        self,
        event: str,
        step: str,
        key: str,
        *,
        seconds: float | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Event:
        """Write an event and sync it to disk.

        Raises:
            StepError: the file cannot be written.
        """
        time = timestamp(precision="milliseconds")
        kept = None if data is None else dict(data)
        entry = Event(event=event, step=step, key=key, time=time, seconds=seconds, data=kept)
        fields = {name: value for name, value in entry._asdict().items() if value is not None}
        line = json.dumps(fields, allow_nan=False).encode() + b"\n"
        with reporting(self.path):
            self._write(line)
        self.events.append(entry)
        self._apply(entry)
        return entry

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            # An incomplete line would swallow the line that follows it.
            os.ftruncate(descriptor, self._size)
            written = os.pwrite(descriptor, line, self._size)
            if written != len(line):
                os.pwrite(descriptor, line[written:], self._size + written)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._size += len(line)

    def _apply(self, event: Event) -> None:
        """Starting a step again undoes it and every step that built on it."""
        if event.key in self._finished:
            keys = list(self._finished)
            for key in keys[keys.index(event.key) :]:
                del self._finished[key]
        if event.event == FINISHED:
            self._finished[event.key] = event


def _parse(line: bytes) -> Event | None:
    """The event in a line; None if there is none."""
    try:
        return decode(Event, json.loads(line), lenient=True)
    except (ValueError, RecursionError, Problem):
        return None
