from __future__ import annotations

from pathlib import Path

import pytest

from hvdenv.environments import generations, prune, registry
from hvdenv.environments.generations import at
from hvdenv.places import Places
from tests.environments import ONE, TWO, build, build_active


def listing(places: Places) -> list[tuple[str, tuple[str, ...], str, str]]:
    return [
        (one.recipe, one.variants, Path(one.prefix).name, one.state)
        for one in registry.list_environments(places)
    ]


def test_environments_are_listed_wherever_they_lie(tmp_path: Path) -> None:
    places = Places(tmp_path / "home")
    assert registry.list_environments(places) == []
    places.envs.mkdir(parents=True)
    inside = at(places.prefix("local", ["x", "torch"]))
    begun = at(places.prefix("local", []))
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
    assert (mine.bytes, mine.files, mine.generations) == (9, 3, (TWO, ONE))
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
