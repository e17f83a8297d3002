"""Asks several hosts by ssh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from hvdenv.command import Command, Outcome
from hvdenv.errors import StepError
from hvdenv.runner import Runner

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# With more connections at once, sshd begins to drop them.
_AT_ONCE = 8


def ask(queries: Mapping[str, Command], runner: Runner) -> dict[str, Outcome | str]:
    """Run a query for each host, several at a time: the outcome, or why there is none."""

    def run(query: Command) -> Outcome | str:
        try:
            outcome = runner.run(query)
        except StepError as error:
            return str(error)
        return f"no answer within {query.timeout:.0f} s" if outcome.timed_out else outcome

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            return dict(zip(queries, pool.map(run, queries.values()), strict=True))
        except BaseException:
            runner.stop()
            raise


def is_this_host(host: str) -> bool:
    name = os.uname().nodename
    return host in ("localhost", name, name.partition(".")[0])
