"""The only module that starts processes and reads the environment variables of this one.

Ruff forbids ``subprocess`` and ``os.environ`` everywhere else. Every process gets an explicit
environment, its own session, a log, and a token that finds and ends everything it started.
"""

from __future__ import annotations

import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from hvdenv.base.command import OWN_PYTHON, Command, Outcome
from hvdenv.base.errors import InterruptedRunError, StepError
from hvdenv.base.masking import clean as cleaned
from hvdenv.base.masking import cut_before, learn

if TYPE_CHECKING:
    import psutil

TOKEN_VARIABLE = "HVDENV_TOKEN"
# Signals on which hvdenv ends everything that it has started, and exits with 130.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 5.0
# Batch systems leave a job seconds between SIGTERM and SIGKILL, and reports need some of them.
STOPPED_SECONDS = 2.0
OUTPUT_LIMIT = 4 << 20
LINE_LIMIT = 1 << 16
ORPHAN_SECONDS = 1.0

# Variables of the user's shell that a step must not see: they change what is built or found, and
# are recorded nowhere. Modules are loaded after this cleaning.
# An extended regular expression, because the script of `plan --format bash` uses it too.
CLEANED_PATTERN = (
    "PYTHON[A-Z0-9_]*|_PYTHON_[A-Z0-9_]+|HOROVOD_[A-Z0-9_]+|HVDENV_(TOKEN|INSTALL_RPATH|BUILD_FOLDER)"
    "|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|CPATH|LIBRARY_PATH|LD_PRELOAD"
    "|C(PP|XX|UDA)?FLAGS|LDFLAGS|CC|CXX|CPP|LD|AR|ARFLAGS|CUDAHOSTCXX|CUDACXX|NVCC_[A-Z_]+"
    "|CMAKE_[A-Za-z0-9_]+|MAKEFLAGS|MFLAGS|GNUMAKEFLAGS|NINJA_STATUS|DESTDIR"
    "|CCL_ROOT|CCL_CONFIGURATION|CUDA_HOME|CUDA_PATH|CUDA_ROOT|CUDNN_[A-Z_]+|NCCL_(HOME|ROOT)[A-Z_]*"
    "|OMPI_[A-Za-z0-9_]+|PMIX_[A-Za-z0-9_]+|PRTE_[A-Za-z0-9_]+|PMI_[A-Z_]+|MPI_HOME|MPICH_[A-Z_]+"
    "|I_MPI_[A-Z_]+|OPAL_PREFIX|VIRTUAL_ENV[A-Z_]*|CONDA_[A-Z_0-9]+"
    "|PIP_(USER|TARGET|PREFIX|ROOT|REQUIRE_VIRTUALENV|NO_BUILD_ISOLATION|NO_DEPS|NO_BINARY"
    "|ONLY_BINARY|REQUIREMENT|PRE|BUILD_CONSTRAINT|DRY_RUN|REPORT|QUIET|VERBOSE|LOG|PYTHON|PLATFORM|ABI"
    "|PYTHON_VERSION|IMPLEMENTATION)|UV_[A-Z_]+"
    "|SETUPTOOLS_[A-Z_]+|DISTUTILS_[A-Z_]+|TF_[A-Z_0-9]+|TORCH_[A-Z_0-9]+"
)
# Files and directories that pip looks for in the current directory: one each, and lists.
PATHS_OF_PIP = (
    *("PIP_CONFIG_FILE", "PIP_CERT", "PIP_CLIENT_CERT"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC"),
)
LISTS_OF_PIP = ("PIP_CONSTRAINT", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
# What every step gets instead.
ALWAYS_SET = (("PYTHONNOUSERSITE", "1"), ("PIP_USER", "0"), ("LC_ALL", "C.UTF-8"))


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what must not leak into a step."""
    kept = {
        name: value for name, value in environ.items() if not re.fullmatch(CLEANED_PATTERN, name)
    }
    # Steps run in other directories than the user's.
    paths = {name: _absolute(kept[name]) for name in PATHS_OF_PIP if name in kept}
    lists = {
        name: " ".join(map(_absolute, kept[name].split())) for name in LISTS_OF_PIP if name in kept
    }
    return {**kept, **paths, **lists, **dict(ALWAYS_SET)}


def _absolute(path: str) -> str:
    return os.path.abspath(path) if os.path.exists(path) else path


def cleaned_names(environ: Mapping[str, str]) -> list[str]:
    """Names that clean() removes, for plan to show."""
    return sorted(name for name in environ if re.fullmatch(CLEANED_PATTERN, name))


def environment() -> Mapping[str, str]:
    return os.environ


def drop_relative_folders() -> None:
    """Remove relative directories from this process's PATH: ``.``, an empty one, ``bin``.

    The current directory may belong to anybody, and its ``git`` or ``mpirun`` would run.
    """
    before = os.environ.get("PATH", os.defpath)
    if (kept := absolute_folders(before)) != before:
        os.environ["PATH"] = kept


def absolute_folders(path: str) -> str:
    """A value of PATH without relative directories. Without any directory, programs look in the current one."""
    kept = [folder for folder in path.split(os.pathsep) if os.path.isabs(folder)]
    return os.pathsep.join(kept) or os.defpath


class Runner:
    """Starts processes.

    Args:
        environ: what processes start from; cleaned before use.
        token: marks every process that this runner starts, directly or not.

    Attributes:
        given: the variables before cleaning, for what runs as in the user's shell.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, token: str = "") -> None:
        self.token = token or os.urandom(16).hex()
        self.given = os.environ if environ is None else environ
        self._base = clean(self.given)
        self._stopped: list[bool] = []  # no Event: two signals at once would wait for its lock

    def environment(self, command: Command) -> dict[str, str]:
        """What the process of this command sees.

        Raises:
            StepError: a variable is derived from another one that nothing has set.
        """
        seen = {**self._base, **dict(command.env), TOKEN_VARIABLE: self.token}
        made = {name: _filled_in(name, value, seen) for name, value in command.derived}
        if OWN_PYTHON in command.argv[:1]:  # may need libraries that the recipe's modules purge
            made["HVDENV_STEP_LIBRARY_PATH"] = seen.get("LD_LIBRARY_PATH", "")  # for what it starts
            made["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
        seen |= made
        learn(seen.items())
        return seen

    def branch(self, base: Mapping[str, str] | None = None) -> Runner:
        """A runner that stops with this one and ends only what it started itself.

        Args:
            base: variables of its processes, not cleaned. Default: those of this runner.
        """
        token = f"{self.token}.{os.urandom(4).hex()}"
        return self._with(token, self._base if base is None else {**base, **dict(ALWAYS_SET)})

    def changed(self, set_variables: Mapping[str, str], unset: Iterable[str] = ()) -> Runner:
        """A runner with the same token whose processes see other variables: those of modules."""
        base, removed = {**self._base, **set_variables}, set(unset)
        kept = {name: value for name, value in base.items() if name not in removed}
        return self._with(self.token, kept)

    def _with(self, token: str, base: dict[str, str]) -> Runner:
        other = Runner(self.given, token)
        other._base, other._stopped = base, self._stopped
        return other

    def stop(self) -> None:
        """End everything that runs now, from any thread; later runs refuse."""
        self._stopped.append(True)

    @property
    def stopped(self) -> bool:
        return bool(self._stopped)

    def run(
        self,
        command: Command,
        *,
        log: Path | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Run a command to its end.

        Args:
            log: file that the masked output is appended to, line by line.
            on_line: called with every line (masked, without control sequences).

        Raises:
            StepError: the program does not exist or cannot be started.
            InterruptedRunError: stop() was called.
        """
        started = time.monotonic()
        deadline = None if command.timeout is None else started + command.timeout
        with _log_lines(log, on_line) as (take_line, lines), self._process(command) as process:
            timed_out = False
            for line in _lines(process):
                if line is not None:
                    take_line(line)
                if self.stopped:
                    raise InterruptedRunError
                if deadline is not None and time.monotonic() > deadline:
                    timed_out = True
                    break
            if not timed_out:
                process.wait()
            else:
                self._end(process)
        return Outcome(
            command=command,
            returncode=-signal.SIGKILL if timed_out else process.returncode,
            output="\n".join(lines),
            seconds=time.monotonic() - started,
            timed_out=timed_out,
        )

    @contextmanager
    def _process(self, command: Command) -> Iterator[subprocess.Popen[bytes]]:
        if self.stopped:
            raise InterruptedRunError
        process = None
        try:
            with undisturbed():
                process = subprocess.Popen(
                    [sys.executable if word == OWN_PYTHON else word for word in command.argv],
                    env=self.environment(command),
                    cwd=command.cwd or _neutral_folder(command.argv),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_limit(command.memory),
                )
            yield process
        except BaseException as error:
            if process:
                self._end(process)
            elif isinstance(error, OSError):
                raise _cannot_start(command, error) from error
            raise
        finally:
            if process and process.stdout:
                process.stdout.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End a process, its session and whatever else carries the token."""
        with undisturbed():
            self._end_session(process)
            end_marked(self.token)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)  # no signal ends what waits for a file server that is gone

    def _end_session(self, process: subprocess.Popen[bytes]) -> None:
        patience = STOPPED_SECONDS if self.stopped else GRACE_SECONDS
        for number, grace in ((signal.SIGTERM, patience), (signal.SIGKILL, 1.0)):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(grace)
                break
            except subprocess.TimeoutExpired:
                continue


def _limit(memory: int | None) -> Callable[[], None] | None:
    """What a new process does to limit its memory, and that of the processes that it starts."""
    if memory is None:
        return None
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory if most == resource.RLIM_INFINITY else min(memory, most)
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _neutral_folder(argv: Sequence[str]) -> str | None:
    """Where to start Python, so that neither it nor a Python that it starts imports from the
    current directory, which may be anybody's."""
    return "/" if "python" in os.path.basename(argv[0]) else None


def _cannot_start(command: Command, error: OSError) -> StepError:
    return StepError(
        f"cannot start {command.argv[0]}: {error.strerror}",
        where=command.cwd.rstrip("/"),  # / is no place to look
        remedy=f"check that {error.filename or command.argv[0]} exists and is executable",
    )


def replace_process(command: Command, environ: Mapping[str, str]) -> NoReturn:
    """Run a command in place of this process.

    Args:
        environ: its variables, not cleaned.

    Raises:
        StepError: the program does not exist or cannot be started.
    """
    # Python ignores these, which the program would inherit.
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)
    before = {each: signal.signal(each, signal.SIG_DFL) for each in ignored}
    if _umask:
        os.umask(_umask[0])
    sys.stdout.flush()
    try:
        os.execvpe(command.argv[0], command.argv, {**environ, **dict(command.env)})
    except OSError as error:
        for number, handler in before.items():
            signal.signal(number, handler)
        raise _cannot_start(command, error) from error


_umask: list[int] = []


def forbid_world_writes() -> None:
    """Make nothing world-writable that hvdenv and its builds create.

    With a umask of 000, anybody could put programs into the environment. Programs of `run` and
    `shell` keep the user's own umask.
    """
    before = os.umask(0o077)
    os.umask(before | 0o002)
    if not _umask:
        _umask.append(before)


@contextmanager
def handled(
    numbers: Iterable[signal.Signals],
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> Iterator[None]:
    """Handle signals in a block; ignored ones stay ignored, as with nohup.

    Python cannot restore a handler that a C library has installed (through LD_PRELOAD, say):
    after the block, such a signal has its default action.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number, each in before.items() if each is not signal.SIG_IGN]
    try:
        with _blocked(heard):
            for number in heard:
                signal.signal(number, handler)
        yield
    finally:
        with _blocked(heard):  # one that arrives now must not leave the others as they are
            for number in heard:
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, default if before[number] is None else before[number])


@contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on each signal that ends this program.

    Python ignores an exception in a destructor or in the callback of a weak reference, such as
    those of its own imports: one that was ignored is raised again soon after.
    """

    def again(ignored: sys.UnraisableHookArgs) -> None:
        if isinstance(ignored.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            hook(ignored)

    hook = sys.unraisablehook
    with handled((*ENDING, signal.SIGALRM), signal.default_int_handler):
        sys.unraisablehook = again
        try:
            yield
        finally:
            sys.unraisablehook = hook
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _blocked(numbers: Iterable[signal.Signals]) -> Iterator[set[int]]:
    """Block signals, and yield those that were blocked before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield {int(each) for each in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put off signals that end this program until the block has ended."""
    if threading.current_thread() is not threading.main_thread():  # others receive none
        yield
        return
    late: list[int] = []
    try:
        with handled((*ENDING, signal.SIGALRM), lambda number, _frame: late.append(number)):
            yield
    finally:
        if late:
            signal.raise_signal(late[0])


def _filled_in(name: str, value: str, seen: Mapping[str, str]) -> str:
    def replace(found: re.Match[str]) -> str:
        if found[1] not in seen:
            raise StepError(
                f"{name} is {value} in the recipe, but no module sets {found[1]}",
                remedy=f"see what the modules set (`module show`), or name the directory itself"
                f" instead of ${found[1]} in the recipe",
            )
        return seen[found[1]]

    return re.sub(r"\$([A-Za-z_][A-Za-z0-9_]*)", replace, value)


def is_marked(process: psutil.Process, token: str) -> bool:
    """Whether a process has a runner's token, or that of one of its branches."""
    seen = process.environ().get(TOKEN_VARIABLE, "")
    return bool(token) and (seen == token or seen.startswith(token + "."))


def end_marked(token: str) -> list[int]:
    """Kill every process on this host that has a runner's token, or that of one of its branches.

    Returns:
        The ids of the killed processes.
    """
    import psutil

    ended: list[int] = []
    while token:  # without one, every process that has none would match
        found = len(ended)
        for process in psutil.process_iter():
            try:
                if process.pid not in (os.getpid(), *ended) and is_marked(process, token):
                    process.kill()
                    ended.append(process.pid)
            except (psutil.Error, OSError):
                continue
        # A killed process may have started another one while they were listed.
        if len(ended) == found:
            break
    return ended


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """Lines of a process as they come; None about ten times a second while waiting.

    Ends when the process has ended and its output is read, even if an orphan of it keeps the pipe
    open, or a second later if the orphan keeps writing. Lines over LINE_LIMIT come in pieces.
    """
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    rest = b""
    ended = 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            # Checked before the pipe, so that the last output of the process is still read.
            over = process.poll() is not None
            ready = selector.select(0.1)
            block = os.read(descriptor, 1 << 16) if ready else b""
            if block:
                *whole, rest = re.split(rb"\r?\n|\r", rest + block)
                if len(rest) > LINE_LIMIT:
                    at = cut_before(rest)
                    whole, rest = [*whole, rest[:at]], rest[at:]
                for line in whole:
                    yield line.decode("utf-8", "replace")
                ended = ended or (time.monotonic() if over else 0.0)
                if ended and time.monotonic() - ended > ORPHAN_SECONDS:
                    break
            elif ready or over:
                break
            else:
                yield None
    if rest:
        yield rest.decode("utf-8", "replace")
    while True:
        try:
            process.wait(0.1)
            return
        except subprocess.TimeoutExpired:
            yield None


@contextmanager
def _log_lines(
    log: Path | None, on_line: Callable[[str], None] | None
) -> Iterator[tuple[Callable[[str], None], Iterable[str]]]:
    """A function that adds each line to the log and a bounded list, and calls the caller's."""
    lines: deque[str] = deque()
    size = 0
    try:
        stream = log.open("a", encoding="utf-8") if log else None
    except OSError as error:
        raise _cannot_log(log, error) from error

    def take(line: str) -> None:
        nonlocal size
        line = cleaned(line)
        lines.append(line)
        size += len(line) + 1
        while size > OUTPUT_LIMIT and len(lines) > 1:
            size -= len(lines.popleft()) + 1
        if stream:
            try:
                stream.write(line + "\n")
                stream.flush()
            except OSError as error:
                raise _cannot_log(log, error) from error
        if on_line:
            on_line(line)

    try:
        yield take, lines
    finally:
        if stream:
            with suppress(OSError):  # what could not be written was reported before
                stream.close()


def _cannot_log(log: Path | None, error: OSError) -> StepError:
    return StepError(
        f"cannot write the log: {error.strerror}",
        where=str(log),
        remedy="check the free space and the state of the file system (df -h, dmesg)",
    )
