"""What a killed attempt has left: steps to run again, files to remove, packages to keep."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from hvdenv.building.state import Record, State
from hvdenv.environments import journal, manifest, package_records
from hvdenv.errors import StepError
from hvdenv.locks import pip_report, pypi
from hvdenv.masking import mask
from hvdenv.plans.plan import Plan
from hvdenv.plans.step import Step, TextFile
from hvdenv.reading import RESULT, WHEEL, hash_file, read_json, read_text


def undo_contradicted(state: State) -> None:
    """Undo in the journal the first step whose results the files contradict."""
    finished = state.finished()
    broken = _broken(state, finished)
    for step in finished:
        reason = broken.get(step.name) or _contradiction(state, step, finished)
        if reason:
            state.progress.note(f"step {step.name} runs again: {reason}")
            state.undo(step.name, reason)
            return


def _contradiction(state: State, step: Step, finished: Sequence[Step]) -> str:
    """Which result of a finished step is missing; empty if none is known to be."""
    plan, generation = state.plan, state.plan.generation
    tidy = {state.keys[each.name] for each in plan.steps if each.effect == "tidy"}
    tidied = any(event.key in tidy for event in state.journal.events)
    for file in step.files:
        temporary = tidied and file.path.is_relative_to(generation / "build")
        if not temporary and not _holds(file):
            return f"{file.path} differs from what the step wrote"
    done = state.journal.finished(state.keys[step.name])
    data = (done.data if done else None) or {}
    if step.effect == "manifest":
        written = generation / manifest.NAME
        if not written.is_file() or hash_file(written, WHEEL)[0] != data.get("digest"):
            return f"{written} differs from what the step wrote"
    if step.effect == "lookup" and not tidied and not _size(plan.wheel):
        # What was compiled may be in the cache by now.
        wheel = plan.wheel.parent
        if data.get("wheel") or any(wheel in each.resets for each in finished):
            return f"{plan.wheel} is empty or missing"
    return ""


def _broken(state: State, finished: Sequence[Step]) -> dict[str, str]:
    """Finished steps that installed a package whose files are lost, and which files."""
    venv = state.plan.environment
    makers = [step for step in finished if venv in step.resets]
    if not makers or not venv.is_relative_to(state.plan.generation):
        return {}
    folder = _site_packages(state.plan)
    settings, python = venv / "pyvenv.cfg", venv / "bin/python"
    if (
        folder is None
        or (settings.exists() and not _size(settings))
        or (python.is_symlink() and not python.exists())
    ):
        return {makers[0].name: f"{venv} is incomplete"}
    inside = str(folder.relative_to(state.plan.generation))
    before = [
        (step.name, _installed_before(state, step, inside))
        for step in state.plan.steps
        if step.installs
    ]
    found: dict[str, str] = {}
    for problem in package_records.verify_records(folder):
        name = problem.partition(": ")[0]
        # A step that started without it, and then finished, has installed it.
        installers = [
            step
            for step, names in before
            if names is not None and not {name, f"{name}.dist-info"} & names
        ]
        found.setdefault(installers[-1] if installers else makers[0].name, problem)
    return found


def _installed_before(state: State, step: Step, folder: str) -> frozenset[str] | None:
    """What was in a folder when a step started; None if it never did."""
    for event in reversed(state.journal.events):
        if (event.key, event.event) == (state.keys[step.name], journal.STARTED) and event.data:
            return frozenset(event.data["installed"].get(folder, ()))
    return None


def reset(state: State, step: Step) -> Record | None:
    """Remove what an earlier attempt at this step left; returns what to note at its start."""
    for path in step.resets:
        _delete(path)
    if not step.installs:
        return None
    before = _earlier_start(state, step)
    if not before:
        return {"installed": _installed_now(state.plan), "kept": []}
    kept = _whole_packages(state, step, before)
    files = {file for package in kept for file in package.files}
    above = {folder for file in files for folder in file.parents}
    for folder, names in before["installed"].items():
        for entry in list((state.plan.generation / folder).glob("*")):
            if entry.name not in names:
                _delete_but(entry, files, above)
    reported = [package.reported for package in kept if package.reported]
    return {"installed": before["installed"], "kept": reported}


def packages(state: State, step: Step) -> list[Mapping[str, str]]:
    """What a step has installed, and what a killed attempt at it had."""
    assert step.report
    before = _earlier_start(state, step) or {}
    now = installed_packages(step.report)
    known = {_identity(each) for each in now}
    return [*now, *(each for each in before.get("kept", ()) if _identity(each) not in known)]


def installed_packages(report: Path) -> list[dict[str, str]]:
    """Name, version, address and hash of each package in an installer's report."""
    found = read_json(report, RESULT)
    if isinstance(found, list):  # of conda packages
        return [{**each, "url": mask(each["url"])} for each in found]
    return [
        {
            "name": each.metadata.name,
            "version": each.metadata.version,
            "url": mask(each.download_info.url),
            "sha256": each.download_info.sha256,
        }
        for each in pip_report.decoded(found).install
    ]


