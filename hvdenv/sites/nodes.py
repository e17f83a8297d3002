"""What hvdenv runs on the hosts of a run by ssh: the end of orphans.

Ranks end themselves at their deadline. After a failed run, hvdenv ends them earlier, and with them
the launcher's own processes, which may have no deadline. Processes of the run have its token in a
variable; others are not touched.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hvdenv.base.command import Command
from hvdenv.base.errors import StepError
from hvdenv.base.runner import TOKEN_VARIABLE, Runner, end_marked
from hvdenv.reports.report import Finding

# With more connections at once, sshd begins to drop them.
_AT_ONCE = 8


def _is_this_host(host: str) -> bool:
    name = os.uname().nodename
    return host in ("localhost", name, name.partition(".")[0])


_ANSWER = "@hvdenv-ended"
# For any POSIX shell. It can read only the processes of its user, which are the ones to end.
_END_MARKED = (
    "for pid in $(grep -lsz '^{name}={token}' /proc/[0-9]*/environ | cut -d/ -f3);"
    " do kill -9 $pid 2>/dev/null && echo {answer} $pid; done; echo {answer}"
)


def end_orphans(hosts: Sequence[str], runner: Runner, seconds: float) -> Iterator[Finding]:
    """End the orphans of a failed run on its hosts, or on this one if there are none.

    All hosts together have ``seconds`` to answer. Yields one finding about those that answered,
    and one for each that did not.
    """
    others = [host for host in hosts if not _is_this_host(host)]
    ended: dict[str, int] = {}
    # The runner of a run that was stopped starts nothing.
    asking = Runner(runner.environment(Command(())))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            ask = partial(_end_there, token=runner.token, seconds=seconds, runner=asking)
            answers = [*zip(others, pool.map(ask, others), strict=True)]
        except BaseException:
            asking.stop()
            raise
    for host, (output, why) in answers:
        lines = output.splitlines()
        if _ANSWER in lines:
            ended[host] = sum(line.startswith(f"{_ANSWER} ") for line in lines)
            continue
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


def _end_there(host: str, token: str, seconds: float, runner: Runner) -> tuple[str, str]:
    """End the marked processes of another host: what it answers, and why that is no answer."""
    script = _END_MARKED.format(name=TOKEN_VARIABLE, token=token, answer=_ANSWER)
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(int(seconds), 1)}")
    words = ("ssh", *options, host, f"sh -c {shlex.quote(script)}")
    try:
        outcome = runner.run(Command(words, timeout=seconds))
    except StepError as error:
        return "", str(error)
    if outcome.timed_out:
        return "", f"no answer within {seconds:.0f} s"
    return outcome.output, outcome.tail(3) or f"exit code {outcome.returncode}"
