"""Runs collectors side by side and checks after them.

A collector finds something out about an environment, a check judges what collectors found. Each
is one function with the decorator collector() or check(). Its parameters name what it needs:

- ``setup``, or one of its fields; the function is left out if that field is None
- the name of a collector; with an ``s`` appended, all results of it, by framework, or by
  framework and controller
- ``framework``, ``controller``: the function then runs once for each
- ``timeout``, of collectors only: the seconds that it has
"""

from __future__ import annotations

import inspect
import itertools
import os
import queue
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from graphlib import TopologicalSorter
from typing import Any, NamedTuple, TypeVar

from hvdenv.command import Command, Outcome
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.errors import HvdenvError, InterruptedRunError, StepError
from hvdenv.launch.launchers import Launch, Mpi, named
from hvdenv.reports.report import EVERYTHING, About, Finding, Measurement
from hvdenv.runner import Runner
from hvdenv.verification import datapath
from hvdenv.verification.bench import Effort
from hvdenv.verification.ranks import RankRun

FRAMEWORKS = ("torch", "tensorflow", "mxnet")
CONTROLLERS = ("MPI", "Gloo")
DEFAULT_LAUNCHERS = ("mpirun", "horovodrun-gloo")
DEFAULT_TIMEOUT = 600.0
TWO_RANKS = Launch((), 2)
# The other launchers belong to a scheduler, or to Horovod.
NEED_MPIRUN = ("mpirun", "horovodrun-mpi")

_CHOICES = {"framework": FRAMEWORKS, "controller": CONTROLLERS}
# TensorFlow takes longest to import, so that its ranks should not be the last ones to start.
_SLOWEST = ("tensorflow", "torch", "mxnet", "")
# Processes that hang are ended within this time.
_ENDING_SECONDS = 3.0
# Less time than this does not show whether ranks hang or import slowly.
_SHARE_SECONDS = 60.0
# Ranks leave this time to the collectors that explain their results.
_RESERVE_SECONDS = 30.0

F = TypeVar("F", bound=Callable[..., Any])
# Called with ``started``, ``stage``, ``failed`` or ``finished``, the label of a collector, and
# for ``stage`` and ``failed`` with what its ranks do or what is wrong.
Progress = Callable[[str, str, str], None]


class Shell(NamedTuple):
    """Variables of the user's shell that change what ranks do.

    Attributes:
        passed: those that ranks get, as they do from `hvdenv run`.
        dropped: names of those that they do not get.
    """

    passed: Mapping[str, str]
    dropped: tuple[str, ...] = ()


class Setup(NamedTuple):
    """An environment, and how to verify it.

    Attributes:
        installation: where the environment is.
        runner: starts the processes.
        expectation: what the environment should have.
        launch: how many ranks every run has, and where.
        launchers: names in LAUNCHERS; the first for each controller is used.
        exercises: what ranks do after their allreduces: NAME or NAME=OPTION.
        full: whether each framework trains over every controller, and horovodrun starts ranks
            over MPI, too.
        effort: what benchmarks may take; None for no benchmarks.
        cores: how many may be used.
        seconds: for everything.
        shell: the user's variables.
        without_shell: the command that verifies again without the variables of the shell.
        tell: where a collector reports ``stage`` and ``failed`` while it runs.
    """

    installation: Installation
    runner: Runner
    expectation: Expectation = Expectation()
    launch: Launch = TWO_RANKS
    launchers: tuple[str, ...] = DEFAULT_LAUNCHERS
    exercises: tuple[str, ...] = ()
    full: bool = False
    effort: Effort | None = None
    cores: int = 1
    seconds: float = DEFAULT_TIMEOUT
    shell: Shell = Shell({})
    without_shell: str = "hvdenv verify --clean"
    tell: Callable[[str, str], None] = lambda what, detail: None

    @property
    def path(self) -> str:
        """PATH of the environment's programs."""
        base = dict(self.installation.env).get("PATH")
        base = base or self.runner.environment(Command(())).get("PATH", os.defpath)
        return os.pathsep.join((*self.installation.path, base))

    def which(self, program: str) -> str:
        """The program that the environment's PATH finds; empty if there is none."""
        return shutil.which(program, path=self.path) or ""

    def command(
        self, argv: Sequence[str], timeout: float, env: tuple[tuple[str, str], ...] = ()
    ) -> Command:
        """A command in the environment; `timeout` is in seconds.

        It starts in /, because horovodrun starts Pythons that import from the current folder, which
        may be anybody's.
        """
        variables = (*self.installation.env, ("PATH", self.path), *env)
        return Command(tuple(argv), variables, "/", timeout)

    def run(
        self, argv: Sequence[str], timeout: float, env: tuple[tuple[str, str], ...] = ()
    ) -> Outcome:
        """Run a command in the environment."""
        return self.runner.branch().run(self.command(argv, timeout, env))

    def launcher(self, controller: str) -> str:
        """The first launcher whose ranks use a controller; empty if there is none."""
        own = self.launch.settings.launchers
        names = (name for name in self.launchers if named(name, own).controller == controller)
        return next(names, "")

    def can_start(self, controller: str, mpi: tuple[Mpi, str]) -> bool:
        """Whether a launcher is there for the ranks of a controller."""
        name = self.launcher(controller)
        return bool(name and (mpi[1] or name not in NEED_MPIRUN))


