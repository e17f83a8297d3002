"""Horovod's own tests of its release, run on the ranks of an environment and judged.

hvdenv contains none of these tests. They come from a checkout, an archive or Horovod's repository, and
are recognised by the hash that git gives their folder. pytest and what else they import is installed
into a folder of the cache, never into the environment.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shlex
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha1
from pathlib import Path
from typing import NamedTuple

from hvdenv import STEP_PROGRAMS
from hvdenv.command import OWN_PYTHON, Command, Outcome
from hvdenv.environments.installation import Installation
from hvdenv.errors import StepError, UsageError
from hvdenv.masking import clean, plain
from hvdenv.places import Places, make_folder
from hvdenv.reading import MIB, OWN, Kind, read_file, read_text
from hvdenv.reports.report import Finding
from hvdenv.runner import Runner
from hvdenv.schema import decode, parse_toml
from hvdenv.standalone.ranks.events import SuiteDone, TestDone, read
from hvdenv.verification import ranks
from hvdenv.verification.checks import findings
from hvdenv.verification.collection import Setup, Suite, check, collector
from hvdenv.verification.collectors import Extensions, HostMpi, rank_run, ranks_are_right
from hvdenv.verification.ranks import Judgement, RankRun

_DATA = Path(__file__).parents[1] / "knowledge" / "suite.toml"
_TEST = Kind("a file of Horovod's tests", 64 * MIB)
# Seconds for one test. The longest of Horovod's takes half a minute on a busy machine.
TEST_SECONDS = 180.0
# Seconds for all of a suite, unless --timeout says otherwise.
SUITE_SECONDS = 7200.0
# A test that ends its ranks is left out, and the others are started again.
_RESTARTS = 20
_SHOWN = 20
_COMMAND_SECONDS = 300.0
# Exit codes of pytest: an internal error, and a wrong command line.
_NOT_RUN = (3, 4)
_UNPACK = (
    "import sys; sys.path.insert(0, sys.argv[1]); import prepare_source;"
    " prepare_source.unpack(*sys.argv[2:])"
)
_REMEDY = (
    "compare the evidence of the ranks; to run this test alone, in the folder of the tests:"
    " `{command} {test}`"
)


class SuiteFile(NamedTuple):
    """A file of Horovod's tests, the framework that it needs, and whether it runs on all ranks."""

    name: str
    framework: str = ""
    ranks: bool = False


class Known(NamedTuple):
    """Tests that fail although nothing is wrong with an installation.

    Attributes:
        tests: the ends of their ids, with * for any characters.
        failures: texts of which one must be in what a rank reports; another failure is new.
        why: the reason.
        source: where it is explained.
    """

    tests: tuple[str, ...]
    failures: tuple[str, ...]
    why: str
    source: str


class SuiteData(NamedTuple):
    """hvdenv/knowledge/suite.toml; `tests` is the hash that git gives each release's folder `test`."""

    packages: tuple[str, ...]
    repository: str
    tests: dict[str, str]
    file: tuple[SuiteFile, ...]
    known: tuple[Known, ...] = ()


class SuiteRun(NamedTuple):
    """The results of some files of Horovod's tests.

    Attributes:
        tests: by test: what each rank reported, by the rank's name.
        crashed: by test: how ranks failed in it.
        problem: why not all tests were tried; None if all were.
    """

    tests: dict[str, Mapping[str, TestDone]]
    crashed: dict[str, Judgement]
    problem: Judgement | None


@lru_cache(maxsize=1)
def data() -> SuiteData:
    return decode(SuiteData, parse_toml(read_text(_DATA, OWN)))


def tree_hash(folder: Path, ignored: Collection[str] = ("__pycache__", ".pytest_cache")) -> str:
    """The hash that git gives a folder with its files, without those that running them leaves."""
    entries: dict[str, bytes] = {}
    for path in (each for each in folder.iterdir() if each.name not in ignored):
        name = os.fsencode(path.name)
        if path.is_symlink():
            content = os.fsencode(os.readlink(path))
            entries[path.name] = b"120000 %b\0%b" % (name, _git_object(b"blob", content))
        elif path.is_dir():  # git sorts folders by their name with a slash
            value = bytes.fromhex(tree_hash(path, ignored))
            entries[f"{path.name}/"] = b"40000 %b\0%b" % (name, value)
        else:
            mode = b"100755" if os.access(path, os.X_OK) else b"100644"
            value = _git_object(b"blob", read_file(path, _TEST).data)
            entries[path.name] = b"%b %b\0%b" % (mode, name, value)
    return _git_object(b"tree", b"".join(entries[key] for key in sorted(entries))).hex()


