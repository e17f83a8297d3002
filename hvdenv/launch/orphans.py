"""What a run of ranks has left on its hosts: it is ended, or said to be unconfirmed.

Ranks end themselves by their deadline. Where a run did not end well, they need not wait
for it, and what a launcher started beside them may have no deadline.

Processes of the run carry its token. An orphan that has dropped it may belong to somebody
else's run, so it is reported and not ended.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hvdenv.command import Command, Outcome
from hvdenv.errors import StepError
from hvdenv.launch.nodes import AT_ONCE, is_this_host
from hvdenv.masking import mask, plain
from hvdenv.reports.report import Finding
from hvdenv.runner import TOKEN_VARIABLE, Runner, end_marked

_ANSWER = "@hvdenv-ended"
# Words for any POSIX shell: only that user's processes can be read, and only they are meant.
_SCRIPT = (
    "for pid in $(grep -lsz '^{name}={token}' /proc/[0-9]*/environ | cut -d/ -f3);"
    " do kill -9 $pid 2>/dev/null && echo {answer} $pid; done;"
    " ps -o pid= -o ppid= -o etimes= -o args= -u $(id -u) | sed 's/^/{process} /'; echo {answer}"
)
_PROCESS = "@hvdenv-process"
# Who adopts orphans on a host that ranks were on.
_INIT = 1
_SHOWN = 8
# How long a process may take to notice that its run is over, in seconds.
_PATIENCE = 1.0
# The kernel says in whole seconds when it started, which start times are counted from.
_CLOCK = 1.0


class Orphan(NamedTuple):
    """A process that stayed behind on a host."""

    host: str
    pid: int
    words: str


class Suspects(NamedTuple):
    """Which processes without the run's token may be what it left behind.

    Attributes:
        folders: that their Python is in.
        since: when the run began, in seconds since the epoch.
    """

    folders: tuple[str, ...]
    since: float

    def runs(self, program: str) -> bool:
        """Whether a program is a Python in one of the folders."""
        inside = program.startswith(tuple(f"{folder.rstrip('/')}/" for folder in self.folders))
        return inside and os.path.basename(program).startswith("python")


_NOBODY = Suspects((), 0.0)


def end(
    hosts: Sequence[str], runner: Runner, seconds: float, suspects: Suspects = _NOBODY
) -> Iterator[Finding]:
    """End what still runs of a run that did not end well.

    Args:
        hosts: where its ranks were; this host alone if empty.
        runner: that started it, and may have been stopped.
        seconds: that all hosts together have to answer.
        suspects: what else is looked for on the other hosts.

    Yields:
        One finding about the hosts that could be asked, and one for each that could not, or
        that has orphans.
    """
    away = [host for host in hosts if not is_this_host(host)]
    ended: dict[str, int] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda host: _ask(host, runner, seconds), away)
        for host, answer in zip(away, answers, strict=True):
            if isinstance(answer, str):
                yield _unconfirmed(host, answer)
                continue
            ended[host] = sum(line.startswith(f"{_ANSWER} ") for line in answer)
            yield from _reported(_orphans_in(answer, host, suspects))
    ended[os.uname().nodename] = len(end_marked(runner.token))
    found = [f"{count} on {host}" for host, count in ended.items() if count]
    message = f"nothing of this run is left on {', '.join(ended)}"
    if found:
        message += f"; processes that had to be ended: {', '.join(found)}"
    yield Finding("orphans", "hosts", "pass", message)


def orphans(suspects: Suspects) -> Iterator[Finding]:
    """Report what a run has left on this host without its token; nothing is ended.

    Args:
        suspects: the processes that are meant, of this user.

    Yields:
        At most one finding.
    """
    deadline = time.monotonic() + _PATIENCE
    while (found := list(_orphans_here(suspects))) and time.monotonic() < deadline:
        time.sleep(0.1)
    yield from _reported(found)


def _orphans_here(suspects: Suspects) -> Iterator[Orphan]:
    import psutil

    me = psutil.Process()
    # An orphan is adopted by init, or by an ancestor that asked for that. What has another
    # parent belongs to that: another run, or a shell.
    adopters = {_INIT, *(each.pid for each in me.parents())}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if (
                words
                and (suspects.runs(words[0]) or suspects.runs(process.exe()))
                and process.create_time() >= suspects.since - _CLOCK
                and process.uids().effective == os.geteuid()
                and process.ppid() in adopters
                and process != me
                and process not in me.parents()
            ):
                yield Orphan(os.uname().nodename, process.pid, shlex.join(words))
        except (psutil.Error, OSError):
            continue


def _orphans_in(lines: Sequence[str], host: str, suspects: Suspects) -> list[Orphan]:
    """The same for another host, from what `ps` says there."""
    found = []
    lasted = time.time() - suspects.since + _CLOCK
    for line in lines:
        mark, *numbers, words = [*line.split(None, 4), "", "", "", "", ""][:5]
        if mark == _PROCESS and all(number.isdigit() for number in numbers):
            pid, parent, age = map(int, numbers)
            if parent == _INIT and age <= lasted and suspects.runs(words.split(" ")[0]):
                found.append(Orphan(host, pid, words))
    return found


def _reported(found: Sequence[Orphan]) -> Iterator[Finding]:
    """What is said of the orphans of one host."""
    if not found:
        return
    host, pids = found[0].host, [str(orphan.pid) for orphan in found]
    kill = f"kill {' '.join(pids)}"
    shown = ", ".join(pids[:_SHOWN]) + (f" and {len(pids) - _SHOWN} more" * (len(pids) > _SHOWN))
    yield Finding(
        "orphans",
        host,
        "unproven",
        f"orphaned processes of this environment's Python that began during verify still run on"
        f" {host}: {shown}; they lack the variable that marks what verify starts, so they were not"
        " ended",
        "\n".join(mask(plain(f"{orphan.pid} on {host}: {orphan.words}")) for orphan in found),
        "unless they belong to another run of yours: "
        + (kill if is_this_host(host) else f"ssh {shlex.quote(host)} {kill}"),
    )


def _ask(host: str, runner: Runner, seconds: float) -> list[str] | str:
    """What a host says that it ended and what runs there, or why it could not be asked."""
    script = _SCRIPT.format(
        name=TOKEN_VARIABLE, token=runner.token, answer=_ANSWER, process=_PROCESS
    )
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(int(seconds), 1)}")
    command = Command(("ssh", *options, host, f"sh -c {shlex.quote(script)}"), timeout=seconds)
    try:
        outcome = Runner(runner.environment(Command(()))).run(command)
    except StepError as error:
        return str(error)
    lines = outcome.output.splitlines()
    return lines if _ANSWER in lines else _why(outcome)


def _why(outcome: Outcome) -> str:
    if outcome.timed_out:
        return f"no answer by ssh within {outcome.command.timeout:.0f} s"
    return outcome.tail(3) or f"ssh ended with exit code {outcome.returncode}"


def _unconfirmed(host: str, why: str) -> Finding:
    return Finding(
        "orphans",
        host,
        "unproven",
        f"unconfirmed whether ranks still run on {host}: {why}",
        remedy=f"ranks end themselves at their deadline; once {host} is back, look there for"
        " processes named rank.py and rank_work.py",
    )
