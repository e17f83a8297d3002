"""Submitting jobs and following them to their end, also after a lost connection."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv.command import Command, Outcome
from hvdenv.errors import StepError, UsageError
from hvdenv.masking import mask, plain
from hvdenv.model.cluster import Scheduler
from hvdenv.places import Places, make_folder, write_json
from hvdenv.reading import MIB, OUTPUT, STATE, open_file, read_json
from hvdenv.runner import LINE_LIMIT, TOKEN_VARIABLE, Runner
from hvdenv.schema import Problem, decode
from hvdenv.sites.jobstate import QUEUES, State, Status, exit_code_in, never_starts, number_of

# Schedulers serve many users: they are asked often only where something changes.
FIRST_POLL, LAST_POLL, SLOWER = 1.0, 10.0, 1.5
# Output lies on a file system that may show it a little later.
OUTPUT_SECONDS = 3.0
# A scheduler is restarted for maintenance now and then, and jobs live on.
PATIENCE_SECONDS = 900.0
ASK_SECONDS = 60.0
COMMAND_NOT_FOUND = 127
_TICK = 0.5
# What sbatch, qsub and bsub print if no server answers, or none is configured on this host.
_UNREACHABLE = (
    "Could not establish a configuration source", "Unable to contact slurm controller",
    "cannot connect to server", "No default server", "Connection refused", "LSF is down",
    "Cannot connect to LSF",
)  # fmt: skip


class Submitted(NamedTuple):
    """A job that was submitted, as it is kept under HVDENV_HOME.

    Attributes:
        scheduler: that has it.
        id: as the scheduler calls it.
        name: of the job.
        script: file that was submitted.
        submitted: when, in UTC.
        key: what the job is for; a call for the same takes it up.
        log: file that all its output goes to; empty where the scheduler decides.
        outputs: files that the scheduler puts its output into, once that is known.
        state: how it ended; empty as long as nobody has seen that.
        exit_code: with which it ended, where that is known.
    """

    scheduler: Scheduler
    id: str
    name: str
    script: str
    submitted: str
    key: str = ""
    log: str = ""
    outputs: tuple[str, ...] = ()
    state: State | None = None
    exit_code: int | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Where its output is."""
        return (self.log,) if self.log else self.outputs


def submit(
    text: str,
    scheduler: Scheduler,
    name: str,
    runner: Runner,
    places: Places,
    *,
    key: str = "",
    log: str = "",
) -> Submitted:
    """Hand a script to the scheduler and note the job.

    Args:
        text: the script.
        scheduler: that takes it.
        name: of the job.
        runner: starts the scheduler's programs.
        places: where scripts and notes are kept.
        key: what the job is for.
        log: file that the script writes its output to.

    Raises:
        StepError: the scheduler does not take it, with what it said.
    """
    folder = make_folder(places.jobs)
    path = folder / f"{name}-{uuid.uuid4().hex[:12]}.sh"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o700)  # Cobalt runs the file itself
    # The mark would have the job ended with this process, were it on the same machine.
    words = ("env", "-u", TOKEN_VARIABLE, *QUEUES[scheduler].submit(str(path)))
    outcome = _ask(words, runner)
    job = QUEUES[scheduler].submitted(outcome.output) if outcome else ""
    if outcome.returncode == COMMAND_NOT_FOUND:
        path.unlink()
        program = {"slurm": "sbatch", "lsf": "bsub"}.get(scheduler, "qsub")
        raise StepError(
            f"there is no {program} on this host, so no job can be submitted from here",
            where=os.uname().nodename,
            remedy="call hvdenv on a login node of the cluster, or load the module that has"
            f" {program}\nhvdenv job RECIPE --to job.sh writes the script instead",
        )
    if not job:
        path.unlink()
        silent = any(each in outcome.output for each in _UNREACHABLE)
        raise StepError(
            "the scheduler cannot be reached" if silent else "the scheduler rejected the job",
            where=" ".join(QUEUES[scheduler].submit("SCRIPT")[:1]),
            detail=outcome.tail(5),
            remedy="try again in a few minutes, or on a login node of the cluster\n"
            "hvdenv job RECIPE --to job.sh writes the script instead"
            if silent
            else "its message is above: check partition, account, time and nodes",
        )
    record = Submitted(scheduler, job, name, str(path), _now(), key, log)
    keep(record, places)
    return record


