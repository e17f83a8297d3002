"""Finding the lock that a command is to go by, and seeing that it is of the recipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdenv.cli.options import (
    Prepared,
    policy_of,
    refuse_foreign_content,
)
from hvdenv.errors import LockError, UsageError
from hvdenv.locks import compare, condalock, folders, pypi
from hvdenv.locks.lockfile import CONDA, MAIN, SIGNATURE, Inputs, Locked, render
from hvdenv.model.layers import Resolved, recipe_folder
from hvdenv.places import find_places
from hvdenv.plans.plan import steps_of
from hvdenv.plans.resolution import Resolution
from hvdenv.plans.step import Step
from hvdenv.plans.steps import GENERATION
from hvdenv.reading import Content

if TYPE_CHECKING:
    from hvdenv.environments.scratch import Scratch
    from hvdenv.model.recipe import Recipe

# In a folder of fetched files: the lock that they are of.
LOCK = "lock"


def root_of(arguments: argparse.Namespace, resolved: Resolved) -> Path:
    """The folder of the locks for a recipe."""
    if arguments.lockfiles:
        return Path(arguments.lockfiles)
    folder = Path(resolved.file).absolute().parent
    return (folder.parent if folder.name == "recipes" else folder) / "lockfiles"


def resolution_of(prepared: Prepared, folder: Path = GENERATION) -> Resolution:
    """The maker of the steps that find the packages of a lock.

    Args:
        prepared: the recipe and the machine.
        folder: to resolve in.
    """
    maker = steps_of(prepared.resolved.recipe, prepared.facts, prepared.python, folder)
    return Resolution(*maker._replace(caches=find_places().cache))


def inputs_of(prepared: Prepared) -> Inputs:
    """What a lock of the recipe on this machine is to hold."""
    return resolution_of(prepared).inputs(prepared.resolved.variants)


def find(arguments: argparse.Namespace, prepared: Prepared, inputs: Inputs) -> Locked | None:
    """The lock that lies where locks do; None if there is none."""
    resolved = prepared.resolved
    recipe, root = resolved.recipe, root_of(arguments, resolved)
    gpu = recipe.horovod.gpu is not None
    return choose(root, inputs, _judge(arguments, root), gpu=gpu, for_cpus=for_cpus(recipe))


def for_cpus(recipe: Recipe) -> tuple[str, ...]:
    """Packages of which a recipe without GPU operations asks for builds for CPUs."""
    if recipe.horovod.gpu:
        return ()
    wanted = ((name, recipe.frameworks[name]) for name in recipe.horovod.frameworks)
    return tuple(each.package or name for name, each in wanted if each.cpu_index)


def needed(
    arguments: argparse.Namespace, prepared: Prepared, inputs: Inputs, named: Path | None
) -> Locked:
    """The lock to go by: the one that is named, or the one that lies where locks do.

    Raises:
        LockError: there is none, or it is not what the recipe asks for.
        UntrustedError: somebody else could have changed it.
    """
    if named:
        locked = folders.read(named, _judge(arguments, named))
    else:
        found = find(arguments, prepared, inputs)
        if found is None:
            raise no_lock(inputs, root_of(arguments, prepared.resolved))
        locked = found
    refuse_unsigned(locked, arguments, prepared)
    refuse_other(locked, inputs, for_cpus(prepared.resolved.recipe))
    return locked


def choose(
    root: Path,
    inputs: Inputs,
    judge: Callable[[Content], None] | None = None,
    *,
    gpu: bool,
    for_cpus: Sequence[str] = (),
) -> Locked | None:
    """The lock for a recipe, Python and platform; None if there is none.

    Where there are several, those of other builds of the frameworks have a label: a recipe
    without GPUs rather takes the one for CPUs, any other the one without a label. One that
    gives what is asked for goes before those that do not.
    """
    found = folders.candidates(root, inputs)
    preferred = sorted(found, key=lambda each: each.name.endswith("-cpu") == gpu)
    locks = [folders.read(each, judge) for each in preferred]
    fitting = (each for each in locks if not unsatisfied(each, inputs, for_cpus))
    return next(fitting, locks[0] if locks else None)


def with_lock(arguments: argparse.Namespace, prepared: Prepared) -> Prepared:
    """The same with the lock that --locked asks for.

    Raises:
        LockError: there is none, or the recipe asks for something else.
        UntrustedError: somebody else could have changed it.
        UsageError: an option is without effect.
    """
    _refuse_unknown_drifts(getattr(arguments, "accept_drift", ()))
    inputs = inputs_of(prepared)
    source = _source(arguments, inputs)
    named = arguments.lock or (source / LOCK if source else None)
    locked = needed(arguments, prepared, inputs, named)
    return prepared._replace(locked=locked, source_folder=source, offline=arguments.offline)


def with_recorded_lock(
    arguments: argparse.Namespace, prepared: Prepared, record: Mapping[str, Any]
) -> Prepared:
    """The same with the lock that a generation was built from, if it was.

    Raises:
        LockError: that lock is not there any more, or the recipe asks for something else.
        UntrustedError: somebody else could have changed it.
    """
    digest = record.get("lock", {}).get("digest")
    if not digest:
        return prepared
    inputs, root = inputs_of(prepared), root_of(arguments, prepared.resolved)
    for folder in folders.candidates(root, inputs):
        locked = folders.read(folder, _judge(arguments, root))
        if locked.digest == digest:
            refuse_unsigned(locked, arguments, prepared)
            refuse_other(locked, inputs, for_cpus(prepared.resolved.recipe))
            return prepared._replace(locked=locked)
    raise LockError(
        "the lock that this environment was built from is not here, or was written anew since",
        where=str(root),
        remedy="--lockfiles names the folder that has it; or `hvdenv build` with --locked first",
    )


def _judge(arguments: argparse.Namespace, root: Path) -> Callable[[Content], None] | None:
    """What refuses a lock that others could have changed; None where that does not matter."""
    # Anybody who can change shipped locks can change hvdenv; `plan` runs nothing.
    if arguments.command == "plan" or root == recipe_folder().parent / "lockfiles":
        return None
    return partial(refuse_foreign_content, arguments=arguments)


def refuse_unsigned(locked: Locked, arguments: argparse.Namespace, prepared: Prepared) -> None:
    """See that a lock is signed, where the site requires it.

    Raises:
        LockError: it is not, or not by a key that the site names.
        RecipeError: somebody else can write the file with these keys.
        UsageError: --require-signed, and no site names keys.
    """
    from hvdenv import trust
    from hvdenv.runner import Runner
    from hvdenv.wheels import signing

    signers = prepared.resolved.recipe.places.locks.signers
    if not signers:
        if getattr(arguments, "require_signed", False):
            raise UsageError(
                "--require-signed: no site file sets places.locks.signers",
                remedy="name a site file that does: --site FILE, or the variable HVDENV_SITE",
            )
        return
    refusal = "it is not signed, but the site requires signatures"
    if locked.signature:
        if not Path(signers).is_file():
            raise LockError("the file with the accepted keys is missing", where=signers)
        if policy := policy_of(arguments):
            trust.refuse_path(signers, policy, "hvdenv would accept the signatures of its keys")
        text, signature = render(locked.lock).encode(), locked.signature.encode()
        refusal = signing.refusal(text, signature, Path(signers), Runner(), signing.LOCK)
    if refusal:
        raise LockError(
            f"the lock is refused: {refusal}",
            where=str(locked.folder / SIGNATURE),
            remedy="review the lock and sign it with a key that the site accepts:"
            f" hvdenv lock {locked.lock.inputs.recipe} --sign",
        )


def signed(locked: Locked, present: Locked | None, key: str) -> Locked:
    """A lock with its signature.

    Args:
        locked: what is going to be written.
        present: what was there before, whose signature stays if it is the same lock.
        key: file of the key to sign with; empty to sign nothing.

    Raises:
        StepError: ssh-keygen does not sign.
    """
    from hvdenv.runner import Runner
    from hvdenv.wheels import signing

    text = render(locked.lock)
    if key:
        return locked._replace(
            signature=signing.sign(text.encode(), key, Runner(), signing.LOCK).decode()
        )
    kept = present.signature if present and render(present.lock) == text else ""
    return locked._replace(signature=kept)


def no_lock(inputs: Inputs, root: Path) -> LockError:
    """The error where a lock was asked for."""
    return LockError(
        f"there is no lock of {inputs.name} for Python {inputs.python} on {inputs.platform}",
        where=str(root),
        remedy=f"`hvdenv lock {inputs.recipe}` writes one; --lockfiles names a folder that has"
        " one, --python another Python",
    )


def _refuse_unknown_drifts(names: Sequence[str]) -> None:
    for name in names:
        if name not in compare.DRIFTS and not name.startswith("modules."):
            raise UsageError(
                f"--accept-drift {name}: no such drift",
                remedy=f"known are {', '.join(compare.DRIFTS)} and modules.NAME",
            )


def _source(arguments: argparse.Namespace, inputs: Inputs) -> Path | None:
    """The folder of fetched files to build from."""
    if not arguments.source_folder:
        return None
    source = Path(arguments.source_folder).absolute()
    if not (source / LOCK / MAIN).is_file():
        raise UsageError(
            "is no folder of fetched files, or fetching them was stopped",
            where=str(source),
            remedy=f"`hvdenv fetch {inputs.recipe} --to {source}`",
        )
    if inputs.sources:
        raise UsageError(
            f"a repository cannot be fetched: {', '.join(inputs.sources)} is built from one",
            remedy="build where its repository can be reached, without --from",
        )
    return source


def refuse_other(locked: Locked, inputs: Inputs, for_cpus: Sequence[str] = ()) -> None:
    """See that a lock gives what the recipe asks for.

    Args:
        locked: the lock.
        inputs: what the recipe asks for now.
        for_cpus: packages that are to be builds for CPUs.

    Raises:
        LockError: it does not.
    """
    problems = unsatisfied(locked, inputs, for_cpus)
    if problems:
        raise LockError(
            "the lock is not what the recipe asks for now",
            where=str(locked.folder),
            detail="\n".join(problems),
            remedy="`hvdenv lock` with the same options writes a new one; or build without"
            " --locked",
        )


def unsatisfied(locked: Locked, inputs: Inputs, for_cpus: Sequence[str] = ()) -> list[str]:
    """Why a lock does not give what is asked for; see refuse_other()."""
    differences = compare.changed(locked.lock.inputs, inputs)
    changed = [str(each) for each in differences if not compare.is_request(each)]
    cuda = compare.cuda_builds(pypi.packages(locked), for_cpus)
    return [*changed, *missing_packages(locked, inputs), *cuda]


def missing_packages(locked: Locked, inputs: Inputs) -> list[str]:
    """What is asked of pip and conda, or required by a package, and the lock does not have; and
    what it has although nothing requires it."""
    packages = pypi.packages(locked)
    python = {each.name: each.version for each in packages}
    by_conda: dict[str, str] = {}
    missing: list[str] = []
    if inputs.conda or CONDA in locked.texts:
        wanted = inputs.conda.packages if inputs.conda else ()
        if CONDA not in locked.texts:
            return [f"{each}: not in the lock" for each in wanted]
        conda = condalock.packages(locked)
        missing += condalock.unsatisfied(conda.packages, wanted)
        missing += condalock.unneeded(conda.packages, wanted)
        by_conda = condalock.for_pip(conda)
    missing += compare.unsatisfied({**python, **by_conda}, inputs.packages)
    missing += compare.unclosed(packages, by_conda)
    if not missing:
        missing += compare.unneeded(packages, inputs.packages)
    return missing


def run_steps(arguments: argparse.Namespace, steps: Sequence[Step], scratch: Scratch) -> None:
    """Run the steps of a Resolution, and tell how it goes.

    Args:
        arguments: how loud.
        steps: in the folder of ``scratch``.
        scratch: runs their commands.

    Raises:
        StepError: a step failed.
    """
    from hvdenv.building.resolve import perform
    from hvdenv.cli.progress import choose as choose_progress

    with choose_progress(len(steps), quiet=arguments.quiet, verbose=arguments.verbose) as progress:
        perform(steps, scratch.runner, progress)
