"""Build and verify combinations of versions as a user would, and record the results.

    python -m grid.run                     the next combination without a row
    python -m grid.run --count 3           the next three
    python -m grid.run torch-2.6           this one, even if it has a row
    python -m grid.run --list              list which have a row
    python -m grid.run --before "nice -n 19"
    python -m grid.run torch-2.6 --suite-from ~/src/horovod    also run Horovod's own tests

--suite-from runs them on two ranks, after the row was written without them, and then adds them to it.

Run it in the root of a checkout. Each combination takes minutes and gigabytes; only one environment
is on disk at a time, and it is removed afterwards. Rows are written to hvdenv/knowledge/grid.json
atomically, so the next call resumes after a kill. Faults of the machine (a full disk, no network,
no such Python, a timeout) give no row.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from grid.wanted import NAME, Wanted, all_wanted
from hvdenv import __version__
from hvdenv.environments.journal import STARTED, Journal
from hvdenv.errors import BusyError, HvdenvError, InterruptedRunError
from hvdenv.knowledge.grid import FILE, Failure, Grid, Judged, Row, SuiteResult, read, told
from hvdenv.model.facts import parse_version
from hvdenv.places import write_text
from hvdenv.reports.report import Status
from hvdenv.schema import encode

PROGRAM = (sys.executable, "-m", "hvdenv")
FOLDER = Path(__file__).parents[1] / ".grid"
FREE_GB = 20
# Machines that do nothing else need a tenth of it.
BUILD_SECONDS, QUESTION_SECONDS, VERIFY_SECONDS = 7200.0, 300.0, 1500.0
SUITE_SECONDS = 7800.0
# Packages whose version decides what works, besides the frameworks themselves.
PACKAGES = ("numpy", "keras", "tf-keras", "protobuf", "setuptools", "cmake")
# Signatures of what says nothing of a combination.
MACHINES_FAULT = frozenset(
    {"disk-full", "read-only", "no-permission", "out-of-memory", "time-limit", "too-many-open-files",
     "too-many-processes", "shared-memory-small", "index-certificate", "index-proxy",
     "network-unreachable", "download-failed"}
)  # fmt: skip
# Of a status, how bad it is; `skip` says nothing.
WORST: tuple[Status, ...] = ("error", "fail", "unproven", "pass")
LINES, WIDTH = 6, 240
CONTROLLERS = {"mpi": "MPI", "gloo": "Gloo"}


class Unfit(Exception):
    """Nothing is known of a combination: it was the machine that failed, or hvdenv refused."""


class Done(NamedTuple):
    """A command that ended."""

    command: str
    code: int
    output: str
    errors: str


class Workplace(NamedTuple):
    """Where one combination at a time is tried.

    Attributes:
        home: everything that hvdenv keeps.
        lock: descriptor of a file that is locked as long as this process, or an hvdenv that it
            has started, is there: that can outlive a killed one.
    """

    home: Path
    lock: int


class Trial(NamedTuple):
    """What was said of one combination, by the commands that a user would call.

    Attributes:
        recipe: as `hvdenv show --json` resolves it.
        plan: of `hvdenv plan --json`.
        build_seconds: of all steps of the build, but not what it waited for before it started.
        report: of `hvdenv verify --json`; None if it was not reached.
        diagnosis: of `hvdenv doctor --json`; None if nothing failed.
        record: what the environment is made of; empty if it was not built.
        said: what a build that failed said last.
    """

    recipe: Mapping[str, Any]
    plan: Mapping[str, Any]
    build_seconds: float
    report: Mapping[str, Any] | None
    diagnosis: Mapping[str, Any] | None
    record: Mapping[str, Any]
    said: str = ""


def main() -> int:
    arguments = _parser().parse_args()
    rows = {row.name: row for row in read(FILE.read_text(encoding="utf-8"))}
    wanted = {each.name: each for each in all_wanted()}
    if unknown := [name for name in arguments.names if name not in wanted]:
        print(f"error: {unknown[0]} is not in grid/wanted.toml", file=sys.stderr)
        return 2
    if arguments.list:
        for name in wanted:
            print(told(rows[name]) if name in rows else f"{name}: no row")
        return 0
    chosen = arguments.names or [name for name in wanted if name not in rows]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (arguments.folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(
                "error: another run is at work, or a build that a killed one left", file=sys.stderr
            )
            return BusyError.exit_code
        place = Workplace(arguments.folder / "home", lock.fileno())
        most = arguments.count or max(1, len(arguments.names))
        try:
            return max([_row(wanted[name], place, arguments) for name in chosen[:most]], default=0)
        except KeyboardInterrupt:
            print("interrupted; the next call goes on with it", file=sys.stderr)
            return InterruptedRunError.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="of grid/wanted.toml")
    parser.add_argument("--count", type=int, help="how many, of those without a row (default: 1)")
    parser.add_argument("--list", action="store_true", help="say which have a row")
    parser.add_argument("--before", default="", help="words before `hvdenv build`, such as nice")
    parser.add_argument(
        "--timeout", type=float, default=BUILD_SECONDS, help="of a build, in seconds"
    )
    parser.add_argument(
        "--suite-from", metavar="PATH", help="a checkout of Horovod, whose own tests to run as well"
    )
    parser.add_argument(
        "--controller", choices=CONTROLLERS.values(), help="run its tests over this one only"
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="for the environment (default: .grid)"
    )
    return parser


def _row(wanted: Wanted, place: Workplace, arguments: argparse.Namespace) -> int:
    """Try one combination and write its row; 0 if there is one now."""
    print(f"{wanted.name}: {wanted.settings}", flush=True)
    before = shlex.split(arguments.before)
    lacks = "no row"
    try:
        trial = try_out(wanted, place, before, arguments.timeout)
        row = row_of(wanted, trial, str(place.home))
        keep(row, FILE)
        lacks = "its row has no results of Horovod's own tests"
        if arguments.suite_from and trial.report:
            keep(row._replace(suite=try_suite(place, arguments)), FILE)
    except Unfit as unfit:
        print(f"{wanted.name}: {lacks}: {unfit}", flush=True)
        return 1
    except HvdenvError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        # After an interruption, the next call resumes.
        if not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            shutil.rmtree(place.home, ignore_errors=True)
    print(told(row), flush=True)
    return 0


def keep(row: Row, file: Path) -> None:
    """Write a row, in the place of an older one of its name."""
    order = [each.name for each in all_wanted()]
    rows = {each.name: each for each in read(file.read_text(encoding="utf-8"))} | {row.name: row}
    known = sorted(
        rows.values(), key=lambda each: order.index(each.name) if each.name in order else len(order)
    )
    text = json.dumps(encode(Grid(1, tuple(known))), indent=1, ensure_ascii=False) + "\n"
    read(text)
    write_text(file, text)


def try_out(wanted: Wanted, place: Workplace, before: Sequence[str], timeout: float) -> Trial:
    """Build and verify a combination in a folder of its own, with no wheel from before.

    Raises:
        Unfit: it says nothing of the combination.
    """
    home = place.home
    recipe = home / "grid.toml"
    # A build that was killed goes on where it was.
    if not recipe.exists() or recipe.read_text(encoding="utf-8") != wanted.recipe:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        recipe.write_text(wanted.recipe, encoding="utf-8")
    free = shutil.disk_usage(home).free / 1e9
    if free < FREE_GB:
        raise Unfit(f"{free:.0f} GB are free, {FREE_GB} are needed")
    allowed = [word for rule in wanted.allow for word in ("--allow", rule)]
    shown = _answer(hvdenv(place, "show", str(recipe), "--json"), 0)["recipe"]
    plan = _answer(hvdenv(place, "plan", str(recipe), "--json"), 0)
    built = hvdenv(place, "build", str(recipe), "--json", *allowed, before=before, timeout=timeout)
    if built.code == 5:
        return Trial(shown, plan, _build_seconds(home), None, _diagnosis(place), {}, built.errors)
    done = _answer(built, 0)
    words = ("verify", str(recipe), "--json", "--timeout", f"{VERIFY_SECONDS:.0f}")
    verified = hvdenv(place, *words, timeout=VERIFY_SECONDS + QUESTION_SECONDS)
    report = _answer(verified, 0, 1, 7)
    record = json.loads(Path(done["generation"], "hvdenv.json").read_text(encoding="utf-8"))
    diagnosis = _diagnosis(place) if verified.code == 1 else None
    return Trial(shown, plan, _build_seconds(home), report, diagnosis, record)


def try_suite(place: Workplace, arguments: argparse.Namespace) -> tuple[SuiteResult, ...]:
    """Run Horovod's own tests in the environment that was built.

    Raises:
        Unfit: it took too long.
    """
    words = ["verify", str(place.home / "grid.toml"), "--json", "--quick", "-n", "2"]
    words += ["--suite-from", arguments.suite_from, "--timeout", f"{SUITE_SECONDS:.0f}"]
    words += ["--controller", arguments.controller] if arguments.controller else []
    done = hvdenv(place, *words, timeout=SUITE_SECONDS + QUESTION_SECONDS)
    findings = _answer(done, 0, 1, 7)["findings"]
    for each in findings:
        if each["check"] == "suite" and each["status"] != "pass":
            print(f"{each['subject']}: {each['message']}\n{each['evidence']}", flush=True)
    return suite_of(findings)


def _build_seconds(home: Path) -> float:
    """Of each step the last attempt: the build may have been taken up again."""
    started: dict[str, datetime] = {}
    seconds: dict[str, float] = {}
    for path in home.glob(f"envs/.{NAME}.hvdenv/*/journal.jsonl"):
        for event in Journal.read(path).events:
            at = datetime.fromisoformat(event.time)
            if event.event == STARTED:
                started[event.step] = at
            elif event.step in started:
                seconds[event.step] = (at - started[event.step]).total_seconds()
    return sum(seconds.values())


def _diagnosis(place: Workplace) -> Mapping[str, Any]:
    found = _answer(hvdenv(place, "doctor", "--json"), 0, 1)
    signatures = {each["id"] for each in (*found["causes"], *found["symptoms"])}
    if faults := sorted(signatures & MACHINES_FAULT):
        raise Unfit(f"the machine: {', '.join(faults)}")
    return found


def _answer(done: Done, *codes: int) -> Mapping[str, Any]:
    """What a command printed, if it ended with one of these codes."""
    if done.code not in codes:
        raise Unfit(
            f"`hvdenv {done.command}` ended with {done.code}: {done.errors.strip()[-2000:]}"
        )
    found: Mapping[str, Any] = json.loads(done.output)
    return found


def hvdenv(
    place: Workplace, *words: str, timeout: float = QUESTION_SECONDS, before: Sequence[str] = ()
) -> Done:
    """Run hvdenv with everything that it keeps under a folder.

    Raises:
        Unfit: it took too long; all that it started is ended.
    """
    command = [*before, *PROGRAM, *words]
    variables = {**os.environ, "HVDENV_HOME": str(place.home)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", env=variables, start_new_session=True,
        pass_fds=(place.lock,),
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=timeout)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        # hvdenv ends what it has started when it is asked to stop.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if isinstance(reason, KeyboardInterrupt):
            raise
        raise Unfit(f"{words[0]} took more than {timeout:.0f} s") from reason
    return Done(words[0], process.returncode, output, errors)


def row_of(wanted: Wanted, trial: Trial, home: str) -> Row:
    """The row of a combination that was tried."""
    recipe, plan, report = trial.recipe, trial.plan, trial.report or {}
    facts, mpi, gpu = plan["facts"], recipe["mpi"], recipe["horovod"].get("gpu")
    packages = trial.record.get("observed", {}).get("packages", {})
    asked = {name: plan["versions"][name] for name in recipe["horovod"]["frameworks"]}
    # As the frameworks say it, which names the CUDA of their wheels.
    said = {name: each for name, each in report.get("environment", {}).items() if name in asked}
    return Row(
        name=wanted.name,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        hvdenv=__version__,
        horovod=plan["versions"]["horovod"],
        python=plan["python"]["version"],
        frameworks={**asked, **said},
        controllers=tuple(recipe["horovod"]["controllers"]),
        mpi=mpi["kind"],
        mpi_version=mpi["version"],
        cuda=_cuda(trial) if gpu else "",
        patches=tuple(sorted(plan["wheel_inputs"]["patches"])),
        packages={name: packages[name] for name in PACKAGES if name in packages},
        compiler=f"g++ {facts['cxx']['version']}",
        glibc=facts["glibc"],
        system=platform.freedesktop_os_release()["PRETTY_NAME"],
        machine=facts["machine"],
        build_seconds=round(trial.build_seconds, 1),
        verify_seconds=round(report.get("seconds", 0.0), 1),
        verdict=report.get("verdict", "not built"),
        judged=judged_of(recipe["horovod"], report.get("findings", ())),
        base=wanted.base,
        settings=wanted.settings,
        allow=wanted.allow,
        failure=failure_of(trial, home),
    )


def _cuda(trial: Trial) -> str:
    """The version of CUDA's compiler, which modules or packages may provide.

    Raises:
        Unfit: it is not known.
    """
    programs = trial.record.get("stack", {}).get("stack", {}).get("programs", {})
    here = trial.plan["facts"].get("nvcc") or {}
    version = parse_version("nvcc", programs.get("nvcc", "")) or here.get("version", "")
    if not version:
        raise Unfit("the version of nvcc is not known: put nvcc on PATH")
    return str(version)


def judged_of(
    horovod: Mapping[str, Any], findings: Sequence[Mapping[str, str]]
) -> tuple[Judged, ...]:
    """The worst finding about each framework under each controller."""
    judged = []
    for framework in horovod["frameworks"]:
        for controller in horovod["controllers"]:
            subject = f"{framework} over {CONTROLLERS[controller]}"
            of_it = {
                each["status"]
                for each in findings
                if each["subject"] == subject or each["subject"].endswith(f", {subject}")
            }
            judged += [
                Judged(framework, controller, status) for status in WORST if status in of_it
            ][:1]
    return tuple(judged)


def suite_of(findings: Iterable[Mapping[str, str]]) -> tuple[SuiteResult, ...]:
    """What a report says of Horovod's own tests, by subject."""
    found: dict[str, SuiteResult] = {}
    for each in findings:
        if each["check"] != "suite":
            continue
        part, _, subject = each["subject"].rpartition(", ")
        lines = each["evidence"].splitlines()
        result = found.setdefault(subject, SuiteResult(subject))
        if each["status"] == "pass":
            skipped = sum(line.startswith("not tried: ") for line in lines)
            passed = int(each["message"].partition(" ")[0])
            result = result._replace(passed=passed, skipped=skipped)
        elif part == "known failures":
            result = result._replace(known=len(lines))
        elif part or re.fullmatch(r"\d+ more tests fail", each["message"]):
            result = result._replace(new=(*result.new, *([part] if part else lines)))
        else:
            result = result._replace(problem=each["message"])
        found[subject] = result
    return tuple(found.values())


def failure_of(trial: Trial, home: str) -> Failure | None:
    """Where it failed, with what is known of why; None if it did not."""
    if trial.diagnosis is None:
        return None
    found = trial.diagnosis
    step = re.search(r"stopped at the step (\S+)", found["subject"][0])
    known = (*found["causes"], *found["symptoms"])[:1]
    bad = [
        f"{each['check']} {each['subject']}: {each['message']}"
        for each in (trial.report or {}).get("findings", ())
        if each["status"] in ("fail", "error")
    ]
    lines = bad or [each["line"] for each in (*known, *found["errors"])]
    lines = lines or trial.said.splitlines()[-LINES:]
    return Failure(
        step[1] if step else "verify",
        known[0]["cause"] if known else "",
        known[0]["id"] if known else "",
        tuple(dict.fromkeys(_short(line, home) for line in lines))[:LINES],
    )


def _short(line: str, home: str) -> str:
    text = " ".join(line.replace(home, "...").split())
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