def recall(job: str, places: Places) -> Submitted:
    """What was noted of a job.

    Raises:
        UsageError: nothing was, with the jobs that are known.
    """
    found = [record for record in records(places) if number_of(record.id) == number_of(job)]
    if found:
        return found[-1]
    known = ", ".join(record.id for record in records(places)[-10:]) or "none"
    raise UsageError(
        f"no job {job} was submitted from here",
        where="--follow",
        remedy=f"known under {places.jobs}: {known}",
    )


def records(places: Places) -> list[Submitted]:
    """All jobs that were noted, the last one at the end; what cannot be read is passed over."""
    found = []
    for path in places.jobs.glob("*.json"):
        try:
            found.append(decode(Submitted, read_json(path, STATE)))
        except (OSError, ValueError, Problem):
            continue
    return sorted(found, key=lambda record: record.submitted)


def unfinished(key: str, places: Places) -> Submitted | None:
    """A job for the same thing whose end nobody has seen."""
    same = [record for record in records(places) if record.key == key and not record.state]
    return same[-1] if same else None


def state_of(record: Submitted, runner: Runner) -> Status | None:
    """How a job is; None if the scheduler does not answer.

    Raises:
        StepError: the scheduler's programs are not here.
    """
    queue = QUEUES[record.scheduler]
    status = queue.told(_ask(queue.ask(record.id), runner).output)
    if status and status.name and status.name != record.name:
        status = Status("gone")  # its number was given to another job
    if status is None or status.state != "gone":
        return status
    if queue.past:
        status = queue.told_past(_ask(queue.past(record.id), runner).output) or status
    code = exit_code_in("\n".join(_last_lines(file) for file in record.files), record.id)
    if status.state != "gone" or code is None:
        return status
    return Status("failed" if code else "completed", exit_code=code)


def cancel(record: Submitted, runner: Runner) -> None:
    """Take a job back.

    Raises:
        StepError: the scheduler refuses.
    """
    outcome = _ask(QUEUES[record.scheduler].cancel(record.id), runner)
    if not outcome:
        raise StepError(
            f"job {record.id} could not be cancelled",
            detail=outcome.tail(5),
            remedy=f"try it yourself: {cancel_command(record)}",
        )


def cancel_command(record: Submitted) -> str:
    """What a person types to cancel a job."""
    return " ".join(QUEUES[record.scheduler].cancel(record.id))


class Listener(NamedTuple):
    """Who is told how a job goes.

    Attributes:
        line: of its output, masked and without control sequences.
        status: its state, when that has changed.
        note: what a person should know meanwhile.
    """

    line: Callable[[str], None]
    status: Callable[[Status], None]
    note: Callable[[str], None]


def follow(
    record: Submitted,
    runner: Runner,
    places: Places,
    listener: Listener,
    *,
    withdraw: bool = False,
    patience: float = PATIENCE_SECONDS,
) -> Status:
    """Watch a job until it has ended.

    Args:
        record: the job.
        runner: starts the scheduler's programs.
        places: where its end is noted.
        listener: is told how it goes.
        withdraw: cancel the job if it can never start.
        patience: seconds that the scheduler may be silent.

    Returns:
        Its last state.

    Raises:
        StepError: it can never start, or the scheduler stays silent.
    """
    watch = _Follower(record, runner, places, listener, withdraw=withdraw, patience=patience)
    while not watch.status or not watch.status.over:
        watch.ask()
        watch.read()
        time.sleep(_TICK)
    watch.drain()
    keep(watch.record._replace(state=watch.status.state, exit_code=watch.status.exit_code), places)
    return watch.status


