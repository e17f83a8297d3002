"""Which environments there are, in HVDENV_HOME or registered, when they were last used, and their space.

hvdenv notes each use in a small file under HVDENV_HOME, since a complete generation is never
changed and may belong to another user. When activate.sh is sourced without hvdenv, only the
access time of that file is known, which some file systems do not keep. The size of a complete
generation is in its record; only unfinished ones and caches are walked.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.base.errors import StepError, UsageError
from hvdenv.base.places import Places, environment_name, make_folder, write_json, write_text
from hvdenv.base.reading import STATE, read_json
from hvdenv.base.runner import Runner
from hvdenv.environments import generations
from hvdenv.environments.generations import MARKER, RECORD, Environment, at, timestamp
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.observe import quota, space
from hvdenv.sites import workspace

State = Literal["complete", "incomplete", "broken", "missing"]


class ListedEnvironment(NamedTuple):
    """An environment as ``hvdenv envs`` lists it.

    Attributes:
        state: ``complete``; ``incomplete``: a build or removal never finished; ``broken``: the prefix points to
            nothing complete; ``missing``: nothing is left of it.
        created: when the active generation was finished, in UTC; or empty.
        generations: the complete ones, newest first.
    """

    recipe: str
    variants: tuple[str, ...]
    prefix: str
    state: State
    created: str
    bytes: int
    files: int
    generations: tuple[str, ...]

    @property
    def environment(self) -> Environment:
        return at(Path(self.prefix))


def register(
    places: Places, environment: Environment, recipe: str, variants: Iterable[str]
) -> None:
    """Register an environment, so that list_environments() finds it anywhere.

    Raises:
        StepError: HVDENV_HOME cannot be written.
    """
    make_folder(places.registry)
    entry = {"prefix": str(environment.prefix), "recipe": recipe, "variants": sorted(variants)}
    write_json(_registered(places, environment), entry)


def forget(places: Places, environment: Environment) -> bool:
    """Undo register(); False if the environment was not registered."""
    try:
        _registered(places, environment).unlink()
    except FileNotFoundError:
        return False
    return True


def list_environments(places: Places) -> list[ListedEnvironment]:
    """All environments under HVDENV_HOME, and registered ones elsewhere.

    Unreadable entries of the registry are skipped; the next build of the environment rewrites
    its entry.
    """
    known = dict(_in_home(places))
    for path in sorted(places.registry.glob("*.json")):
        try:
            entry = read_json(path, STATE)
            environment = at(Path(entry["prefix"]))
            known[environment] = (str(entry["recipe"]), tuple(map(str, entry["variants"])))
        except (OSError, ValueError, TypeError, KeyError, UsageError):
            continue
    listed = [_list(environment, *names) for environment, names in known.items()]
    return sorted(listed, key=lambda one: (one.recipe, one.variants, one.prefix))


def find(places: Places, name: str) -> Environment:
    """An environment by its name (``local+torch``) or, with a slash, by its prefix.

    Raises:
        UsageError: the name is unknown or ambiguous.
    """
    if "/" in name:
        return at(Path(name))
    known = list_environments(places)
    named = [each for each in known if environment_name(each.recipe, each.variants) == name]
    # Those in directories that are gone are only listed.
    named = [each for each in named if Path(each.prefix).exists()] or named
    if len(named) != 1:
        raise UsageError(
            f"{len(named) or 'no'} environments are named {name}",
            detail="\n".join(each.prefix for each in named),
            remedy="use its prefix instead of its name; list them with `hvdenv envs`"
            if named
            else "list environments with `hvdenv envs`, or build one: hvdenv build RECIPE",
        )
    return named[0].environment


def _in_home(places: Places) -> Iterator[tuple[Environment, tuple[str, tuple[str, ...]]]]:
    """Environments in the default directory, by the names that environment_name() gives."""
    for store in places.envs.glob(".*.hvdenv"):
        name = store.name[1 : -len(".hvdenv")]
        recipe, *variants = name.split("+")
        yield at(places.envs / name), (recipe, tuple(variants))


def _list(environment: Environment, recipe: str, variants: tuple[str, ...]) -> ListedEnvironment:
    records = environment.records()
    record = records.get(environment.pointed(), GenerationRecord())
    state: State = "missing"
    if record.created:
        state = "complete"
    elif os.path.lexists(environment.prefix):
        state = "broken"
    elif environment.identities() or environment.remains():
        state = "incomplete"
    return ListedEnvironment(
        recipe=record.recipe or recipe,
        variants=record.variants if record.recipe else variants,
        prefix=str(environment.prefix),
        state=state,
        created=record.created,
        bytes=record.bytes,
        files=record.files,
        generations=tuple(records),
    )


def _registered(places: Places, environment: Environment) -> Path:
    return places.registry / f"{_short_hash(environment.prefix)}.json"


def _short_hash(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


class LastUsed(NamedTuple):
    """The latest known use.

    Attributes:
        when: in UTC, in the format of records; empty if unknown.
    """

    when: str = ""
    how: Literal["", "hvdenv", "access time"] = ""


def note_use(places: Places, environment: Path) -> None:
    """Note that an environment, by its prefix or generation, is used now.

    Does nothing if hvdenv did not build it or the note cannot be written.
    """
    generation = Path(os.path.realpath(environment))
    if not (generation / MARKER).is_file():
        return
    path = _note_of(places, generation)
    try:
        make_folder(path.parent)
        write_text(path, f"{generation}\n")
    except StepError:
        return


def forget_use(places: Places, generation: Path) -> None:
    _note_of(places, generation).unlink(missing_ok=True)


def last_use(places: Places, generation: Path) -> LastUsed:
    """When a generation was last used."""
    noted = _time(_note_of(places, generation), "st_mtime")
    activate = generation / "activate.sh"
    read = _time(activate, "st_atime")
    # The build itself reads it before it writes the record.
    if read > max(noted, _time(generation / RECORD, "st_mtime"), _time(activate, "st_ctime")):
        return LastUsed(timestamp(read), "access time")
    return LastUsed(timestamp(noted), "hvdenv") if noted else LastUsed()


def keeps_access_times(folder: Path) -> bool:
    """Whether reading a file there leaves a trace."""
    try:
        return not os.statvfs(folder).f_flag & os.ST_NOATIME
    except OSError:
        return False


def _note_of(places: Places, generation: Path) -> Path:
    return places.used / _short_hash(Path(os.path.realpath(generation)))


def _time(path: Path, which: str) -> float:
    try:
        return float(getattr(path.stat(), which))
    except OSError:
        return 0.0


GenerationState = Literal["active", "complete", "unfinished", "damaged"]


class Size(NamedTuple):
    """Bytes of files, and the number of files and links."""

    bytes: int
    files: int


class Generation(NamedTuple):
    """One generation of an environment.

    Attributes:
        state: ``damaged`` has no readable record; ``unfinished`` is a build or a removal.
        created: when it was finished, or last worked on; in UTC.
        used_by: how that is known; see LastUsed.
    """

    generation: str
    state: GenerationState
    created: str
    bytes: int
    files: int
    used: str
    used_by: str
    added: tuple[str, ...] = ()

    @property
    def since(self) -> str:
        """Time since when it is unused."""
        return max(self.created, self.used)


class CacheSize(NamedTuple):
    name: str
    path: str
    bytes: int
    files: int


class Room(NamedTuple):
    """Space left on the file system of a directory, in bytes and inodes; None if unknown."""

    path: str
    disk_free: int | None
    inodes_free: int | None
    quota_free: int | None


def measure(folder: Path) -> Size:
    """Size of what is in a directory; links are not followed, and unreadable directories are left out."""
    size = files = 0
    for where, folders, names in os.walk(folder):
        paths = [os.path.join(where, name) for name in (*folders, *names)]
        for path in paths:
            with suppress(OSError):
                found = os.lstat(path)
                files += not stat.S_ISDIR(found.st_mode)
                size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return Size(size, files)


def list_generations(environment: Environment, places: Places) -> tuple[Generation, ...]:
    records, active = environment.records(), environment.active()
    found = []
    for identity in (*environment.identities(), *environment.remains()):
        folder = environment.generation(identity)
        used, added = last_use(places, folder), ()
        if record := records.get(identity):
            state: GenerationState = "active" if identity == active else "complete"
            created, size = record.created, Size(record.bytes, record.files)
            added = tuple(record.additions.get("requirements", ()))
        else:
            is_damaged = identity in environment.identities() and not environment.begun(identity)
            state = "damaged" if is_damaged else "unfinished"
            created, size = _last_change(folder), measure(folder)
        found.append(Generation(identity, state, created, *size, used.when, used.how, added))
    return tuple(sorted(found, key=lambda one: (one.created, one.generation), reverse=True))


def _last_change(folder: Path) -> str:
    """When a build last changed something in the directory of a generation."""
    try:
        latest = max(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder))
    except (OSError, ValueError):
        return ""
    return generations.timestamp(latest)


def list_caches(places: Places) -> tuple[CacheSize, ...]:
    """The caches under HVDENV_HOME, not those of pip and other programs."""
    folders = sorted(each for each in places.cache.glob("*") if each.is_dir())
    return tuple(CacheSize(each.name, str(each), *measure(each)) for each in folders)


def free_space(folders: Iterable[Path], runner: Runner) -> tuple[Room, ...]:
    """Space left on the file systems of some directories, each once."""
    devices: dict[int, Path] = {}
    for folder in folders:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        devices.setdefault(folder.stat().st_dev, folder)
    left = quota(runner) if devices else None
    return tuple(Room(str(each), *space(each), left) for each in devices.values())


def space_warnings(environment: Environment, runner: Runner) -> tuple[str, ...]:
    """Policies that will delete files of an environment without the user."""
    active = environment.active()
    if not active:
        return ()
    resolved = generations.read_record(environment.record(active)).resolved
    stated, folder = resolved.get("places", {}), environment.prefix.parent
    found = []
    elsewhere = stated.get("environments") not in (None, str(folder))
    if stated.get("expires_days") and not elsewhere:
        found.append(
            f"each file here is deleted {stated['expires_days']} days after its last use;"
            " `hvdenv verify` reports missing files"
        )
    if stated.get("workspace"):
        left = workspace.remaining(folder, runner)
        found += [f"its workspace is deleted in {left}; extend it with ws_extend"] if left else []
    return tuple(found)
