"""Judge an environment: find the facts out side by side, then ask every check."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from hvdenv.checks import CHECKS, table
from hvdenv.errors import HvdenvError, InterruptedRunError
from hvdenv.evidence import CONTROLLERS, FACTS, FRAMEWORKS
from hvdenv.installation import Expectation, Installation
from hvdenv.report import Finding, Measurement, Report
from hvdenv.runner import Runner

DEFAULT_LAUNCHERS = ("mpirun", "horovodrun-gloo")
DEFAULT_TIMEOUT = 300.0

# Parameters that stand for all of a kind, and the fact that they are made of.
_PLURALS = {"extensions": "extension", "rank_runs": "rank_run"}
_CHOICES = {"framework": FRAMEWORKS, "controller": CONTROLLERS}
# The order in which facts start when several could: others wait for the first, and
# --check-build is the longest of the rest.
_FIRST = ("mpi", "build_table", "extension", "rank_run", "changed_files")
# TensorFlow takes longest to import: what runs alone at the end should be short.
_SLOWEST = ("tensorflow", "torch", "mxnet", "")

Progress = Callable[[str, str, float], None]


class Key(NamedTuple):
    """One fact or check, for one framework and controller where it is about one."""

    name: str
    framework: str = ""
    controller: str = ""


class Failed(NamedTuple):
    """A fact that could not be found out."""

    error: Exception


def verify(
    installation: Installation,
    expectation: Expectation,
    runner: Runner,
    *,
    ranks: int = 2,
    timeout: float = DEFAULT_TIMEOUT,
    launchers: tuple[str, ...] = DEFAULT_LAUNCHERS,
    cores: int | None = None,
    on_event: Progress = lambda what, label, seconds: None,
) -> Report:
    """Judge an environment.

    Args:
        installation: where it is.
        expectation: what it should have.
        runner: starts the processes; its stop() ends this call.
        ranks: how many ranks every allreduce has.
        timeout: seconds that each process has.
        launchers: names in launchers.LAUNCHERS; the first for each controller is used.
        cores: how many may be used; those of this process if not given.
        on_event: called with ``started`` or ``finished``, a label and the seconds.

    Raises:
        InterruptedRunError: the runner was stopped, or this process got a SIGTERM; nothing runs then.
    """
    began, started = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    given = {
        "installation": installation,
        "expectation": expectation,
        "runner": runner,
        "ranks": ranks,
        "timeout": timeout,
        "launchers": launchers,
        "cores": cores or len(os.sched_getaffinity(0)),
    }
    with _ended_by_sigterm(runner):
        facts, measurements = _Facts(given, on_event).find_all()
    findings = [finding for key in _checks() for finding in _ask(key, given, facts)]
    extensions = _collected("extension", facts)
    rows = () if isinstance(extensions, Failed) else tuple(table(expectation, extensions, findings))
    seconds = time.monotonic() - began
    return Report(
        installation.recipe,
        installation.prefix,
        socket.gethostname(),
        started,
        seconds,
        tuple(findings),
        (*measurements, Measurement("verify", round(seconds, 3), "s")),
        rows,
    )


@contextmanager
def _ended_by_sigterm(runner: Runner) -> Iterator[None]:
    """Stop the runner on SIGTERM, and whenever the block is left by an exception."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        runner.stop()

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        yield
    except BaseException:
        runner.stop()
        raise
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


class _Facts:
    """Runs the facts in threads, each as soon as what it needs is known."""

    def __init__(self, given: Mapping[str, Any], on_event: Progress) -> None:
        self._given = given
        self._on_event = on_event
        self._done: queue.SimpleQueue[tuple[Key, Any, float]] = queue.SimpleQueue()
        self._values: dict[Key, Any] = {}
        self._measurements: list[Measurement] = []
        self._running: dict[Key, threading.Thread] = {}
        keys = [key for name in FACTS for key in _instances(name, FACTS[name].function)]
        self._waiting = sorted(keys, key=_urgency)

    def find_all(self) -> tuple[dict[Key, Any], list[Measurement]]:
        """All facts and how long each took.

        Raises:
            InterruptedRunError: the runner was stopped.
        """
        try:
            while self._waiting or self._running:
                self._start_what_can()
                if self._running:
                    self._take(*self._done.get())
        finally:
            if self._running:
                self._given["runner"].stop()
                for thread in self._running.values():
                    thread.join()
        return self._values, self._measurements

    def _start_what_can(self) -> None:
        for key in list(self._waiting):
            if all(need in self._values for need in _needs(key)) and self._has_room(key):
                self._waiting.remove(key)
                self._start(key)

    def _has_room(self, key: Key) -> bool:
        """Whether there are cores for it: one too many processes costs more than it brings."""
        return not self._running or self._cores(key) <= self._given["cores"] - sum(
            self._cores(running) for running in self._running
        )

    def _cores(self, key: Key) -> int:
        """What a fact takes; one core is left to --check-build, the longest of all."""
        wanted = FACTS[key.name].cores(self._given["ranks"])
        return min(wanted, max(int(self._given["cores"]) - 1, 1))

    def _start(self, key: Key) -> None:
        fact = FACTS[key.name]
        try:
            applies = fact.applies(**_arguments(key, fact.applies, self._given, self._values))
            arguments = _arguments(key, fact.function, self._given, self._values)
        except Exception as error:
            self._values[key] = Failed(error)
            return
        if not applies:
            self._values[key] = None
            return
        self._on_event("started", _label(key), 0.0)
        thread = threading.Thread(target=self._find, args=(key, arguments), name=_label(key))
        self._running[key] = thread
        thread.start()

    def _find(self, key: Key, arguments: dict[str, Any]) -> None:
        began = time.monotonic()
        value: Any
        try:
            value = FACTS[key.name].function(**arguments)
        except Exception as error:
            value = Failed(error)
        self._done.put((key, value, time.monotonic() - began))

    def _take(self, key: Key, value: Any, seconds: float) -> None:
        self._running.pop(key).join()
        if isinstance(value, Failed) and isinstance(value.error, InterruptedRunError):
            raise value.error
        self._values[key] = value
        self._measurements.append(Measurement(_label(key), round(seconds, 3), "s"))
        self._on_event("finished", _label(key), seconds)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount]


