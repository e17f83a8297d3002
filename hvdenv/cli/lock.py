"""Write the lock of a recipe: every package with its hash, sources, patches and flags.

What is locked already keeps its versions; a lock that still fits is left as it is. After
`hvdenv build --locked` the lock also gets what the build was made with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hvdenv.cli.locking import (
    find,
    for_cpus,
    inputs_of,
    missing_packages,
    no_lock,
    refuse_unsigned,
    resolution_of,
    root_of,
    run_steps,
    signed,
    unsatisfied,
)
from hvdenv.cli.options import (
    Prepared,
    add_json,
    add_lockfiles,
    add_loudness,
    add_prefix,
    add_python,
    add_recipe,
    add_trust,
    prepare,
    print_json,
)
from hvdenv.errors import LockError, RecipeError, StepError, UsageError
from hvdenv.reading import RESULT, read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hvdenv.environments.scratch import Scratch
    from hvdenv.locks.lockfile import Built, Inputs, Locked
    from hvdenv.plans.resolution import Resolution

EXAMPLES = """\
examples:
  hvdenv lock local                      resolve, and write lockfiles/local/py3.11-linux-x86_64
  hvdenv lock local --check              has the recipe changed, does the lock still satisfy it
  hvdenv lock local --update numpy       move one package, keep all others
  hvdenv lock local --upgrade            resolve everything anew
  hvdenv lock local --sign --key ~/.ssh/id_ed25519.pub
  hvdenv lock taurus --platform linux-ppc64le --lockfiles ~/locks
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_python(parser)
    add_prefix(parser)
    add_json(parser)
    add_loudness(parser)
    add_lockfiles(parser)
    add_trust(parser)
    parser.add_argument(
        "--sign", action="store_true", help="sign the lock: you vouch for its contents"
    )
    parser.add_argument(
        "--key", metavar="FILE", help="key to sign with (default: places.locks.key)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="only compare; exit 4 if it differs")
    what.add_argument("--update", metavar="NAME", help="move this package to what is there now")
    what.add_argument("--upgrade", action="store_true", help="move all packages")
    parser.add_argument(
        "--platform", metavar="P", help="such as linux-ppc64le: of a machine that is not this one"
    )


def run(arguments: argparse.Namespace) -> int:
    from hvdenv.locks import folders

    prepared = _prepare(arguments)
    inputs = inputs_of(prepared)
    root, key = root_of(arguments, prepared.resolved), _key(arguments, prepared)
    try:
        present = find(arguments, prepared, inputs)
    except (LockError, RecipeError) as error:
        if arguments.check or arguments.update:
            raise
        print(f"{error}\nwriting it anew, of what there is now", file=sys.stderr)
        present = None
    if arguments.check:
        return _check(present, prepared, inputs, arguments, root)
    _refuse_unknown(arguments.update, present)
    if present and _fits(present, prepared, inputs) and not (arguments.update or arguments.upgrade):
        wanted = present._replace(lock=present.lock._replace(inputs=inputs, built=None))
    else:
        wanted = _resolve(arguments, prepared, inputs, present, root)
    wanted = signed(_with_build(wanted, present, prepared), present, key)
    changed = folders.write(wanted)
    if present and present.signature and not wanted.signature:
        print(
            "the lock has changed, so its signature is gone: sign again with --sign",
            file=sys.stderr,
        )
    if arguments.json:
        print_json({"folder": str(wanted.folder), "changed": changed})
    elif not arguments.quiet:
        states = ["built" if wanted.lock.built else "resolved, not built yet"]
        states += ["signed"] if wanted.signature else []
        print(f"{'written' if changed else 'nothing to do'}: {wanted.folder} ({', '.join(states)})")
    return 0


def _key(arguments: argparse.Namespace, prepared: Prepared) -> str:
    """File of the key to sign with; empty if no signature is requested."""
    if not arguments.sign and not arguments.key:
        return ""
    if not arguments.sign or arguments.check:
        raise UsageError("--key goes with --sign, and --sign does not go with --check")
    key = arguments.key or prepared.resolved.recipe.places.locks.key
    if not key:
        raise UsageError(
            "no key to sign with", remedy="name it: --key FILE, or places.locks.key in a site file"
        )
    return str(key)


def _prepare(arguments: argparse.Namespace) -> Prepared:
    """The recipe, for this machine or for the platform that was named."""
    from hvdenv.locks.lockfile import Platform
    from hvdenv.schema import Problem, decode

    prepared = prepare(arguments, thorough=False)
    if not arguments.platform:
        return prepared
    try:
        decode(Platform, arguments.platform)
    except Problem as problem:
        raise UsageError(f"--platform: {problem.message}") from problem
    machine = arguments.platform.partition("-")[2]
    return prepared._replace(facts=prepared.facts._replace(machine=machine, origin="declared"))


def _fits(present: Locked, prepared: Prepared, inputs: Inputs) -> bool:
    """Whether the packages of a lock are still those to take."""
    from hvdenv.locks import compare

    moved = any(map(compare.moves_packages, compare.changed(present.lock.inputs, inputs)))
    return not (moved or missing_packages(present, inputs) or _cuda_builds(present, prepared))


def _cuda_builds(locked: Locked, prepared: Prepared) -> tuple[str, ...]:
    from hvdenv.locks import compare, pypi

    return compare.cuda_builds(pypi.packages(locked), for_cpus(prepared.resolved.recipe))


def _check(
    present: Locked | None,
    prepared: Prepared,
    inputs: Inputs,
    arguments: argparse.Namespace,
    root: Path,
) -> int:
    """Say whether the recipe has changed, and whether the lock satisfies it all the same."""
    from hvdenv.locks import compare

    if present is None:
        raise no_lock(inputs, root)
    refuse_unsigned(present, arguments, prepared)
    changes = [str(each) for each in compare.changed(present.lock.inputs, inputs)]
    problems = unsatisfied(present, inputs, for_cpus(prepared.resolved.recipe))
    if arguments.json:
        answer = {"folder": str(present.folder), "changed": changes, "unsatisfied": problems}
        print_json(answer)
    elif not arguments.quiet:
        print(f"recipe since the lock: {'changed' if changes else 'as it was'}")
        print("".join(f"  {line}\n" for line in changes), end="")
        print(f"lock: {'does not satisfy' if problems else 'satisfies'} the recipe")
        print("".join(f"  {line}\n" for line in problems), end="")
    return LockError.exit_code if problems else 0


def _refuse_unknown(name: str | None, present: Locked | None) -> None:
    """A name that is not in the lock would move nothing."""
    if name and not (present and {name, _normal(name)} & _names(present)):
        raise UsageError(
            f"--update: {name} is not in the lock",
            where=str(present.folder) if present else "",
            remedy="`hvdenv lock` without --update writes one with all that the recipe needs",
        )


def _names(present: Locked) -> set[str]:
    from hvdenv.locks import condalock, pypi
    from hvdenv.locks.lockfile import CONDA

    names = {each.name for each in pypi.packages(present)}
    if CONDA in present.texts:
        names |= {each.name for each in condalock.packages(present).packages}
    return names


def _normal(name: str | None) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(name) if name else ""


def _resolve(
    arguments: argparse.Namespace,
    prepared: Prepared,
    inputs: Inputs,
    present: Locked | None,
    root: Path,
) -> Locked:
    """A lock of what indexes and channels have now, or still of what was locked."""
    from hvdenv.environments import scratch
    from hvdenv.locks import folders, pypi
    from hvdenv.locks.lockfile import CONDA, PYPI, File, bind
    from hvdenv.places import find_places

    kept = None if arguments.upgrade else present
    texts: dict[File, str] = {}
    packages: tuple[pypi.Package, ...] = ()
    with scratch.folder(find_places().scratch, "resolving") as work:
        maker = resolution_of(prepared, work.path)
        if inputs.conda:
            texts[CONDA] = _conda(arguments, maker, kept, work)
        if inputs.packages:
            texts[PYPI] = _pypi(arguments, prepared, maker, kept, texts.get(CONDA), work)
            packages = pypi.parse(texts[PYPI], Path(PYPI))
    names = [each.package or name for name, each in prepared.resolved.recipe.frameworks.items()]
    found = bind(folders.place(root, inputs, pypi.labels(packages, names)), inputs, texts)
    if missing := missing_packages(found, inputs):
        raise LockError(
            "what pip and conda answered is not what they were asked for",
            where=inputs.name,
            detail="\n".join(missing),
            remedy="look at pip's configuration (constraints?) and at the channels",
        )
    if cuda := _cuda_builds(found, prepared):
        raise _no_cpu_builds(prepared, inputs, cuda)
    return found


def _no_cpu_builds(prepared: Prepared, inputs: Inputs, cuda: Sequence[str]) -> LockError:
    """The error where indexes have nothing but CUDA builds for a recipe without GPUs."""
    frameworks = prepared.resolved.recipe.frameworks
    indexes = {name: each.cpu_index for name, each in frameworks.items() if each.cpu_index}
    keys = " and ".join(f"frameworks.{name}.cpu_index" for name in indexes)
    return LockError(
        "the recipe asks for CPU builds, but pip found only CUDA builds; no lock was written",
        where=inputs.name,
        detail="\n".join(cuda),
        remedy=f"lock where {' and '.join(indexes.values())} can be reached, or name another place"
        " that has CPU builds: PIP_EXTRA_INDEX_URL=URL or PIP_FIND_LINKS=FOLDER\n"
        f"if you want CUDA builds, use a recipe without {keys}",
    )


def _conda(
    arguments: argparse.Namespace, maker: Resolution, kept: Locked | None, work: Scratch
) -> str:
    """Have the conda packages solved; what was locked is preferred."""

    from hvdenv.locks import condalock
    from hvdenv.locks.lockfile import CONDA

    condalock.load()  # before the solve, which takes minutes
    before = condalock.packages(kept) if kept and CONDA in kept.texts else None
    free = (
        [arguments.update]
        if before and arguments.update in {p.name for p in before.packages}
        else []
    )
    prefer = condalock.preferring(before, free) if before else {}
    run_steps(arguments, maker.solution(prefer), work)
    records = read_json(maker.solved, RESULT)
    return condalock.render(condalock.lock(records, maker.conda_spec))


def _pypi(
    arguments: argparse.Namespace,
    prepared: Prepared,
    maker: Resolution,
    kept: Locked | None,
    conda: str | None,
    work: Scratch,
) -> str:
    """Have pip resolve; where what was locked does not fit any more, everything anew."""
    from hvdenv.building.resolve import pylock
    from hvdenv.locks import condalock, pypi

    moved = _normal(arguments.update)
    locked = pypi.packages(kept) if kept else ()
    pins = {each.name: each.version for each in locked if each.name != moved}
    installed = condalock.for_pip(condalock.parse(conda)) if conda else {}
    here = prepared.facts.origin == "observed" and not conda
    choices = [pins] if arguments.update or not pins else [pins, {}]
    # Where a package has no wheel for all machines, one for this machine may be built.
    ways = [
        steps
        for each in choices
        for steps in (
            *([maker.elsewhere(each, installed)] if maker.portable else ()),
            *([maker.here(each)] if here else ()),
        )
    ]
    for number, steps in enumerate(ways, 1):
        try:
            run_steps(arguments, steps, work)
        except StepError as error:
            if number == len(ways):
                raise
            print(f"{error.message}; trying another way", file=sys.stderr)
            continue
        return pylock(maker, locked)
    raise UsageError(
        "the packages of this recipe can only be told on its own machines",
        where=prepared.resolved.file,
        remedy="run `hvdenv lock` there",
    )


def _with_build(wanted: Locked, present: Locked | None, prepared: Prepared) -> Locked:
    """The lock with what a build of it was made with, if there is such a build."""
    built = _build_of(wanted, prepared)
    if built is None and present and present.digest == wanted.digest:
        built = present.lock.built
    return wanted._replace(lock=wanted.lock._replace(built=built))


def _build_of(wanted: Locked, prepared: Prepared) -> Built | None:
    from hvdenv.locks.contents import built

    for record in prepared.target.records().values():
        if record.get("lock", {}).get("digest") == wanted.digest:
            return built(record)
    return None
