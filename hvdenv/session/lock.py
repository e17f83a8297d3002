"""Finding the lock that a command uses, and checking that it fits the recipe and is trusted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdenv.base.errors import LockError, UsageError
from hvdenv.base.places import find_places
from hvdenv.building.run_step import perform
from hvdenv.locks import compare, lockfile
from hvdenv.locks.lockfile import MAIN, Inputs, Locked
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.recipe_files import recipe_folder
from hvdenv.plans.plan import steps_of
from hvdenv.plans.resolution import Resolution
from hvdenv.plans.step import Step
from hvdenv.plans.steps import GENERATION
from hvdenv.session.prepare import Prepared
from hvdenv.session.progress import choose as choose_progress
from hvdenv.session.request import Request

if TYPE_CHECKING:
    from hvdenv.environments.prefix_lock import Scratch

# The lock in a directory of fetched files.
LOCK = "lock"


def make_resolution(prepared: Prepared, folder: Path = GENERATION) -> Resolution:
    """Makes the steps that resolve the packages of a lock, in a directory."""
    maker = steps_of(prepared.resolved.recipe, prepared.facts, prepared.python, folder)
    return Resolution(*maker._replace(caches=find_places().cache))


class RecipeLocks(NamedTuple):
    """The locks of a recipe.

    Attributes:
        request: its gate refuses locks that other users could have changed.
        inputs: what the recipe asks for now.
        cpu: packages that must be CPU builds.
        root: directory of the locks.
    """

    request: Request
    inputs: Inputs
    cpu: tuple[str, ...]
    root: Path

    def find(self) -> Locked | None:
        """The lock of the recipe; None if there is none."""
        folder = lockfile.lock_folder(self.root, self.inputs)
        if not (folder / MAIN).is_file():
            return None
        # Whoever can change shipped locks can change hvdenv.
        shipped = self.root == recipe_folder().parent / "lockfiles"
        return lockfile.read_lock(folder) if shipped else self._read(folder)

    def require(self, named: Path | None) -> Locked:
        """The named lock, or else that of the recipe, if it is what the recipe asks for now."""
        locked = self._read(named) if named else self.find()
        if locked is None:
            raise self.missing()
        self.check(locked)
        return locked

    def _read(self, folder: Path) -> Locked:
        use = "hvdenv would install and run what it lists"
        return lockfile.read_lock(
            folder, lambda content: self.request.gate.refuse_content(content, use)
        )

    def problems(self, locked: Locked) -> list[str]:
        return compare.problems(locked, self.inputs, self.cpu)

    def check(self, locked: Locked) -> None:
        if problems := self.problems(locked):
            raise LockError(
                "the lock is not what the recipe asks for now",
                where=str(locked.folder),
                detail="\n".join(problems),
                remedy="write a new one with `hvdenv lock` and the same options, or build without"
                " --locked",
            )

    def missing(self) -> LockError:
        inputs, words = self.inputs, self.request.named
        words += f" --python {self.request.python}" if self.request.python else ""
        if inputs.platform != f"linux-{os.uname().machine}":
            words += f" --platform {inputs.platform}"
        if self.request.lockfiles:
            words += f" --lockfiles {shlex.quote(str(self.root))}"
        return LockError(
            f"there is no lock of {inputs.name} for Python {inputs.python} on {inputs.platform}",
            where=str(self.root),
            remedy=f"write one with `hvdenv lock {words}`, or name a directory that has one"
            " with --lockfiles, or another Python with --python",
        )


def recipe_locks(request: Request, prepared: Prepared) -> RecipeLocks:
    folder = Path(prepared.resolved.file).absolute().parent
    beside = (folder.parent if folder.name == "recipes" else folder) / "lockfiles"
    maker = make_resolution(prepared)
    return RecipeLocks(
        request,
        maker.inputs(prepared.resolved.keyed),
        maker.cpu_packages,
        request.lockfiles or beside,
    )


def add_lock(request: Request, prepared: Prepared) -> Prepared:
    """Add the lock that --locked asks for; see RecipeLocks.require()."""
    locks = recipe_locks(request, prepared)
    source = _fetched(request, request.fetched, locks.inputs) if request.fetched else None
    locked = locks.require(request.lock or (source / LOCK if source else None))
    return prepared._replace(locked=locked, source_folder=source, offline=request.offline)


def _fetched(request: Request, fetched: Path, inputs: Inputs) -> Path:
    """The directory of fetched files to build from."""
    source = fetched.absolute()
    if not (source / LOCK / MAIN).is_file():
        raise UsageError(
            "is not a directory of fetched files, or `hvdenv fetch` did not finish",
            where=str(source),
            remedy=f"`hvdenv fetch {request.named} --to {shlex.quote(str(source))}`",
        )
    if inputs.sources:
        raise UsageError(
            f"a repository cannot be fetched: {', '.join(inputs.sources)} is built from one",
            remedy="build without --fetched on a host that can reach the repository",
        )
    return source


def add_recorded_lock(request: Request, prepared: Prepared, record: GenerationRecord) -> Prepared:
    """Add the lock that a generation was built from, if it was built from one."""
    if record.lock is None:
        return prepared
    locks = recipe_locks(request, prepared)
    locked = locks.find()
    if locked and locked.digest == record.lock.digest:
        locks.check(locked)
        return prepared._replace(locked=locked)
    raise LockError(
        "the lock that this environment was built from is not here, or was rewritten since",
        where=str(locks.root),
        remedy="name the directory that has it with --lockfiles, or run `hvdenv build` with --locked"
        " first",
    )


def run_steps(request: Request, steps: Sequence[Step], scratch: Scratch) -> str:
    """Run steps; returns the output of the last one."""
    with choose_progress(len(steps), quiet=request.quiet, verbose=request.verbose) as progress:
        return perform(steps, scratch.runner, progress)