def _instances(name: str, function: Callable[..., Any]) -> Iterator[Key]:
    """One key for each framework and controller that the function is about."""
    names = _parameters(function)
    choices = [_CHOICES[kind] if kind in names else ("",) for kind in ("framework", "controller")]
    for framework, controller in itertools.product(*choices):
        yield Key(name, framework, controller)


def _checks() -> Iterator[Key]:
    for name, function in CHECKS.items():
        yield from _instances(name, function)


def _urgency(key: Key) -> tuple[int, int]:
    """Where a fact stands among those that could start: the slowest first."""
    return _FIRST.index(key.name), _SLOWEST.index(key.framework)


def _label(key: Key) -> str:
    return FACTS[key.name].label.format(framework=key.framework, controller=key.controller)


def _of(name: str, key: Key) -> Key:
    """The fact of that name which is about what a key is about."""
    names = _parameters(FACTS[name].function)
    return Key(
        name,
        key.framework if "framework" in names else "",
        key.controller if "controller" in names else "",
    )


def _needs(key: Key) -> list[Key]:
    fact = FACTS[key.name]
    names = {*_parameters(fact.function), *_parameters(fact.applies)}
    return [_of(name, key) for name in names if name in FACTS]


def _arguments(
    key: Key, function: Callable[..., Any], given: Mapping[str, Any], facts: Mapping[Key, Any]
) -> dict[str, Any]:
    """What a function's parameters ask for.

    Raises:
        Exception: one of them could not be found out: the error that it met.
    """
    arguments: dict[str, Any] = {}
    for name in _parameters(function):
        if name in _CHOICES:
            arguments[name] = getattr(key, name)
        elif name in given:
            arguments[name] = given[name]
        else:
            kind = _PLURALS.get(name)
            value = _collected(kind, facts) if kind else facts[_of(name, key)]
            if isinstance(value, Failed):
                raise value.error
            arguments[name] = value
    return arguments


def _collected(name: str, facts: Mapping[Key, Any]) -> Any:
    """All facts of one name: by framework, or by framework and controller."""
    found: dict[Any, Any] = {}
    for key, value in facts.items():
        if key.name != name:
            continue
        if isinstance(value, Failed):
            return value
        found[(key.framework, key.controller) if key.controller else key.framework] = value
    return {key: found[key] for key in sorted(found, key=_order)}


def _order(key: Any) -> tuple[int, str]:
    framework, controller = key if isinstance(key, tuple) else (key, "")
    return FRAMEWORKS.index(framework), controller


def _ask(key: Key, given: Mapping[str, Any], facts: Mapping[Key, Any]) -> list[Finding]:
    """The findings of one check; its own error is a finding too."""
    function = CHECKS[key.name]
    try:
        return list(function(**_arguments(key, function, given, facts)))
    except HvdenvError as error:
        text = error.message if not error.where else f"{error.where}: {error.message}"
        return [Finding(key.name, _subject(key), "error", text, error.detail, error.remedy)]
    except Exception as error:
        import traceback

        evidence = "".join(traceback.format_exception(error))
        message = f"the check could not run: {type(error).__name__}: {error}"
        remedy = "this is a mistake in hvdenv: report it with the evidence"
        return [Finding(key.name, _subject(key), "error", message, evidence, remedy)]


def _subject(key: Key) -> str:
    return " over ".join(part for part in (key.framework, key.controller) if part) or key.name
