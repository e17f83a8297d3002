"""The status of a job: read from a scheduler's answer as its data file says, and in words."""

import json
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import NamedTuple

from hvdenv.base.errors import RecipeError
from hvdenv.model.dialect import AnyState, Dialect, JobQuery, State

PATTERN_SECONDS = 5.0
# The last line of a job's output.
EXIT_LINE = "hvdenv: job {id} ended with exit code"
_ENDED = re.compile(EXIT_LINE.format(id=r"(\S+)") + r" ([0-9]+)$", re.MULTILINE)

# What happened to a job that did not end by itself, and what to do.
_ENDS: Mapping[State, tuple[str, str]] = {
    "timeout": (
        "reached its time limit",
        "request more time (--time), or have the program write checkpoints",
    ),
    "cancelled": ("was cancelled", "if you did not cancel it, contact the site's support"),
    "node failure": (
        "ended because a node failed or could not start it",
        "submit it again; if that fails again, report its nodes to the site's support",
    ),
    "out of memory": (
        "used more memory than it was given",
        "set job.memory, start fewer ranks on each node, or use smaller batches",
    ),
    "preempted": (
        "was preempted by another job",
        "submit it again, or to a queue whose jobs are not preempted",
    ),
    "failed": ("failed, and the scheduler does not report how", "look at the end of its output"),
    "gone": (
        "is not known to the scheduler, and its output does not say how it ended",
        "look at the end of its output",
    ),
}


class Status(NamedTuple):
    """What a scheduler reports about a job.

    Attributes:
        state: ``gone`` if the scheduler does not know the job, or no longer knows it.
        reason: why it waits or ended, in the scheduler's words; may be empty.
        exit_code: of a job that has ended, if known; 128 and the signal's number if a
            signal ended it.
        hosts: where it runs, as the scheduler writes it.
    """

    state: State
    reason: str = ""
    exit_code: int | None = None
    outputs: tuple[str, ...] = ()
    hosts: str = ""
    name: str = ""

    @property
    def over(self) -> bool:
        return self.state not in ("waiting", "running")

    @property
    def abnormal_end(self) -> tuple[str, str] | None:
        """What happened to a job that did not end by itself, and what to do; None if it did."""
        if self.state == "failed" and self.exit_code is not None:
            return None
        return _ENDS.get(self.state)

    def hopeless(self, dialect: Dialect) -> str:
        """Why a waiting job can never start as submitted; empty if it can."""
        return _meaning(dialect.hopeless, self.reason) if self.state == "waiting" else ""

    def describe(self, dialect: Dialect) -> str:
        """For people: ``waiting (Priority: other jobs come first)``."""
        if self.state == "running":
            return f"running on {self.hosts}" if self.hosts else "running"
        if self.reason in ("", "NonZeroExitCode", "(null)"):
            return self.state
        meaning = _meaning(dialect.waiting, self.reason) if self.state == "waiting" else ""
        return f"{self.state} ({self.reason}{f': {meaning}' if meaning else ''})"


def _meaning(known: Mapping[str, str], reason: str) -> str:
    """What is known about a reason, by what it begins with before a comma or colon."""
    return known.get(reason) or known.get(re.split("[,:]", reason)[0], "")


def find_exit_code(output: str, job: str) -> int | None:
    """The exit code that a job's script wrote as its last line; None if it did not get there."""
    found = _ENDED.findall(output)
    if found and job_number(found[-1][0]) == job_number(job):
        return int(found[-1][1])
    return None


def job_number(job: str) -> str:
    """A job's id without the name of a server or cluster."""
    return re.split("[.;]", job)[0]


def number(text: str) -> int:
    """A number in what a scheduler answers or sets; 0 if it is anything else."""
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text, re.ASCII) else 0