def _earlier_start(state: State, step: Step) -> Record | None:
    """What a killed attempt at this step noted, if its results still count."""
    key = state.keys[step.name]
    # What was tried before an earlier step ran again is gone.
    earlier = {*takewhile(lambda each: each != key, state.keys.values())}
    since = takewhile(lambda event: event.key not in earlier, reversed(state.journal.events))
    started = (event for event in since if event.event == journal.STARTED)
    return next((event.data for event in started if event.key == key and event.data), None)


class _Kept(NamedTuple):
    """A package that stays: its files, and its entry in pip's report if there is one."""

    files: frozenset[Path]
    reported: Mapping[str, str] | None


def _whole_packages(state: State, step: Step, before: Record) -> list[_Kept]:
    """Packages that a killed attempt has installed completely: pip continues after them.

    Only those that pip's report or the lock names, so that the record has them all.
    """
    plan = state.plan
    known: dict[tuple[str, str], Mapping[str, str] | None] = {}
    if step.effect == "packages" and plan.locked:
        known = {(canonicalize_name(p.name), p.version): None for p in pypi.packages(plan.locked)}
    if step.report:
        with suppress(OSError, ValueError, KeyError, TypeError, StepError):  # cut off by the kill
            known = {_identity(each): each for each in installed_packages(step.report)}
        known |= {_identity(each): each for each in before.get("kept", ())}
    folder = _site_packages(plan)
    if not known or folder is None or not folder.is_relative_to(plan.generation):
        return []
    names = before["installed"].get(str(folder.relative_to(plan.generation)), ())
    found = package_records.finished_packages(folder)
    new = {name: _package(name) for name in found if f"{name}.dist-info" not in names}
    return [_Kept(found[name], known[package]) for name, package in new.items() if package in known]


def _site_packages(plan: Plan) -> Path | None:
    return next(iter(plan.environment.glob("lib/python3.*/site-packages")), None)


def _installed_now(plan: Plan) -> dict[str, list[str]]:
    """What is in the folders that packages are installed into."""
    venv = plan.environment
    folders = [
        *sorted(venv.glob("lib/python3.*/site-packages")),
        *(venv / name for name in ("bin", "lib", "share", "etc", "include", ".")),
    ]
    return {
        str(folder.relative_to(plan.generation)): sorted(each.name for each in folder.iterdir())
        for folder in folders
        if folder.is_dir()
    }


def _package(name: str) -> tuple[str, str]:
    """Name and version from the name of a distribution's folder, such as ``torch-2.13.0``."""
    project, _, version = name.rpartition("-")
    return canonicalize_name(project), version


def _identity(package: Mapping[str, str]) -> tuple[str, str]:
    return canonicalize_name(package["name"]), package["version"]


def _holds(file: TextFile) -> bool:
    """Whether a file has what a step wrote into it."""
    try:
        found = file._replace(text=read_text(file.path, RESULT))
        return found == file or found.content == file.content
    except (FileNotFoundError, ValueError, SyntaxError):
        return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _delete_but(path: Path, kept: Collection[Path], above: Collection[Path]) -> None:
    """Delete a file or tree, except for some files and the folders above them."""
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
