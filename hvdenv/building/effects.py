"""What hvdenv itself does in a step, after its commands have run.

An effect takes the state of the build, the step and the output of its commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from hvdenv.base.command import OWN_PYTHON, Command
from hvdenv.base.errors import HvdenvError, StepError
from hvdenv.base.masking import holds_secret, mask
from hvdenv.base.places import make_folder, reporting, sync_tree
from hvdenv.base.reading import LOCK, RESULT, WHEEL, hash_file, read_json, read_text
from hvdenv.base.runner import Runner
from hvdenv.base.schema import Table, encode
from hvdenv.building import wheelcache
from hvdenv.building.resolver import PythonPlatform, Resolver, all_hashes, here
from hvdenv.building.state import LOGS, Done, Record, State
from hvdenv.environments import generations, manifest
from hvdenv.environments.installation import is_version, with_modules
from hvdenv.environments.installation import recorded as installed
from hvdenv.environments.installed import damaged_files
from hvdenv.locks import compare, pypi
from hvdenv.locks.record import Additions, GenerationRecord, LockUse
from hvdenv.model.observe import ask_interpreter
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import site_python
from hvdenv.plans.step import Step
from hvdenv.plans.steps import UV_PYTHON
from hvdenv.sites import module_shell
from hvdenv.sites.modules import Loaded
from hvdenv.verification import inspection
from hvdenv.verification.setup import Setup


def try_modules(recipe: Recipe, runner: Runner) -> Loaded | None:
    """What the modules of a recipe set for the build; None if it has none.

    They are loaded before the build starts, since most failures show here.

    Raises:
        IncompatibleError: this machine has no module system.
        StepError: a module cannot be loaded, or they provide another Python than the recipe says.
    """
    if recipe.modules is None:
        return None
    loaded = module_shell.load(recipe.modules, "build", runner)
    provided = site_python(recipe)
    if recipe.python.provider == "conda" or not provided:
        return loaded
    runner = runner.changed(loaded.set, loaded.unset)
    named = Command((), derived=(("PYTHON", provided.path),))
    path, stated = runner.environment(named)["PYTHON"], recipe.python.version
    found = ask_interpreter(path, runner)
    if found is None:
        raise StepError(
            f"{path} does not run with the modules of the recipe loaded",
            where="python",
            remedy="add a module that provides Python to modules.load, or name an existing"
            " environment of the site with python.prefix",
        )
    if not SpecifierSet(stated).contains(found.version):
        raise StepError(
            f"{path} is Python {found.version} with the modules of the recipe loaded;"
            f" the recipe says {stated}",
            where="python.version",
            remedy="name the modules or the environment that provide that version; to accept this"
            f" one: --set 'python.version=\"=={found.version}\"'",
        )
    return loaded


def load_modules(state: State, step: Step, _: str) -> Done:
    """Load the modules of the plan; later steps see what they set."""
    build = state.request.modules
    assert step.modules and build
    run = module_shell.load(step.modules, "run", state.runner)
    state.runner = state.runner.changed(build.set, build.unset)
    loaded = {"run": _recorded(run), "build": _recorded(build)}
    state.refuse_drift(GenerationRecord(modules=loaded))
    return Done(", ".join(build.loaded), loaded)


def _recorded(loaded: Loaded) -> Table:
    """What modules set, without secrets: other users can read the records of an environment."""
    kept = {name: value for name, value in loaded.set.items() if not holds_secret(name, value)}
    table: Table = encode(loaded._replace(set=kept))
    return table


def resolve(state: State, step: Step, output: str) -> Done:
    """Find the files of the packages that are requested.

    Raises:
        StepError: there are none that fit together, or an index cannot be read.
        LockError: a package has no hash.
    """
    asked, plan, facts = step.requested, state.plan, state.request.facts
    assert asked
    present = pypi.listed(output)
    resolver = Resolver(
        sources=asked.sources,
        work=make_folder(plan.generation / "build" / "resolving"),
        cache=state.places.cache / "uv",
        runner=state.runner,
        python=here(plan.python.version),
        builds=True,
        machine=PythonPlatform(plan.python.version, facts.machine, facts.glibc or "2.17"),
        where="packages",
        log=state.log,
        note=state.progress.note,
    )
    found = resolver.lock(
        asked.requirements,
        {"pip"} | compare.fitting(present, asked.requirements),
        asked.pins,
        *(("--no-deps",) if asked.alone else ()),
        strict=True,
    )
    for line in compare.cuda_builds(found, asked.cpu):
        state.progress.note(
            f"no CPU build was found: {line}, several GB; to avoid that, interrupt and point pip at a"
            " CPU build (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS)"
        )
    with reporting(asked.listed, inside=True):
        # An old pip knows fewer platforms than uv, and installs another file of the same version.
        old = Version(plan.python.version).release[:2] < UV_PYTHON
        hashes = all_hashes(read_text(resolver.pylock, LOCK)) if old else {}
        asked.listed.write_text(pypi.requirements(found, hashes))
    return Done(f"{len(found)} packages", {"packages": [each._asdict() for each in found]})


def record_framework(_: State, step: Step, __: str) -> Done:
    """Note the wheel that a framework was installed from."""
    assert step.wheel
    (wheel,) = step.wheel.directory.glob("*.whl")
    name, version = parse_wheel_filename(wheel.name)[:2]
    sha256 = hash_file(wheel, WHEEL)[0]
    package = {"name": name, "version": str(version), "url": wheel.as_uri(), "sha256": sha256}
    return Done(data={"packages": [package]})


def look_up(state: State, step: Step, output: str) -> Done:
    """Take a wheel that was made from the same inputs from a cache, if one has it.

    Raises:
        StepError: Horovod's frameworks are not those that the recipe says.
        LockError: they differ from those of the lock.
    """
    assert step.wheel
    stack = _last_line(output)
    inputs = {**step.wheel.inputs, "stack": stack}
    if step.effect == "lookup":  # Horovod's
        _compare_stack(state, stack)
        state.refuse_drift(state.known()._replace(stack=inputs))
    taken = wheelcache.take(state.caches, inputs, make_folder(step.wheel.directory))
    for note in taken.notes:
        state.progress.note(note)
    if taken.entry is None:
        return Done("no such wheel in the cache", {"inputs": inputs})
    recorded = {"inputs": inputs, "wheel": str(taken.entry)}
    return Done(f"a wheel of this stack is in {taken.entry.parents[1]}", recorded)


def _last_line(output: str) -> Record:
    """The JSON document that the last command printed."""
    document: Record = json.loads(output.strip().splitlines()[-1])
    return document


def _compare_stack(state: State, stack: Record) -> None:
    """Check that the frameworks are those that rules and patches were chosen for.

    Raises:
        StepError: one is missing, or has another version.
    """
    for name in state.plan.versions.keys() - {"horovod"}:
        stated, found = state.plan.versions[name], stack["frameworks"].get(name)
        if found is None and not _can_import(state, name):
            raise StepError(
                f"the environment has no {name}; the recipe says {stated}",
                where=f"frameworks.{name}",
                remedy="add the module that provides it to modules.load; with"
                " python.system_site_packages the environment sees its packages",
            )
        if found and not found["version"]:
            raise StepError(
                f"the metadata of {name} has no version: files of it are missing",
                where=f"frameworks.{name}",
                remedy="build again, which installs everything again",
            )
        if found and not is_version(found["version"], stated):
            raise StepError(
                f"{name} {found['version']} is installed; the recipe says {stated}",
                where=f"frameworks.{name}.version",
                remedy="name the module that provides that version; to accept this one:"
                f" --set 'frameworks.{name}.version=\"{found['version'].partition('+')[0]}\"'",
            )


def _can_import(state: State, name: str) -> bool:
    """Whether there is a module of this name; some vendors' packages have other names."""
    ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    python = str(state.plan.environment / "bin" / "python")
    return bool(state.runner.run(Command((python, "-c", ask))))


