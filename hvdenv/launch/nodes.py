"""Asks several hosts what they have of what running an image takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hvdenv.errors import StepError
from hvdenv.launch.preflight import Node, parse_node, peers_of, question
from hvdenv.runner import Runner, environment

# More connections at once, and sshd begins to drop them.
AT_ONCE = 8


def ask(hosts: Sequence[str], image: str, runner: Runner, *, ssh: bool) -> dict[str, Node | str]:
    """Ask all hosts, several at a time.

    Args:
        hosts: this one is asked without ssh.
        image: the image's file.
        runner: starts ssh.
        ssh: whether the first host has to reach the others by ssh, and they it.

    Returns:
        For each host what it says, or why it could not be asked.
    """

    def one(host: str) -> Node | str:
        peers = peers_of(host, hosts) if ssh else ()
        path = environment().get("PATH", "")
        here = sys.executable if is_here(host) else ""
        try:
            outcome = runner.run(question(host, image, peers, path, here=here))
        except StepError as error:
            return str(error)
        if outcome.timed_out:
            return "no answer in time"
        return parse_node(outcome.output) or outcome.tail() or "no answer"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            return dict(zip(hosts, pool.map(one, hosts), strict=True))
        except BaseException:
            runner.stop()
            raise


def is_here(host: str) -> bool:
    """Whether a name is that of this host."""
    name = os.uname().nodename
    return host in ("localhost", name, name.partition(".")[0])