class _Follower:
    """A job that is being followed: what is known of it, and when to ask again."""

    def __init__(
        self,
        record: Submitted,
        runner: Runner,
        places: Places,
        listener: Listener,
        *,
        withdraw: bool,
        patience: float,
    ) -> None:
        self.record, self.runner, self.places, self.listener = record, runner, places, listener
        self.withdraw, self.patience = withdraw, patience
        self.status = Status(record.state, exit_code=record.exit_code) if record.state else None
        self._tails: dict[str, OutputTail] = {}
        self._pause = self._due = 0.0
        self._silent_since: float | None = None

    def ask(self) -> None:
        """Ask the scheduler, if it is time to."""
        if time.monotonic() < self._due or (self.status and self.status.over):
            return
        status = state_of(self.record, self.runner)
        self._pause = min(LAST_POLL, max(FIRST_POLL, self._pause * SLOWER))
        if status is None:
            self._wait_for_answer()
        elif self._silent_since is not None:
            self._silent_since = None
            self.listener.note("the scheduler answers again")
        if status and status != self.status:
            self.status, self._pause = status, FIRST_POLL
            self._learn(status)
            self.listener.status(status)
            self._refuse_hopeless(status)
        self._due = time.monotonic() + self._pause

    def read(self) -> int:
        """Pass on what came of the job's output; the number of lines.

        Before it runs, an older job may have left a file of the same name.
        """
        if not self.status or self.status.state == "waiting":
            return 0
        lines = [line for tail in self._open_tails() for line in tail.lines()]
        for line in lines:
            self.listener.line(line)
            if exit_code_in(line, self.record.id) is not None:
                self._due = 0.0
        return len(lines)

    def drain(self) -> None:
        """What still comes after the end of the job, until nothing more does."""
        deadline = time.monotonic() + OUTPUT_SECONDS
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            quiet = 0 if self.read() else quiet + 1
            time.sleep(_TICK)
        for tail in self._open_tails():
            for line in tail.lines(last=True):
                self.listener.line(line)

    def _open_tails(self) -> list[OutputTail]:
        return [self._tails.setdefault(file, OutputTail(file)) for file in self.record.files]

    def _learn(self, status: Status) -> None:
        """Note where the output goes: the scheduler forgets it some minutes after the end."""
        if status.outputs and status.outputs != self.record.outputs:
            self.record = self.record._replace(outputs=status.outputs)
            keep(self.record, self.places)

    def _wait_for_answer(self) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self.listener.note(
                "the scheduler does not answer; that does not touch the job; asking again"
            )
        elif now - self._silent_since > self.patience:
            raise StepError(
                f"the scheduler has not answered for {self.patience:.0f} seconds",
                where=f"job {self.record.id}",
                remedy=f"the job goes on without it; later: hvdenv job --follow {self.record.id}",
            )

    def _refuse_hopeless(self, status: Status) -> None:
        reason = never_starts(status)
        if not reason:
            return
        remedy = f"{cancel_command(self.record)} takes it back; then submit it with other values"
        if self.withdraw:
            cancel(self.record, self.runner)
            keep(self.record._replace(state="cancelled"), self.places)
            remedy = "it was taken back; submit it with other values"
        raise StepError(
            f"it cannot start: {reason} ({status.reason})",
            where=f"job {self.record.id}",
            remedy=remedy,
        )


def keep(record: Submitted, places: Places) -> None:
    """Note a job, or what has become of it.

    Raises:
        StepError: HVDENV_HOME cannot be written.
    """
    values: dict[str, Any] = {
        name: value for name, value in record._asdict().items() if value is not None
    }
    write_json(places.jobs / f"{record.scheduler}-{number_of(record.id)}.json", values)


def _ask(words: tuple[str, ...], runner: Runner) -> Outcome:
    return runner.run(Command(words, timeout=ASK_SECONDS))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class OutputTail:
    """A file that grows on another machine.

    Args:
        path: the file; it may not be there yet.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._offset = 0
        self._rest = b""

    def lines(self, *, last: bool = False) -> Iterator[str]:
        """The lines that came since the last call.

        Args:
            last: a line without its end counts too.
        """
        for block in self._new_blocks():
            *whole, self._rest = (self._rest + block).split(b"\n")
            if len(self._rest) > LINE_LIMIT:
                whole, self._rest = [*whole, self._rest], b""
            yield from map(_shown, whole)
        if last and self._rest:
            yield _shown(self._rest)
            self._rest = b""

    def _new_blocks(self) -> Iterator[bytes]:
        """What was added since the last call, a part of it at a time."""
        # Opened each time: that is when NFS looks what is new.
        try:
            with open_file(self.path, OUTPUT) as stream:
                end = stream.seek(0, os.SEEK_END)
                stream.seek(self._offset)
                while block := stream.read(max(0, min(MIB, end - self._offset))):
                    self._offset += len(block)
                    yield block
        except OSError:
            return


def _shown(line: bytes) -> str:
    """A line for people; of a progress bar, only how it looks in the end."""
    shown = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
    return mask(plain(shown.decode("utf-8", "replace")))


def _last_lines(path: str) -> str:
    """The end of a file; empty if it cannot be read."""
    try:
        with open_file(path, OUTPUT) as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - LINE_LIMIT))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