@contextmanager
def limited() -> Iterator[None]:
    """Ends patterns of a site's own scheduler that take too long: signals interrupt a match.

    Raises:
        RecipeError: they do.
    """
    if current_thread() is not main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise RecipeError(
            f"a pattern takes longer than {PATTERN_SECONDS:g} s",
            where="the table schedulers of the recipe or site file",
            remedy=r"rewrite patterns that repeat a repeat, such as (\S+ ?)*",
        )

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATTERN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def parse_status(text: str, answer: JobQuery, job: str) -> Status | None:
    """The status in an answer about a job; None if the text is not an answer."""
    with limited():
        return _Reader(text.replace("\n\t", "") if answer.folded else text, answer, job).status()


class _Reader(NamedTuple):
    text: str
    answer: JobQuery
    job: str

    def status(self) -> Status | None:
        answer = self.answer
        if answer.unknown and self.search(answer.unknown):
            return Status("gone")
        word = self.first(answer.state)
        state = answer.states.get(word, answer.other) if word else None
        if state is None:
            return None
        reason = next(filter(None, map(self.first, answer.reason)), "")
        code, meant = self.exit_code()
        ended = self.ended(state, reason, code, meant)
        name = self.first(answer.name)
        if ended == "completed":
            code = 0
        elif meant or ended in ("waiting", "running") or (ended, code) == ("failed", 0):
            code = None  # not of the program: the scheduler failed
        return Status(
            state=ended,
            reason=reason,
            exit_code=code,
            outputs=self.outputs(name),
            hosts="" if ended == "waiting" else self.hosts(),
            name=name,
        )

    def ended(self, state: AnyState, reason: str, code: int | None, meant: State | None) -> State:
        """The state, with what the reason and the exit code say about it."""
        if state in ("ended", "failed"):
            for start, end in self.answer.ends.items():
                if reason.startswith(start):
                    return end
        if state != "ended":
            return state
        return meant or ("cancelled" if code is None else "failed" if code else "completed")

    def exit_code(self) -> tuple[int | None, State | None]:
        """The exit code as a shell has it, and the state that it stands for."""
        found = self.answer.exit_code and self.search(self.answer.exit_code)
        if not found:
            return None, None
        text, signal = found["code"] or "", number(found.groupdict().get("signal") or "")
        code = -number(text[1:]) if text.startswith("-") else number(text)
        if not code and (not text or text.strip("0")):  # an own pattern may match any text
            return None, None
        if meant := self.answer.codes.get(str(code), self.answer.negative if code < 0 else None):
            return code, meant
        code = code or (128 + signal if signal else 0)
        return (code if code < 256 else 128 + code % 128), None

    def outputs(self, name: str) -> tuple[str, ...]:
        """The paths of output files, each once."""
        folder = self.first(self.answer.directory)
        files = set()
        for file in filter(None, map(self.first, self.answer.outputs)):
            for mark, meaning in self.answer.placeholders.items():
                file = file.replace(mark, {"{id}": self.job, "{name}": name}.get(meaning, meaning))
            files.add(file if file.startswith("/") or not folder else f"{folder}/{file}")
        return tuple(sorted(files))

    def hosts(self) -> str:
        answer = self.answer
        part = self.first(answer.hosts_in) if answer.hosts_in else self.text
        found = re.findall(self.pattern(answer.hosts), part, re.MULTILINE) if answer.hosts else []
        return "+".join(dict.fromkeys(found))

    def pattern(self, pattern: str) -> str:
        return pattern.replace("{id}", re.escape(self.job))

    def search(self, pattern: str) -> re.Match[str] | None:
        return re.search(self.pattern(pattern), self.text, re.MULTILINE)

    def first(self, pattern: str) -> str:
        """The groups of the first match, joined; empty if there is none."""
        found = self.search(pattern) if pattern else None
        if not found:
            return ""
        text = ": ".join(each for each in found.groups() if each).strip()
        try:
            return str(json.loads(f'"{text}"', strict=False)) if self.answer.escaped else text
        except ValueError:
            return text
