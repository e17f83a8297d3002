from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv.environments import generations, prune
from hvdenv.environments.generations import Environment
from hvdenv.errors import BusyError, UsageError
from tests.environments import ONE, THREE, TWO, build, build_active
from tests.files import write


def test_rollback_goes_to_the_one_before(environment: Environment) -> None:
    for identity in (TWO, ONE, THREE):
        build(environment, identity)
    generations.create(environment, "4" * 12)
    generations.switch(environment, THREE)
    assert prune.rollback(environment) == ONE
    assert prune.rollback(environment) == TWO
    with pytest.raises(UsageError, match="no earlier generation") as caught:
        prune.rollback(environment)
    assert f"complete are: {THREE}, {ONE}, {TWO}" in caught.value.remedy
    assert prune.rollback(environment, THREE) == THREE
    assert environment.active() == THREE
    for other in ("4" * 12, "5" * 12, "../x"):
        with pytest.raises(UsageError, match="no complete generation"):
            prune.rollback(environment, other)
    assert environment.active() == THREE


def test_prune_keeps_the_active_one_and_as_many_as_asked(environment: Environment) -> None:
    for number in range(1, 6):
        build(environment, str(number) * 12)
    generations.switch(environment, TWO)
    generations.create(environment, "6" * 12)
    (environment.store / ".removed-x").mkdir()
    (environment.store / ".new-x").mkdir()
    (environment.store / ".link-x").symlink_to("/usr")
    (environment.store / "mine").mkdir()
    cleared = prune.prune(environment, keep=1)
    assert set(cleared.removed) == {ONE, THREE, "4" * 12, "6" * 12}
    assert cleared.kept == ()
    assert set(os.listdir(environment.store)) == {TWO, "5" * 12, "mine"}
    assert environment.active() == TWO
    prune.prune(environment, keep=0)
    assert environment.identities() == [TWO]


def test_a_generation_that_lost_files_is_not_the_one_to_go_back_to(
    environment: Environment,
) -> None:
    build(environment, ONE)
    build(environment, TWO, manifest_digest="0" * 64)
    build_active(environment, THREE)
    assert prune.prune(environment, keep=1, dry_run=True).removed == (TWO,)
    assert prune.rollback(environment) == ONE
    # What the prefix points to is kept, even damaged; then the newest is the one to go back to.
    generations.switch(environment, THREE)
    environment.record(THREE).write_text("{")
    prune.prune(environment, keep=1)
    assert environment.identities() == [ONE, THREE]
    assert prune.rollback(environment) == ONE


def test_removing_never_follows_links_out(environment: Environment, tmp_path: Path) -> None:
    precious = write(tmp_path / "precious" / "data", "")
    write(precious.with_name(generations.MARKER), "")
    build(environment, ONE)
    (environment.generation(ONE) / "out").symlink_to(precious.parent)
    environment.generation(TWO).symlink_to(precious.parent)
    other = write(environment.generation(THREE) / "data", "")
    generations.switch(environment, ONE)

    cleared = prune.remove(environment)

    assert cleared.removed == (ONE,)
    assert {Path(path).name for path, _ in cleared.kept} == {TWO, THREE}
    assert precious.exists() and other.exists()
    assert not os.path.lexists(environment.prefix)


def test_remove_leaves_nothing(environment: Environment, tmp_path: Path) -> None:
    build_active(environment, ONE)
    old, new = (environment.store / f".{ONE}.sqsh.{each * 32}" for each in "ab")
    for path in (old, new):  # of processes that pack the environment, or were killed
        path.touch()
    os.utime(old, (0, 0))
    prune.prune(environment, keep=1)
    assert (old.exists(), new.exists()) == (False, True)
    generations.create(environment, TWO)
    cleared = prune.remove(environment)
    assert (cleared.removed, cleared.kept) == ((ONE, TWO), ())
    assert os.listdir(tmp_path) == []
    for change in changes(environment):
        with pytest.raises(UsageError, match="no environment that hvdenv built"):
            change()
    assert os.listdir(tmp_path) == []


def changes(environment: Environment) -> tuple[Callable[[], object], ...]:
    return (
        lambda: prune.remove(environment, force=True),
        lambda: prune.prune(environment, keep=0),
        lambda: prune.rollback(environment),
    )


def test_nothing_is_changed_while_a_build_on_another_machine_runs(environment: Environment) -> None:
    build(environment, ONE)
    build_active(environment, TWO)
    fields = ("boot", "namespace", "started", "job", "user", "since", "token")
    holder = dict.fromkeys(fields, "x") | {"host": f"not-{socket.gethostname()}", "pid": 1}
    (environment.store / "lock-1").write_text(json.dumps(holder))
    for change in changes(environment):
        with pytest.raises(BusyError):
            change()
    assert environment.active() == TWO
    assert environment.identities() == [ONE, TWO]
