"""A process on a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
from collections.abc import Mapping
from types import TracebackType

from tests.support.waiting import wait_until


class Terminal:
    """A process with a terminal of its own, and a user in front of it."""

    def __init__(self, words: list[str], variables: Mapping[str, str] = os.environ) -> None:
        self.seen = ""
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execvpe(words[0], words, variables)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, *texts: str) -> None:
        """Read until all of these texts have been printed."""

        def printed() -> bool:
            if select.select([self.descriptor], [], [], 0.1)[0]:
                self.seen += os.read(self.descriptor, 4096).decode(errors="replace")
            return all(text in self.seen for text in texts)

        wait_until(printed, 120)

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        ended: list[int] = []

        def has_ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            ended.append(status)
            return pid == self.pid

        wait_until(has_ended, 120)
        self.pid = 0
        return os.waitstatus_to_exitcode(ended[-1])