class Key(NamedTuple):
    """One run of a collector or check, for one framework and controller where it has these."""

    name: str
    framework: str = ""
    controller: str = ""


class Failed(NamedTuple):
    """The result of a collector that raised an error."""

    error: Exception


class Collector(NamedTuple):
    """How something is found out.

    Attributes:
        function: finds it out.
        label: how progress and measurements call it.
        applies: decides with parameters of its own; if false, the result is None.
        cores: how many cores it keeps busy, for a number of ranks.
        alone: whether nothing else may run at the same time.
        starts_ranks: whether it shares its time with other runs of ranks.
        least: seconds that it always has.
    """

    function: Callable[..., Any]
    label: str
    applies: Callable[..., bool]
    cores: Callable[[int], int]
    alone: bool
    starts_ranks: bool
    least: float


# By name, in the order in which they start when several can.
COLLECTORS: dict[str, Collector] = {}
# By the name that their findings carry.
CHECKS: dict[str, Callable[..., Iterator[Finding]]] = {}


def collector(
    label: str,
    *,
    applies: Callable[..., bool] = lambda: True,
    cores: Callable[[int], int] = lambda ranks: 1,
    alone: bool = False,
    starts_ranks: bool = False,
    least: float = 0.0,
) -> Callable[[F], F]:
    """Register a collector under its function's name; the arguments are Collector's."""

    def register(function: F) -> F:
        COLLECTORS[function.__name__] = Collector(
            function=function,
            label=label,
            applies=applies,
            cores=cores,
            alone=alone,
            starts_ranks=starts_ranks,
            least=least,
        )
        return function

    return register


def check(name: str) -> Callable[[F], F]:
    """Register a check under the name that its findings carry."""

    def register(function: F) -> F:
        CHECKS[name] = function
        return function

    return register


def is_of_ranks(name: str) -> bool:
    """Whether a check judges ranks, which get variables of the user's shell."""
    names = _parameters(CHECKS[name]) if name in CHECKS else ()
    return not {"controller", "rank_runs"}.isdisjoint(names)


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _keys(name: str, function: Callable[..., Any], framework: str = "") -> Iterator[Key]:
    """One key for each framework (or this one) and controller that the function has."""
    names = _parameters(function)
    choices = [_CHOICES[kind] if kind in names else ("",) for kind in ("framework", "controller")]
    for key in itertools.starmap(Key, itertools.product([name], *choices)):
        if framework in ("", key.framework):
            yield key


def _wanted(functions: Mapping[str, Callable[..., Any]], setup: Setup) -> Iterator[Key]:
    """All keys, without functions that need a field of the setup that is None."""
    for name, function in functions.items():
        if all(getattr(setup, each, each) is not None for each in _parameters(function)):
            yield from _keys(name, function)


def _plural(name: str) -> str:
    """The collector of which a parameter names all results; empty if there is none."""
    singular = name.removesuffix("s")
    return singular if name not in COLLECTORS and singular in COLLECTORS else ""


def _of(name: str, key: Key) -> Key:
    """The key of a collector for the framework and controller of another key."""
    names = _parameters(COLLECTORS[name].function)
    framework = key.framework if "framework" in names else ""
    return Key(name, framework, key.controller if "controller" in names else "")


def _needs(key: Key) -> Iterator[Key]:
    """The collectors that have to be done first."""
    found = COLLECTORS[key.name]
    for name in {*_parameters(found.function), *_parameters(found.applies)}:
        if name in COLLECTORS:
            yield _of(name, key)
        elif plural := _plural(name):
            yield from _keys(plural, COLLECTORS[plural].function, key.framework)


