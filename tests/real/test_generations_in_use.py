from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hvdenv.base.errors import BusyError
from hvdenv.environments import generations, prune
from hvdenv.environments.generations import Environment, at
from tests.real.conftest import Process, Start
from tests.support import environments
from tests.support.environments import ONE, TWO
from tests.support.waiting import wait_until

FILES = 150

SLEEP = "import time; time.sleep(600)"

SWITCH = """
import sys
from pathlib import Path
from hvdenv.environments import generations
environment = generations.at(Path(sys.argv[1]))
print(flush=True)
while True:
    for identity in ("1" * 12, "2" * 12):
        generations.switch(environment, identity)
"""

REMOVE = """
import sys
from pathlib import Path
from hvdenv.environments import generations, prune
environment = generations.at(Path(sys.argv[1]))
print(flush=True)
getattr(prune, sys.argv[2])(environment, **eval(sys.argv[3]))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    one = at(tmp_path / "env")
    generations.claim(one)
    for identity in (ONE, TWO):
        build(one, identity)
    generations.switch(one, TWO)
    return one


def build(environment: Environment, identity: str) -> None:
    folder = environment.generation(environments.build(environment, identity)) / "bin"
    for number in range(FILES):
        (folder / str(number)).touch()
    shutil.copy("/bin/sleep", folder / "sleep")


def whole(environment: Environment, identity: str) -> bool:
    return len(os.listdir(environment.generation(identity) / "bin")) == FILES + 2


def using(environment: Environment, identity: str) -> list[int]:
    return [each.pid for each in prune.users(environment) if each.uses(identity)]


def runs(environment: Environment, start: Start) -> Process:
    return start(environment.generation(ONE) / "bin/sleep", 600)


def works_there(environment: Environment, start: Start) -> Process:
    return start("sleep", 600, cwd=environment.generation(ONE) / "bin")


def loaded(environment: Environment, start: Start) -> Process:
    script = (
        "import mmap, sys, time; stream = open(sys.stdin.readline().strip(), 'rb');"
        "kept = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ); stream.close(); time.sleep(600)"
    )
    process = start(sys.executable, "-c", script)
    assert process.stdin is not None
    process.stdin.write(f"{environment.generation(ONE)}/bin/sleep\n")
    process.stdin.flush()
    return process


def named(environment: Environment, start: Start) -> Process:
    return start(sys.executable, "-c", SLEEP, environment.generation(ONE) / "x")


def activated(environment: Environment, start: Start) -> Process:
    return start("sleep", 600, VIRTUAL_ENV=environment.generation(ONE) / "venv")


def first_in_path(environment: Environment, start: Start) -> Process:
    path = f"{environment.generation(ONE)}/venv/bin:{os.environ['PATH']}"
    # It has loaded nothing from there, and has another generation activated.
    return start(sys.executable, "-c", SLEEP, PATH=path, CONDA_PREFIX=environment.prefix / "conda")


def through_the_prefix(environment: Environment, start: Start) -> Process:
    return start(sys.executable, "-c", SLEEP, environment.prefix / "bin/script")


def starts_ranks_in_its_image(environment: Environment, start: Start) -> Process:
    """A launcher from the generation, or a keeper: see standalone/image/enter.py."""
    program = environment.store / f"{ONE}.sqsh.enter.py"
    return start(sys.executable, "-c", SLEEP, environment.generation(ONE) / "x", program)


@pytest.mark.parametrize(
    "use",
    [
        runs,
        works_there,
        loaded,
        named,
        activated,
        first_in_path,
        through_the_prefix,
        starts_ranks_in_its_image,
    ],
)
def test_a_generation_in_use_is_neither_pruned_nor_removed(
    environment: Environment,
    start: Start,
    use: Callable[[Environment, Start], Process],
) -> None:
    process = use(environment, start)
    try:
        wait_until(lambda: using(environment, ONE))
        uses_both = use in (through_the_prefix, first_in_path)
        assert using(environment, TWO) == ([process.pid] if uses_both else [])
        cleared = prune.prune(environment, keep=0)
        assert cleared.removed == ()
        assert [identity for identity, _ in cleared.kept] == [ONE]
        assert f"process {process.pid} (" in cleared.kept[0][1]
        with pytest.raises(BusyError, match=f"process {process.pid} ") as caught:
            prune.remove(environment)
        assert caught.value.exit_code == 6
        assert "--force" in caught.value.remedy
        assert environment.active() == TWO
        assert whole(environment, ONE)
        assert whole(environment, TWO)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not using(environment, ONE))
    assert prune.prune(environment, keep=0).removed == (ONE,)


def test_the_shell_that_calls_hvdenv_uses_what_it_has_activated(
    environment: Environment, start: Start
) -> None:
    script = """VIRTUAL_ENV=$FOLDER/venv; export VIRTUAL_ENV; "$PYTHON" -c "$PROGRAM" $PREFIX \
        remove {}; echo shell $$"""
    process = start(
        *("bash", "-c", script),
        FOLDER=environment.generation(ONE),
        PYTHON=sys.executable,
        PROGRAM=REMOVE,
        PREFIX=environment.prefix,
    )
    assert process.stdout is not None
    said = process.stdout.read()
    assert f"shell {process.pid}\n" in said
    assert f"in use by process {process.pid} (bash)\n" in said
    assert whole(environment, ONE)


def test_a_path_through_the_prefix_is_that_of_the_active_generation(
    environment: Environment, start: Start
) -> None:
    process = start("sleep", 600, PATH=f"{environment.prefix}/venv/bin:{os.environ['PATH']}")
    wait_until(lambda: using(environment, TWO) == [process.pid])
    assert prune.prune(environment, keep=0).removed == (ONE,)


def test_naming_the_prefix_is_not_using_it(environment: Environment, start: Start) -> None:
    for path in (f"{environment.prefix}", f"{environment.prefix}/", f"{environment.prefix}-2/x"):
        process = psutil.Process(start(sys.executable, "-c", SLEEP, "--prefix", path).pid)
        wait_until(lambda process=process, path=path: path in process.cmdline())  # type: ignore[misc]
    assert prune.users(environment) == []


def test_removed_by_force_although_used(environment: Environment, start: Start) -> None:
    runs(environment, start)
    wait_until(lambda: using(environment, ONE))
    assert prune.remove(environment, force=True).removed == (ONE, TWO)
    assert not environment.store.exists()


def kill_at_random(process: Process, longest: float, chance: random.Random) -> None:
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(chance.random() * longest)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_kill_while_switching_leaves_a_complete_one(
    environment: Environment, start: Start
) -> None:
    chance = random.Random(1)
    seen: list[str] = []
    # A busy machine may not get to any switch at first.
    while len(seen) < 15 or set(seen) != {ONE, TWO}:
        kill_at_random(start(sys.executable, "-c", SWITCH, environment.prefix), 0.05, chance)
        seen.append(environment.active())
        assert seen[-1] in (ONE, TWO) and len(seen) < 150
    prune.prune(environment, keep=1)
    assert set(os.listdir(environment.store)) == {ONE, TWO}


@pytest.mark.parametrize(("function", "options"), [("remove", {}), ("prune", {"keep": 0})])
def test_a_kill_while_removing_leaves_nothing_that_looks_whole(
    tmp_path: Path,
    start: Start,
    function: str,
    options: dict[str, int],
) -> None:
    chance = random.Random(2)
    for number in range(12):
        environment = at(tmp_path / f"env{number}")
        generations.claim(environment)
        for identity in (ONE, TWO):
            build(environment, identity)
        generations.switch(environment, TWO)

        process = start(sys.executable, "-c", REMOVE, environment.prefix, function, options)
        kill_at_random(process, 0.15, chance)

        assert environment.active() == environment.pointed()
        for identity in environment.identities():
            assert environment.records([identity])
            assert whole(environment, identity)
        if function == "prune":
            assert environment.active() == TWO
            prune.prune(environment, keep=0)
            assert os.listdir(environment.store) == [TWO]
        elif environment.store.exists():
            prune.remove(environment)
            assert not environment.store.exists()
        assert function == "prune" or not os.path.lexists(environment.prefix)
