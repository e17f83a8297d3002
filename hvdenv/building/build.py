"""Running a plan: it becomes a generation, and the prefix is pointed at it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from packaging.specifiers import SpecifierSet

from hvdenv import __version__
from hvdenv.building import indexes
from hvdenv.command import Command, Outcome, spelled_out
from hvdenv.contents.packages import normal
from hvdenv.environments import generations, journal, manifest, prefix_lock, registry
from hvdenv.environments.generations import Environment
from hvdenv.environments.installation import is_version, with_modules
from hvdenv.environments.installation import recorded as installed
from hvdenv.errors import HvdenvError, LockError, StepError
from hvdenv.knowledge.diagnosis import diagnose_step
from hvdenv.locks import compare, pypi
from hvdenv.locks.built import built_with, drift
from hvdenv.locks.lockfile import Locked
from hvdenv.masking import mask
from hvdenv.model.cluster import Wheels
from hvdenv.model.facts import Facts
from hvdenv.model.observe import ask_interpreter
from hvdenv.model.recipe import Recipe
from hvdenv.places import Places, blocked, make_folder, sync_folder, sync_tree
from hvdenv.plans.plan import Plan, site_python
from hvdenv.plans.step import Step, TextFile, identity
from hvdenv.reading import RESULT, WHEEL, read_file, read_json, read_text
from hvdenv.runner import Runner, end_marked, environment
from hvdenv.schema import encode
from hvdenv.sites.modules import Loaded
from hvdenv.wheels import cache_entry, downloads, wheelcache

LOCK_WAIT_SECONDS = 2.0
# Fetching and installing gigabytes takes minutes.
FILES_WAIT_SECONDS = 1800.0
OBSERVE_SECONDS = 60.0
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
        modules: what the recipe's modules set for the build: they were tried before.
        accepted: drifts from the lock that the user takes although they are errors.
        wheels: where compiled wheels are looked for and put.
    """

    plan_for: Callable[[Path], Plan]
    digest: str
    resolved: Mapping[str, Any]
    facts: Facts
    findings: tuple[Mapping[str, str | bool], ...]
    modules: Loaded | None = None
    accepted: tuple[str, ...] = ()
    wheels: Wheels = Wheels()


class Built(NamedTuple):
    """What a build came to.

    Attributes:
        prefix: the link that points to the environment.
        generation: its folder.
        changed: False when there was nothing to do.
        seconds: wall time.
        drift: how it was made otherwise than the build that filled in the lock.
    """

    prefix: Path
    generation: Path
    changed: bool
    seconds: float
    drift: tuple[compare.Difference, ...] = ()


def try_modules(recipe: Recipe, runner: Runner) -> Loaded | None:
    """Load the modules of a recipe before anything is made: most of what fails, fails here.

    Returns:
        What they set for the build; None if the recipe has none.

    Raises:
        IncompatibleError: there is no module system here.
        StepError: a module cannot be loaded, or they bring another Python than the recipe says.
    """
    if recipe.modules is None:
        return None
    from hvdenv.sites import modulesystem

    system = modulesystem.find(runner, recipe.modules.init)
    loaded = modulesystem.load(system, recipe.modules, "build", runner)
    if recipe.python.provider == "conda" or not (brought := site_python(recipe)):
        return loaded
    runner = runner.changed(loaded.set, loaded.unset)
    named = Command((), derived=(("PYTHON", brought.path),))
    path, stated = runner.environment(named)["PYTHON"], recipe.python.version
    found = ask_interpreter(path, runner)
    if found is None:
        raise StepError(
            f"with the modules of the recipe there is no {path} that runs",
            where="python",
            remedy="name modules that bring a Python in modules.load, or with python.prefix an"
            " environment of the site that is there",
        )
    if not SpecifierSet(stated).contains(found.version):
        raise StepError(
            f"with the modules of the recipe {path} is Python {found.version};"
            f" the recipe says {stated}",
            where="python.version",
            remedy="name the modules or the environment that bring that one; if this one is meant:"
            f" --set 'python.version=\"=={found.version}\"'",
        )
    return loaded


