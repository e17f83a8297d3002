"""Which environments there are, in HVDENV_HOME or registered, and the size of their generations."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.base.errors import UsageError
from hvdenv.base.places import Places, environment_name, make_folder, write_json
from hvdenv.base.reading import STATE, read_json
from hvdenv.environments.generations import Environment, at
from hvdenv.locks.record import GenerationRecord

State = Literal["complete", "incomplete", "broken", "missing"]


class ListedEnvironment(NamedTuple):
    """An environment as ``hvdenv envs`` lists it.

    Attributes:
        state: ``complete``; ``incomplete``: a build or removal never finished; ``broken``: the prefix points to
            nothing complete; ``missing``: nothing is left of it.
        created: when the active generation was finished, in UTC; or empty.
    """

    recipe: str
    variants: tuple[str, ...]
    prefix: str
    state: State
    created: str
    bytes: int
    files: int

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
    record = environment.records().get(environment.pointed(), GenerationRecord())
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
    )


def _registered(places: Places, environment: Environment) -> Path:
    digest = hashlib.sha256(os.fsencode(environment.prefix)).hexdigest()
    return places.registry / f"{digest[:16]}.json"


GenerationState = Literal["active", "complete", "unfinished", "damaged"]


class Generation(NamedTuple):
    """One generation of an environment.

    Attributes:
        state: ``damaged`` has no readable record; ``unfinished`` is a build or a removal.
        created: when it was finished, in UTC; empty for others.
        bytes, files: of a complete one, from its record.
    """

    generation: str
    state: GenerationState
    created: str
    bytes: int = 0
    files: int = 0
    added: tuple[str, ...] = ()


def list_generations(environment: Environment) -> tuple[Generation, ...]:
    records, active = environment.records(), environment.active()
    found = []
    for identity in (*environment.identities(), *environment.remains()):
        state: GenerationState
        if record := records.get(identity):
            state = "active" if identity == active else "complete"
            added = record.additions.requirements
            one = Generation(identity, state, record.created, record.bytes, record.files, added)
        else:
            is_damaged = identity in environment.identities() and not environment.begun(identity)
            state = "damaged" if is_damaged else "unfinished"
            one = Generation(identity, state, "")
        found.append(one)
    return tuple(sorted(found, key=lambda one: (one.created, one.generation), reverse=True))