def arguments(
    key: Key, function: Callable[..., Any], setup: Setup, results: Mapping[Key, Any]
) -> dict[str, object]:
    """The values of a function's parameters.

    Raises:
        KeyError: a collector is not done.
        AttributeError: nothing has the name of a parameter.
        Exception: the error of a collector that failed.
    """
    found: dict[str, object] = {}
    for name in _parameters(function):
        if name in _CHOICES:
            found[name] = getattr(key, name)
        elif name in COLLECTORS or _plural(name):
            plural = _plural(name)
            value = collected(plural, results, key.framework) if plural else results[_of(name, key)]
            if isinstance(value, Failed):
                raise value.error
            found[name] = value
        elif name == "timeout":
            found[name] = setup.seconds
        else:
            found[name] = setup if name == "setup" else getattr(setup, name)
    return found


def collected(name: str, results: Mapping[Key, Any], framework: str = "") -> Any:
    """All results of a collector: by framework, or by framework and controller.

    Runs of ranks that failed to start are None: the check of a single run says why.
    """
    found: dict[Any, Any] = {}
    for key in _keys(name, COLLECTORS[name].function, framework):
        if key not in results:
            continue
        value = results[key]
        if isinstance(value, Failed):
            if not key.controller:
                return value
            value = None
        found[key[1:] if key.controller else key.framework] = value
    return found


def label_of(key: Key) -> str:
    """How progress and measurements call a key's collector."""
    text = COLLECTORS[key.name].label
    return text.format(framework=key.framework, controller=key.controller)


class Collection:
    """Runs the collectors in threads, each as soon as what it needs is known.

    Attributes:
        results: by key; None where a collector does not apply, Failed where it raised an error.
        measurements: how long each took.
    """

    def __init__(self, setup: Setup, on_event: Progress = lambda what, label, detail: None):
        self.setup = setup
        self.results: dict[Key, Any] = {}
        self.measurements: list[Measurement] = []
        self._failures: list[tuple[Key, str]] = []
        self._on_event = on_event
        self._done: queue.SimpleQueue[tuple[Key, Any, float]] = queue.SimpleQueue()
        self._end = time.monotonic() + setup.seconds - min(_ENDING_SECONDS, setup.seconds / 10)
        self._running: dict[Key, threading.Thread] = {}
        functions = {name: each.function for name, each in COLLECTORS.items()}
        order = list(COLLECTORS)
        self._waiting = sorted(
            _wanted(functions, setup),
            key=lambda key: (order.index(key.name), _SLOWEST.index(key.framework)),
        )
        needs = {key: {*_needs(key)} & {*self._waiting} for key in self._waiting}
        self._sorter = TopologicalSorter(needs)
        self._sorter.prepare()
        self._ready: set[Key] = set()

    def run(self) -> None:
        """Run all; once the runner is stopped, those that are left fail."""
        try:
            while self._sorter.is_active():
                before = len(self._ready)
                self._ready.update(self._sorter.get_ready())
                new = len(self._ready) > before
                for key in [key for key in self._waiting if key in self._ready]:
                    if self._has_room(key):
                        self._waiting.remove(key)
                        self._ready.remove(key)
                        self._start(key)
                # One that did not apply has ended at once, and others may be ready by that.
                if self._running and not new:
                    self._take(*self._done.get())
        finally:
            if self._running:
                self.setup.runner.stop()
                for thread in self._running.values():
                    thread.join()

    def unjudged(self) -> Iterator[Finding]:
        """What failed in runs of ranks that were interrupted, so that no check judges them."""
        for key, message in self._failures:
            if isinstance(self.results.get(key), Failed):
                about = _about(key, self.results)
                yield Finding("interrupted", label_of(key), "fail", message, about=about)

    def _has_room(self, key: Key) -> bool:
        """Whether there are cores for it: one process too many slows all others down."""
        if self._running and any(COLLECTORS[each.name].alone for each in (key, *self._running)):
            return False
        busy = sum(map(self._cores, self._running))
        return not self._running or self._cores(key) <= self.setup.cores - busy

    def _cores(self, key: Key) -> int:
        """The cores of a collector; one core is left to --check-build, which takes longest."""
        wanted = COLLECTORS[key.name].cores(self.setup.launch.ranks)
        return min(wanted, max(self.setup.cores - 1, 1))

    def _start(self, key: Key) -> None:
        found = COLLECTORS[key.name]
        try:
            applies = found.applies(**arguments(key, found.applies, self.setup, self.results))
            values = arguments(key, found.function, self.setup, self.results)
            if "setup" in values:
                tell = partial(self._tell, key)
                values["setup"] = self.setup._replace(tell=tell)
            if applies and "timeout" in values:
                values["timeout"] = self._share(key)
            if self.setup.runner.stopped:
                raise InterruptedRunError
        except Exception as error:
            self._finish(key, Failed(error))
            return
        if not applies:
            self._finish(key, None)
            return
        self._on_event("started", label_of(key), "")
        thread = threading.Thread(target=self._find, args=(key, values), name=label_of(key))
        self._running[key] = thread
        thread.start()

    def _tell(self, key: Key, what: str, detail: str) -> None:
        if what == "failed":
            self._failures.append((key, detail))
        self._on_event(what, label_of(key), detail)

    def _share(self, key: Key) -> float:
        """Seconds for a collector: ranks that hang must not use up the time of all others.

        Raises:
            StepError: there is no time left.
        """
        found = COLLECTORS[key.name]
        left = self._end - time.monotonic()
        if found.starts_ranks:
            left -= min(_RESERVE_SECONDS, self.setup.seconds / 4)
        if found.least:
            return max(left, found.least)
        if left < 1:
            raise StepError(
                f"not tried: verify had used up its {self.setup.seconds:.0f} seconds",
                remedy="fix what took so long, or allow more time with --timeout",
            )
        if not found.starts_ranks:
            return left
        others = [COLLECTORS[each.name] for each in self._waiting if self._may_apply(each)]
        runs = 1 + sum(each.starts_ranks and each.alone == found.alone for each in others)
        return max(left / runs, min(left, _SHARE_SECONDS))

    def _may_apply(self, key: Key) -> bool:
        """Whether it will be found out, as far as that is known by now."""
        applies = COLLECTORS[key.name].applies
        try:
            return bool(applies(**arguments(key, applies, self.setup, self.results)))
        except KeyError:
            return True
        except Exception:
            return False

    def _find(self, key: Key, values: dict[str, object]) -> None:
        began = time.monotonic()
        value: Any
        try:
            value = COLLECTORS[key.name].function(**values)
        except Exception as error:
            value = Failed(error)
        self._done.put((key, value, time.monotonic() - began))

    def _take(self, key: Key, value: Any, seconds: float) -> None:
        self._running.pop(key).join()
        self._finish(key, value)
        self.measurements.append(Measurement(label_of(key), round(seconds, 3), "s"))
        if isinstance(value, Failed) and not isinstance(value.error, InterruptedRunError):
            self._on_event("failed", label_of(key), str(value.error))
        self._on_event("finished", label_of(key), "")

    def _finish(self, key: Key, value: Any) -> None:
        self.results[key] = value
        self._sorter.done(key)


