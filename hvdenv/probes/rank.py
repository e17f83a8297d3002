"""What a launcher starts as each rank: it watches over the rank's real work.

usage: python -S -u rank.py TOKEN DEADLINE FRAMEWORK CONTROLLER

The work (rank_allreduce.py) is a child of its own, so that a rank that crashes, hangs
or prints nonsense is reported all the same. Nothing of the child's output is passed on
as it is; events go to standard output, one line each:

    @hvdenv TOKEN CRC32 PAYLOAD

PAYLOAD is JSON in base64 without padding: launchers prefix lines, programs colour them
and hvdenv hides what looks like a password in them, and all that would change JSON.

``started``  host, process, and what the launcher says about this rank
``result``   what rank_allreduce.py found
``overdue``  the deadline is near: the child's last lines, its stacks among them
``exited``   exit code or signal, last lines, seconds, what ended it

The child ends with this process (parent death signal), and this process ends by itself
at the deadline and when its launcher is gone. CONTROLLER is mpi, gloo or `-` (as it is).
Runs on Python 3.6 and up with nothing but its standard library.
"""

import base64
import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import zlib

LAUNCHER_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
)
PR_SET_PDEATHSIG = 1
OVERDUE_SECONDS = 1.0
GRACE_SECONDS = 3.0
TAIL_LINES = 40
# A whole event has to reach a pipe in one piece: 4096 bytes (PIPE_BUF), in base64.
TAIL_BYTES = 2500


def emit(token, kind, **payload):
    """Write one event; a launcher that no longer reads is not an error."""
    text = json.dumps(dict(payload, event=kind, host=socket.gethostname(), pid=os.getpid()))
    payload = base64.b64encode(text.encode("ascii")).rstrip(b"=")
    crc = zlib.crc32(payload) & 0xFFFFFFFF
    line = "\n@hvdenv {} {:08x} {}\n".format(token, crc, payload.decode("ascii"))
    with contextlib.suppress(OSError):
        os.write(1, line.encode("ascii"))


class Tail:
    """The last lines of the child's output, and what Horovod says there about itself."""

    def __init__(self):
        self._rest = b""
        self._lines = []
        self.facts = {}

    def take(self, block):
        whole = (self._rest + block).replace(b"\r", b"\n").split(b"\n")
        self._rest = whole.pop()[-TAIL_BYTES:]
        for line in whole:
            self._take_line(line.decode("utf-8", "replace").rstrip())

    def _take_line(self, line):
        words = line.split()
        for what in ("controller", "CPU"):
            if line.endswith("to perform {} operations.".format(what)) and "Using" in words:
                self.facts[what.lower()] = words[words.index("Using") + 1]
        if line:
            self._lines = [*self._lines[1 - TAIL_LINES :], line[:300]]

    def text(self):
        """Last lines that fit into one event, control characters shown as such."""
        lines = self._lines + ([self._rest.decode("utf-8", "replace")[:300]] if self._rest else [])
        text = "\n".join(lines)
        while len(json.dumps(text)) > TAIL_BYTES:
            text = text[len(text) // 20 + 1 :]
        return text


def die_with_parent(parent):
    """A function for the child to call between fork and exec."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def call():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return call


def child_environment(deadline, controller):
    """The rank's environment: Horovod says what it does, and a few threads are enough.

    A stall is named by Horovod, but not ended by it: the deadline does that for all
    ranks at once, and then each of them still shows where it was.
    """
    env = dict(os.environ)
    seconds = max(int(deadline), 2)
    env.update(
        HOROVOD_LOG_LEVEL="debug",
        HOROVOD_STALL_CHECK_TIME_SECONDS=str(max(seconds // 4, 1)),
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(seconds),
        TF_CPP_MIN_LOG_LEVEL="2",
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="1",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="-1",
        PYTHONNOUSERSITE="1",
    )
    if controller != "-":
        env["HOROVOD_CONTROLLER"] = controller
    return env


class Watch:
    """Runs the child to its end, whatever end that is."""

    def __init__(self, token, deadline, framework, controller):
        self.token = token
        self.deadline = deadline
        self.started = time.time()
        self.parent = os.getppid()
        self.tail = Tail()
        self.report = b""
        self.ended_by = ""
        self.kill_at = 0.0
        self.overdue = False
        self.child = self._start(framework, controller)

    def _start(self, framework, controller):
        work = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_allreduce.py")
        self.reports, writer = os.pipe()
        os.set_inheritable(writer, True)
        soon = max(self.deadline - 2 * OVERDUE_SECONDS, self.deadline / 2)
        child = subprocess.Popen(
            [sys.executable, "-s", "-u", work, framework, str(writer), str(soon)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Some launchers talk to their ranks over inherited descriptors (PMI_FD).
            close_fds=False,
            env=child_environment(self.deadline, controller),
            preexec_fn=die_with_parent(os.getpid()),
        )
        os.close(writer)
        return child

    def on_signal(self, number, _frame):
        """Pass the launcher's signal on; the child has a grace to follow it."""
        if not self.ended_by:
            self.ended_by = "launcher"
            self.kill_at = time.time() + GRACE_SECONDS
        self.child.send_signal(number)

    def run(self):
        """Wait for the child.

        Returns:
            Its exit status as subprocess gives it.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.child.stdout, selectors.EVENT_READ)
            selector.register(self.reports, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(0.1)
                for key, _ in ready:
                    self._read(selector, key)
                if not ready and self.child.poll() is not None:
                    break
                self._look_at_the_clock()
        while self.child.poll() is None:
            self._look_at_the_clock()
            time.sleep(0.05)
        return self.child.returncode

    def _read(self, selector, key):
        block = os.read(key.fd, 65536)
        if not block:
            selector.unregister(key.fileobj)
        elif key.fd == self.reports:
            self._take_report(block)
        else:
            self.tail.take(block)

    def _take_report(self, block):
        self.report += block
        if self.report.endswith(b"\n"):
            payload = json.loads(self.report.decode("utf-8"))
            self.report = b""
            emit(self.token, "result", said=self.tail.facts, **payload)

    def _look_at_the_clock(self):
        now = time.time()
        left = self.started + self.deadline - now
        if os.getppid() != self.parent:
            self._kill("the launcher is gone")
        elif left <= 0:
            self._kill("deadline")
        elif self.kill_at and now > self.kill_at:
            self._kill("launcher")
        elif left <= OVERDUE_SECONDS and not self.overdue:
            self.overdue = True
            emit(self.token, "overdue", tail=self.tail.text(), seconds=self.seconds())

    def _kill(self, why):
        if self.child.poll() is None:
            self.ended_by = self.ended_by or why
            self.child.kill()

    def seconds(self):
        """Seconds since the start."""
        return round(time.time() - self.started, 2)


def signal_name(code):
    """The name of the signal in an exit status of subprocess; empty if there was none."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return "signal {}".format(-code)


def follow(code):
    """End as the child ended."""
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def main(token, deadline, framework, controller):
    seen = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}
    emit(token, "started", variables=seen)
    watch = Watch(token, float(deadline), framework, controller)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, watch.on_signal)
    code = watch.run()
    emit(
        token,
        "exited",
        code=code,
        signal=signal_name(code),
        ended_by=watch.ended_by,
        seconds=watch.seconds(),
        tail=watch.tail.text() if code else "",
    )
    if code:
        # Launchers end the other ranks as soon as one fails, and then read no more.
        time.sleep(0.3)
    follow(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
