"""What a launcher starts as each rank: the supervisor of the rank's work.

usage: python -S -u rank.py TOKEN DEADLINE FRAMEWORK CONTROLLER DEVICE [EXERCISE...]

The work (rank_work.py) is a child of its own, so that a rank that crashes, hangs or prints
nonsense is reported all the same. For the exercise ``program``, the child is program/observe.py,
which runs a training program of the user. Nothing of the child's output is passed on as it is:
events go to standard output (events.py). Started, Overdue and Exited are this program's own;
the others come from the child.

The child ends with this process (parent death signal), and this process ends by itself
at the deadline and when its launcher is gone. DEADLINE is SECONDS, or SECONDS@WALL@BOOT@STEADY:
seconds from now, but no later than a time by the steady clock of the host with this boot id, or
by the wall clock of other hosts, if that agrees: ranks that start late then end with the others. CONTROLLER is MPI or Gloo. DEVICE is gpu if ranks may use
GPUs, and host if they must not. Runs on Python 3.6 and newer with its standard library.
"""

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Callable, Dict, List, Optional, Sequence

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import datapath
import events

# How often Horovod negotiates while ranks try its operations and train.
CYCLE_MILLISECONDS = "5"
PR_SET_PDEATHSIG = 1
OVERDUE_SECONDS = 1.0
GRACE_SECONDS = 3.0
# Seconds after the deadline at which even a rank without a supervisor ends.
LATE_SECONDS = 3
TAIL_LINES = 40
TAIL_BYTES = 2500
STALLED_BYTES = 200
# How a crash begins, and how many lines of it are kept: a backtrace may be longer than a tail.
CRASH = ("Caught signal ", "*** Process received signal ***", "Fatal Python error: ")
CRASH_LINES, CRASH_WIDTH = 9, 160
LEAST_SPACE = 1 << 20