def judge(setup: Setup, results: Mapping[Key, Any]) -> Iterator[Finding]:
    """The findings of all checks; one finding for all that were interrupted."""
    missed: dict[str, None] = {}
    for key in _wanted(CHECKS, setup):
        try:
            yield from ask(key, setup, results)
        except InterruptedRunError:
            missed[key.name] = None
    if missed:
        message = f"it was ended before it could judge: {', '.join(missed)}"
        remedy = "run it again and leave it the time that it needs"
        yield Finding("interrupted", "verify", "error", message, remedy=remedy)


def ask(key: Key, setup: Setup, results: Mapping[Key, Any]) -> list[Finding]:
    """The findings of one check; its own error is a finding too.

    Those that do not state their rows of the table are about the framework and controller of
    the key, or else about everything.

    Raises:
        InterruptedRunError: verify was ended before the check had what it needs.
    """
    about = _about(key, results)
    return [
        each._replace(about=about) if each.about == EVERYTHING else each
        for each in _answers(key, setup, results)
    ]


def _about(key: Key, results: Mapping[Key, Any]) -> About:
    """The rows of the table that a key stands for: also the operations that its ranks used."""
    if not key.framework:
        return EVERYTHING
    if not key.controller:
        return About((key.framework,))
    run = results.get(key._replace(name="rank_run"))
    used = datapath.operations(run) if isinstance(run, RankRun) else ()
    return About((key.framework,), (key.controller,), tuple(sorted(used)) or (key.controller,))


def _answers(key: Key, setup: Setup, results: Mapping[Key, Any]) -> list[Finding]:
    function = CHECKS[key.name]
    subject = " over ".join(filter(None, key[1:])) or key.name
    try:
        return list(function(**arguments(key, function, setup, results)))
    except InterruptedRunError:
        raise
    except HvdenvError as error:
        text = error.message if not error.where else f"{error.where}: {error.message}"
        return [Finding(key.name, subject, "error", text, error.detail, error.remedy)]
    except Exception as error:
        return [bug(key.name, subject, error)]


def bug(check: str, subject: str, error: Exception) -> Finding:
    """The finding for an error in hvdenv itself, which keeps the rest of the report."""
    return Finding(
        check=check,
        subject=subject,
        status="error",
        message=f"the check could not run: {type(error).__name__}: {error}",
        evidence="".join(traceback.format_exception(error)),
        remedy="this is a bug in hvdenv: report it with the evidence",
    )
