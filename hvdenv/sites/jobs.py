"""Submitting jobs and following them to their end, also after a lost connection."""

import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.command import Command, Outcome
from hvdenv.base.errors import StepError, UsageError
from hvdenv.base.masking import clean, cut_before
from hvdenv.base.places import Places, make_folder, write_json, write_text
from hvdenv.base.reading import MIB, OUTPUT, STATE, open_file, read_json
from hvdenv.base.runner import LINE_LIMIT, TOKEN_VARIABLE, Runner
from hvdenv.base.schema import Problem, decode, encode
from hvdenv.model import template
from hvdenv.model.dialect import Dialect, JobQuery, State
from hvdenv.sites.status import Status, find_exit_code, job_number, limited, parse_status

# Schedulers serve many users: hvdenv polls often only while something changes.
FIRST_POLL, LAST_POLL, SLOWER = 1.0, 10.0, 1.5
# A network file system may show output a little later.
OUTPUT_SECONDS = 3.0
# Schedulers are restarted for maintenance now and then, while jobs go on.
PATIENCE_SECONDS = 900.0
QUERY_SECONDS = 60.0
COMMAND_NOT_FOUND = 127
_TICK = 0.5


class Submitted(NamedTuple):
    """A job that was submitted, as recorded under HVDENV_HOME.

    Attributes:
        cluster: of a federation, if it is not the own one.
        submitted: when, in UTC.
        key: identifies what the job is for; a later call for the same resumes following it.
        log: file that all its output goes to; empty if the scheduler decides.
        outputs: files that the scheduler puts its output into, once known.
        state: how it ended; None until that was observed.
    """

    scheduler: str
    dialect: Dialect
    name: str
    key: str = ""
    log: str = ""
    id: str = ""
    script: str = ""
    submitted: str = ""
    cluster: str = ""
    outputs: tuple[str, ...] = ()
    state: State | None = None
    exit_code: int | None = None

    @property
    def files(self) -> tuple[str, ...]:
        return (self.log,) if self.log else self.outputs

    def words(self, command: str) -> tuple[str, ...]:
        """A command of the scheduler about this job."""
        return template.words(command, {"id": self.id, "cluster": self.cluster or None})


def submit(text: str, job: Submitted, runner: Runner, places: Places) -> Submitted:
    """Submit the script of a job, and record it.

    Raises:
        StepError: the scheduler rejects it, or cannot be reached.
    """
    dialect = job.dialect
    path = make_folder(places.jobs) / f"{job.name}-{uuid.uuid4().hex[:12]}.sh"
    write_text(path, text, 0o700)  # Cobalt runs the file itself
    # With this variable, the job would end with this process if both are on the same machine.
    words = ("env", "-u", TOKEN_VARIABLE, *template.words(dialect.submit, {"script": str(path)}))
    outcome = _call(words, runner)
    with limited():
        found = [*re.finditer(dialect.submitted, outcome.output, re.MULTILINE)] if outcome else []
    if not found:
        path.unlink()
        raise _not_submitted(dialect, outcome)
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    cluster = found[-1].groupdict().get("cluster") or ""
    job = job._replace(id=found[-1]["id"], cluster=cluster, script=str(path), submitted=now)
    keep(job, places)
    return job


def _not_submitted(dialect: Dialect, outcome: Outcome) -> StepError:
    instead = "\nhvdenv job RECIPE --to job.sh writes the script instead"
    if outcome.returncode == COMMAND_NOT_FOUND:
        return without_scheduler(dialect, dialect.program, instead)
    message = "the scheduler rejected the job"
    remedy = "see its message above; check partition, account, time and nodes"
    if any(each in outcome.output for each in dialect.unreachable):
        message = "the scheduler cannot be reached"
        remedy = f"try again in a few minutes, or on a login node of the cluster{instead}"
    return StepError(message, where=dialect.program, detail=outcome.tail(5), remedy=remedy)


