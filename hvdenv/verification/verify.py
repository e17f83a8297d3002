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

from hvdenv import __version__
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.errors import HvdenvError, InterruptedRunError, StepError
from hvdenv.launch import orphans
from hvdenv.launch.launchers import Launch
from hvdenv.launch.placement import influences
from hvdenv.reports.report import Finding, Measurement, Report
from hvdenv.runner import Runner, end_marked, environment, handled
from hvdenv.verification import bench, collectives, training
from hvdenv.verification.bench import Effort
from hvdenv.verification.checks import CHECKS, REBUILD, Shell, damaged, table
from hvdenv.verification.collectors import CONTROLLERS, FACTS, FRAMEWORKS
from hvdenv.verification.datapath import records

DEFAULT_LAUNCHERS = ("mpirun", "horovodrun-gloo")
DEFAULT_TIMEOUT = 600.0
# What ranks do after their allreduces: NAME or NAME=OPTION, see standalone/ranks/rank_work.py.
DEFAULT_EXERCISES: tuple[str, ...] = (collectives.EXERCISE, training.FIRST)
FULL_EXERCISES = (collectives.FULL, training.EXERCISE)
# Three for process sets that overlap; Adasum needs 2, 4, 8 and so on.
_USUAL_RANKS, _RANKS_WITH_ROOM = 3, 4
TWO_RANKS = Launch((), 2)

# Parameters that stand for all of a kind, and the fact that they are made of.
_PLURALS = {"extensions": "extension", "rank_runs": "rank_run", "bench_runs": "bench_run"}
_CHOICES = {"framework": FRAMEWORKS, "controller": CONTROLLERS}
# Facts that start ranks.
_RANKS = ("rank_run", "bench_run", "speed_runs")
# The order in which facts start when several could: others wait for the first, and
# --check-build is the longest of the rest. Benchmarks come last, when nothing else runs.
_FIRST = (
    "mpi", "libraries", "build_table", "rank_run", "extension", "changed_files", "observed",
    "image_mpi", "bench_run", "speed_runs",
)  # fmt: skip
# TensorFlow takes longest to import: what runs alone at the end should be short.
_SLOWEST = ("tensorflow", "torch", "mxnet", "")
# How long hosts have to say what is left there; a batch system that ends verify does not wait.
_ORPHAN_SECONDS, _HURRIED_SECONDS = 6.0, 1.0
_LEAST_SECONDS = 2.0
# To end what hangs takes time too.
_ENDING_SECONDS = 3.0
# However little time is left, ranks that hang are told from slow imports only by waiting.
_SHARE_SECONDS = 60.0
# What ranks leave to the rest: without it, nothing could be said about them.
_RESERVE_SECONDS = 30.0

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
    launch: Launch = TWO_RANKS,
    timeout: float = DEFAULT_TIMEOUT,
    launchers: tuple[str, ...] = DEFAULT_LAUNCHERS,
    exercises: tuple[str, ...] = DEFAULT_EXERCISES,
    effort: Effort | None = None,
    cores: int | None = None,
    on_event: Progress = lambda what, label, seconds: None,
) -> Report:
    """Judge an environment.

    Args:
        installation: where it is.
        expectation: what it should have.
        runner: starts the processes; its stop() ends this call, as SIGINT and SIGTERM do:
            then the report holds what was found out so far.
        launch: how many ranks every allreduce has, and where they are.
        timeout: seconds for all of it; ranks that hang have a share of that.
        launchers: names in launchers.LAUNCHERS; the first for each controller is used.
        exercises: what ranks do after their allreduces.
        effort: what benchmarks may take; None for no benchmarks.
        cores: how many may be used; those of this process if not given.
        on_event: called with ``started`` or ``finished``, a label and the seconds.
    """
    cores = cores or len(os.sched_getaffinity(0))
    mine, passed = influences(environment()), influences(runner.given)
    began, started = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    given = {
        "installation": installation,
        "expectation": expectation,
        "runner": runner,
        "launch": launch._replace(root=os.geteuid() == 0, cores=cores),
        "timeout": timeout,
        "launchers": launchers,
        "exercises": exercises,
        "effort": effort,
        "cores": cores,
        "shell": Shell(passed, tuple(name for name in mine if name not in passed)),
    }
    with _ended_by_signals(runner):
        facts, measurements = _Facts(given, on_event).find_all()
        findings = list(_all_findings(given, facts))
        findings = _with_cause(findings, facts.get(Key("changed_files")))
        try:
            suspects = _suspects(installation, time.time() - (time.monotonic() - began))
            findings += _orphans(facts, launch, runner, suspects)
        except Exception as error:
            findings.append(_own_mistake("orphans", "hosts", error))
    extensions = _collected("extension", facts)
    rows = () if isinstance(extensions, Failed) else tuple(table(expectation, extensions, findings))
    speeds = bench.measurements(_collected("bench_run", facts), _collected("speed_runs", facts))
    seconds = time.monotonic() - began
    runs = _collected("rank_run", facts)
    return Report(
        recipe=installation.recipe,
        prefix=installation.prefix,
        host=socket.gethostname(),
        started=started,
        seconds=seconds,
        findings=tuple(findings),
        measurements=(*measurements, *speeds, Measurement("verify", round(seconds, 3), "s")),
        table=rows,
        ranks=tuple(record for (name, _), run in runs.items() for record in records(name, run)),
        environment=dict(_environment(given, facts)),
    )


