"""Running a plan: it becomes a generation, and the prefix is pointed at it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hvdenv import __version__, buildlock, generations, journal, manifest, registry, wheelcache
from hvdenv.command import Command, Outcome, spelled_out
from hvdenv.errors import StepError
from hvdenv.facts import Facts
from hvdenv.failures import explain
from hvdenv.generations import Environment
from hvdenv.masking import mask
from hvdenv.places import Places, blocked, make_folder
from hvdenv.plan import Plan, Step, step_identity
from hvdenv.runner import Runner, end_marked
from hvdenv.schema import encode

LOCK_WAIT_SECONDS = 2.0
LOGS = "logs"
JOURNAL = "journal.jsonl"


class Progress(Protocol):
    """Who is told how a build goes."""

    def step_started(self, number: int, step: Step) -> None: ...

    def step_line(self, line: str) -> None: ...

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None: ...

    def note(self, text: str) -> None: ...


class Request(NamedTuple):
    """What is to be built.

    Attributes:
        plan_for: makes the plan for a generation's folder.
        digest: digest of that plan.
        resolved: the recipe as plain tables, for the record.
        facts: of this machine.
        findings: what the rules said, for the record.
    """

    plan_for: Callable[[Path], Plan]
    digest: str
    resolved: Mapping[str, Any]
    facts: Facts
    findings: tuple[Mapping[str, str], ...]


class Built(NamedTuple):
    """What a build came to.

    Attributes:
        prefix: the link that points to the environment.
        generation: its folder.
        changed: False when there was nothing to do.
        seconds: wall time.
    """

    prefix: Path
    generation: Path
    changed: bool
    seconds: float


def already_built(environment: Environment, digest: str) -> Path | None:
    """The complete generation that the prefix points to, if it is of this plan."""
    active = environment.active()
    if not active:
        return None
    record = generations.read_record(environment.record(active))
    return environment.generation(active) if record.get("plan_digest") == digest else None


def build(
    request: Request,
    environment: Environment,
    places: Places,
    progress: Progress,
    *,
    rebuild: bool = False,
    break_lock: bool = False,
) -> Built:
    """Build an environment, or go on with a build that was killed.

    Args:
        request: what to build.
        environment: where.
        places: where caches lie.
        progress: who is told.
        rebuild: make a new generation even if there is one of this plan, whole or begun.
        break_lock: take the lock from whoever holds it.

    Raises:
        StepError: a step failed; the environment that was there before is untouched.
        BusyError: another build holds the prefix.
        UsageError: the prefix cannot be used.
    """
    started = time.monotonic()
    present = None if rebuild else already_built(environment, request.digest)
    if present:
        return Built(environment.prefix, present, False, time.monotonic() - started)
    generations.claim(environment)
    with buildlock.hold(environment.store, wait=LOCK_WAIT_SECONDS, break_lock=break_lock) as held:
        if held.replaced:
            ended = len(end_marked(held.replaced.token))
            progress.note(f"going on after a build that was killed ({ended} left processes ended)")
        identity = "" if rebuild else _earlier(environment, request.digest)
        if identity:
            generations.switch(environment, identity)
            record = generations.read_record(environment.record(identity))
            registry.register(places, environment, record["recipe"], record["variants"])
            progress.note(f"generation {identity} is of this plan: the prefix points to it again")
        else:
            identity = generations.new_identity(environment, request.digest)
            left = generations.discard(environment, identity) if rebuild else ""
            if left:
                progress.note(left)
            generation = generations.create(environment, identity)
            _Run(request, environment, generation, places, progress, held).run()
    return Built(
        environment.prefix, environment.generation(identity), True, time.monotonic() - started
    )


def _earlier(environment: Environment, digest: str) -> str:
    """A complete generation of this plan; or empty."""
    return next(
        (
            identity
            for identity, record in environment.records().items()
            if record.get("plan_digest") == digest
        ),
        "",
    )


class _Run:
    """One run over the steps of a plan."""

    def __init__(
        self,
        request: Request,
        environment: Environment,
        generation: Path,
        places: Places,
        progress: Progress,
        held: buildlock.Held,
    ) -> None:
        self.request = request
        self.environment = environment
        self.generation = generation
        self.places = places
        self.progress = progress
        self.held = held
        self.plan = request.plan_for(generation)
        self.runner = Runner(token=held.token)
        self.journal = journal.Journal.read(generation / JOURNAL)
        # What steps recorded, by step name: in this run or in one before it.
        self.recorded: dict[str, Mapping[str, Any]] = {}
        self.keys: dict[str, str] = {}

    def run(self) -> None:
        if self.journal.damage:
            self.progress.note(self.journal.damage)
        make_folder(self.generation / LOGS)
        key = ""
        for number, step in enumerate(self.plan.steps, 1):
            key = self.keys[step.name] = journal.chain(key, step_identity(step))
            done = self.journal.finished(key)
            if done:
                self.recorded[step.name] = done.data or {}
                self.progress.step_done(number, step, "already done", 0.0)
                continue
            self.held.check()
            self._do(number, step, key)

    def _do(self, number: int, step: Step, key: str) -> None:
        if step.spared_by_cache and self.recorded["stack"].get("wheel"):
            self._finish(number, step, key, "not needed: the wheel is in the cache", {}, 0.0)
            return
        started = time.monotonic()
        self.progress.step_started(number, step)
        self._reset(step, key)
        self.journal.append(journal.STARTED, step.name, key, data=self._baseline(step))
        log = self.generation / LOGS / f"{number:02}-{step.name}.log"
        try:
            note, data = self._perform(step, log)
        except StepError as error:
            self.journal.append(journal.FAILED, step.name, key, data={"error": error.message})
            if step.undoes:
                self.journal.append(journal.FAILED, step.undoes, self.keys[step.undoes])
            raise
        self._finish(number, step, key, note, data, time.monotonic() - started)

    def _finish(
        self, number: int, step: Step, key: str, note: str, data: dict[str, Any], seconds: float
    ) -> None:
        self.recorded[step.name] = data
        if step.effect != "record":  # the record is the last thing written into a generation
            self.journal.append(
                journal.FINISHED, step.name, key, seconds=round(seconds, 3), data=data
            )
        self.progress.step_done(number, step, note, seconds)

    def _perform(self, step: Step, log: Path) -> tuple[str, dict[str, Any]]:
        if step.report:
            make_folder(step.report.parent)
        for file in step.files:
            make_folder(file.path.parent)
            try:
                file.path.write_text(file.text, encoding="utf-8")
            except OSError as error:
                raise blocked(file.path, error) from error
        output = "".join(self._execute(step, command, log).output for command in step.commands)
        effects: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
            "lookup": self._lookup,
            "keep": self._keep,
            "tidy": self._tidy,
            "manifest": self._manifest,
            "record": self._record,
        }
        if step.effect:
            return effects[step.effect](output)
        return "", {"packages": _installed(step.report)} if step.report else {}

    def _execute(self, step: Step, command: Command, log: Path) -> Outcome:
        with log.open("a", encoding="utf-8") as stream:
            stream.write(f"$ {mask(spelled_out(command))}\n")
        outcome = self.runner.run(command, log=log, on_line=self.progress.step_line)
        if not outcome:
            raise _failed(step, outcome, log)
        return outcome

    def _reset(self, step: Step, key: str) -> None:
        """Take away what an earlier attempt at this step left half done."""
        for path in step.resets:
            _delete(path)
        if step.installs:
            self._remove_what_came_after(key)

    def _remove_what_came_after(self, key: str) -> None:
        """Remove what a killed attempt at a step has installed."""
        # What was tried before another step finished is no more.
        since = takewhile(
            lambda event: event.event != journal.FINISHED, reversed(self.journal.events)
        )
        started = (event for event in since if event.event == journal.STARTED)
        before = next((event.data for event in started if event.key == key and event.data), None)
        for folder, names in before["installed"].items() if before else ():
            for entry in list((self.generation / folder).glob("*")):
                if entry.name not in names:
                    _delete(entry)

    def _baseline(self, step: Step) -> dict[str, Any] | None:
        """What is installed before a step adds to it."""
        if not step.installs:
            return None
        venv = self.plan.venv
        folders = [
            *sorted(venv.glob("lib/python3.*/site-packages")),
            *(venv / name for name in ("bin", "lib", "share", "etc", "include", ".")),
        ]
        return {
            "installed": {
                str(folder.relative_to(self.generation)): sorted(
                    each.name for each in folder.iterdir()
                )
                for folder in folders
                if folder.is_dir()
            }
        }

    def _lookup(self, output: str) -> tuple[str, dict[str, Any]]:
        stack = json.loads(output.strip().splitlines()[-1])
        inputs = {**self.plan.wheel_inputs, "stack": stack}
        found = wheelcache.find(self.places, inputs)
        if found.note:
            self.progress.note(found.note)
        if found.wheel is None:
            return "no such wheel in the cache", {"inputs": inputs}
        make_folder(self.plan.wheel.parent)
        shutil.copyfile(found.wheel, self.plan.wheel)
        return "a wheel of this stack is in the cache", {
            "inputs": inputs,
            "wheel": str(found.wheel),
        }

    def _keep(self, output: str) -> tuple[str, dict[str, Any]]:
        inspected = json.loads(output.strip().splitlines()[-1])
        if not self.recorded["stack"].get("wheel"):
            wheelcache.store(self.places, self.recorded["stack"]["inputs"], self.plan.wheel)
        names = ", ".join(
            f"{name} {each['built_with']}" for name, each in sorted(inspected["frameworks"].items())
        )
        return f"extensions for {names}; {inspected['bytes'] / 1e6:.1f} MB", inspected

    def _tidy(self, _: str) -> tuple[str, dict[str, Any]]:
        shutil.rmtree(self.generation / "build", ignore_errors=True)
        return "", {}

    def _manifest(self, _: str) -> tuple[str, dict[str, Any]]:
        site_packages = next(iter(self.plan.venv.glob("lib/python3.*/site-packages")), None)
        written = manifest.write(
            self.generation, (LOGS, JOURNAL, generations.RECORD, generations.MARKER), site_packages
        )
        if written.problems:
            raise StepError(
                "packages in the environment are not whole",
                where=str(site_packages),
                detail="\n".join(written.problems[:20]),
                remedy="build again: every package is installed anew, with --rebuild in a new "
                "generation\na package that is broken again is so where pip has it from",
            )
        return (
            f"{written.files} files, {written.bytes / 1e9:.1f} GB",
            {"digest": written.digest, "files": written.files, "bytes": written.bytes},
        )

    def _record(self, _: str) -> tuple[str, dict[str, Any]]:
        plan, listed = self.plan, self.recorded["manifest"]
        generations.write_record(
            self.environment.record(self.generation.name),
            {
                "hvdenv": __version__,
                "recipe": plan.recipe,
                "variants": list(plan.variants),
                "prefix": str(self.environment.prefix),
                "generation": self.generation.name,
                "created": generations.now(),
                "plan_digest": plan.digest,
                "manifest_digest": listed["digest"],
                "files": listed["files"],
                "bytes": listed["bytes"],
                "python": plan.python._asdict(),
                "variables": plan.variables,
                "resolved": self.request.resolved,
                "facts": encode(self.request.facts),
                "findings": list(self.request.findings),
                "stack": self.recorded["stack"]["inputs"],
                "wheel": self.recorded["inspection"],
                "packages": [
                    package
                    for recorded in self.recorded.values()
                    for package in recorded.get("packages", ())
                ],
            },
        )
        generations.switch(self.environment, self.generation.name)
        registry.register(self.places, self.environment, plan.recipe, plan.variants)
        return str(self.environment.prefix), {}


def _failed(step: Step, outcome: Outcome, log: Path) -> StepError:
    known = explain(outcome.output)
    how = f"exit status {outcome.returncode}"
    if outcome.returncode < 0:
        how = f"ended by signal {-outcome.returncode}"
    remedy = f"{known.remedy}\n" if known else ""
    return StepError(
        f"step {step.name} failed ({how})" + (f": {known.cause}" if known else ""),
        where=str(log),
        detail=outcome.tail(15),
        remedy=f"{remedy}the whole log is {log}\nto repeat the command alone:\n"
        f"  {mask(spelled_out(outcome.command))}",
    )


def _installed(report: Path) -> list[dict[str, str]]:
    """Name, version, address and hash of what pip installed."""
    found = json.loads(report.read_text(encoding="utf-8"))
    return [
        {
            "name": each["metadata"]["name"],
            "version": each["metadata"]["version"],
            "url": mask(each["download_info"]["url"]),
            "sha256": each["download_info"]
            .get("archive_info", {})
            .get("hashes", {})
            .get("sha256", ""),
        }
        for each in found["install"]
    ]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_OBJECTS = re.compile(r"^\s*\[(\d+)/(\d+)\] ")


def compiled_objects(line: str) -> tuple[int, int] | None:
    """How many objects of how many are compiled, if a line of Ninja says so."""
    found = _OBJECTS.match(line)
    return (int(found.group(1)), int(found.group(2))) if found else None
