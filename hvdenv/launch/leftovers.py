"""What a run of ranks has left on its hosts: it is ended, or said to be unconfirmed.

Ranks end themselves by their deadline. Where a run did not end well, they need not wait
for it, and what a launcher started beside them may have no deadline.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from hvdenv.command import Command, Outcome
from hvdenv.errors import StepError
from hvdenv.launch.nodes import AT_ONCE, is_here
from hvdenv.reports.report import Finding
from hvdenv.runner import TOKEN_VARIABLE, Runner, end_marked

_ANSWER = "@hvdenv-ended"
# Words for any POSIX shell: only that user's processes can be read, and only they are meant.
_SCRIPT = (
    "for pid in $(grep -lsz '^{name}={token}' /proc/[0-9]*/environ | cut -d/ -f3);"
    " do kill -9 $pid 2>/dev/null && echo {answer} $pid; done; echo {answer}"
)


def end(hosts: Sequence[str], runner: Runner, seconds: float) -> Iterator[Finding]:
    """End what still runs of a run that did not end well.

    Args:
        hosts: where its ranks were; this host alone if empty.
        runner: that started it, and may have been stopped.
        seconds: that all hosts together have to answer.

    Yields:
        One finding about the hosts that could be asked, and one for each that could not.
    """
    away = [host for host in hosts if not is_here(host)]
    ended: dict[str, int] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda host: _ask(host, runner, seconds), away)
        for host, answer in zip(away, answers, strict=True):
            if isinstance(answer, int):
                ended[host] = answer
            else:
                yield _unconfirmed(host, answer)
    ended[os.uname().nodename] = len(end_marked(runner.token))
    found = [f"{count} on {host}" for host, count in ended.items() if count]
    message = f"nothing of this run is left on {', '.join(ended)}"
    if found:
        message += f"; processes that had to be ended: {', '.join(found)}"
    yield Finding("leftovers", "hosts", "pass", message)


def _ask(host: str, runner: Runner, seconds: float) -> int | str:
    """How many processes a host had to end, or why it could not be asked."""
    script = _SCRIPT.format(name=TOKEN_VARIABLE, token=runner.token, answer=_ANSWER)
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(int(seconds), 1)}")
    command = Command(("ssh", *options, host, f"sh -c {shlex.quote(script)}"), timeout=seconds)
    try:
        outcome = Runner(runner.environment(Command(()))).run(command)
    except StepError as error:
        return str(error)
    answers = [line for line in outcome.output.splitlines() if line.startswith(_ANSWER)]
    return len(answers) - 1 if _ANSWER in answers else _why(outcome)


def _why(outcome: Outcome) -> str:
    if outcome.timed_out:
        return f"no answer by ssh within {outcome.command.timeout:.0f} s"
    return outcome.tail(3) or f"ssh ended with exit code {outcome.returncode}"


def _unconfirmed(host: str, why: str) -> Finding:
    return Finding(
        "leftovers",
        host,
        "unproven",
        f"unconfirmed whether ranks still run on {host}: {why}",
        remedy=f"ranks end themselves at their deadline; once {host} is back, look there for"
        " processes named rank.py and rank_work.py",
    )