def usual_ranks(cores: int, gpus: int = 0) -> int:
    """How many ranks verify starts by default.

    Args:
        cores: how many there are for them.
        gpus: how many GPUs ranks should use; two ranks cannot share one under NCCL.
    """
    ranks = _RANKS_WITH_ROOM if cores >= _RANKS_WITH_ROOM else _USUAL_RANKS
    return min(ranks, gpus) if gpus > 1 else ranks


def _environment(given: Mapping[str, Any], facts: Mapping[Key, Any]) -> Iterator[tuple[str, str]]:
    """What ran, in names and versions, as far as that could be found out."""
    known = {key: value for key, value in facts.items() if value and not isinstance(value, Failed)}
    extensions = [value for key, value in known.items() if key.name == "extension"]
    yield "hvdenv", __version__
    for name, fact in (("Python", "python_version"), ("horovod", "version")):
        versions = dict.fromkeys(filter(None, (getattr(each.facts, fact) for each in extensions)))
        if versions:
            yield name, ", ".join(versions)
    for each in extensions:
        if each.facts.installed:
            yield each.framework, each.facts.installed
    if Key("mpi") in known and known[Key("mpi")][1]:
        yield "mpirun", known[Key("mpi")][1]
    launch = given["launch"]
    yield "ranks", str(launch.ranks)
    if launch.hosts:
        yield "hosts", ", ".join(host.name for host in launch.hosts)
    yield "cores", str(given["cores"])
    yield "kernel", os.uname().release


def _suspects(installation: Installation, since: float) -> orphans.Suspects:
    """Processes that may be what ranks left; none for an image, whose programs are inside it."""
    folders = [installation.prefix, os.path.dirname(installation.python)]
    folders += [os.path.realpath(folder) for folder in folders]
    return orphans.Suspects(() if installation.inside else tuple(dict.fromkeys(folders)), since)


def _orphans(
    facts: Mapping[Key, Any], launch: Launch, runner: Runner, suspects: orphans.Suspects
) -> Iterator[Finding]:
    """What ranks have left on their hosts; others than this are asked where it ended badly."""
    ranks = [value for key, value in facts.items() if key.name == "rank_run"]
    failed = any(run and not isinstance(run, Failed) and run.returncode for run in ranks)
    if not failed and not runner.stopped:
        end_marked(runner.token)  # what a rank may have started beside itself
    else:
        seconds = _HURRIED_SECONDS if runner.stopped else _ORPHAN_SECONDS
        yield from orphans.end([host.name for host in launch.hosts], runner, seconds, suspects)
    if any(ranks):
        yield from orphans.orphans(suspects)


