"""Checks of an installation: each judges what programs in it showed. Nothing is run here."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from hvdenv.base.command import Outcome
from hvdenv.base.masking import shown
from hvdenv.environments.installation import Expectation, hides_variables, is_version
from hvdenv.environments.manifest import ChangedFile
from hvdenv.knowledge.diagnosis import explain
from hvdenv.reports.report import Finding, Status
from hvdenv.sites.jobs import COMMAND_NOT_FOUND
from hvdenv.sites.placement import hidden_variables
from hvdenv.verification.drift import compare
from hvdenv.verification.evidence import Evidence
from hvdenv.verification.inspection import (
    CHECK_BUILD_ROWS,
    BuildTable,
    Extension,
    Extensions,
    hidden_modules,
)
from hvdenv.verification.rank_judgement import Judgement
from hvdenv.verification.rank_start import FILES_OF_RANKS
from hvdenv.verification.setup import CONTROLLERS, OPERATIONS, Setup

# Of a variable's value, such as a long LD_LIBRARY_PATH.
_VALUE = 200
# What the import of a framework may take on a slow file system.
_FAIR_SECONDS = 30.0
_BUILD_WITH = (
    "rebuild Horovod in this environment with HOROVOD_WITH_{name}=1: without this variable, a"
    " build that makes no extension still succeeds"
)
# The remedy for everything that fails if files are damaged.
REBUILD = (
    "rebuild it: `hvdenv build RECIPE --rebuild` (with --prefix if unused files are purged there)"
)


def check_build(setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Whether Horovod's own table can be read and shows what is expected."""
    found, extensions = evidence.build_table.result(), evidence.all_extensions
    judgement = _judge_table(found, extensions, setup.expectation)
    if judgement.status == "fail":
        judgement = judgement._replace(evidence=found.outcome.tail(40))
    yield Finding("check-build", "horovodrun --check-build", *judgement)


def _judge_table(found: BuildTable, extensions: Extensions, expectation: Expectation) -> Judgement:
    table = found.table
    if table is None:
        return _no_table(found)
    expected = (
        ([CHECK_BUILD_ROWS[name] for name in expectation.frameworks or ()], table.frameworks),
        (expectation.controllers or (), table.controllers),
        (expectation.operations or (), table.tensor_operations),
    )
    if missing := [name for names, rows in expected for name in names if not rows.get(name)]:
        message = f"expected, but not marked: {', '.join(missing)}"
        remedy = "see the finding `extension`: a row is also blank if an extension does not load"
        return Judgement("fail", message, remedy=remedy)
    versions = {e.facts.version for e in extensions.values() if e.facts.version}
    if versions - {table.version}:
        packages = ", ".join(sorted(versions))
        message = f"horovodrun belongs to Horovod {table.version}, the package is {packages}"
        remedy = "reinstall Horovod: horovodrun and the package come from two installations"
        return Judgement("fail", message, remedy=remedy)
    notes = [
        f"it marks {row}, which has no extension (a known bug of Horovod)"
        for framework, row in CHECK_BUILD_ROWS.items()
        if table.frameworks[row] and not extensions[framework].present
    ]
    return Judgement("pass", "; ".join([f"Horovod {table.version}", *notes]))


def _no_table(found: BuildTable) -> Judgement:
    if "unrecognized arguments" in found.outcome.output:
        return Judgement("skip", "this Horovod is too old for --check-build")
    if found.outcome.returncode == COMMAND_NOT_FOUND:
        message = "no table could be read: there is no horovodrun in this environment or on PATH"
        return Judgement("fail", message, remedy="reinstall Horovod, which contains horovodrun")
    ending, last = _ending(found.outcome), found.outcome.tail(1)
    why = (f"{ending} ({last})" if last else ending) if ending else found.problem
    remedy = "read the last lines of the evidence; horovodrun must work in this environment"
    return Judgement("fail", f"no table could be read: {why}", remedy=remedy)


