"""What a launcher starts as each rank: it watches over the rank's real work.

usage: python -S -u rank.py TOKEN DEADLINE FRAMEWORK CONTROLLER DEVICE [EXERCISE...]

The work (rank_work.py) is a child of its own, so that a rank that crashes, hangs
or prints nonsense is reported all the same. Nothing of the child's output is passed on
as it is; events go to standard output, in lines of at most 500 bytes:

    @hvdenv TOKEN CRC32 SOURCE.EVENT.PART.PARTS.PAYLOAD

SOURCE stands for this process, EVENT counts from 0, PART from 0 to PARTS - 1. The payloads
of all parts are JSON in base64 without padding: launchers prefix lines, programs colour them
and hvdenv hides what looks like a password in them, and all that would change JSON.

Launchers cut what ranks write and mix the pieces: srun cuts lines after 1024 bytes, mpirun
wherever 4096 bytes or the terminal's buffer end, Horovod's own after 1000 bytes. So lines
are short, and each is written twice, one after the other: one cut spares one of them.

``started``  host, process, and what the launcher says about this rank
``extension``, ``joined``, ``stage``, ``result``, ``path`` and those of exercises  what
    rank_work.py says and found
``overdue``  the deadline is near: the child's last lines, its stacks among them, whether it
    is stopped, and what Horovod says that it waits for
``exited``   exit code or signal, last lines, seconds, what ended it

``overdue`` and ``exited`` name the last stage and what was tried in it.

The child ends with this process (parent death signal), and this process ends by itself
at the deadline and when its launcher is gone. DEADLINE is SECONDS@UNTIL: seconds from now,
but no later than a time by the clock of the host that launches, as far as clocks agree, so
that ranks that start late end with the others. CONTROLLER is MPI or Gloo; DEVICE is gpu
where ranks may use GPUs, and host where they must not.
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

import datapath

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
# Exercises that measure time.
TIMED = ("bench", "speed")
PR_SET_PDEATHSIG = 1
OVERDUE_SECONDS = 1.0
GRACE_SECONDS = 3.0
# After the deadline even a rank ends that nobody watches over any more.
LATE_SECONDS = 3
TAIL_LINES = 40
TAIL_BYTES = 2500
PART_BYTES = 380
STALLED_BYTES = 200
# How a crash begins, and how many lines of it say in what: a backtrace may be longer than a tail.
CRASH = ("Caught signal ", "*** Process received signal ***", "Fatal Python error: ")
CRASH_LINES, CRASH_WIDTH = 9, 160
LEAST_SPACE = 1 << 20


class EventWriter:
    """Says to hvdenv what happens, through whatever the launcher does with lines."""

    def __init__(self, token):
        self.token = token
        self.source = base64.b16encode(os.urandom(4)).decode("ascii")
        self.count = 0

    def emit(self, kind, **payload):
        """Write one event; a launcher that no longer reads is not an error."""
        event = dict(payload, event=kind, host=socket.gethostname(), pid=os.getpid())
        with contextlib.suppress(OSError):
            for line in self.lines(event):
                os.write(1, "\n{0}\n{0}\n".format(line).encode("ascii"))

    def lines(self, event):
        """The lines that say one event."""
        whole = base64.b64encode(json.dumps(event).encode("ascii")).rstrip(b"=").decode("ascii")
        parts = [whole[at : at + PART_BYTES] for at in range(0, len(whole), PART_BYTES)]
        for number, part in enumerate(parts):
            said = ".".join(map(str, (self.source, self.count, number, len(parts), part)))
            crc = zlib.crc32(said.encode("ascii")) & 0xFFFFFFFF
            yield "@hvdenv {} {:08x} {}".format(self.token, crc, said)
        self.count += 1


class OutputTail:
    """The last lines of the child's output, and what libraries say there about themselves."""

    def __init__(self):
        self._rest = b""
        self._lines = []
        self._crash = []
        self._names_missing = False
        self.stalled = ""
        self.seen = datapath.Seen()

    def take(self, block):
        whole = (self._rest + block).replace(b"\r", b"\n").split(b"\n")
        self._rest = whole.pop()[-TAIL_BYTES:]
        for line in whole:
            self._take_line(line.decode("utf-8", "replace").rstrip())

    def _take_line(self, line):
        self._take_stall(line)
        if line and not self.seen.take(line):
            self._lines = [*self._lines[1 - TAIL_LINES :], line[:300]]
            begins = any(text in line for text in CRASH)
            if (self._crash or begins) and len(self._crash) < CRASH_LINES:
                self._crash.append(_narrowed(line))

    def _take_stall(self, line):
        """Keep Horovod's list of the ranks that it waits for, and for which tensors."""
        number = line.partition(":")[0]
        if line.startswith("Missing ranks:"):
            self.stalled = "missing ranks:"
            self._names_missing = True
        elif self._names_missing and number.isdigit():
            self.stalled = "{} {}".format(self.stalled, line)[:STALLED_BYTES]
        else:
            self._names_missing = False

    def text(self):
        """Last lines that fit into one event, control characters shown as such.

        Where a crash would not be among them, it stands first, in a few lines.
        """
        lines = self._lines + ([self._rest.decode("utf-8", "replace")[:300]] if self._rest else [])
        text = self._fitting("\n".join(lines))
        if self._crash and self._crash[0] not in text:
            text = self._fitting("\n".join(lines), "\n".join([*self._crash, "...", ""]))
        return text

    def _fitting(self, text, before=""):
        """As much of the end of a text as fits into one event, behind another one."""
        while text and len(json.dumps(before + text)) > TAIL_BYTES:
            text = text[len(text) // 20 + 1 :]
        return before + text


def _narrowed(line):
    """A line whose middle is left out if it is long: of a frame, the end of its path counts."""
    half = CRASH_WIDTH // 2
    return line if len(line) <= CRASH_WIDTH else "{}...{}".format(line[:half], line[-half:])


def seconds_left(deadline):
    """The seconds until a deadline; of SECONDS@UNTIL, UNTIL counts if the clocks agree."""
    seconds, _, until = deadline.partition("@")
    left = float(until) - time.time() if until else 0.0
    return left if 0 < left < float(seconds) else float(seconds)


def is_stopped(pid):
    """Whether a signal has stopped a process."""
    try:
        with open("/proc/{}/stat".format(pid)) as stream:
            return stream.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def die_with_parent(parent, seconds):
    """A function for the child to call between fork and exec."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def call():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.alarm(seconds)  # outlives exec, and a parent that is stopped
        if os.getppid() != parent:
            os._exit(1)

    return call


def child_environment(deadline, controller, device, exercises):
    """The rank's environment: libraries say what they do, and a few threads are enough.

    Where times count, they say no more than they do for anybody.

    A stall is named by Horovod, but not ended by it: the deadline does that for all
    ranks at once, and then each of them still shows where it was.
    """
    env = {name: os.environ[name] for name in os.environ if name not in datapath.ELSEWHERE}
    env.pop("PYTHONSAFEPATH", None)  # rank_work.py imports its siblings
    names = {word.partition("=")[0] for word in exercises}
    if not names & set(TIMED):
        env.update(datapath.VARIABLES)
    if "collectives" in names:
        # It adds process sets later. Ranks that do not agree about this wait for each other.
        env["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    seconds = max(int(deadline), 2)
    env.update(
        HOROVOD_STALL_CHECK_TIME_SECONDS=str(max(seconds // 4, 1)),
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(seconds),
        TF_CPP_MIN_LOG_LEVEL="2",
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="1",
        OMP_NUM_THREADS="1",
        PYTHONNOUSERSITE="1",
    )
    if controller == "MPI":  # for Gloo, Horovod's launcher sets it, with what it needs
        env.setdefault("HOROVOD_CONTROLLER", "mpi")
    return env


class Supervisor:
    """Runs the child to its end, whatever end that is."""

    def __init__(self, voice, deadline, framework, controller, device, exercises):
        self.emit = voice.emit
        self.deadline = deadline
        self.at = {"stage": "start", "detail": ""}
        self.started = time.time()
        self.parent = os.getppid()
        self.tail = OutputTail()
        self.report = b""
        self.ended_by = ""
        self.kill_at = self.gone_at = 0.0
        self.overdue = False
        self.child = self._start(framework, controller, device, exercises)

    def _start(self, framework, controller, device, exercises):
        work = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_work.py")
        self.reports, writer = os.pipe()
        os.set_inheritable(writer, True)
        soon = max(self.deadline - 2 * OVERDUE_SECONDS, self.deadline / 2)
        child = subprocess.Popen(
            [sys.executable, "-s", "-u", work, framework, controller, device]
            + [str(writer), str(soon)]
            + list(exercises),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Some launchers talk to their ranks over inherited descriptors (PMI_FD).
            close_fds=False,
            env=child_environment(self.deadline, controller, device, exercises),
            preexec_fn=die_with_parent(os.getpid(), int(self.deadline) + LATE_SECONDS),
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
                # Asked before its output is: what it wrote last is then there to be read.
                over = self.child.poll() is not None
                ready = selector.select(0.1)
                # What was printed before a report is read before it.
                for key, _ in sorted(ready, key=lambda one: one[0].fd == self.reports):
                    self._read(selector, key)
                if over and (not ready or self._is_long_gone()):
                    break  # others that it has started may hold its output open
                self._look_at_the_clock()
        while self.child.poll() is None:
            self._look_at_the_clock()
            time.sleep(0.05)
        return self.child.returncode

    def _is_long_gone(self):
        self.gone_at = self.gone_at or time.time()
        return time.time() > self.gone_at + OVERDUE_SECONDS

    def _read(self, selector, key):
        block = os.read(key.fd, 65536)
        if not block:
            selector.unregister(key.fileobj)
        elif key.fd == self.reports:
            self._take_report(block)
        else:
            self.tail.take(block)

    def _take_report(self, block):
        *whole, self.report = (self.report + block).split(b"\n")
        for line in whole:
            payload = json.loads(line.decode("utf-8"))
            kind = payload.pop("event")
            if kind == "stage" and payload["stage"] == self.at["stage"]:
                self.at = payload  # details are many: they are told if it ends there
                continue
            if kind == "stage":
                self.at = payload
            if kind == "result":
                payload["said"] = self.tail.seen.of_horovod()
            if kind == "path":
                payload["said"] = self.tail.seen.values
            self.emit(kind, **payload)

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
            self.emit(
                "overdue",
                tail=self.tail.text(),
                seconds=self.seconds(),
                stopped=is_stopped(self.child.pid),
                stalled=self.tail.stalled,
                **self.at,
            )

    def _kill(self, why):
        if self.child.poll() is None:
            self.ended_by = self.ended_by or why
            self.child.kill()

    def seconds(self):
        """Seconds since the start."""
        return round(time.time() - self.started, 2)


def resolves(name):
    """Whether a name means an address."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def full_folders():
    """Folders of temporary files in which no space is left."""
    full = []
    for folder in (os.environ.get("TMPDIR", "/tmp"), "/dev/shm"):
        with contextlib.suppress(OSError):
            seen = os.statvfs(folder)
            if seen.f_bavail * seen.f_frsize < LEAST_SPACE or (seen.f_files and not seen.f_favail):
                full.append(folder)
    return full


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


def main(token, deadline, framework, controller, device, *exercises):
    seen = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}
    voice = EventWriter(token)
    voice.emit("started", variables=seen)
    watch = Supervisor(voice, seconds_left(deadline), framework, controller, device, exercises)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, watch.on_signal)
    signal.alarm(int(watch.deadline) + 2 * LATE_SECONDS)  # even if nobody reads any more
    code = watch.run()
    voice.emit(
        "exited",
        code=code,
        signal=signal_name(code),
        ended_by=watch.ended_by,
        seconds=watch.seconds(),
        tail=watch.tail.text() if code else "",
        full=full_folders() if code else [],
        nameless=code < 0 and controller == "Gloo" and not resolves(socket.gethostname()),
        **watch.at,
    )
    if code:
        # Launchers end the other ranks as soon as one fails, and then read no more.
        time.sleep(0.3)
    follow(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