def already_built(
    environment: Environment,
    digest: str,
    locked: Locked | None = None,
    accepted: Collection[str] = (),
) -> Path | None:
    """The complete generation that the prefix points to, if it is of this plan.

    Args:
        environment: with the prefix.
        digest: of the plan.
        locked: the lock to go by.
        accepted: drifts from it that the user takes although they are errors.

    Raises:
        LockError: it is, but it was made with a drift that is not accepted now.
    """
    active = environment.active()
    if not active:
        return None
    record = generations.read_record(environment.record(active))
    if record.get("plan_digest") != digest:
        return None
    refused = _refused(locked, record, accepted)
    if refused:
        raise _drifted(
            "the environment was not made with what the lock was built with",
            str(environment.prefix),
            refused,
            "--rebuild makes it anew with what is here now",
        )
    return environment.generation(active)


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
    locked = request.plan_for(environment.store).locked
    present = (
        None if rebuild else already_built(environment, request.digest, locked, request.accepted)
    )
    if present:
        return finished(environment, present.name, locked, started, changed=False)
    generations.claim(environment)
    with prefix_lock.hold(environment.store, wait=LOCK_WAIT_SECONDS, break_lock=break_lock) as held:
        if held.replaced:
            ended = len(end_marked(held.replaced.token))
            progress.note(f"going on after a build that was killed ({ended} left processes ended)")
        damage = "" if rebuild else environment.damage(environment.pointed())
        if damage:
            progress.note(f"files of {environment.prefix} are damaged, so it is rebuilt: {damage}")
        identity = "" if rebuild else _earlier(environment, request, locked)
        if identity:
            generations.switch(environment, identity)
            record = generations.read_record(environment.record(identity))
            registry.register(places, environment, record["recipe"], record["variants"])
            progress.note(f"generation {identity} is of this plan: the prefix points to it again")
            for each in _drift(locked, record):
                progress.note(f"drift from the lock: {each}")
        else:
            identity = generations.new_identity(environment, request.digest)
            left = generations.discard(environment, identity) if rebuild else ""
            if left:
                progress.note(left)
            generation = generations.create(environment, identity)
            with _temporary() as folder:
                _Run(
                    request, environment, generation, places, progress, held, break_lock, folder
                ).run()
    return finished(environment, identity, locked, started, changed=True)


def finished(
    environment: Environment, identity: str, locked: Locked | None, started: float, *, changed: bool
) -> Built:
    """What a build came to, with the drift that it would tell if it were made now.

    Args:
        environment: that was built.
        identity: of its generation.
        locked: the lock to go by.
        started: on the monotonic clock.
        changed: whether there was something to do.
    """
    record = generations.read_record(environment.record(identity)) if locked else {}
    drift = _drift(locked, record)
    folder, seconds = environment.generation(identity), time.monotonic() - started
    return Built(environment.prefix, folder, changed, seconds, drift)


@contextmanager
def _temporary() -> Iterator[Path]:
    """A TMPDIR for one build: pip and compilers leave gigabytes in it when they are killed."""
    from tempfile import gettempdir

    from hvdenv.environments import scratch  # only who builds needs them

    try:
        root = Path(gettempdir())
    except OSError as error:
        raise blocked(Path(environment().get("TMPDIR", "/tmp")), error) from error
    with scratch.folder(root, "build") as temporary:
        yield temporary.path


def _earlier(environment: Environment, request: Request, locked: Locked | None) -> str:
    """A complete generation of this plan, without a drift that is refused; or empty."""
    return next(
        (
            identity
            for identity, record in environment.records().items()
            if record.get("plan_digest") == request.digest
            and not _refused(locked, record, request.accepted)
        ),
        "",
    )