def is_damaged(changed_files: Sequence[ChangedFile]) -> bool:
    """Whether files are missing or empty, as a purge or a power cut leaves them."""
    return any(d.kind == "missing" or d.detail.startswith("0 bytes ") for d in changed_files)


def check_files(_setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Whether all files of the build are still there: scratch file systems are purged.

    Files that were added, or changed outside of Horovod, are named: other checks judge them.
    """
    if evidence.changed_files is None:
        return
    changed_files = evidence.changed_files.result()
    count = Counter(each.kind for each in changed_files)
    missing, changed, extra = (count[kind] for kind in ("missing", "changed", "extra"))
    details = "\n".join(f"{d.kind}: {d.path} {d.detail}".rstrip() for d in changed_files[:40])
    damaged = is_damaged(changed_files)
    of_horovod = [d for d in changed_files if "/site-packages/horovod/" in d.path]
    if damaged or any(d.kind == "changed" for d in of_horovod):
        counts = ((missing, "removed"), (changed, "changed"))
        parts = [f"{n} {'file was' if n == 1 else 'files were'} {how}" for n, how in counts if n]
        message = f"{'files are damaged: ' * damaged}{' and '.join(parts)} since the build"
        yield Finding("files", "manifest", "fail", message, evidence=details, remedy=REBUILD)
        return
    notes = [f"{changed} changed"] * bool(changed) + [f"{extra} added"] * bool(extra)
    message = "; ".join(["all files of the build are present", *notes])
    yield Finding("files", "manifest", "pass", message, evidence=details)


def check_drift(_setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Whether what the environment depends on is still what it was built on."""
    if evidence.observed is None:
        return
    observed = evidence.observed.result()
    if observed is None:
        message = "its build recorded nothing that can be compared"
        yield Finding("drift", "since the build", "skip", message)
        return
    was, now = observed
    changes = compare(was, now)
    hosts = f"built on {was.host}, now on {now.host}"
    details = "\n".join([hosts, *(change.what for change in changes)])
    harmless = [change.what for change in changes if not change.matters]
    for change in (change for change in changes if change.matters):
        message = f"{change.what}: {change.why}"
        yield Finding(
            "drift", change.subject, "fail", message, evidence=details, remedy=change.remedy
        )
    if len(harmless) == len(changes):
        message = "; ".join(harmless[:3]) or "nothing has changed"
        more = f"; {len(harmless) - 3} more harmless changes" if harmless[3:] else ""
        yield Finding("drift", "since the build", "pass", message + more, evidence=details)


def check_variables(setup: Setup, _evidence: Evidence) -> Iterator[Finding]:
    """Variables of the user's shell that change what ranks do."""
    shell, installation = setup.shell, setup.installation
    named = {name: text for name, text in shell.passed.items() if name not in FILES_OF_RANKS}
    unset = [name for name in named if name in installation.unset]
    passed = {name: text for name, text in named.items() if name not in unset}
    notes, evidence = [], [f"{n}={shown(n, value)[:_VALUE]}" for n, value in named.items()]
    if unset:
        notes.append(
            f"your shell sets {' and '.join(unset)}, but ranks run without, as under `hvdenv run`"
            " and in `hvdenv shell`; a Python that you start yourself obeys them"
        )
    if passed:
        notes.append(
            f"ranks get {', '.join(passed)} from your shell, as under `hvdenv run`;"
            " --clean drops such variables in both"
        )
    if shell.dropped:
        names = ", ".join(shell.dropped)
        notes.append(f"--clean drops {names}; `hvdenv run --clean` does the same")
    launcher, patched = setup.launcher("Gloo"), hides_variables(installation.prefix)
    if away := hidden_variables(launcher, passed, (), patched=patched):
        evidence.append(f"not passed on by {launcher}: {', '.join(away)}")
    if notes:
        message = "; ".join(notes)
        yield Finding("variables", "your shell", "pass", message, evidence="\n".join(evidence))


def check_rendezvous(_setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Whether the servers of horovodrun refuse requests without the key of the job.

    A Horovod without the patch is not broken, so that its holes are named and not judged.
    """
    found = evidence.rendezvous.result()
    holes = " and ".join(found.accepted)
    details = f"a request without a signature was accepted by a server on 127.0.0.1: {holes}"
    if found.error:
        judgement = Judgement("skip", f"could not be probed: {found.error}", found.traceback)
    elif not found.accepted:
        judgement = Judgement("pass", "they refuse requests that are not signed with the job's key")
    elif found.patched:
        message = f"the patch safe-rendezvous is there, but not at work: {holes}"
        judgement = Judgement("fail", message, details, REBUILD)
    else:
        judgement = Judgement(
            "skip",
            f"whoever reaches a port of horovodrun can run code as its user ({holes})",
            details,
            "let hvdenv build Horovod 0.26.1 or newer, with its patch safe-rendezvous; otherwise start"
            " ranks by mpirun or srun, and horovodrun only on nodes that you share with nobody",
        )
    yield Finding("rendezvous", "servers of horovodrun", *judgement)


def check_any_framework(setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Where nothing is stated: whether at least one framework has an extension."""
    extensions = evidence.all_extensions.values()
    if setup.expectation.frameworks is None and not any(each.present for each in extensions):
        facts = [extension.facts for extension in extensions]
        lines = [f"package: {facts[0].horovod or 'not found'}"]
        lines += [f"not there: {each.path}" for each in facts if each.path]
        message = "Horovod has no extension for any framework"
        remedy = _BUILD_WITH.format(name="<FRAMEWORK>")
        yield Finding(
            "frameworks", "any framework", "fail", message, evidence="\n".join(lines), remedy=remedy
        )


def check_shadowing(setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Whether other packages come before the environment's: of PYTHONPATH, or the user's own."""
    libraries, installation = evidence.libraries.result(), setup.installation
    hiding = hidden_modules(installation)
    facts = [each.facts for name, each in libraries.items() if setup.expectation.asks(name)]
    remedy = (
        "unload the module that sets it, or let the recipe use the module's package"
        ' (provider = "present")'
        if installation.generation
        else "unset PYTHONPATH; --clean leaves it out here and under `hvdenv run`"
    )
    for package, seen in {package: each for each in facts for package in each.shadowed}.items():
        path = f"{seen.shadowed[package]}/{package}"
        message = f"PYTHONPATH puts {path} before the environment's own {package}"
        details = f"python: {seen.python}\nhorovod: {seen.horovod}"
        yield Finding("shadowing", package, "fail", message, evidence=details, remedy=remedy)
    if hiding:
        works = any(found.facts.framework for found in libraries.values())
        first, *others = hiding
        more = f", and {len(others)} more" if others else ""
        message = f"PYTHONPATH puts {hiding[first]} before Python's own module {first}{more}"
        verdict: tuple[Status, str] = ("pass", "") if works else ("fail", remedy)
        details = "\n".join(hiding.values())
        yield Finding(
            "shadowing", "Python", verdict[0], message, evidence=details, remedy=verdict[1]
        )
    left_out = {name: folder for each in facts for name, folder in each.left_out.items()}
    for package, folder in left_out.items():
        message = (
            f"{folder}/{package} is left out, also under `hvdenv run`; a Python that is started"
            " without PYTHONNOUSERSITE=1 imports it"
        )
        yield Finding("shadowing", f"{package} of the user", "pass", message)


def check_extension(framework: str, setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Whether a framework's extension exists, loads, and fits the framework installed."""
    extension, expectation = evidence.extensions[framework].result(), setup.expectation
    facts = extension.facts
    stated = framework in (expectation.frameworks or ())
    if not extension.present and not stated and not _ending(extension.outcome):
        return
    details = "\n".join(f"{key}: {value}" for key, value in facts._asdict().items() if value)
    problems = chain(_absence(extension), _misfit(extension, expectation))
    message, remedy = next(problems, ("", ""))
    if message:
        details = facts.traceback or details or extension.outcome.tail(40)
        # With hardly any time left, a good one does not finish either.
        timeout = extension.outcome.command.timeout or 0
        hurried = extension.outcome.timed_out and timeout < _FAIR_SECONDS
        status: Status = "error" if hurried else "fail"
        if not expectation.asks(framework):
            status, message = "skip", f"not requested: {message}"
        yield Finding("extension", framework, status, message, evidence=details, remedy=remedy)
        return
    built = ", ".join(name for name in OPERATIONS if extension.built(name))
    message = f"{framework} {facts.installed}, Horovod {facts.version}: {built}"
    if facts.built_with is None:
        message += "; this Horovod does not record what it was built with"
    yield Finding("extension", framework, "pass", message, evidence=details)


def _rebuild(extension: Extension) -> str:
    return _BUILD_WITH.format(name=CHECK_BUILD_ROWS[extension.framework].upper())


def _absence(extension: Extension) -> Iterator[tuple[str, str]]:
    """Why the extension cannot be inspected, and what to do."""
    facts, name = extension.facts, extension.framework
    if extension.cut_off:
        sizes = f"{facts.size} of {facts.size_by_header} bytes"
        remedy = f"check whether the disk or the quota is full; {_rebuild(extension)}"
        yield f"the extension file is truncated: {facts.path} has {sizes}", remedy
    if ending := _ending(extension.outcome):
        remedy = f"see the evidence; {_rebuild(extension)}"
        if extension.outcome.timed_out:
            remedy = "find out what took so long, or allow more time with --timeout"
        yield f"importing horovod.{name} {ending}", remedy
    if not facts.framework:
        yield f"inspecting horovod.{name} gave no answer", "read the output in the evidence"
    if not facts.horovod:
        yield "there is no package horovod in this environment", "install Horovod in it"
    if not extension.present:
        others = ", ".join(facts.others)
        more = f"; existing ones are for another Python: {others}" if others else ""
        yield f"the extension is missing: {facts.path}{more}", _rebuild(extension)


def _misfit(extension: Extension, expectation: Expectation) -> Iterator[tuple[str, str]]:
    """How the extension contradicts the installed framework or the recipe, and what to do."""
    facts, name = extension.facts, extension.framework
    if facts.built_with is not None and facts.installed and facts.built_with != facts.installed:
        built_with = facts.built_with or "(not recorded)"
        yield (
            f"built with {name} {built_with}, but {facts.installed} is installed",
            f"install {name} {facts.built_with}, or rebuild Horovod for {facts.installed}",
        )
    for package, found in ((name, facts.installed), ("horovod", facts.version)):
        stated = expectation.versions.get(package)
        if stated and found and not is_version(found, stated):
            yield (
                f"{package} {found} is installed, but the recipe says {stated}",
                "load the modules that provide it, or state in the recipe what they provide",
            )
    if facts.error:
        message = f"horovod.{name} does not import: {facts.error.splitlines()[0]}"
        known = explain(facts.traceback or facts.error)
        if known and known.kind == "cause":
            yield f"{message} ({known.cause})", known.remedy
        yield message, _rebuild(extension)
    if any(extension.built(controller) is None for controller in CONTROLLERS):
        yield f"horovod.{name} does not report what was built into it", _rebuild(extension)
    wanted = dict.fromkeys([*(expectation.controllers or ()), *(expectation.operations or ())])
    if missing := [each for each in wanted if not extension.built(each)]:
        yield f"horovod.{name} was built without {', '.join(missing)}", _rebuild(extension)


def _ending(outcome: Outcome) -> str:
    if outcome.timed_out:
        return f"did not finish within {outcome.command.timeout:.0f} s"
    if outcome.returncode < 0:
        return f"was ended by {signal.Signals(-outcome.returncode).name}"
    return f"exited with code {outcome.returncode}" if outcome.returncode else ""