def _git_object(kind: bytes, content: bytes) -> bytes:
    return sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).digest()


@contextmanager
def prepared(
    source: Path | None, installation: Installation, version: str, runner: Runner, places: Places
) -> Iterator[Suite]:
    """Find Horovod's tests, and install what they import.

    Args:
        source: a checkout of Horovod, its folder `test`, or an archive of it; None for the
            repository.
        version: of the Horovod in the environment.

    Raises:
        UsageError: the source has no tests, there is no source for this version, or the
            environment is an image.
        StepError: a command failed.
    """
    if installation.inside:
        raise UsageError(
            "verify does not run Horovod's own tests in an image",
            where=installation.prefix,
            remedy="leave out --suite and --suite-from",
        )
    folder = make_folder(places.cache / "suite")
    # Not in /tmp: ranks on other hosts read it.
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as work:
        if source is None:
            tests, release = _from_repository(version, folder, runner), version
        else:
            tests = tests_in(source, Path(work), runner)
            digest = tree_hash(tests)
            of = [release for release, each in data().tests.items() if each == digest]
            release = version if version in of else next(iter(of), "")
        packages = _packages(Setup(installation, runner), folder)
        yield Suite(str(tests), str(packages), release, work)


def tests_in(source: Path, work: Path, runner: Runner) -> Path:
    """The absolute path of the tests in a checkout or archive, which is unpacked in a folder."""
    where = f"--suite-from {source}"
    source = source.absolute()
    if source.is_file():
        unpacked = work / "unpacked"
        _run(runner, OWN_PYTHON, "-c", _UNPACK, str(STEP_PROGRAMS), str(source), str(unpacked))
        source = unpacked
    for tests in (source / "test", source):
        if (tests / "parallel").is_dir() and (tests / "utils").is_dir():
            return tests
    raise UsageError(
        "there are no tests of Horovod",
        where=where,
        remedy="name a checkout of Horovod, or an archive of one",
    )


def _from_repository(version: str, folder: Path, runner: Runner) -> Path:
    expected = data().tests.get(version)
    if not expected:
        raise UsageError(
            f"hvdenv does not know the tests of Horovod {version or 'in this environment'}",
            where="--suite",
            remedy="name a checkout of that release with --suite-from",
        )
    checkout = folder / f"horovod-{version}"
    tests = checkout / "test"
    if not (tests.is_dir() and tree_hash(tests) == expected):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            cloned = Path(temporary) / "horovod"
            words = ("--branch", f"v{version}", "--", data().repository, str(cloned))
            _run(runner, "git", "clone", "--quiet", "--depth", "1", *words)
            # All of it: Python executes what is in __pycache__ as well.
            if tree_hash(cloned / "test", ignored=()) != expected:
                raise StepError(
                    f"the tests at v{version} differ from those of the release",
                    where=data().repository,
                    remedy="name a checkout that you trust with --suite-from",
                )
            try:
                cloned.rename(checkout)
            except OSError:  # it exists: tests have left files there, or another verify was faster
                if tree_hash(tests) != expected:
                    checkout.rename(Path(temporary) / "spoiled")
                    cloned.rename(checkout)
    return tests