@contextmanager
def _ended_by_signals(runner: Runner) -> Iterator[None]:
    """Stop the runner on a signal that ends programs, and if the block is left by an exception."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        runner.stop()

    main = threading.current_thread() is threading.main_thread()
    try:
        with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if main else (), stop):
            yield
    except BaseException:
        runner.stop()
        raise


class _Facts:
    """Runs the facts in threads, each as soon as what it needs is known."""

    def __init__(self, given: Mapping[str, Any], on_event: Progress) -> None:
        self._given = given
        self._on_event = on_event
        self._done: queue.SimpleQueue[tuple[Key, Any, float]] = queue.SimpleQueue()
        self._values: dict[Key, Any] = {}
        self._measurements: list[Measurement] = []
        timeout: float = given["timeout"]
        self._end = time.monotonic() + timeout - min(_ENDING_SECONDS, timeout / 10)
        self._running: dict[Key, threading.Thread] = {}
        functions = {name: FACTS[name].function for name in FACTS}
        keys = [key for name in functions for key in _wanted(name, functions[name], given)]
        self._waiting = sorted(keys, key=_urgency)

    def find_all(self) -> tuple[dict[Key, Any], list[Measurement]]:
        """All facts and how long each took; once the runner is stopped, Failed are the rest."""
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
        if self._running and any(FACTS[each.name].alone for each in (key, *self._running)):
            return False
        return not self._running or self._cores(key) <= self._given["cores"] - sum(
            self._cores(running) for running in self._running
        )

    def _cores(self, key: Key) -> int:
        """What a fact takes; one core is left to --check-build, the longest of all."""
        wanted = FACTS[key.name].cores(self._given["launch"].ranks)
        return min(wanted, max(int(self._given["cores"]) - 1, 1))

    def _start(self, key: Key) -> None:
        fact = FACTS[key.name]
        try:
            applies = fact.applies(**_arguments(key, fact.applies, self._given, self._values))
            arguments = _arguments(key, fact.function, self._given, self._values)
            if applies and "timeout" in arguments:
                arguments["timeout"] = self._share(key)
            if self._given["runner"].stopped:
                raise InterruptedRunError
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

    def _share(self, key: Key) -> float:
        """Seconds that a fact may take: ranks that hang must not use up the time of all others.

        Raises:
            StepError: there is no time left.
        """
        left = self._end - time.monotonic()
        if key.name in _RANKS:
            left -= min(_RESERVE_SECONDS, self._given["timeout"] / 4)
        if key.name == "extension":
            return max(left, _LEAST_SECONDS)  # nothing could be said about ranks without it
        if left < 1:
            raise StepError(
                f"not tried: the {self._given['timeout']:.0f} seconds for all of verify were over",
                remedy="mend what took so long, or give more with --timeout",
            )
        if key.name not in _RANKS:
            return left
        alike = [
            each
            for each in self._waiting
            if each.name in _RANKS and FACTS[each.name].alone == FACTS[key.name].alone
        ]
        waiting = 1 + sum(map(self._may_apply, alike))
        return max(left / waiting, min(left, _SHARE_SECONDS))

    def _may_apply(self, key: Key) -> bool:
        """Whether it will be found out, as far as that can be told by now."""
        applies = FACTS[key.name].applies
        try:
            return bool(applies(**_arguments(key, applies, self._given, self._values)))
        except KeyError:
            return True  # what it needs is not known yet
        except Exception:
            return False

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


def _wanted(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[Key]:
    """The same, but none if it needs what the caller of verify did not give."""
    if all(given.get(each, True) is not None for each in _parameters(function)):
        yield from _instances(name, function)


def _checks(given: Mapping[str, Any]) -> Iterator[Key]:
    for name, function in CHECKS.items():
        yield from _wanted(name, function, given)


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
    several = [
        each
        for name in names & _PLURALS.keys()
        for each in _instances(_PLURALS[name], FACTS[_PLURALS[name]].function)
        if key.framework in ("", each.framework)
    ]
    return [*(_of(name, key) for name in names if name in FACTS), *several]


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
            value = _collected(kind, facts, key.framework) if kind else facts[_of(name, key)]
            if isinstance(value, Failed):
                raise value.error
            arguments[name] = value
    return arguments


def _collected(name: str, facts: Mapping[Key, Any], framework: str = "") -> Any:
    """All facts of one name: by framework, or by framework and controller.

    Ranks that could not be started are None here: the check that is about them says why.
    """
    found: dict[Any, Any] = {}
    for key, value in facts.items():
        if key.name != name or framework not in ("", key.framework):
            continue
        if isinstance(value, Failed):
            if not key.controller:
                return value
            value = None
        found[(key.framework, key.controller) if key.controller else key.framework] = value
    return {key: found[key] for key in sorted(found, key=_order)}


def _order(key: Any) -> tuple[int, str]:
    framework, controller = key if isinstance(key, tuple) else (key, "")
    return FRAMEWORKS.index(framework), controller


def _all_findings(given: Mapping[str, Any], facts: Mapping[Key, Any]) -> Iterator[Finding]:
    """What the checks find; one finding for all that could not be asked in time."""
    missed = []
    for key in _checks(given):
        try:
            yield from _ask(key, given, facts)
        except InterruptedRunError:
            missed.append(key)
    if missed:
        names = ", ".join(dict.fromkeys(key.name for key in missed))
        yield Finding(
            "interrupted", "verify", "error", f"it was ended before it could judge: {names}",
            remedy="run it again and leave it the time that it needs",
        )  # fmt: skip


def _with_cause(findings: list[Finding], changed_files: Any) -> list[Finding]:
    """The same; where files are damaged, that comes first, and no other remedy is given."""
    if isinstance(changed_files, Failed) or not damaged(changed_files or ()):
        return findings
    others = [each for each in findings if each.check != "files"]
    return [each for each in findings if each.check == "files"] + [
        each._replace(remedy=f"files are damaged: {REBUILD}")
        if each.status in ("fail", "error")
        else each
        for each in others
    ]


def _ask(key: Key, given: Mapping[str, Any], facts: Mapping[Key, Any]) -> list[Finding]:
    """The findings of one check; its own error is a finding too.

    Raises:
        InterruptedRunError: verify was ended before the check had what it needs.
    """
    function = CHECKS[key.name]
    try:
        return list(function(**_arguments(key, function, given, facts)))
    except InterruptedRunError:
        raise
    except HvdenvError as error:
        text = error.message if not error.where else f"{error.where}: {error.message}"
        return [Finding(key.name, _subject(key), "error", text, error.detail, error.remedy)]
    except Exception as error:
        return [_own_mistake(key.name, _subject(key), error)]


def _own_mistake(check: str, subject: str, error: Exception) -> Finding:
    """What is said of an error in hvdenv itself: the rest of the report is kept."""
    import traceback

    evidence = "".join(traceback.format_exception(error))
    message = f"the check could not run: {type(error).__name__}: {error}"
    remedy = "this is a bug in hvdenv: report it with the evidence"
    return Finding(check, subject, "error", message, evidence, remedy)


def _subject(key: Key) -> str:
    return " over ".join(part for part in (key.framework, key.controller) if part) or key.name