def keep_framework(state: State, step: Step, _: str) -> Done:
    """Store a framework's wheel in the user's own cache."""
    assert step.wheel
    (wheel,) = step.wheel.directory.glob("*.whl")
    _store(state, state.recorded[step.spared_by]["inputs"], wheel)
    return Done()


def keep_horovod(state: State, _: Step, output: str) -> Done:
    """Store the wheel in the user's own cache, after the commands have inspected it."""
    wheel, looked_up = state.plan.wheel, state.recorded["stack"]
    inspected = {**_last_line(output), "sha256": hash_file(wheel, WHEEL)[0]}
    if not looked_up.get("wheel"):
        _store(state, looked_up["inputs"], wheel)
    names = ", ".join(
        f"{name} {each['built_with']}" for name, each in sorted(inspected["frameworks"].items())
    )
    return Done(f"extensions for {names}; {inspected['bytes'] / 1e6:.1f} MB", inspected)


def _store(state: State, inputs: Record, wheel: Path) -> None:
    """Store a wheel for later builds; if that fails, this build continues without."""
    own, most = state.caches[0], state.request.wheels.own_gb * 1e9
    try:
        wheelcache.store(own, inputs, wheel)
        wheelcache.prune(own, largest=most, spared=wheelcache.key(inputs))
    except StepError as error:
        state.progress.note(f"the wheel is not kept: {error.where}: {error.message}")


