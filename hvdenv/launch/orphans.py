"""Ends the processes that a failed run left on its hosts, or reports hosts as unconfirmed.

Ranks end themselves at their deadline. After a failed run, this module ends them earlier, and
with them the launcher's own processes, which may have no deadline. Processes of the run have its
token in a variable; others are not touched.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence

from hvdenv.command import Command
from hvdenv.launch.nodes import ask, is_this_host
from hvdenv.reports.report import Finding
from hvdenv.runner import TOKEN_VARIABLE, Runner, end_marked

_ANSWER = "@hvdenv-ended"
# For any POSIX shell. It can read only the processes of its user, which are the ones to end.
_SCRIPT = (
    "for pid in $(grep -lsz '^{name}={token}' /proc/[0-9]*/environ | cut -d/ -f3);"
    " do kill -9 $pid 2>/dev/null && echo {answer} $pid; done; echo {answer}"
)


def end(hosts: Sequence[str], runner: Runner, seconds: float) -> Iterator[Finding]:
    """End the orphans of a failed run on its hosts, or on this one if there are none.

    All hosts together have ``seconds`` to answer. Yields one finding about those that answered,
    and one for each that did not.
    """
    others = {h: _query(h, runner.token, seconds) for h in hosts if not is_this_host(h)}
    ended: dict[str, int] = {}
    # The runner of a run that was stopped starts nothing.
    for host, answer in ask(others, Runner(runner.environment(Command(())))).items():
        lines = [] if isinstance(answer, str) else answer.output.splitlines()
        if _ANSWER in lines:
            ended[host] = sum(line.startswith(f"{_ANSWER} ") for line in lines)
            continue
        why = (
            answer
            if isinstance(answer, str)
            else answer.tail(3) or f"exit code {answer.returncode}"
        )
        yield Finding(
            check="orphans",
            subject=host,
            status="unproven",
            message=f"unconfirmed whether ranks still run on {host}: {why}",
            remedy=f"ranks end themselves at their deadline; once {host} is reachable, check it for"
            " processes named rank.py and rank_work.py",
        )
    ended[os.uname().nodename] = len(end_marked(runner.token))
    found = [f"{count} on {host}" for host, count in ended.items() if count]
    message = f"no processes of this run are left on {', '.join(ended)}"
    if found:
        message += f"; hvdenv ended: {', '.join(found)}"
    yield Finding(check="orphans", subject="hosts", status="pass", message=message)


def _query(host: str, token: str, seconds: float) -> Command:
    """Ends the marked processes of a host."""
    script = _SCRIPT.format(name=TOKEN_VARIABLE, token=token, answer=_ANSWER)
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(int(seconds), 1)}")
    return Command(("ssh", *options, host, f"sh -c {shlex.quote(script)}"), timeout=seconds)
