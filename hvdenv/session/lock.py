"""Finding the lock that a command uses, and checking that it fits the recipe and is trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.building.run_step import perform
from hvdenv.contents.record import GenerationRecord
from hvdenv.errors import LockError, UsageError
from hvdenv.locks import compare, folders
from hvdenv.locks.built import DRIFTS
from hvdenv.locks.lockfile import MAIN, Inputs, Locked
from hvdenv.model.recipe_files import recipe_folder
from hvdenv.places import find_places
from hvdenv.plans.plan import steps_of
from hvdenv.plans.resolution import Resolution
from hvdenv.plans.step import Step
from hvdenv.plans.steps import GENERATION
from hvdenv.reading import Content
from hvdenv.session.prepare import Prepared
from hvdenv.session.progress import choose as choose_progress
from hvdenv.session.request import Request

if TYPE_CHECKING:
    from hvdenv.environments.scratch import Scratch
    from hvdenv.model.recipe import Recipe

# The lock in a folder of fetched files.
LOCK = "lock"


def root_of(request: Request, prepared: Prepared) -> Path:
    if request.lockfiles:
        return Path(request.lockfiles)
    folder = Path(prepared.resolved.file).absolute().parent
    return (folder.parent if folder.name == "recipes" else folder) / "lockfiles"


def resolution_of(prepared: Prepared, folder: Path = GENERATION) -> Resolution:
    """Makes the steps that resolve the packages of a lock, in a folder."""
    maker = steps_of(prepared.resolved.recipe, prepared.facts, prepared.python, folder)
    return Resolution(*maker._replace(caches=find_places().cache))


def inputs_of(prepared: Prepared) -> Inputs:
    return resolution_of(prepared).inputs(prepared.resolved.keyed)


def cpu_packages(recipe: Recipe) -> tuple[str, ...]:
    """Packages that must be CPU builds: those with a CPU index in a recipe without GPUs."""
    if recipe.horovod.gpu:
        return ()
    frameworks = ((name, recipe.frameworks[name]) for name in recipe.horovod.frameworks)
    return tuple(each.package or name for name, each in frameworks if each.cpu_index)


def find(request: Request, prepared: Prepared) -> Locked | None:
    """The lock in the recipe's folder of locks; None if there is none."""
    root = root_of(request, prepared)
    folder = folders.place(root, inputs_of(prepared))
    if not (folder / MAIN).is_file():
        return None
    return folders.read(folder, _refuse_others(request, root))


def required(request: Request, prepared: Prepared, named: Path | None) -> Locked:
    """The named lock, or else the one in the recipe's folder of locks; it must satisfy the recipe."""
    if named:
        locked: Locked | None = folders.read(named, _refuse_others(request, named))
    else:
        locked = find(request, prepared)
    if locked is None:
        raise no_lock(request, prepared)
    _check(locked, prepared)
    return locked


def add_lock(request: Request, prepared: Prepared) -> Prepared:
    """Add the lock that --locked asks for; see required()."""
    _refuse_unknown_drifts(getattr(request, "accept_drift", ()))
    source = _source(request, inputs_of(prepared))
    named = request.lock or (source / LOCK if source else None)
    locked = required(request, prepared, named)
    return prepared._replace(locked=locked, source_folder=source, offline=request.offline)


def add_recorded_lock(request: Request, prepared: Prepared, record: GenerationRecord) -> Prepared:
    """Add the lock that a generation was built from, if it was built from one."""
    if record.lock is None:
        return prepared
    locked = find(request, prepared)
    if locked and locked.digest == record.lock.digest:
        _check(locked, prepared)
        return prepared._replace(locked=locked)
    raise LockError(
        "the lock that this environment was built from is not here, or was rewritten since",
        where=str(root_of(request, prepared)),
        remedy="name the folder that has it with --lockfiles, or run `hvdenv build` with --locked"
        " first",
    )


def problems_of(locked: Locked, prepared: Prepared) -> list[str]:
    packages = cpu_packages(prepared.resolved.recipe)
    return compare.problems(locked, inputs_of(prepared), packages)


def _check(locked: Locked, prepared: Prepared) -> None:
    if problems := problems_of(locked, prepared):
        raise LockError(
            "the lock is not what the recipe asks for now",
            where=str(locked.folder),
            detail="\n".join(problems),
            remedy="write a new one with `hvdenv lock` and the same options, or build without"
            " --locked",
        )


def _refuse_others(request: Request, root: Path) -> Callable[[Content], None] | None:
    """What refuses a lock that another user could have changed; None where that does not matter."""
    # Whoever can change shipped locks can change hvdenv.
    if root == recipe_folder().parent / "lockfiles":
        return None
    use = "hvdenv would install and run what it lists"
    return lambda content: request.gate.refuse_content(content, use)


def no_lock(request: Request, prepared: Prepared) -> LockError:
    inputs = inputs_of(prepared)
    return LockError(
        f"there is no lock of {inputs.name} for Python {inputs.python} on {inputs.platform}",
        where=str(root_of(request, prepared)),
        remedy=f"write one with `hvdenv lock {inputs.recipe}`, or name a folder that has one with"
        " --lockfiles, or another Python with --python",
    )


def _refuse_unknown_drifts(names: Sequence[str]) -> None:
    for name in names:
        if name not in DRIFTS and not name.startswith("modules."):
            raise UsageError(
                f"--accept-drift {name}: no such drift",
                remedy=f"known are {', '.join(DRIFTS)} and modules.NAME",
            )


def _source(request: Request, inputs: Inputs) -> Path | None:
    """The folder of fetched files to build from."""
    if not request.fetched:
        return None
    source = Path(request.fetched).absolute()
    if not (source / LOCK / MAIN).is_file():
        raise UsageError(
            "is no folder of fetched files, or `hvdenv fetch` did not finish",
            where=str(source),
            remedy=f"`hvdenv fetch {inputs.recipe} --to {source}`",
        )
    if inputs.sources:
        raise UsageError(
            f"a repository cannot be fetched: {', '.join(inputs.sources)} is built from one",
            remedy="build without --fetched on a host that can reach the repository",
        )
    return source


def run_steps(request: Request, steps: Sequence[Step], scratch: Scratch) -> str:
    """Run steps; returns the output of the last one."""
    with choose_progress(len(steps), quiet=request.quiet, verbose=request.verbose) as progress:
        return perform(steps, scratch.runner, progress)