def without_scheduler(dialect: Dialect, program: str, instead: str = "") -> StepError:
    """The error where a program of the scheduler does not exist."""
    return StepError(
        f"this machine has no {dialect.label}: there is no {program} on PATH",
        where=os.uname().nodename,
        remedy="call hvdenv on a login node of the cluster, or load the module that provides"
        f" {program}{instead}",
    )


def recall(job: str, places: Places) -> Submitted:
    """The record of a job.

    Raises:
        UsageError: there is none.
    """
    every = records(places)
    found = [record for record in every if job_number(record.id) == job_number(job)]
    if found:
        return found[-1]
    known = ", ".join(record.id for record in every[-10:]) or "none"
    raise UsageError(
        f"no record of a job {job}",
        where="--follow",
        remedy=f"jobs recorded in {places.jobs}: {known}",
    )


def records(places: Places) -> list[Submitted]:
    """All recorded jobs, oldest first; unreadable records are skipped."""
    found = []
    for path in places.jobs.glob("*.json"):
        with suppress(OSError, ValueError, Problem):
            found.append(decode(Submitted, read_json(path, STATE)))
    return sorted(found, key=lambda record: record.submitted)


def unfinished(key: str, places: Places) -> Submitted | None:
    """The last job with this key whose end was not observed."""
    same = [record for record in records(places) if record.key == key and not record.state]
    return same[-1] if same else None


def keep(record: Submitted, places: Places) -> None:
    """Write the record of a job.

    Raises:
        StepError: HVDENV_HOME cannot be written.
    """
    name = f"{record.scheduler}-{job_number(record.id)}.json"
    write_json(places.jobs / name, encode(record))


def find_status(record: Submitted, runner: Runner) -> Status | None:
    """The status of a job; None if the scheduler does not answer."""
    dialect = record.dialect
    status = _ask(dialect.query, record, runner)
    if status and status.name and status.name != record.name:
        status = Status("gone")  # its number was given to another job
    if status is None or status.state != "gone":
        return status
    if dialect.history.command:
        status = _ask(dialect.history, record, runner) or status
    code = find_exit_code("\n".join(map(_end, record.files)), record.id)
    if status.state != "gone" or code is None:
        return status
    return Status("failed" if code else "completed", exit_code=code)


def _ask(question: JobQuery, record: Submitted, runner: Runner) -> Status | None:
    outcome = _call(record.words(question.command), runner)
    return parse_status(outcome.output, question, record.id)


def cancel(record: Submitted, runner: Runner) -> None:
    """Cancel a job.

    Raises:
        StepError: the scheduler refuses.
    """
    words = record.words(record.dialect.cancel)
    outcome = _call(words, runner)
    if not outcome:
        raise StepError(
            f"cannot cancel job {record.id}",
            detail=outcome.tail(5),
            remedy=f"try it yourself: {' '.join(words)}",
        )


def _call(words: tuple[str, ...], runner: Runner) -> Outcome:
    return runner.run(Command(words, timeout=QUERY_SECONDS))


class JobNote(NamedTuple):
    """What hvdenv says about a job."""

    text: str