class OutputTail:
    """The last lines of the child's output, and what libraries log there about themselves."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: List[str] = []
        self._crash: List[str] = []
        self._names_missing = False
        self.stalled = ""
        self.seen = datapath.Seen()

    def take(self, block: bytes) -> None:
        whole = (self._rest + block).replace(b"\r", b"\n").split(b"\n")
        self._rest = whole.pop()[-TAIL_BYTES:]
        for line in whole:
            self._take_line(line.decode("utf-8", "replace").rstrip())

    def _take_line(self, line: str) -> None:
        self._take_stall(line)
        if line and not self.seen.take(line):
            self._lines = [*self._lines[1 - TAIL_LINES :], line[:300]]
            begins = any(text in line for text in CRASH)
            if (self._crash or begins) and len(self._crash) < CRASH_LINES:
                self._crash.append(_narrowed(line))

    def _take_stall(self, line: str) -> None:
        """Keep Horovod's list of missing ranks, each with its tensors."""
        number = line.partition(":")[0]
        if line.startswith("Missing ranks:"):
            self.stalled = "missing ranks:"
            self._names_missing = True
        elif self._names_missing and number.isdigit():
            self.stalled = "{} {}".format(self.stalled, line)[:STALLED_BYTES]
        else:
            self._names_missing = False

    def text(self) -> str:
        """The last lines that fit into one event, after the beginning of a crash before them."""
        lines = self._lines + ([self._rest.decode("utf-8", "replace")[:300]] if self._rest else [])
        text = self._fitting("\n".join(lines))
        if self._crash and self._crash[0] not in text:
            text = self._fitting("\n".join(lines), "\n".join([*self._crash, "...", ""]))
        return text

    def _fitting(self, text: str, before: str = "") -> str:
        """As much of the end of a text as fits into one event, after another text."""
        while text and len(json.dumps(before + text)) > TAIL_BYTES:
            text = text[len(text) // 20 + 1 :]
        return before + text


def _narrowed(line: str) -> str:
    """A line without its middle if it is long: the end of a frame's path matters."""
    half = CRASH_WIDTH // 2
    return line if len(line) <= CRASH_WIDTH else "{}...{}".format(line[:half], line[-half:])


def seconds_left(deadline: str) -> float:
    """The seconds until a deadline: SECONDS, or fewer if the UNTIL of SECONDS@UNTIL is earlier."""
    seconds, _, until = deadline.partition("@")
    left = 0.0
    if until:
        wall, boot, steady = until.split("@")
        # Clocks are set, steady ones never jump: but only processes of one host share one.
        here = boot == boot_id()
        left = float(steady) - time.monotonic() if here else float(wall) - time.time()
    return left if 0 < left < float(seconds) else float(seconds)


def boot_id() -> str:
    """What only processes of this host, since it was started, have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process."""
    try:
        with open("/proc/{}/stat".format(pid)) as stream:
            return stream.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def die_with_parent(parent: int, seconds: int) -> Callable[[], None]:
    """A function for the child to call between fork and exec."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def call() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.alarm(seconds)  # outlives exec, and a parent that is stopped
        if os.getppid() != parent:
            os._exit(1)

    return call


def child_environment(deadline: float, controller: str, exercises: Sequence[str]) -> Dict[str, str]:
    """The rank's environment: libraries log what they do, and use few threads.

    If exercises measure time, libraries log no more than usual. Horovod reports a stall but does
    not end it: the deadline ends all ranks at once, and each then shows where it was.
    """
    env = {name: os.environ[name] for name in os.environ if name not in datapath.ELSEWHERE}
    env.pop("PYTHONSAFEPATH", None)  # rank_work.py imports its siblings
    names = {word.partition("=")[0] for word in exercises}
    if controller == "MPI":  # for Gloo, Horovod's launcher sets it
        env.setdefault("HOROVOD_CONTROLLER", "mpi")
    if "program" in names:  # as `hvdenv run` starts it, but ranks that wait for others end
        env.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "15")
        env.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "45")
        return env
    if "bench" not in names:
        env.update(datapath.VARIABLES)
    if "collectives" in names:
        # It adds process sets later; ranks that differ in this variable wait for each other.
        env["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        # By default, idle ranks negotiate every millisecond, which takes a third of a core each.
        env.setdefault("HOROVOD_CYCLE_TIME", CYCLE_MILLISECONDS)
    seconds = max(int(deadline), 2)
    env.update(
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(seconds),
        HOROVOD_STALL_CHECK_TIME_SECONDS=str(max(seconds // 4, 1)),
        TF_CPP_MIN_LOG_LEVEL="2",
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="1",
        OMP_NUM_THREADS="1",
        PYTHONNOUSERSITE="1",
    )
    return env


class Supervisor:
    """Runs the child until it ends, and reports how."""

    def __init__(self, writer: events.EventWriter, deadline: float, words: Sequence[str]) -> None:
        """Start the child with FRAMEWORK, CONTROLLER, DEVICE and exercises."""
        self.write = writer.emit
        self.deadline = deadline
        self.at = events.Stage("start")
        self.started = time.monotonic()
        self.parent = os.getppid()
        self.tail = OutputTail()
        self.report = b""
        self.ended_by = ""
        self.kill_at = self.gone_at = 0.0
        self.overdue = False
        self.child = self._start(words)

    def _start(self, words: Sequence[str]) -> "subprocess.Popen[bytes]":
        _, controller, _, *exercises = words
        here = os.path.dirname(os.path.abspath(__file__))
        work = os.path.join(here, "rank_work.py")
        if exercises and exercises[0].partition("=")[0] == "program":
            work = os.path.join(os.path.dirname(here), "program", "observe.py")
        self.reports, writer = os.pipe()
        os.set_inheritable(writer, True)
        soon = max(self.deadline - 2 * OVERDUE_SECONDS, self.deadline / 2)
        child = subprocess.Popen(
            [sys.executable, "-s", "-u", work, *words[:3], str(writer), str(soon), *exercises],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Some launchers talk to their ranks over inherited descriptors (PMI_FD).
            close_fds=False,
            env=child_environment(self.deadline, controller, exercises),
            preexec_fn=die_with_parent(os.getpid(), int(self.deadline) + LATE_SECONDS),
        )
        os.close(writer)
        return child

    def on_signal(self, number: int, _frame: Optional[FrameType]) -> None:
        """Pass the launcher's signal on; the child has some seconds to follow it."""
        if not self.ended_by:
            self.ended_by = "launcher"
            self.kill_at = time.monotonic() + GRACE_SECONDS
        self.child.send_signal(number)

    def run(self) -> int:
        """Wait for the child; returns its exit status as subprocess states it."""
        assert self.child.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self.child.stdout, selectors.EVENT_READ)
            selector.register(self.reports, selectors.EVENT_READ)
            while selector.get_map():
                # Polled before its output is read, which then includes its last lines.
                over = self.child.poll() is not None
                ready = selector.select(0.1)
                # Output that was printed before a report is read first.
                for key, _ in sorted(ready, key=lambda one: one[0].fd == self.reports):
                    self._read(selector, key)
                if over and (not ready or self._is_long_gone()):
                    break  # processes that it has started may hold its output open
                self._look_at_the_clock()
        while self.child.poll() is None:
            self._look_at_the_clock()
            time.sleep(0.05)
        return self.child.returncode

    def _is_long_gone(self) -> bool:
        self.gone_at = self.gone_at or time.monotonic()
        return time.monotonic() > self.gone_at + OVERDUE_SECONDS

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        block = os.read(key.fd, 65536)
        if not block:
            selector.unregister(key.fileobj)
        elif key.fd == self.reports:
            self._take_report(block)
        else:
            self.tail.take(block)

    def _take_report(self, block: bytes) -> None:
        *whole, self.report = (self.report + block).split(b"\n")
        for line in whole:
            try:
                table = json.loads(line.decode("utf-8"))
                kind = table["event"]
                stage = events.Stage(str(table.get("stage", "")), str(table.get("detail", "")))
            except Exception as error:  # the rank goes on, and its end is still reported
                self.tail.take(("malformed event: %s\n" % error).encode("utf-8", "replace"))
                continue
            if kind == "Stage":
                before, self.at = self.at, stage
                if before.stage == stage.stage:
                    continue  # details are many: they are reported if the rank ends there
            elif kind == "DataPath":
                table["logged"] = self.tail.seen.values
            self.write(table)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        left = self.started + self.deadline - now
        if os.getppid() != self.parent:
            self._kill("the launcher is gone")
        elif left <= 0:
            self._kill("deadline")
        elif self.kill_at and now > self.kill_at:
            self._kill("launcher")
        elif left <= OVERDUE_SECONDS and not self.overdue:
            self.overdue = True
            late = events.Overdue(
                stage=self.at.stage,
                detail=self.at.detail,
                tail=self.tail.text(),
                seconds=self.seconds(),
                stopped=is_stopped(self.child.pid),
                stalled=self.tail.stalled,
            )
            self.write(events.to_table(late))

    def _kill(self, why: str) -> None:
        if self.child.poll() is None:
            self.ended_by = self.ended_by or why
            self.child.kill()

    def seconds(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self.started, 2)


