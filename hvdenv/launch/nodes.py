"""Asks several hosts whether they can run an image; see preflight."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hvdenv.errors import StepError
from hvdenv.launch.preflight import Node, node_query, parse_node, peers_of
from hvdenv.runner import Runner, environment

# With more connections at once, sshd begins to drop them.
AT_ONCE = 8


def ask_nodes(
    hosts: Sequence[str], image: str, runner: Runner, *, ssh: bool
) -> dict[str, Node | str]:
    """Ask all hosts, several at a time: for each host its report, or why there is none.

    With ``ssh``, the first host and the others must reach each other by ssh.
    """

    def ask(host: str) -> Node | str:
        peers = peers_of(host, hosts) if ssh else ()
        path = environment().get("PATH", "")
        try:
            outcome = runner.run(node_query(host, image, peers, path, here=is_this_host(host)))
        except StepError as error:
            return str(error)
        if outcome.timed_out:
            return "no answer in time"
        return parse_node(outcome.output) or outcome.tail() or "no answer"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            return dict(zip(hosts, pool.map(ask, hosts), strict=True))
        except BaseException:
            runner.stop()
            raise


def is_this_host(host: str) -> bool:
    name = os.uname().nodename
    return host in ("localhost", name, name.partition(".")[0])
