"""Orphaned processes of a run on its hosts: ends them, or reports hosts as unconfirmed.

Ranks end themselves at their deadline. After a failed run, this module ends them earlier, and
with them the launcher's own processes, which may have no deadline.

Processes of the run have its token in a variable. An orphan without it may belong to another run,
so hvdenv reports it and does not end it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdenv.command import Command
from hvdenv.launch.nodes import ask, is_this_host
from hvdenv.masking import clean
from hvdenv.reading import SYSTEM, read_text
from hvdenv.reports.report import Finding
from hvdenv.runner import TOKEN_VARIABLE, Runner, end_marked, is_marked

_ANSWER = "@hvdenv-ended"
# For any POSIX shell. It can read only the processes of its user, which are the ones to end.
_SCRIPT = (
    "for pid in $(grep -lsz '^{name}={token}' /proc/[0-9]*/environ | cut -d/ -f3);"
    " do kill -9 $pid 2>/dev/null && echo {answer} $pid; done;"
    " ps -o pid= -o ppid= -o etimes= -o args= -u $(id -u) | sed 's/^/{process} /'; echo {answer}"
)
_PROCESS = "@hvdenv-process"
# Adopts orphans on other hosts.
_INIT = 1
_SHOWN = 8
# Seconds for a process to notice that its run is over.
_PATIENCE = 1.0
# `ps` and the kernel round times.
_CLOCK = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Orphan(NamedTuple):
    host: str
    pid: int
    words: str


class Suspects(NamedTuple):
    """Describes processes without the run's token that may be its orphans.

    Attributes:
        since: start of the run, in seconds since the host was started.
        token: of the run. Processes that have it, or are being killed, are not orphans.
    """

    folders: tuple[str, ...]
    since: float
    token: str = ""

    def runs(self, program: str) -> bool:
        """Whether a program is a Python in one of the folders."""
        inside = program.startswith(tuple(f"{folder.rstrip('/')}/" for folder in self.folders))
        return inside and os.path.basename(program).startswith("python")


_NOBODY = Suspects((), 0.0)


def since_boot() -> float:
    """The seconds since this host was started. Unlike the time, they never jump."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def end(
    hosts: Sequence[str], runner: Runner, seconds: float, suspects: Suspects = _NOBODY
) -> Iterator[Finding]:
    """End the orphans of a failed run on its hosts, or on this one if there are none.

    All hosts together have ``seconds`` to answer. Yields one finding about those that answered,
    and one for each that did not, or that has orphans without the token.
    """
    others = {h: _query(h, runner.token, seconds) for h in hosts if not is_this_host(h)}
    ended: dict[str, int] = {}
    # The runner of a run that was stopped starts nothing.
    for host, answer in ask(others, Runner(runner.environment(Command(())))).items():
        lines = [] if isinstance(answer, str) else answer.output.splitlines()
        if _ANSWER in lines:
            ended[host] = sum(line.startswith(f"{_ANSWER} ") for line in lines)
            yield from _reported(_orphans_in(lines, host, suspects))
            continue
        why = (
            answer
            if isinstance(answer, str)
            else answer.tail(3) or f"exit code {answer.returncode}"
        )
        yield Finding(
            check="orphans", subject=host, status="unproven",
            message=f"unconfirmed whether ranks still run on {host}: {why}",
            remedy=f"ranks end themselves at their deadline; once {host} is reachable, check it for"
            " processes named rank.py and rank_work.py",
        )  # fmt: skip
    ended[os.uname().nodename] = len(end_marked(runner.token))
    found = [f"{count} on {host}" for host, count in ended.items() if count]
    message = f"no processes of this run are left on {', '.join(ended)}"
    if found:
        message += f"; hvdenv ended: {', '.join(found)}"
    yield Finding(check="orphans", subject="hosts", status="pass", message=message)


def orphans(suspects: Suspects) -> Iterator[Finding]:
    """Report orphans without the token on this host, in at most one finding; ends nothing."""
    deadline = time.monotonic() + _PATIENCE
    while (found := list(_local_orphans(suspects))) and time.monotonic() < deadline:
        time.sleep(0.1)
    yield from _reported(found)


def _local_orphans(suspects: Suspects) -> Iterator[Orphan]:
    import psutil

    me = psutil.Process()
    # Orphans are adopted by init, or by an ancestor that asked the kernel for them. A process with
    # another parent belongs to that parent: another run, or a shell.
    adopters = {_INIT, *(each.pid for each in me.parents())}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if (
                words
                and (suspects.runs(words[0]) or suspects.runs(process.exe()))
                and _began(process.pid) >= suspects.since - _CLOCK
                and process.uids().effective == os.geteuid()
                and process.ppid() in adopters
                and process != me
                and process not in me.parents()
                and not is_marked(process, suspects.token)
                and not _is_dying(process.pid)
            ):
                yield Orphan(os.uname().nodename, process.pid, shlex.join(words))
        except (psutil.Error, OSError):
            continue


def _began(pid: int) -> float:
    """When a process began, in seconds since the host was started."""
    stat = read_text(f"/proc/{pid}/stat", SYSTEM, errors="replace")
    return int(stat.rpartition(")")[2].split()[19]) / _TICKS


def _is_dying(pid: int) -> bool:
    """Whether a process was killed, which on a busy host takes effect seconds later."""
    status = read_text(f"/proc/{pid}/status", SYSTEM, errors="replace")
    pending = re.findall(r"^S\w+Pnd:\s*(\w+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


def _orphans_in(lines: Sequence[str], host: str, suspects: Suspects) -> list[Orphan]:
    """The same for another host, from the output of `ps`."""
    found = []
    lasted = since_boot() - suspects.since + _CLOCK
    for line in lines:
        mark, *numbers, words = [*line.split(None, 4), "", "", "", "", ""][:5]
        if mark == _PROCESS and all(number.isdigit() for number in numbers):
            pid, parent, age = map(int, numbers)
            if parent == _INIT and age <= lasted and suspects.runs(words.split(" ")[0]):
                found.append(Orphan(host, pid, words))
    return found


def _reported(found: Sequence[Orphan]) -> Iterator[Finding]:
    if not found:
        return
    host, pids = found[0].host, [str(orphan.pid) for orphan in found]
    kill = f"kill {' '.join(pids)}"
    shown = ", ".join(pids[:_SHOWN]) + (f" and {len(pids) - _SHOWN} more" * (len(pids) > _SHOWN))
    yield Finding(
        check="orphans",
        subject=host,
        status="unproven",
        message=f"orphaned processes of this environment's Python that began during verify still run on"
        f" {host}: {shown}; they lack the variable that marks processes of verify, so hvdenv did"
        " not end them",
        evidence="\n".join(clean(f"{orphan.pid} on {host}: {orphan.words}") for orphan in found),
        remedy="unless they belong to another run of yours: "
        + (kill if is_this_host(host) else f"ssh {shlex.quote(host)} {kill}"),
    )


def _query(host: str, token: str, seconds: float) -> Command:
    """Ends the marked processes of a host, and lists all processes of the user."""
    script = _SCRIPT.format(name=TOKEN_VARIABLE, token=token, answer=_ANSWER, process=_PROCESS)
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(int(seconds), 1)}")
    return Command(("ssh", *options, host, f"sh -c {shlex.quote(script)}"), timeout=seconds)