def full_folders() -> List[str]:
    """Directories of temporary files without free space."""
    full = []
    for folder in (os.environ.get("TMPDIR", "/tmp"), "/dev/shm"):
        with contextlib.suppress(OSError):
            seen = os.statvfs(folder)
            if seen.f_bavail * seen.f_frsize < LEAST_SPACE or (seen.f_files and not seen.f_favail):
                full.append(folder)
    return full


def signal_name(code: int) -> str:
    """The name of the signal in an exit status of subprocess; empty if there was none."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return "signal {}".format(-code)


def follow(code: int) -> None:
    """End as the child ended."""
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def main(token: str, deadline: str, *words: str) -> None:
    seen = {name: os.environ[name] for name in events.LAUNCHER_VARIABLES if name in os.environ}
    writer = events.EventWriter(token)
    writer.emit(events.to_table(events.Started(seen)))
    supervisor = Supervisor(writer, seconds_left(deadline), words)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, supervisor.on_signal)
    signal.alarm(int(supervisor.deadline) + 2 * LATE_SECONDS)  # even if nothing reads its output
    code = supervisor.run()
    end = events.Exited(
        stage=supervisor.at.stage,
        detail=supervisor.at.detail,
        code=code,
        signal=signal_name(code),
        ended_by=supervisor.ended_by,
        seconds=supervisor.seconds(),
        tail=supervisor.tail.text() if code else "",
        full=full_folders() if code else [],
    )
    writer.emit(events.to_table(end))
    writer.repeat()
    if code:
        # Launchers end the other ranks as soon as one fails, and then read no more.
        time.sleep(0.3)
    follow(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
