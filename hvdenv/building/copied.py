"""Copies packages from an environment that has them, instead of installing them.

Unpacking and compiling 10,000 Python files takes most of a build. An environment that was built
from the same lock, or the same files of indexes, with the same interpreter has them already. They
are copied: no file is shared, so no environment can change another.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hvdenv.base import trust
from hvdenv.base.command import OWN_PYTHON, Command
from hvdenv.base.errors import HvdenvError
from hvdenv.base.places import Places
from hvdenv.base.reading import OWN, read_file
from hvdenv.base.schema import Table
from hvdenv.building.state import State
from hvdenv.environments import manifest, registry
from hvdenv.locks import pypi
from hvdenv.locks.record import GenerationRecord
from hvdenv.plans.plan import Plan

# The steps that a copy replaces, by name.
REPLACED = ("environment", "packages")
# Longer first lines of scripts are cut off by Linux before 5.1.
_FIRST_LINE = 127


def find_source(
    plan: Plan, resolved: Mapping[str, object], places: Places, found: Sequence[Table] = ()
) -> Path | None:
    """A virtual environment of this user that has the packages of a plan and no others but Horovod.

    Args:
        resolved: the recipe of the plan as tables.
        found: the packages of a plan without a lock, as a record has them.
    """
    files = [each._asdict() for each in pypi.packages(plan.locked)] if plan.locked else found
    # Not every machine makes the same of sources.
    wheels = all(each["file"].endswith(".whl") for each in files)
    compiles = not wheels or (plan.locked and plan.locked.lock.inputs.sources)
    if compiles or not files or not {step.name for step in plan.steps}.issuperset(REPLACED):
        return None
    for listed in registry.list_environments(places):
        environment = listed.environment
        for identity, record in environment.records().items():
            folder = environment.generation(identity)
            if (
                _fits(plan, resolved, record, files)
                and _is_own(folder)
                and _is_unchanged(folder, record.manifest_digest)
            ):
                return folder / "venv"
    return None


def copy(source: Path, state: State) -> str:
    """Make the environment of a build from a copy of another, without Horovod.

    Returns:
        Why it failed, and all is as it was before; or empty.
    """
    target = state.plan.environment
    empty = target.with_name("build") / target.name
    try:
        if target.exists():
            empty.parent.mkdir(exist_ok=True)
            target.rename(empty)
        # Its own modes count, as far as the user's umask allows them, and not its group.
        words = ("cp", "-dR", "--reflink=auto", "--preserve=timestamps", str(source), str(target))
        copied = state.runner.run(Command(words))
        if not copied:
            raise OSError(copied.tail(1))
        python = str(target / "bin" / "python")
        _relocate(target, os.fsencode(source))
        uninstall = (OWN_PYTHON, "-m", "uv", "pip", "uninstall")
        removed = state.runner.run(
            Command((*uninstall, "--no-config", "--python", python, "horovod"))
        )
        if not removed:
            raise OSError(removed.tail(1))
    except (OSError, ValueError, HvdenvError) as error:
        shutil.rmtree(target, ignore_errors=True)
        if empty.exists():
            empty.rename(target)
        return str(error)
    return ""


def _fits(
    plan: Plan, resolved: Mapping[str, object], record: GenerationRecord, files: Iterable[Table]
) -> bool:
    """Whether a generation has the packages of a plan, for the same interpreter."""
    locked, used = plan.locked, record.lock
    same = used and used.digest == locked.digest if locked else _are_same(record.packages, files)
    return (
        bool(same)
        and record.environment == "venv"
        and record.python.get("path") == plan.python.path
        and record.python.get("version") == plan.python.version
        and record.resolved.get("python") == resolved.get("python")
        and not record.additions.requirements
    )


def _are_same(*packages: Iterable[Table]) -> bool:
    """Whether lists have the same packages, installed from the same files."""
    keys = ("name", "version", "sha256")
    one, other = ({tuple(map(each.get, keys)) for each in found} for found in packages)
    return one == other


def _is_own(generation: Path) -> bool:
    """Whether the environment of a generation exists, and nobody else can have changed a file."""
    if not (generation / "venv" / "bin" / "python").exists():
        return False
    faults = trust.judge_environment(str(generation / "venv"), trust.trusted_owners(), whole=True)
    return all(fault.note for fault in faults)


def _is_unchanged(generation: Path, digest: str) -> bool:
    """Whether the environment of a generation has the files of its manifest and no others: the user
    may have installed something by hand."""
    try:
        known = manifest.read(generation / manifest.NAME, digest)
        changes = manifest.compare(generation, known)
    except HvdenvError:
        return False
    return not any(each.path.startswith("venv/") for each in changes)


def _relocate(environment: Path, old: bytes) -> None:
    """Write the place of an environment into the files that name the place it was copied from.

    Python corrects that of bytecode. RECORDs keep the hashes of scripts as they were installed.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a script cannot name its interpreter here.
    """
    new = os.fsencode(environment)
    _replace(environment / "pyvenv.cfg", old, new)
    for path in (environment / "bin").iterdir():
        if path.is_file() and not path.is_symlink():
            _replace(path, old, new)


def _replace(path: Path, old: bytes, new: bytes) -> None:
    """Replace a path in a text file."""
    content = read_file(path, OWN).data
    if old not in content or b"\0" in content:
        return
    content = content.replace(old, new)
    first = content.split(b"\n", 1)[0]
    if first.startswith(b"#!") and (len(first) > _FIRST_LINE or first.count(b" ")):
        raise ValueError(f"{path} cannot name its interpreter: the path is too long, or has spaces")
    path.write_bytes(content)