class Follower:
    """Follows a job to its end, and records that.

    Args:
        withdraw: cancel the job if it can never start.
    """

    def __init__(
        self, record: Submitted, runner: Runner, places: Places, *, withdraw: bool = False
    ) -> None:
        self.record, self.runner, self.places, self.withdraw = record, runner, places, withdraw
        ended = Status(record.state, exit_code=record.exit_code) if record.state else None
        self.status: Status | None = ended
        self._tails: dict[str, OutputTail] = {}
        self._pause = self._due = self._silent_since = 0.0

    def events(self) -> Iterator[str | JobNote | Status]:
        """Each line of its output, masked and without control sequences, each new status, and notes.

        The last status is that of the end.

        Raises:
            StepError: the job can never start, or the scheduler stays silent.
        """
        while not (self.status and self.status.over):
            if time.monotonic() >= self._due:
                yield from self._poll()
            # Before the job runs, a file of this name may be an older job's.
            if self.status and self.status.state != "waiting":
                for line in self._lines():
                    if find_exit_code(line, self.record.id) is not None:
                        self._due = 0.0
                    yield line
            time.sleep(_TICK)
        yield from self._late_lines()
        state, code = self.status.state, self.status.exit_code
        keep(self.record._replace(state=state, exit_code=code), self.places)
        yield self.status._replace(outputs=self.status.outputs or self.record.outputs)

    def _poll(self) -> Iterator[JobNote | Status]:
        """Ask for the status; yields it if it is new."""
        found = find_status(self.record, self.runner)
        self._pause = min(LAST_POLL, max(FIRST_POLL, self._pause * SLOWER))
        yield from self._notes(silent=found is None)
        if found and found != self.status:
            self.status, self._pause = found, FIRST_POLL
            if found.outputs:  # the scheduler forgets them minutes after the end
                self.record = self.record._replace(outputs=found.outputs)
                keep(self.record, self.places)
            yield found
            if reason := found.hopeless(self.record.dialect):
                raise self._hopeless(f"{reason} ({found.reason})")
        self._due = time.monotonic() + self._pause

    def _notes(self, *, silent: bool) -> Iterator[JobNote]:
        since, now = self._silent_since, time.monotonic()
        self._silent_since = (since or now) if silent else 0.0
        if since and not silent:
            yield JobNote("the scheduler answers again")
        elif silent and not since:
            yield JobNote(
                "the scheduler does not answer; this does not affect the job; asking again"
            )
        elif silent and now - since > PATIENCE_SECONDS:
            raise StepError(
                f"the scheduler has not answered for {PATIENCE_SECONDS:.0f} seconds",
                where=f"job {self.record.id}",
                remedy="the job is still running; follow it later: hvdenv job --follow"
                f" {self.record.id}",
            )

    def _hopeless(self, reason: str) -> StepError:
        record = self.record
        remedy = f"cancel it ({' '.join(record.words(record.dialect.cancel))}) and submit it"
        if self.withdraw:
            cancel(record, self.runner)
            keep(record._replace(state="cancelled"), self.places)
            remedy = "hvdenv cancelled it; submit it again"
        return StepError(
            f"it cannot start: {reason}",
            where=f"job {record.id}",
            remedy=f"{remedy} with other values",
        )

    def _lines(self, *, last: bool = False) -> Iterator[str]:
        """New lines of its output: files that grow elsewhere and may not exist yet."""
        for file in self.record.files:
            yield from self._tails.setdefault(file, OutputTail(file)).lines(last=last)

    def _late_lines(self) -> Iterator[str]:
        """Lines that arrive after the end of the job."""
        deadline = time.monotonic() + OUTPUT_SECONDS
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            lines = [*self._lines()]
            yield from lines
            quiet = 0 if lines else quiet + 1
            time.sleep(_TICK)
        yield from self._lines(last=True)


class OutputTail:
    """Reads a file that grows."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._offset = 0
        self._rest = b""

    def lines(self, *, last: bool = False) -> Iterator[str]:
        """The lines since the last call; with ``last``, also one without a line break."""
        # Opened each time, since that is when NFS looks for changes.
        with suppress(OSError), open_file(self.path, OUTPUT) as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(self._offset)
            while block := stream.read(max(0, min(MIB, end - self._offset))):
                self._offset += len(block)
                *whole, self._rest = (self._rest + block).split(b"\n")
                if len(self._rest) > LINE_LIMIT:
                    at = cut_before(self._rest)
                    whole, self._rest = [*whole, self._rest[:at]], self._rest[at:]
                yield from map(_shown, whole)
        if last and self._rest:
            yield _shown(self._rest)
            self._rest = b""


def _shown(line: bytes) -> str:
    """A line for people; of a progress bar, only its last state."""
    shown = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
    return clean(shown.decode("utf-8", "replace"))


def _end(path: str) -> str:
    """The end of a file; empty if it cannot be read."""
    with suppress(OSError), open_file(path, OUTPUT) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - LINE_LIMIT))
        return stream.read().decode("utf-8", "replace")
    return ""