def _drift(locked: Locked | None, record: Mapping[str, Any]) -> tuple[compare.Difference, ...]:
    """What is made otherwise than by the build that filled in the lock."""
    if locked is None or locked.lock.built is None:
        return ()
    return drift(locked.lock.built, built_with(record))


def _refused(
    locked: Locked | None, record: Mapping[str, Any], accepted: Collection[str]
) -> list[compare.Difference]:
    """Of the drift, what a rule makes an error and the user does not take."""
    return [
        each
        for each in _drift(locked, record)
        if each.severity == "error" and each.name not in accepted
    ]


def _drifted(
    message: str, where: str, refused: Sequence[compare.Difference], remedy: str
) -> LockError:
    options = " ".join(f"--accept-drift {each.name}" for each in refused)
    return LockError(
        message,
        where=where,
        detail="\n".join(f"{each}: {each.reason}" for each in refused),
        remedy=f"{remedy}; or take it as it is: {options}",
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
        held: prefix_lock.Held,
        break_lock: bool,
        temporary: Path,
    ) -> None:
        self.break_lock = break_lock
        self.request = request
        self.environment = environment
        self.generation = generation
        self.places = places
        self.progress = progress
        self.held = held
        self.plan = request.plan_for(generation)
        self.caches = (wheelcache.own(places), *wheelcache.shared(request.wheels))
        self.runner = Runner(token=held.token).changed(
            {"RATTLER_CACHE_DIR": str(places.cache / "conda"), "TMPDIR": str(temporary)}
        )
        self.journal = journal.Journal.read(generation / JOURNAL)
        # What steps recorded, by step name: in this run or in one before it.
        self.recorded: dict[str, Mapping[str, Any]] = {}
        self.keys: dict[str, str] = {}
        # When all of the generation was on the disk, by the clock that dates its files.
        self.synced = 0.0

    def run(self) -> None:
        # Now, so that `doctor` finds it wherever it lies if a step fails.
        registry.register(self.places, self.environment, self.plan.recipe, self.plan.variants)
        if self.journal.damage:
            self.progress.note(self.journal.damage)
        make_folder(self.generation / LOGS)
        self._sync_all()  # what an earlier process has left may be in memory only
        key = ""
        for step in self.plan.steps:
            key = self.keys[step.name] = journal.chain(key, identity(step))
        self._repair()
        for number, step in enumerate(self.plan.steps, 1):
            key = self.keys[step.name]
            done = self.journal.finished(key)
            # Modules are loaded anew: what they set is only in the memory of a build.
            if done and step.effect != "modules":
                self.recorded[step.name] = done.data or {}
                self.progress.step_done(number, step, "already done", 0.0)
                continue
            self.held.check()
            self._do(number, step, key)

    def _repair(self) -> None:
        """Undo in the journal what the files contradict: those steps are done again."""
        finished = [step for step in self.plan.steps if self.journal.finished(self.keys[step.name])]
        broken = self._broken(finished)
        for step in finished:
            reason = broken.get(step.name) or self._contradiction(step, finished)
            if reason:
                self.progress.note(f"step {step.name} runs again: {reason}")
                self.journal.append(
                    journal.FAILED, step.name, self.keys[step.name], data={"error": reason}
                )
                return

    def _contradiction(self, step: Step, finished: Sequence[Step]) -> str:
        """What of a finished step's result is not there; empty if nothing is known to be."""
        tidied = any(
            event.key == self.keys[each.name]
            for each in self.plan.steps
            if each.effect == "tidy"
            for event in self.journal.events
        )
        build = self.generation / "build"
        for file in step.files:
            if not (tidied and file.path.is_relative_to(build)) and not _holds(file):
                return f"{file.path} differs from what the step wrote"
        done = self.journal.finished(self.keys[step.name])
        data = (done.data if done else None) or {}
        if step.effect == "manifest":
            written = self.generation / manifest.NAME
            if not written.is_file() or _sha256(written) != data.get("digest"):
                return f"{written} differs from what the step wrote"
        if step.effect == "lookup" and not tidied and not _size(self.plan.wheel):
            # What was compiled may be in the cache by now.
            wheel = self.plan.wheel.parent
            if data.get("wheel") or any(wheel in each.resets for each in finished):
                return f"{self.plan.wheel} is empty or missing"
        return ""

    def _broken(self, finished: Sequence[Step]) -> dict[str, str]:
        """Finished steps that have installed a package of which files are lost, and which."""
        venv = self.plan.environment
        makers = [step for step in finished if venv in step.resets]
        if not makers or not venv.is_relative_to(self.generation):
            return {}
        folder = next(iter(venv.glob("lib/python3.*/site-packages")), None)
        settings, python = venv / "pyvenv.cfg", venv / "bin/python"
        if (
            folder is None
            or (settings.exists() and not _size(settings))
            or (python.is_symlink() and not python.exists())
        ):
            return {makers[0].name: f"{venv} is incomplete"}
        inside = str(folder.relative_to(self.generation))
        before = [
            (step.name, self._installed_before(step, inside))
            for step in self.plan.steps
            if step.installs
        ]
        found: dict[str, str] = {}
        for problem in manifest.verify_records(folder):
            name = problem.partition(": ")[0]
            # A step that found it missing and then finished has installed it.
            bringers = [
                step
                for step, names in before
                if names is not None and not {name, f"{name}.dist-info"} & names
            ]
            found.setdefault(bringers[-1] if bringers else makers[0].name, problem)
        return found

    def _installed_before(self, step: Step, folder: str) -> frozenset[str] | None:
        """What was in a folder when a step began; None if it never did."""
        key = self.keys[step.name]
        started = (
            event
            for event in reversed(self.journal.events)
            if event.key == key and event.event == journal.STARTED and event.data
        )
        event = next(started, None)
        return frozenset(event.data["installed"].get(folder, ())) if event and event.data else None

    def _undo(self, step: Step, reason: str) -> None:
        """Mark a step as failed in the journal, and with it the step that it undoes, so both run again."""
        self.journal.append(journal.FAILED, step.name, self.keys[step.name], data={"error": reason})
        if step.undoes:
            self.journal.append(journal.FAILED, step.undoes, self.keys[step.undoes])

    def _do(self, number: int, step: Step, key: str) -> None:
        if step.spared_by_cache and self.recorded["stack"].get("wheel"):
            self._finish(number, step, key, "not needed: the wheel is in the cache", {}, 0.0)
            return
        started = time.monotonic()
        self.progress.step_started(number, step)
        before = self._reset(step, key)
        self.journal.append(journal.STARTED, step.name, key, data=before)
        log = self.generation / LOGS / f"{number:02}-{step.name}.log"
        try:
            note, data = self._perform(step, log)
        except StepError as error:
            self._undo(step, error.message)
            raise
        self._finish(number, step, key, note, data, time.monotonic() - started)

    def _finish(
        self, number: int, step: Step, key: str, note: str, data: dict[str, Any], seconds: float
    ) -> None:
        self.recorded[step.name] = data
        if step.effect != "record":  # the record is the last thing written into a generation
            self._sync(step)
            self.journal.append(
                journal.FINISHED, step.name, key, seconds=round(seconds, 3), data=data
            )
        self.progress.step_done(number, step, note, seconds)

    def _sync(self, step: Step) -> None:
        """Have what a step has made on the disk, before the journal says that it finished."""
        if step.installs or self.plan.environment in step.resets:
            self._sync_all()
            return
        with _on_disk(self.generation):
            sync_tree(self.generation / "build")
            for file in step.files:
                if file.path.exists():
                    sync_tree(file.path)
            sync_folder(self.generation)

    def _sync_all(self) -> None:
        """Have the whole generation on the disk."""
        with _on_disk(self.generation):
            os.utime(self.generation)
            now = self.generation.stat().st_mtime
            sync_tree(self.generation, self.synced)
            self.synced = now

    def _perform(self, step: Step, log: Path) -> tuple[str, dict[str, Any]]:
        if step.report:
            make_folder(step.report.parent)
        for file in step.files:
            make_folder(file.path.parent)
            try:
                file.path.write_text(file.text, encoding="utf-8")
            except OSError as error:
                raise blocked(file.path, error) from error
        with self._alone(step):
            output = "".join(self._execute(step, command, log).output for command in step.commands)
        effects: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
            "modules": lambda _: self._load_modules(step),
            "lookup": self._lookup,
            "keep": self._keep,
            "tidy": self._tidy,
            "manifest": self._manifest,
            "record": self._record,
        }
        if step.effect in effects:
            return effects[step.effect](output)
        return "", {"packages": self._packages(step)} if step.report else {}

    def _packages(self, step: Step) -> list[dict[str, str]]:
        """What a step has installed, and what a killed attempt at it had."""
        assert step.report
        before = self._earlier_start(self.keys[step.name]) or {}
        now = _installed(step.report)
        known = {_identity(each) for each in now}
        return now + [each for each in before.get("kept", ()) if _identity(each) not in known]

    @contextmanager
    def _alone(self, step: Step) -> Iterator[None]:
        """For the files that builds of one lock share: pip writes them in place."""
        if step.effect != "packages" or not self.plan.locked:
            yield
            return
        folder = self.places.cache / "files" / self.plan.locked.digest[:12]
        with prefix_lock.hold(folder, wait=FILES_WAIT_SECONDS, break_lock=self.break_lock) as held:
            if held.replaced:
                end_marked(held.replaced.token)
            yield
            downloads.touch(self.places, folder)
        downloads.trim(self.places, folder, Runner(token=self.held.token))

    def _execute(self, step: Step, command: Command, log: Path) -> Outcome:
        with _on_disk(log), log.open("a", encoding="utf-8") as stream:
            stream.write(f"$ {mask(spelled_out(command))}\n")
        outcome = self.runner.run(command, log=log, on_line=self.progress.step_line)
        if not outcome and step.effect == "closure":
            raise _not_closed(self.plan.locked, outcome)
        if not outcome:
            raise _failed(step, indexes.with_other_pages(outcome, self.runner, log), log)
        for line in indexes.withdrawn(outcome.output):
            self.progress.note(line)
        return outcome

    def _reset(self, step: Step, key: str) -> dict[str, Any] | None:
        """Remove what an earlier attempt at this step left unfinished.

        Returns:
            What the journal notes at the start of the step.
        """
        for path in step.resets:
            _delete(path)
        if not step.installs:
            return None
        before = self._earlier_start(key)
        if not before:
            return {"installed": self._installed_now(), "kept": []}
        kept = self._whole_packages(step, before)
        files = {file for package in kept for file in package.files}
        above = {folder for file in files for folder in file.parents}
        for folder, names in before["installed"].items():
            for entry in list((self.generation / folder).glob("*")):
                if entry.name not in names:
                    _delete_but(entry, files, above)
        reported = [package.reported for package in kept if package.reported]
        return {"installed": before["installed"], "kept": reported}

    def _earlier_start(self, key: str) -> Mapping[str, Any] | None:
        """What an attempt at this step noted that was killed, if its results still count."""
        # What was tried before an earlier step was done again is no more.
        earlier = {*takewhile(lambda each: each != key, self.keys.values())}
        since = takewhile(lambda event: event.key not in earlier, reversed(self.journal.events))
        started = (event for event in since if event.event == journal.STARTED)
        return next((event.data for event in started if event.key == key and event.data), None)

    def _whole_packages(self, step: Step, before: Mapping[str, Any]) -> list[_Kept]:
        """Packages that a killed attempt has installed to their end: pip goes on after them.

        Only those that a report of pip's or the lock names, so that the record has them all.
        """
        known: dict[tuple[str, str], Mapping[str, str] | None] = {}
        if step.effect == "packages" and self.plan.locked:
            known = {(normal(p.name), p.version): None for p in pypi.packages(self.plan.locked)}
        if step.report:
            with suppress(OSError, ValueError, KeyError, TypeError):  # cut off by the kill
                known = {_identity(each): each for each in _installed(step.report)}
            known |= {_identity(each): each for each in before.get("kept", ())}
        folder = next(iter(self.plan.environment.glob("lib/python3.*/site-packages")), None)
        if not known or folder is None or not folder.is_relative_to(self.generation):
            return []
        names = before["installed"].get(str(folder.relative_to(self.generation)), ())
        found = manifest.finished_packages(folder)
        new = {name: _package(name) for name in found if f"{name}.dist-info" not in names}
        return [
            _Kept(found[name], known[package]) for name, package in new.items() if package in known
        ]

    def _installed_now(self) -> dict[str, list[str]]:
        """What is in the folders that packages are installed into."""
        venv = self.plan.environment
        folders = [
            *sorted(venv.glob("lib/python3.*/site-packages")),
            *(venv / name for name in ("bin", "lib", "share", "etc", "include", ".")),
        ]
        return {
            str(folder.relative_to(self.generation)): sorted(each.name for each in folder.iterdir())
            for folder in folders
            if folder.is_dir()
        }

    def _load_modules(self, step: Step) -> tuple[str, dict[str, Any]]:
        from hvdenv.sites import modulesystem

        assert step.modules and self.request.modules
        system = modulesystem.find(self.runner, step.modules.init)
        run = modulesystem.load(system, step.modules, "run", self.runner)
        build = self.request.modules
        self.runner = self.runner.changed(build.set, build.unset)
        loaded = {"run": encode(run), "build": encode(build)}
        self._refuse_drift({"modules": loaded})
        return ", ".join(build.loaded), loaded

    def _compare_stack(self, stack: Mapping[str, Any]) -> None:
        """See that the frameworks are those that rules and patches were chosen for.

        Raises:
            StepError: one is missing, or of another version.
        """
        for name in self.plan.versions.keys() - {"horovod"}:
            stated, found = self.plan.versions[name], stack["frameworks"].get(name)
            if found is None and not self._can_import(name):
                raise StepError(
                    f"there is no {name} in the environment, and the recipe says {stated}",
                    where=f"frameworks.{name}",
                    remedy="name the module that brings it in modules.load; with"
                    " python.system_site_packages the environment sees its packages",
                )
            if found and not found["version"]:
                raise StepError(
                    f"the metadata of {name} has no version: files of it are missing",
                    where=f"frameworks.{name}",
                    remedy="build again with --rebuild, which installs everything again",
                )
            if found and not is_version(found["version"], stated):
                raise StepError(
                    f"{name} {found['version']} is installed; the recipe says {stated}",
                    where=f"frameworks.{name}.version",
                    remedy="name the module that brings it; or, if this one is meant,"
                    f" --set 'frameworks.{name}.version=\"{found['version'].partition('+')[0]}\"'",
                )

    def _can_import(self, name: str) -> bool:
        """Whether there is a module of this name; packages of some vendors are called otherwise."""
        ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
        python = str(self.plan.environment / "bin" / "python")
        return bool(self.runner.run(Command((python, "-c", ask))))

    def _lookup(self, output: str) -> tuple[str, dict[str, Any]]:
        stack = json.loads(output.strip().splitlines()[-1])
        self._compare_stack(stack)
        inputs = {**self.plan.wheel_inputs, "stack": stack}
        self._refuse_drift({**self._known(), "stack": inputs})
        make_folder(self.plan.wheel.parent)
        taken = wheelcache.take(self.caches, inputs, self.plan.wheel, Runner(token=self.held.token))
        for note in taken.notes:
            self.progress.note(note)
        if taken.entry is None:
            return "no such wheel in the cache", {"inputs": inputs}
        return f"a wheel of this stack is in {taken.entry.parents[1]}", {
            "inputs": inputs,
            "wheel": str(taken.entry),
        }

    def _refuse_drift(self, record: Mapping[str, Any]) -> None:
        """Stop where this is not made with what the lock was built with.

        Args:
            record: as much of it as is known.

        Raises:
            LockError: something differs that a rule makes an error, and it is not accepted.
        """
        locked = self.plan.locked
        refused = _refused(locked, record, self.request.accepted)
        if locked and refused:
            raise _drifted(
                "this machine does not give what the lock was built with",
                str(locked.folder),
                refused,
                "load or name what the lock has",
            )

    def _known(self) -> dict[str, Any]:
        """What of the record is known before anything is compiled."""
        return {
            "hvdenv": __version__,
            "python": self.plan.python._asdict(),
            "facts": encode(self.request.facts),
            "modules": self.recorded.get("modules", {}),
        }

    def _keep(self, output: str) -> tuple[str, dict[str, Any]]:
        inspected = json.loads(output.strip().splitlines()[-1])
        inspected["sha256"] = _sha256(self.plan.wheel)
        if not self.recorded["stack"].get("wheel"):
            self._store(self.caches[0])
        if self.request.wheels.publish:
            self._store(self.caches[1])
        names = ", ".join(
            f"{name} {each['built_with']}" for name, each in sorted(inspected["frameworks"].items())
        )
        return f"extensions for {names}; {inspected['bytes'] / 1e6:.1f} MB", inspected

    def _store(self, cache: cache_entry.Cache) -> None:
        """Keep the wheel for later builds; this one goes on without."""
        inputs, wheels = self.recorded["stack"]["inputs"], self.request.wheels
        runner, signing_key = Runner(token=self.held.token), wheels.key if cache.shared else None
        try:
            wheelcache.store(cache, inputs, self.plan.wheel, runner, signing_key or "")
            if not cache.shared:
                wheelcache.trim(cache, wheels.own_gb * 1e9, cache_entry.key(inputs), runner)
        except StepError as error:
            self.progress.note(f"the wheel is not kept: {error.where}: {error.message}")

    def _tidy(self, _: str) -> tuple[str, dict[str, Any]]:
        shutil.rmtree(self.generation / "build", ignore_errors=True)
        return "", {}

    def _manifest(self, _: str) -> tuple[str, dict[str, Any]]:
        # What is the site's own is not judged here: it may be as its makers want it.
        own = self.plan.environment.is_relative_to(self.generation)
        folders = self.plan.environment.glob("lib/python3.*/site-packages") if own else ()
        site_packages = next(iter(folders), None)
        written = manifest.write(
            self.generation, (LOGS, JOURNAL, generations.RECORD, generations.MARKER), site_packages
        )
        if written.problems:
            if self.plan.locked:  # they may be so where uv unpacks them from
                downloads.forget_unpacked(self.places, Runner(token=self.held.token))
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
        record = {
            **self._known(),
            "recipe": plan.recipe,
            "variants": list(plan.variants),
            "prefix": str(self.environment.prefix),
            "generation": self.generation.name,
            "created": generations.now(),
            "plan_digest": plan.digest,
            "manifest_digest": listed["digest"],
            "files": listed["files"],
            "bytes": listed["bytes"],
            "sizes": self._sample(listed["digest"]),
            "variables": plan.variables,
            "resolved": self.request.resolved,
            "findings": list(self.request.findings),
            "environment": os.path.relpath(plan.environment, plan.generation)
            if plan.environment.is_relative_to(plan.generation)
            else str(plan.environment),
            "stack": self.recorded.get("stack", {}).get("inputs", {}),
            "wheel": self.recorded.get("inspection", {}),
            "packages": [
                package
                for recorded in self.recorded.values()
                for package in recorded.get("packages", ())
            ],
        }
        if plan.locked:
            # Of these nobody was asked for a report.
            record["packages"] += [each._asdict() for each in pypi.packages(plan.locked)]
        if plan.additions:
            record["additions"] = encode(plan.additions)
        record.update(self._observed(record))
        if "stack" not in self.recorded:  # Horovod is the site's: nothing was looked at before.
            self._refuse_drift(record)
        if plan.locked:
            record["lock"] = self._of_lock(plan.locked, record)
        self._sync_all()
        generations.write_record(self.environment.record(self.generation.name), record)
        generations.switch(self.environment, self.generation.name)
        return str(self.environment.prefix), {}

    def _sample(self, digest: str) -> dict[str, int]:
        """Sizes of some files, by which a later command sees at no cost that some are lost."""
        try:
            read = manifest.read(self.generation / manifest.NAME, digest)
            return manifest.sample(self.generation, read)
        except OSError as error:
            raise blocked(self.generation / manifest.NAME, error, "read") from error

    def _of_lock(self, locked: Locked, record: Mapping[str, Any]) -> dict[str, Any]:
        """What the record says of the lock."""
        differences = _drift(locked, record)
        for each in differences:
            self.progress.note(f"drift from the lock: {each}")
        return {
            "digest": locked.digest,
            "drift": [encode(each) for each in differences],
            "accepted": sorted({each.name for each in differences} & {*self.request.accepted}),
        }

    def _observed(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """What the environment has, as verify will see it, to tell later what has changed."""
        from hvdenv.verification import collectors

        # Not the runner of the steps: modules for the build are loaded there.
        runner = Runner(token=self.held.token)
        loaded = self.recorded.get("modules", {}).get("run", {})
        try:
            found = installed(self.generation, record)
            found = with_modules(found, loaded["set"]) if loaded else found
            mpi, _ = collectors.mpi(found, runner, OBSERVE_SECONDS)
            return {"observed": encode(collectors.observe(found, runner, OBSERVE_SECONDS, mpi))}
        except HvdenvError as error:
            self.progress.note(f"verify will not tell what has changed since: {error.message}")
            return {}


@contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    """Report what cannot be written to the disk."""
    try:
        yield
    except OSError as error:
        raise blocked(Path(error.filename or path), error) from error


def _not_closed(locked: Locked | None, outcome: Outcome) -> LockError:
    """The error where packages of a lock require what is not there."""
    return LockError(
        "the installed packages of the lock lack something that they require",
        where=str(locked.folder) if locked else "",
        detail=outcome.tail(15),
        remedy="the lock was changed by hand, or an index had other metadata: `hvdenv lock --upgrade"
        " RECIPE` writes a new one",
    )


def _failed(step: Step, outcome: Outcome, log: Path) -> StepError:
    known = diagnose_step(log).best
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
    found = read_json(report, RESULT)
    if isinstance(found, list):  # of conda packages
        return [{**each, "url": mask(each["url"])} for each in found]
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


class _Kept(NamedTuple):
    """A package that stays: its files, and what pip's report said of it if there is one."""

    files: frozenset[Path]
    reported: Mapping[str, str] | None


def _package(name: str) -> tuple[str, str]:
    """What a distribution is by the name of its folder, such as ``torch-2.13.0``."""
    project, _, version = name.rpartition("-")
    return normal(project), version


def _identity(package: Mapping[str, str]) -> tuple[str, str]:
    return normal(package["name"]), package["version"]


def _holds(file: TextFile) -> bool:
    """Whether a file has the text that a step wrote into it."""
    try:
        return read_text(file.path, RESULT) == file.text
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _sha256(file: Path) -> str:
    return hashlib.sha256(read_file(file, WHEEL).data).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _delete_but(path: Path, kept: Collection[Path], above: Collection[Path]) -> None:
    """Delete a file or tree, but for some files and the folders above them."""
    if path in above and not path.is_symlink():
        for entry in list(path.iterdir()):
            _delete_but(entry, kept, above)
    elif path not in kept:
        _delete(path)


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
