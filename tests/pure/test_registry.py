"""Which environments there are, what they take, and what goes by age."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from hvdenv.base.places import Places, find_places
from hvdenv.environments import generations, prefix_lock, prune, registry
from hvdenv.environments.generations import Environment, at
from tests.support.commands import Hvdenv
from tests.support.environments import ONE, THREE, TWO, build, build_active, local
from tests.support.files import write


def listing(places: Places) -> list[tuple[str, tuple[str, ...], str, str]]:
    return [
        (one.recipe, one.variants, Path(one.prefix).name, one.state)
        for one in registry.list_environments(places)
    ]


def test_environments_are_listed_wherever_they_lie(tmp_path: Path) -> None:
    places = Places(tmp_path / "home")
    assert registry.list_environments(places) == []
    places.envs.mkdir(parents=True)
    inside = at(places.envs / "local+torch+x")
    begun = at(places.envs / "local")
    outside = at(tmp_path / "mine")
    for environment in (inside, begun, outside):
        generations.claim(environment)
    registry.register(places, outside, "local", ["b", "a"])
    generations.create(begun, ONE)
    build(outside, ONE, recipe="local", variants=["a", "b"], bytes=7, files=2)
    build_active(outside, TWO, recipe="local", variants=["a", "b"], bytes=9, files=3)
    build_active(inside, ONE)
    (places.envs / "foreign").mkdir()

    assert listing(places) == [
        ("local", (), "local", "incomplete"),
        ("local", ("a", "b"), "mine", "complete"),
        ("local", ("torch", "x"), "local+torch+x", "complete"),
    ]
    mine = registry.list_environments(places)[1]
    assert (mine.bytes, mine.files) == (9, 3)
    assert mine.created == generations.read_record(outside.record(TWO)).created

    outside.record(TWO).write_text("{")
    assert listing(places)[1][3] == "broken"
    prune.remove(outside)
    assert listing(places)[1][3] == "missing"
    registry.forget(places, outside)
    registry.forget(places, outside)
    assert len(listing(places)) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"prefix": 1}', b'{"prefix": "/"}', b'"x"']
)
def test_a_damaged_entry_of_the_registry_hides_no_other(tmp_path: Path, content: bytes) -> None:
    places = Places(tmp_path)
    registry.register(places, at(tmp_path / "env"), "local", [])
    (places.registry / "0123456789abcdef.json").write_bytes(content)
    assert listing(places) == [("local", (), "env", "missing")]


def ago(days: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(days=days)).isoformat(timespec="microseconds")


@pytest.fixture
def environment() -> Environment:
    """`local`: ONE of 200 days ago, TWO of 100, THREE active."""
    environment = local()
    for identity, days in ((ONE, 200), (TWO, 100), (THREE, 1)):
        fields = {"created": ago(days), "recipe": "local", "variants": [], "bytes": 10, "files": 2}
        build(environment, identity, **fields)
        (environment.generation(identity) / "activate.sh").write_text("")
    generations.switch(environment, THREE)
    return environment


def listed(environment: Environment) -> dict[str, registry.Generation]:
    found = registry.list_generations(environment)
    return {each.generation: each for each in found}


def test_records_say_what_complete_ones_take(environment: Environment) -> None:
    write(generations.create(environment, "4" * 12) / "half/file", "12345")
    environment.record(build(environment, "5" * 12)).write_text("{")
    found = listed(environment)
    states = {"1": "complete", "2": "complete", "3": "active", "4": "unfinished", "5": "damaged"}
    assert {name[0]: each.state for name, each in found.items()} == states
    assert [(found[each].bytes, found[each].files) for each in (ONE, THREE)] == [(10, 2)] * 2
    assert list(found)[:3] == [THREE, TWO, ONE]


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        ("", [ONE]),
        ("--keep 2", []),
        ("--older-than 150d", [ONE]),
        ("--older-than 12w", [ONE, TWO]),
        ("--older-than 12h --keep 1", [ONE]),
        ("--older-than 300d", []),
    ],
)
def test_prune_by_number_and_age(
    words: str, gone: list[str], environment: Environment, hvdenv: Hvdenv
) -> None:
    would = hvdenv("envs", "prune", *words.split(), "--dry-run").out
    assert environment.identities() == [ONE, TWO, THREE]
    said = hvdenv("envs", "prune", "local", *words.split()).out
    assert environment.identities() == [each for each in (ONE, TWO, THREE) if each not in gone]
    assert would == said.replace("removed", "would remove")
    assert said.count("removed ") == len(gone) and (said == "nothing to remove\n") is (not gone)


def test_what_is_unfinished_is_pruned_at_any_age(environment: Environment, hvdenv: Hvdenv) -> None:
    generations.create(environment, "4" * 12)
    hvdenv("envs", "prune", "--older-than", "7d", "--keep", "5")
    assert environment.identities() == [ONE, TWO, THREE]
    for age in ("d", "-1d", "1m", "1.5d", "٣d", "1d ", "999999d"):
        assert "is not an age" in hvdenv("envs", "prune", f"--older-than={age}", code=2).err


def test_an_environment_that_somebody_deleted(
    environment: Environment, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    gone, held = generations.at(tmp_path / "aa"), generations.at(tmp_path / "ab")
    registry.register(find_places(), gone, "local", [])
    registry.register(find_places(), held, "held", [])
    held.store.mkdir()
    generations.create(held, ONE)
    with prefix_lock.hold(held.store, wait=0):  # the others are pruned all the same
        said = hvdenv("envs", "prune", "--keep", "1")
    assert f"kept {held.prefix}: another build holds this prefix" in said.err
    assert held.identities() == [ONE]
    (held.store / ONE).rename(held.store / ".removed-1")  # as if remove was killed
    write(held.store / ".removed-1/file", "x" * 300_000)
    state = f"held  incomplete  {held.prefix}\n    .removed-1  unfinished\n"
    assert state in hvdenv("envs").out
    assert f"{held.prefix}: .removed-1\n" in hvdenv("envs", "prune", str(held.prefix)).out
    (held.store / ".removed-1").mkdir()
    assert "removed what was left of" in hvdenv("envs", "remove", str(held.prefix)).out
    assert not held.store.exists()
    registry.register(find_places(), held, "held", [])
    held.store.symlink_to("/usr")  # nor does one that cannot be looked at stop prune
    assert f"kept {held.prefix}: no environment" in hvdenv("envs", "prune", "--keep", "1").err
    registry.forget(find_places(), held)
    assert environment.identities() == [TWO, THREE]
    assert f"local  missing  {gone.prefix}\n" in hvdenv("envs").out
    assert "nothing was left of it" in hvdenv("envs", "remove", str(gone.prefix)).out
    hvdenv("envs", "remove", str(gone.prefix), code=2)
    assert [each.environment for each in registry.list_environments(find_places())] == [environment]


def test_the_list(environment: Environment, hvdenv: Hvdenv) -> None:
    said = hvdenv("envs").out
    assert said.startswith(f"local  complete  {environment.prefix}\n    {THREE}  active: 0.0 MB, 2")
    assert "total: 0.0 MB, 6 files\n" in said
    (entry,) = json.loads(hvdenv("envs", "--json").out)
    contract = {"recipe", "variants", "prefix", "state", "created", "bytes", "files"}
    assert entry.keys() == contract | {"sizes"}
    assert [each["generation"] for each in entry["sizes"]] == [THREE, TWO, ONE]
