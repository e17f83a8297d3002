"""Build and verify combinations of versions as a user would, and record the results.

    python benchmarks/combinations.py              the next combination without a row
    python benchmarks/combinations.py torch-2.6    this one, even if it has a row
    python benchmarks/combinations.py --list       list which have a row

benchmarks/combinations.toml lists the combinations; hvdenv/knowledge/combinations.json has the
rows. Each combination takes minutes and gigabytes, in a temporary directory (below TMPDIR) that is
removed afterwards. Faults of the machine (a full disk, no network, no such Python, a timeout) give
no row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hvdenv import __version__
from hvdenv.base.places import write_text
from hvdenv.base.schema import decode, encode, parse_toml
from hvdenv.knowledge.combinations import (
    FILE,
    Failure,
    Judged,
    Kind,
    RowName,
    TriedRow,
    read,
)
from hvdenv.model.facts import parse_version
from hvdenv.model.recipe import Controller, Framework, Name, Version
from hvdenv.reports.report import Status

WANTED = Path(__file__).with_suffix(".toml")
PROGRAM = (sys.executable, "-m", "hvdenv")
# Idle machines need a tenth of it.
BUILD_SECONDS, QUESTION_SECONDS, VERIFY_SECONDS = 7200.0, 300.0, 1500.0
# Packages whose version decides what works, besides the frameworks themselves.
PACKAGES = ("numpy", "keras", "tf-keras", "protobuf", "setuptools", "cmake")
# Signatures of failures that are not due to the combination.
MACHINES_FAULT = frozenset(
    {
        "disk-full",
        "permission-denied",
        "out-of-memory",
        "out-of-memory-in-compiler",
        "killed",
        "time-limit",
        "limit-reached",
        "too-many-processes",
        "shared-memory-full",
        "map-failed",
        "file-system-fails",
        "host-unknown",
        "connect-failed",
        "tls-failed",
        "index-proxy",
        "download-broken-off",
    }
)
# The worst first; `skip` says nothing.
WORST: tuple[Status, ...] = ("error", "fail", "unproven", "pass")
CONTROLLERS: dict[Controller, str] = {"mpi": "MPI", "gloo": "Gloo"}
LINES, WIDTH = 6, 240


class NoResult(Exception):
    """Nothing is known of a combination: the machine failed, or hvdenv refused."""


class Wanted(NamedTuple):
    """One combination to try: a shipped recipe with other versions.

    Attributes:
        name: of its row.
        torch, tensorflow: versions; at least one of them.
        mpi, mpi_version: a package of the index. Default: that of the recipe.
        set: further keys of the recipe, as TOML.
        allow: rules that block it. The build continues, to test the rule.
        base: the recipe.
    """

    name: RowName
    python: Version
    torch: Version | None = None
    tensorflow: Version | None = None
    mpi: Kind | None = None
    mpi_version: Version | None = None
    set: dict[str, str] = {}
    allow: tuple[Name, ...] = ()
    base: Name = "local"

    @property
    def settings(self) -> dict[str, str]:
        """How its recipe differs from the base: values for keys, as TOML."""
        both = {"torch": self.torch, "tensorflow": self.tensorflow}
        versions = {name: version for name, version in both.items() if version}
        mpi = {"kind": self.mpi, "package": self.mpi, "version": self.mpi_version}
        plain = {
            "python.version": f"=={self.python}.*",
            "horovod.frameworks": list(versions),
            **{f"frameworks.{name}.version": version for name, version in versions.items()},
            **{f"mpi.{key}": value for key, value in mpi.items() if value},
        }
        # Strings and lists of strings are the same in JSON and in TOML.
        return {**{key: json.dumps(value) for key, value in plain.items()}, **self.set}

    @property
    def recipe(self) -> str:
        """Its recipe, as text."""
        head = f'format = 1\nextends = "{self.base}"\nname = "combination"\n'
        return head + "".join(f"{key} = {value}\n" for key, value in self.settings.items())


class Trial(NamedTuple):
    """What the commands that a user would call printed for one combination.

    Attributes:
        recipe: of `hvdenv show --json`.
        plan: of `hvdenv plan --json`.
        record: `hvdenv.json` of the environment; empty if the build failed.
        report: of `hvdenv verify --json`; empty if the build failed.
        diagnosis: of `hvdenv doctor --json`; empty if nothing failed.
        errors: standard error of a build that failed.
    """

    recipe: Mapping[str, Any]
    plan: Mapping[str, Any]
    build_seconds: float
    record: Mapping[str, Any]
    report: Mapping[str, Any]
    diagnosis: Mapping[str, Any]
    errors: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    wanted = {each.name: each for each in all_wanted()}
    parser.add_argument("name", nargs="?", choices=wanted, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="list which have a row")
    arguments = parser.parse_args()
    rows = {row.name: row for row in read(FILE.read_text(encoding="utf-8"))}
    if arguments.list:
        for each in wanted:
            print(rows.get(each, f"{each}: no row"))
        return 0
    name = arguments.name or next((each for each in wanted if each not in rows), None)
    if name is None:
        print("every combination has a row")
        return 0
    print(f"{name}: {wanted[name].settings}", flush=True)
    try:
        with TemporaryDirectory(prefix="hvdenv-", ignore_cleanup_errors=True) as home:
            row = row_of(wanted[name], try_out(wanted[name], Path(home)), home)
    except (NoResult, subprocess.TimeoutExpired) as reason:
        print(f"{name}: no row: {reason}")
        return 1
    keep(row)
    print(row)
    return 0


def all_wanted() -> tuple[Wanted, ...]:
    """All combinations to try, in order."""
    document = parse_toml(WANTED.read_text(encoding="utf-8"))
    return decode(tuple[Wanted, ...], document["wanted"])


def keep(row: TriedRow) -> None:
    """Write a row in place of an older one of the same name."""
    rows = {each.name: each for each in read(FILE.read_text(encoding="utf-8"))} | {row.name: row}
    ordered = tuple(rows[each.name] for each in all_wanted() if each.name in rows)
    text = json.dumps({"rows": encode(ordered)}, indent=1, ensure_ascii=False) + "\n"
    read(text)
    write_text(FILE, text)


def try_out(wanted: Wanted, home: Path) -> Trial:
    """Build and verify a combination in an empty directory.

    Raises:
        NoResult: the outcome says nothing about the combination.
        subprocess.TimeoutExpired: a command took too long.
    """
    recipe = home / "combination.toml"
    recipe.write_text(wanted.recipe, encoding="utf-8")
    words = (str(recipe), "--json")
    shown = hvdenv(home, "show", *words)[1]["recipe"]
    plan = hvdenv(home, "plan", *words)[1]
    allowed = (word for rule in wanted.allow for word in ("--allow", rule))
    started = time.monotonic()
    code, built, errors = hvdenv(
        home, "build", *words, *allowed, codes=(0, 5), timeout=BUILD_SECONDS
    )
    seconds = time.monotonic() - started
    if code == 5:
        return Trial(shown, plan, seconds, {}, {}, diagnose(home), errors)
    record = json.loads(Path(built["generation"], "hvdenv.json").read_text(encoding="utf-8"))
    limit = ("--timeout", f"{VERIFY_SECONDS:.0f}")
    code, report, _ = hvdenv(
        home, "verify", *words, *limit, codes=(0, 1, 7), timeout=VERIFY_SECONDS + QUESTION_SECONDS
    )
    return Trial(shown, plan, seconds, record, report, diagnose(home) if code == 1 else {})


def diagnose(home: Path) -> Mapping[str, Any]:
    """What doctor prints about the last failure.

    Raises:
        NoResult: the machine is at fault.
    """
    found = hvdenv(home, "doctor", "--json", codes=(0, 1))[1]
    named = {each["id"] for each in (*found["causes"], *found["symptoms"])}
    if faults := sorted(named & MACHINES_FAULT):
        raise NoResult(f"the machine: {', '.join(faults)}")
    return found


def hvdenv(
    home: Path, *words: str, codes: Sequence[int] = (0,), timeout: float = QUESTION_SECONDS
) -> tuple[int, Mapping[str, Any], str]:
    """Run hvdenv with everything that it keeps in a directory.

    Returns:
        Its exit code, the JSON that it printed (empty if a build failed), and its standard error.

    Raises:
        NoResult: its exit code is none of these.
        subprocess.TimeoutExpired: it took too long. hvdenv ended what it had started.
    """
    process = subprocess.Popen(
        [*PROGRAM, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "HVDENV_HOME": str(home)},
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    if process.returncode not in codes:
        raise NoResult(
            f"`hvdenv {words[0]}` exited with {process.returncode}: {errors.strip()[-2000:]}"
        )
    return process.returncode, json.loads(output or "{}"), errors


def row_of(wanted: Wanted, trial: Trial, home: str) -> TriedRow:
    """The row of a combination that was tried."""
    recipe, plan, report = trial.recipe, trial.plan, trial.report
    facts, mpi = plan["facts"], recipe["mpi"]
    packages = trial.record.get("observed", {}).get("packages", {})
    requested = {name: plan["versions"][name] for name in recipe["horovod"]["frameworks"]}
    # As the frameworks themselves report them, with the CUDA of their wheels.
    reported = {
        name: each for name, each in report.get("environment", {}).items() if name in requested
    }
    return TriedRow(
        name=wanted.name,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        hvdenv=__version__,
        horovod=plan["versions"]["horovod"],
        python=plan["python"]["version"],
        frameworks={**requested, **reported},
        mpi=mpi["kind"],
        mpi_version=mpi["version"],
        cuda=cuda_of(trial) if recipe["horovod"].get("gpu") else "",
        patches=tuple(sorted(plan["wheel_inputs"]["patches"])),
        packages={name: packages[name] for name in PACKAGES if name in packages},
        compiler=f"g++ {facts['cxx']['version']}",
        glibc=facts["glibc"],
        system=platform.freedesktop_os_release()["PRETTY_NAME"],
        machine=facts["machine"],
        build_seconds=round(trial.build_seconds, 1),
        verify_seconds=round(report.get("seconds", 0.0), 1),
        verdict=report.get("verdict", "not built"),
        judged=judged_of(tuple(requested), report.get("findings", ())),
        settings=wanted.settings,
        allow=wanted.allow,
        base=wanted.base,
        failure=failure_of(trial, home) if trial.diagnosis else None,
    )


def cuda_of(trial: Trial) -> str:
    """The version of CUDA's compiler, which modules or packages may provide.

    Raises:
        NoResult: it is unknown.
    """
    programs = trial.record.get("stack", {}).get("stack", {}).get("programs", {})
    here = trial.plan["facts"].get("nvcc") or {}
    version = parse_version("nvcc", programs.get("nvcc", "")) or here.get("version", "")
    if not version:
        raise NoResult("the version of nvcc is unknown: put nvcc on PATH")
    return str(version)


def judged_of(
    frameworks: Iterable[Framework], findings: Sequence[Mapping[str, str]]
) -> tuple[Judged, ...]:
    """The worst finding about each framework under each controller."""
    judged = []
    for framework, controller in product(frameworks, CONTROLLERS):
        subject = f"{framework} over {CONTROLLERS[controller]}"
        found = {each["status"] for each in findings if subject == _ranks(each["subject"])}
        judged += [Judged(framework, controller, each) for each in WORST if each in found][:1]
    return tuple(judged)


def _ranks(subject: str) -> str:
    """``torch over MPI`` of ``alltoall, torch over MPI``."""
    return subject.rpartition(", ")[2]


def failure_of(trial: Trial, home: str) -> Failure:
    """Where it failed, and what is known of the cause."""
    found = trial.diagnosis
    step = re.search(r"stopped at the step (\S+)", found["subject"][0])
    known = (*found["causes"], *found["symptoms"])[:1]
    bad = [
        f"{each['check']} {each['subject']}: {each['message']}"
        for each in trial.report.get("findings", ())
        if each["status"] in ("fail", "error")
    ]
    lines = bad or [each["line"] for each in (*known, *found["errors"])]
    lines = lines or trial.errors.splitlines()[-LINES:]
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