def tidy(state: State, _: Step, __: str) -> Done:
    """Remove the build directory, and write permission for everybody."""
    generation = state.plan.generation
    shutil.rmtree(generation / "build", ignore_errors=True)
    for folder, folders, files in os.walk(generation):
        for path in (os.path.join(folder, name) for name in (*folders, *files)):
            mode = os.lstat(path).st_mode
            # Everybody can write uv's lock file and files of some conda packages.
            if mode & stat.S_IWOTH and not stat.S_ISLNK(mode):
                with contextlib.suppress(OSError):  # a hard link to a file of another user
                    os.chmod(path, stat.S_IMODE(mode) & ~stat.S_IWOTH)
    return Done()


def _forget_unpacked(state: State) -> None:
    """Empty the cache of uv: a power cut may have left empty files in it."""
    clean = (
        OWN_PYTHON,
        "-m",
        "uv",
        "cache",
        "clean",
        "--cache-dir",
        str(state.places.cache / "uv"),
    )
    # uv waits for other processes before it empties its cache.
    state.plain_runner.run(Command(clean, timeout=60.0))


def write_manifest(state: State, _: Step, __: str) -> Done:
    plan = state.plan
    written = manifest.write(plan.generation, (LOGS, generations.RECORD, generations.MARKER))
    # The site's own environment is not judged here: it may be as its makers want it.
    own = plan.environment.is_relative_to(plan.generation)
    files = written.files
    hashes = {str(plan.generation / path): each.sha256 for path, each in files.items()}
    problems = []
    for folder in plan.environment.glob("lib/python3.*/site-packages") if own else ():
        with reporting(folder, "read", inside=True):
            problems += damaged_files(folder, hashes)
    if problems:
        # They may be damaged where uv unpacks them from.
        _forget_unpacked(state)
        raise StepError(
            "packages in the environment are not whole",
            where=str(plan.environment),
            detail="\n".join(problems[:20]),
            remedy="build again with --rebuild, which installs every package again\n"
            "a package that is broken again is broken at its source",
        )
    size = sum(each.size for each in files.values())
    return Done(
        f"{len(written.entries)} files, {size / 1e9:.1f} GB",
        {"digest": written.digest, "files": len(written.entries), "bytes": size},
    )


_OBSERVE_SECONDS = 60.0


def write_record(state: State, _: Step, __: str) -> Done:
    """The effect of the last step: write the record, and point the prefix at the generation."""
    record = _contents(state)
    generation = state.plan.generation
    with reporting(generation, inside=True):
        sync_tree(generation)
    state.held.check()  # the flush may take minutes
    identity = generation.name
    generations.write_record(state.environment.record(identity), record)
    generations.switch(state.environment, identity)
    return Done(str(state.environment.prefix))


def installed_packages(report: Path) -> list[dict[str, str]]:
    """Name, version, address and hash of each conda package in a report."""
    return [{**each, "url": mask(each["url"])} for each in read_json(report, RESULT)]


def _contents(state: State) -> GenerationRecord:
    plan, listed, recorded = state.plan, state.recorded["manifest"], state.recorded
    own = plan.environment.is_relative_to(plan.generation)
    packages = [package for step in recorded.values() for package in step.get("packages", ())]
    if plan.locked:
        # No installer wrote a report of these.
        packages += [each._asdict() for each in pypi.packages(plan.locked)]
    record = state.known()._replace(
        recipe=plan.recipe,
        variants=tuple(plan.variants),
        prefix=str(state.environment.prefix),
        generation=plan.generation.name,
        created=generations.timestamp(),
        plan_digest=plan.digest,
        manifest_digest=listed["digest"],
        files=listed["files"],
        bytes=listed["bytes"],
        variables=dict(plan.variables),
        resolved=dict(state.request.resolved),
        findings=tuple(dict(each) for each in state.request.findings),
        environment=os.path.relpath(plan.environment, plan.generation)
        if own
        else str(plan.environment),
        stack=recorded.get("stack", {}).get("inputs", {}),
        wheel=dict(recorded.get("inspection", {})),
        packages=tuple(packages),
        additions=plan.additions or Additions(),
    )
    record = record._replace(observed=_observed(state, record))
    if "stack" not in recorded:  # Horovod is the site's: nothing was compared before
        state.refuse_drift(record)
    return record._replace(lock=LockUse(plan.locked.digest) if plan.locked else None)


def _observed(state: State, record: GenerationRecord) -> Table | None:
    """What verify will find in the environment, to report later what has changed."""
    # Not the runner of the steps: that one has the modules for the build.
    runner = state.plain_runner
    loaded = state.recorded.get("modules", {}).get("run", {})
    try:
        found = installed(state.plan.generation, record)
        found = with_modules(found, loaded["set"]) if loaded else found
        setup = Setup(found, runner)
        mpi, _ = inspection.host_mpi(setup, _OBSERVE_SECONDS)
        observed: Table = encode(inspection.observe(setup, _OBSERVE_SECONDS, mpi))
        return observed
    except HvdenvError as error:
        state.progress.note(f"verify cannot report what has changed since: {error.message}")
        return None