def _packages(setup: Setup, folder: Path) -> Path:
    python = (setup.installation.python, "-s")
    ask = (*python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    version = _output(setup.run(ask, _COMMAND_SECONDS)).strip()
    packages = folder / f"packages-py{version}"
    if not packages.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            pip = (*python, "-m", "pip", "install", "--quiet", "--target")
            argv = (*pip, f"{temporary}/packages", *data().packages)
            _output(setup.run(argv, _COMMAND_SECONDS))
            try:
                Path(temporary, "packages").rename(packages)
            except OSError:
                if not packages.is_dir():  # another verify was not faster
                    raise
    return packages


def _run(runner: Runner, *argv: str) -> None:
    _output(runner.branch().run(Command(argv, timeout=_COMMAND_SECONDS)))


def _output(outcome: Outcome) -> str:
    if outcome.returncode:
        argv = outcome.command.argv
        raise StepError(
            f"{Path(argv[0]).name} failed (exit {outcome.returncode})",
            where=" ".join(argv),
            detail=outcome.tail(15),
            remedy="Horovod's tests need this: see the output above",
        )
    return outcome.output


@collector(
    "Horovod's tests of {framework} over {controller}",
    applies=ranks_are_right,
    alone=True,
    starts_ranks=True,
)
def suite_run(
    setup: Setup, suite: Suite, mpi: HostMpi, timeout: float, framework: str, controller: str
) -> SuiteRun:
    """The tests of a framework on all ranks, over a controller."""

    def start(exercise: str, seconds: float) -> RankRun:
        timed = setup._replace(exercises=(exercise,))
        return rank_run(timed, mpi, seconds, framework, controller)

    names = [each.name for each in data().file if each.ranks and each.framework == framework]
    return try_files(suite, names, start, timeout)


@collector("Horovod's tests without ranks", alone=True, starts_ranks=True)
def suite_alone(setup: Setup, suite: Suite, timeout: float, extensions: Extensions) -> SuiteRun:
    """The tests that need no ranks, in one process."""
    usable = [name for name, each in extensions.items() if each.usable]
    framework = next(iter(usable), "")
    if not framework:
        return SuiteRun({}, {}, Judgement("skip", "no framework can be used"))
    installation = setup.installation
    only_mpi = extensions[framework].built("MPI") and not extensions[framework].built("Gloo")
    controller = "MPI" if only_mpi else "Gloo"

    def start(exercise: str, seconds: float) -> RankRun:
        token = uuid.uuid4().hex
        argv = (
            *(*installation.inside, installation.python, "-S", "-u"),
            *(f"{installation.programs}/ranks/rank.py", token, f"{seconds:g}"),
            *(framework, controller, "host", exercise),
        )
        outcome = setup.run(argv, seconds)
        found = ranks.collect(read(outcome.output, token))
        return RankRun(
            launcher="",
            controller=controller,
            argv=argv,
            size=1,
            ranks=found,
            returncode=outcome.returncode,
            timeout=seconds,
        )

    fitting = {"", *usable}
    names = [each.name for each in data().file if not each.ranks and each.framework in fitting]
    return try_files(suite, names, start, timeout)


def try_files(
    suite: Suite, names: Sequence[str], start: Callable[[str, float], RankRun], timeout: float
) -> SuiteRun:
    """Run files one after the other, each in new processes.

    Args:
        start: starts ranks with an exercise, and the seconds that they have.
        timeout: in seconds, for all.
    """
    end = time.monotonic() + timeout
    found = SuiteRun({}, {}, None)
    plan = Path(suite.work, f"{uuid.uuid4().hex}.json")

    def try_once(name: str) -> RankRun | None:
        """Run what is left of a file; None if no time is left."""
        done, left = [*found.tests, *found.crashed], end - time.monotonic()
        words = {"tests": suite.tests, "packages": suite.packages, "files": [name]}
        plan.write_text(json.dumps({**words, "done": done, "seconds": TEST_SECONDS}))
        return start(f"suite={plan}", left) if left >= 1 else None

    # Those that do not exist are of another release.
    for name in (name for name in names if Path(suite.tests, name).exists()):
        if problem := _try_file(name, try_once, found):
            return found._replace(problem=problem)
    return found


def _try_file(
    name: str, try_once: Callable[[str], RankRun | None], found: SuiteRun
) -> Judgement | None:
    """Run a file, and again without a test that ended its ranks; adds to what was found.

    Returns why not all of its tests were tried; None if they were.
    """
    for _ in range(_RESTARTS):
        run = try_once(name)
        if run is None:
            message = f"no time was left from {name} on"
            return Judgement("unproven", message, "", "allow more with --timeout")
        outcomes = _outcomes(run)
        done = [rank.last(SuiteDone) for rank in run.ranks]
        if len(done) == run.size and all(each and each.code not in _NOT_RUN for each in done):
            found.tests.update(outcomes)
            return None
        cause, how = ranks.breakdown(run)
        test = cause[0].detail if cause else ""
        if not test or test in found.tests or test in found.crashed:
            return how._replace(message=f"{name}: {how.message}")
        causes = {rank.name for rank in cause}
        # What only some ranks finished is tried again, unless it is why they ended.
        found.tests.update(
            (each, by_rank)
            for each, by_rank in outcomes.items()
            if len(by_rank) == run.size
            or any(done.outcome == "failed" for name, done in by_rank.items() if name in causes)
        )
        if not causes <= found.tests.get(test, {}).keys():
            found.tests.pop(test, None)
            found.crashed[test] = how
    message = f"{name}: its ranks ended in {_RESTARTS} tests, and the others were not tried"
    return Judgement("unproven", message, "", "fix what ends the ranks first")


def _outcomes(run: RankRun) -> dict[str, dict[str, TestDone]]:
    found: dict[str, dict[str, TestDone]] = {}
    for rank in run.ranks:
        for event in rank.all(TestDone):
            found.setdefault(event.test, {})[rank.name] = event
    return found


@check("suite")
def suite_of_ranks(
    setup: Setup, suite: Suite, suite_run: SuiteRun | None, framework: str, controller: str
) -> Iterator[Finding]:
    """What Horovod's own tests show of a framework over a controller."""
    if suite_run is not None:
        found = judge(suite_run, suite.release, _command(setup, suite, setup.launch.ranks))
        yield from findings("suite", f"{framework} over {controller}", found)


@check("suite-alone")
def suite_without_ranks(setup: Setup, suite: Suite, suite_alone: SuiteRun) -> Iterator[Finding]:
    """What Horovod's own tests show that need no ranks."""
    found = judge(suite_alone, suite.release, _command(setup, suite))
    yield from findings("suite", "tests without ranks", found)


def _command(setup: Setup, suite: Suite, count: int = 0) -> str:
    """Runs pytest, which is not in the environment, on so many ranks or without any."""
    installation = setup.installation
    named = [installation.recipe] if installation.recipe else ["--prefix", installation.prefix]
    on_ranks = ["-n", str(count)] if count else []
    program = ["env", f"PYTHONPATH={suite.packages}", "python", "-m", "pytest"]
    return shlex.join(["hvdenv", "run", *named, *on_ranks, "--", *program])


def judge(run: SuiteRun, release: str, command: str) -> Iterator[tuple[str, Judgement]]:
    """Pairs of a test and its judgement for new failures; then on known failures and all that passed.

    Args:
        release: whose tests they are; empty if unknown.
        command: runs pytest on ranks.
    """
    failures = dict(_failures(run))
    reasons = {test: why for test in failures if (why := known(test, run.tests.get(test, {})))}
    new = [test for test in failures if test not in reasons]
    for test in new[:_SHOWN]:
        remedy = _REMEDY.format(command=command, test=shlex.quote(test))
        yield test, failures[test]._replace(remedy=remedy)
    if more := new[_SHOWN:]:
        yield "", Judgement("fail", f"{len(more)} more tests fail", "\n".join(more))
    if reasons:
        message = f"{'1 test fails' if len(reasons) == 1 else f'{len(reasons)} tests fail'} for known reasons"
        lines = [f"{test}: {each.why} ({each.source})" for test, each in reasons.items()]
        yield "known failures", Judgement("skip", message, "\n".join(lines))
    if run.problem:
        yield "", run.problem
    if passed := [test for test, each in run.tests.items() if _outcome(each) == "passed"]:
        yield "", _passed(run, len(passed), release)


def _passed(run: SuiteRun, count: int, release: str) -> Judgement:
    skipped = {test: each for test, each in run.tests.items() if _outcome(each) == "skipped"}
    of = f"Horovod {release}'s tests" if release else "tests of an unknown release"
    message = f"{count} of {of} {'passes' if count == 1 else 'pass'}"
    if skipped:
        message += f"; {len(skipped)} {'skips itself' if len(skipped) == 1 else 'skip themselves'}"
    reasons = {
        test: next(done.reason for done in each.values() if done.outcome == "skipped")
        for test, each in skipped.items()
    }
    lines = [f"not tried: {test}: {plain(reason)}" for test, reason in reasons.items()]
    return Judgement("pass", message, "\n".join(lines))


def _outcome(each: Mapping[str, TestDone]) -> str:
    """``failed`` if any rank failed, ``skipped`` if any skipped it."""
    outcomes = {done.outcome for done in each.values()}
    return next(one for one in ("failed", "skipped", "passed") if one in outcomes)


def _failures(run: SuiteRun) -> Iterator[tuple[str, Judgement]]:
    for test, each in run.tests.items():
        failed = {name: done for name, done in each.items() if done.outcome == "failed"}
        if failed:
            texts = [f"{name}:\n{done.reason}" for name, done in failed.items()]
            first = next(iter(failed.values())).reason
            last = next((line for line in first.splitlines() if line.startswith("E ")), "")
            message = f"fails on {ranks.listed(list(failed))}: {last.removeprefix('E').strip()}"
            yield test, Judgement("fail", clean(message), clean("\n".join(texts)))
    for test, how in run.crashed.items():
        yield test, how


def known(test: str, by_rank: Mapping[str, TestDone]) -> Known | None:
    """Why a test is known to fail as it does on each rank; None if it is not."""
    texts = [done.reason for done in by_rank.values() if done.outcome == "failed"]
    for each in data().known if texts else ():
        if any(fnmatch.fnmatchcase(test, f"*{name}") for name in each.tests) and all(
            any(failure in text for failure in each.failures) for text in texts
        ):
            return each
    return None
