"""Write the lock of a recipe: every package with its hash, sources, patches and flags.

Locked packages keep their versions, and a lock that still matches is not rewritten. After
`hvdenv build --locked`, run `hvdenv lock` again to record the compiler and MPI of the build."""

import argparse
from collections.abc import Sequence

from hvdenv.base.errors import LockError, NetworkError, RecipeError, StepError, UsageError
from hvdenv.base.places import find_places
from hvdenv.base.reading import RESULT, read_json
from hvdenv.building.resolver import PythonPlatform, Resolver, elsewhere, here
from hvdenv.cli.options import add, add_options, give, read_request
from hvdenv.environments import prefix_lock
from hvdenv.environments.prefix_lock import Scratch
from hvdenv.locks import compare, condalock, lockfile, pypi
from hvdenv.locks.compare import built_with
from hvdenv.locks.lockfile import CONDA, PLATFORMS, PYPI, File, Inputs, Locked, bind
from hvdenv.locks.packages import canonicalize_name, parse_requirement
from hvdenv.plans.resolution import Resolution
from hvdenv.session.lock import RecipeLocks, make_resolution, recipe_locks, run_steps
from hvdenv.session.output import report
from hvdenv.session.prepare import Prepared, prepare
from hvdenv.session.request import Request

EXAMPLES = """\
examples:
  hvdenv lock local                      resolve, and write lockfiles/local/py3.11-linux-x86_64
  hvdenv lock local --check              exit with 4 if the lock no longer matches
  hvdenv lock local --update numpy       update one package, keep all others
  hvdenv lock local --upgrade            resolve everything again
  hvdenv lock neuron --platform linux-x86_64 --lockfiles ~/locks      on any machine
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe", "python", "prefix", "json", "loudness", "lockfiles", "trust")
    what = parser.add_mutually_exclusive_group()
    add(what, "--check", "compare only; exit with 4 if the lock does not match")
    add(what, "--update NAME", "update this package to its newest version")
    add(what, "--upgrade", "update all packages")
    add(
        parser,
        "--platform PLATFORM",
        "lock for another machine, such as linux-aarch64",
        choices=PLATFORMS,
    )


def run(arguments: argparse.Namespace) -> int:
    request = read_request(arguments, anywhere=True)
    prepared = _prepare(request, arguments.platform)
    locks = recipe_locks(request, prepared)
    try:
        present = locks.find()
    except (LockError, RecipeError) as error:
        if arguments.check or arguments.update:
            raise
        report(f"{error}\nwriting a new lock from what is available now")
        present = None
    if arguments.check:
        if present is None:
            raise locks.missing()
        return _check(arguments, locks, present)
    _refuse_unknown(arguments.update, present)
    moves = arguments.update or arguments.upgrade
    if present and not moves and compare.packages_still_fit(present, locks.inputs, locks.cpu):
        locked = present._replace(lock=present.lock._replace(inputs=locks.inputs, built=None))
    else:
        locked = _resolve(arguments, prepared, locks, present)
    locked = _with_build(locked, present, prepared)
    changed = lockfile.write_lock(locked)
    state = "built" if locked.lock.built else "resolved, not built yet"
    give(
        arguments,
        {"directory": str(locked.folder), "changed": changed},
        f"{'written' if changed else 'nothing to do'}: {locked.folder} ({state})",
    )
    return 0


def _prepare(request: Request, platform: str | None) -> Prepared:
    prepared = prepare(request, thorough=False)
    if not platform:
        return prepared
    machine = platform.partition("-")[2]
    return prepared._replace(facts=prepared.facts._replace(machine=machine, origin="declared"))


def _check(arguments: argparse.Namespace, locks: RecipeLocks, present: Locked) -> int:
    changes = [str(each) for each in compare.changed(present.lock.inputs, locks.inputs)]
    problems = [each for each in locks.problems(present) if each not in changes]
    give(
        arguments,
        {"directory": str(present.folder), "changed": changes, "unsatisfied": problems},
        f"recipe since the lock: {'changed' if changes else 'unchanged'}",
        *(f"  {line}" for line in changes),
        f"lock: {'does not satisfy' if changes or problems else 'satisfies'} the recipe",
        *(f"  {line}" for line in problems),
    )
    return LockError.exit_code if changes or problems else 0


def _refuse_unknown(name: str | None, present: Locked | None) -> None:
    known = {each.name for each in pypi.packages(present)} if present else set()
    if present and CONDA in present.texts:
        known |= {each.name for each in condalock.packages(present).packages}
    if name and not {name, canonicalize_name(name)} & known:
        raise UsageError(
            f"--update: {name} is not in the lock",
            where=str(present.folder) if present else "",
            remedy="`hvdenv lock` without --update writes one with all that the recipe needs",
        )


def _resolve(
    arguments: argparse.Namespace, prepared: Prepared, locks: RecipeLocks, present: Locked | None
) -> Locked:
    """A new lock from indexes and channels; it keeps versions of the present one if it can."""
    inputs, kept = locks.inputs, None if arguments.upgrade else present
    texts: dict[File, str] = {}
    with prefix_lock.scratch_folder(find_places().scratch, "resolving") as work:
        maker = make_resolution(prepared, work.path)
        ways = _ways(prepared, maker, work) if inputs.packages else []
        if inputs.conda:
            texts[CONDA] = _conda(arguments, maker, kept, work)
        if inputs.packages:
            texts[PYPI] = _pypi(arguments, ways, maker, kept, texts.get(CONDA), work)
    found = bind(lockfile.lock_folder(locks.root, inputs), inputs, texts)
    if problems := compare.package_problems(found, inputs):
        raise LockError(
            "uv or conda resolved versions that the recipe does not allow",
            where=inputs.name,
            detail="\n".join(problems),
            remedy="check pip's configuration for constraints (pip config list), and the recipe's channels",
        )
    if cuda := compare.cuda_builds(pypi.packages(found), locks.cpu):
        raise _no_cpu_builds(prepared, inputs, cuda)
    return found


def _no_cpu_builds(prepared: Prepared, inputs: Inputs, cuda: Sequence[str]) -> LockError:
    frameworks = prepared.resolved.recipe.frameworks
    indexes = {name: each.cpu_index for name, each in frameworks.items() if each.cpu_index}
    keys = " and ".join(f"frameworks.{name}.cpu_index" for name in indexes)
    return LockError(
        "the recipe asks for CPU builds, but uv found only CUDA builds; no lock was written",
        where=inputs.name,
        detail="\n".join(cuda),
        remedy=f"lock where {' and '.join(indexes.values())} can be reached, or name another place"
        " that has CPU builds: PIP_EXTRA_INDEX_URL=URL or PIP_FIND_LINKS=DIR\n"
        f"if you want CUDA builds, use a recipe without {keys}",
    )


def _conda(
    arguments: argparse.Namespace, maker: Resolution, kept: Locked | None, work: Scratch
) -> str:
    """Solve for the conda packages; locked versions are preferred."""
    before = condalock.packages(kept) if kept and CONDA in kept.texts else None
    prefer = condalock.preferring(before, arguments.update) if before else {}
    run_steps(read_request(arguments), maker.solution(prefer), work)
    records = read_json(maker.solved, RESULT)
    return condalock.render(records, maker.conda_spec)


def _pypi(
    arguments: argparse.Namespace,
    ways: Sequence[Resolver],
    maker: Resolution,
    kept: Locked | None,
    conda: str | None,
    work: Scratch,
) -> str:
    """Resolve for all machines of the platform; if that fails, for this one."""
    moved = canonicalize_name(arguments.update or "")
    locked = pypi.packages(kept) if kept else ()
    pins = {each.name: each.version for each in locked if each.name != moved}
    apart = _provided(arguments, maker, conda, work)
    for number, way in enumerate(ways, 1):
        try:
            found = way.lock(maker.requirements, apart, pins, strict=bool(moved))
            break
        except (LockError, StepError) as error:
            if number == len(ways) or isinstance(error, NetworkError):
                raise
            report(f"{error.message}; trying another way")
    python = ".".join(maker.python.version.split(".")[:2])
    return pypi.render(pypi.as_before(found, locked), python, maker.facts.machine)


def _ways(prepared: Prepared, maker: Resolution, work: Scratch) -> list[Resolver]:
    """First for all machines of the platform, from wheels; then for this machine.

    Raises:
        UsageError: it can be resolved neither here nor elsewhere.
    """
    version, facts = maker.python.version, prepared.facts
    common = PythonPlatform(version, facts.machine, maker.glibc)
    resolver = Resolver(
        sources=maker.sources,
        work=work.path,
        cache=find_places().cache / "uv",
        runner=work.runner,
        python=elsewhere(maker),
        machine=common,
        note=report,
    )
    ways = [resolver] if maker.portable else []
    if facts.origin == "observed" and maker.recipe.python.provider != "conda":
        own = common._replace(glibc=facts.glibc or maker.glibc)
        ways.append(resolver._replace(python=here(version), builds=True, machine=own))
    if not ways:
        raise UsageError(
            "the packages of this recipe can only be resolved on its own machines",
            where=prepared.resolved.file,
            remedy="run `hvdenv lock` there",
        )
    return ways


def _provided(
    arguments: argparse.Namespace, maker: Resolution, conda: str | None, work: Scratch
) -> set[str]:
    """Packages that conda or the site provides, and pip; these are not locked as Python packages."""
    if conda:
        versions = condalock.for_pip(condalock.parse(conda).packages)
        return {"pip"} | compare.fitting(versions, maker.requirements)
    if maker.portable:
        return {"pip"}
    printed = run_steps(read_request(arguments), maker.site(), work)
    requested = {canonicalize_name(parse_requirement(each).name) for each in maker.requirements}
    return pypi.listed(printed).keys() - requested


def _with_build(locked: Locked, present: Locked | None, prepared: Prepared) -> Locked:
    """The lock with what a build of it was made with, if it was built."""
    for record in prepared.environment.records().values():
        if record.lock and record.lock.digest == locked.digest:
            return locked._replace(lock=locked.lock._replace(built=built_with(record)))
    built = present.lock.built if present and present.digest == locked.digest else None
    return locked._replace(lock=locked.lock._replace(built=built))
