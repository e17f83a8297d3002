"""Builds of a plan that installs nothing real: what is built, what is kept, and when.

Scripts stand for pip: the first step makes an environment with one package in it, the second
adds another. Files in the directory `switches` let a step fail.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

from hvdenv.base.command import Command
from hvdenv.base.errors import BusyError, HvdenvError, LockError, StepError
from hvdenv.base.places import Places, sync_tree
from hvdenv.building import copied, effects
from hvdenv.building.engine import build
from hvdenv.building.state import BuildRequest, Built, already_built
from hvdenv.building.wheelcache import key, names, own, store
from hvdenv.environments.generations import Environment, at, switch
from hvdenv.locks.lockfile import BuiltWith, Horovod, Inputs, Locked, bind
from hvdenv.model.cluster import Wheels
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.plans.plan import TEMPORARY, Plan
from hvdenv.plans.step import Step, Wheel
from hvdenv.plans.steps import GENERATION
from hvdenv.session import progress
from hvdenv.session.progress import Lines, Silent, VerifyProgress, choose

DIGEST = "1" * 64

# Stands for pip: the nth installation of a package has the version n.
INSTALL = """
name=$1 folder=$2 switches=$3
mkdir -p "$folder"
version=$(($(ls "$switches" | grep -c "^$name") + 1))
touch "$switches/$name-$version"
about=$folder/$name-$version.dist-info
mkdir "$about"
printf 12345 > "$folder/$name.py"
[ "$name" = second ] || [ ! -e "$switches/broken" ] || printf 1 > "$folder/$name.py"
printf x > "$about/METADATA"
printf "$name.py,sha256=WZRHGrsBESr8wYFZ9sx0tPURuZgG2lmzyvWpwXPKz8U,5" > "$about/RECORD"
[ "$name" = first ] || [ ! -e "$switches/stopped" ] || { seq 0 39; cat "$switches/stopped"; exit 2; }
"""
# "Compiles" a wheel, an empty one where it is told to.
COMPILE = """
mkdir -p "$(dirname "$1")"
if [ -e "$2/empty" ]; then : > "$1"; else printf extension > "$1"; fi
"""
# Stands for hvdenv/standalone/steps/inspect_wheel.py.
INSPECT = """
printf '{"frameworks": {}, "bytes": %d}' "$(wc -c < "$1")"
[ -s "$1" ]
"""
# Stands for hvdenv/standalone/steps/check_requirements.py.
LOOK = """
[ ! -e "$1/open" ] || { echo tensorflow 2.15.1 requires 'six>=1.12', which is not installed; exit 1; }
"""
STEPS = "environment frameworks stack wheel inspection tidy manifest record".split()


class Recorder(Silent):
    """Keeps what is reported to the user."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.notes_of: dict[str, str] = {}
        self.notes: list[str] = []
        self.said: list[str] = []

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None:
        self.notes_of[step.name] = note
        self.done.append(step.name)

    def note(self, text: str) -> None:
        self.said.append(text)
        if "wheel" in text:
            self.notes.append(text)


class Site(NamedTuple):
    """Where the builds of a test take place."""

    environment: Environment
    switches: Path
    facts: Facts
    # The lock to go by; and whether Horovod is the site's.
    locked: Locked | None = None
    present: bool = False

    @property
    def plan(self) -> Plan:
        venv = GENERATION / "venv"
        folder = venv / "lib/python3.11/site-packages"
        wheel = GENERATION / "build" / "wheel" / "x.whl"

        def sh(script: str, *words: object) -> tuple[Command]:
            return (Command(("sh", "-c", script, "sh", *map(str, words), str(self.switches))),)

        lookup, found = (Command(("echo", "{}")),), Wheel(wheel.parent, {})
        steps: tuple[Step, ...] = (
            Step("environment", "", sh(INSTALL, "first", folder)),
            Step("frameworks", "", sh(INSTALL, "second", folder)),
            Step("stack", "", lookup, effect="lookup", wheel=found),
            Step("wheel", "", sh(COMPILE, wheel), spared_by="stack"),
            Step("inspection", "", sh(INSPECT, wheel), effect="keep"),
            Step("tidy", "", effect="tidy"),
            Step("manifest", "", effect="manifest"),
            Step("record", "", effect="record"),
        )
        if self.locked:
            closure = Step("requirements", "", sh(LOOK), effect="closure")
            steps = (*steps[:2], closure, *steps[2:])
        if self.present:
            steps = tuple(step for step in steps if step.name in ("environment", *STEPS[-2:]))
        return Plan(
            recipe="local",
            variants=(),
            python=Interpreter(sys.executable, "3.11.0"),
            versions={},
            generation=GENERATION,
            environment=venv,
            wheel=wheel,
            variables={},
            step_variables={"TMPDIR": str(TEMPORARY)},
            steps=steps,
            wheel_inputs={},
            digest=DIGEST,
            locked=self.locked,
        )

    @property
    def home(self) -> Path:
        return self.environment.prefix.parent / "home"

    def build(
        self,
        *,
        rebuild: bool = False,
        break_lock: bool = False,
        home: Path | None = None,
        recorder: Recorder | None = None,
        **request: Any,
    ) -> tuple[Built, Recorder]:
        """Build, or find that there is nothing to do."""
        recorder = recorder or Recorder()
        present = None if rebuild else already_built(self.environment, self.plan)
        if present:
            return present, recorder
        asked = BuildRequest(plan=self.plan, resolved={}, facts=self.facts, findings=(), **request)
        places = Places(home or self.home)
        words = {"rebuild": rebuild, "break_lock": break_lock}
        return build(asked, self.environment, places, recorder, **words), recorder

    def fails(self, switch: str, match: str, **more: Any) -> HvdenvError:
        """Build with a switch on, by which a step fails."""
        (self.switches / switch).touch()
        with pytest.raises((StepError, LockError), match=match) as caught:
            self.build(**more)
        (self.switches / switch).unlink()
        assert not os.path.lexists(self.environment.prefix)
        return caught.value

    def installed(self) -> set[str]:
        """Names of the packages in the environment, with their versions."""
        folder = self.environment.prefix / "venv/lib/python3.11/site-packages"
        return {path.stem for path in folder.glob("*.dist-info")}


@pytest.fixture
def site(tmp_path: Path, facts: Facts) -> Site:
    (tmp_path / "switches").mkdir()
    return Site(at(tmp_path / "env"), tmp_path / "switches", facts)


def test_what_a_failed_build_left_is_removed_by_the_next(site: Site) -> None:
    site.fails("stopped", "step frameworks failed")
    orphan = site.environment.generation(DIGEST[:12]) / "orphan"
    orphan.touch()
    built, recorder = site.build()
    assert recorder.done == STEPS
    assert built.changed
    assert built.generation == orphan.parent
    assert not orphan.exists()
    assert site.installed() == {"first-2", "second-2"}
    again, recorder = site.build()
    assert (again.changed, again.generation, recorder.done) == (False, built.generation, [])
    # A rebuild leaves what is complete.
    (built.generation / "used").touch()
    rebuilt, recorder = site.build(rebuild=True)
    assert recorder.done == STEPS
    assert rebuilt.generation.name == f"{built.generation.name}-2"
    assert (built.generation / "used").exists()
    assert site.environment.active() == rebuilt.generation.name


def test_a_build_that_is_taken_over_at_its_end_leaves_the_other_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, taken = sync_tree, list[Built]()

    def sync_while_another_takes_over(folder: Path) -> None:
        sync(folder)
        monkeypatch.setattr(effects, "sync_tree", sync)
        taken.append(site.build(break_lock=True)[0])

    monkeypatch.setattr(effects, "sync_tree", sync_while_another_takes_over)
    with pytest.raises(BusyError, match="removed the lock"):
        site.build()
    assert site.environment.generation(site.environment.active()) == taken[0].generation
    assert [*site.environment.records()] == [taken[0].generation.name]


@pytest.mark.parametrize(
    ("line", "cause", "remedy"),
    [
        ("a.cc:1:2: error: no such thing", "the compiler stopped: no such thing", "the whole log"),
        ("x.o: No space left on device", "full", "  --prefix DIR  instead of "),
    ],
)
def test_the_error_of_a_step_says_all_that_is_needed(
    site: Site, line: str, cause: str, remedy: str
) -> None:
    (site.switches / "stopped").write_text(line)
    error = site.fails("stopped", f"step frameworks failed .exit status 2.: .*{cause}")
    assert error.exit_code == 5
    assert error.where.endswith("/logs/02-frameworks.log")
    assert error.detail.splitlines() == [*map(str, range(26, 40)), line]
    assert remedy in error.remedy
    assert "to repeat the command alone:\n  " in error.remedy


@pytest.mark.parametrize("shared", [False, True])
def test_a_cached_wheel_spares_the_compile(site: Site, tmp_path: Path, shared: bool) -> None:
    """Also one that a failed build has stored; what is read from a shared cache is not kept."""
    site.fails("broken", "not whole")
    second = site._replace(environment=at(site.environment.prefix.with_name("second")))
    cache = Places(site.home).wheels
    if shared:
        wheels = Wheels(read=(str(cache),))
        _, recorder = second.build(home=tmp_path / "other", wheels=wheels)
        assert not Places(tmp_path / "other").wheels.exists()
    else:
        _, recorder = second.build()
    assert recorder.notes == []
    assert recorder.notes_of["wheel"] == "not needed: the wheel is in the cache"
    assert recorder.notes_of["inspection"] == "extensions for ; 0.0 MB"
    assert recorder.notes_of["stack"] == f"a wheel of this stack is in {cache}"


def test_packages_that_cannot_be_copied_are_installed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = site.build()[0].generation / "venv"
    monkeypatch.setattr(copied, "REPLACED", ("environment", "frameworks"))
    monkeypatch.setattr(copied, "find_source", lambda *_: first)  # it has no pyvenv.cfg
    second = site._replace(environment=at(site.environment.prefix.with_name("second")))
    assert second.build()[1].done == [*STEPS[:2], *STEPS[1:]]
    assert second.installed() == {"first-2", "second-2"}


def test_a_build_goes_on_without_its_caches(site: Site, tmp_path: Path) -> None:
    """Nothing can be kept, and of what is damaged nothing is used: a line for each."""
    (site.home / "cache").mkdir(parents=True)
    (site.home / "cache" / "wheels").write_text("")
    built, recorder = site.build(wheels=Wheels(read=(str(tmp_path / "none"),)))
    assert built.changed
    assert recorder.done == STEPS
    *looked, kept = recorder.notes
    assert [note.partition(": ")[0] for note in looked] == ["cached wheel not used"] * 2
    assert "Not a directory" in looked[0]
    assert "No such file" in looked[1]
    assert kept.startswith(f"the wheel is not kept: {site.home}/cache/wheels")
    assert "\n" not in "".join(recorder.notes)


def test_only_wheels_that_pass_inspection_are_kept_up_to_the_size_of_the_cache(
    site: Site, tmp_path: Path
) -> None:
    old = tmp_path / "horovod-0.whl"
    old.write_text("old wheel")
    cache = own(Places(site.home))
    store(cache, {"old": 1}, old)
    for _ in range(2):
        site.fails("empty", "step inspection failed")
    assert names(cache) == [key({"old": 1})]
    site.build(wheels=Wheels(own_gb=10e-9))
    (kept,) = names(cache)
    assert kept != key({"old": 1})


@pytest.mark.parametrize("rebuild", [False, True])
def test_packages_that_are_not_whole_are_all_installed_again(site: Site, rebuild: bool) -> None:
    error = site.fails("broken", "not whole")
    assert "first.py has other content than its RECORD states" in error.detail
    assert "build again" in error.remedy
    site.fails("broken", "not whole", rebuild=rebuild)
    _, recorder = site.build(rebuild=rebuild)
    assert recorder.done == STEPS
    assert recorder.said[0].startswith("removing what an unfinished build left")
    assert site.installed() == {"first-3", "second-3"}


def test_a_complete_generation_that_has_lost_files_is_not_taken(site: Site) -> None:
    first, _ = site.build()
    os.truncate(first.generation / "venv/lib/python3.11/site-packages/first-1.dist-info/RECORD", 1)
    second, recorder = site.build()
    assert recorder.done == STEPS
    assert site.environment.active() == second.generation.name != first.generation.name
    damaged = "files of this generation are damaged: venv/lib.* has 1 bytes"
    with pytest.raises(StepError, match=damaged):
        switch(site.environment, first.generation.name)


def of_a_lock(site: Site, *, present: bool) -> Site:
    """The same by a lock whose build had a module that is not loaded here."""
    inputs = Inputs("local", (), "3.11", "linux-x86_64", Horovod("0.28.1"))
    site = site._replace(locked=bind(site.switches, inputs, {}), present=present)
    return with_lock_of(site, BuiltWith("0.1.0", "3.11.0", modules={"gcc/12": ""}))


def with_lock_of(site: Site, built: BuiltWith | None) -> Site:
    assert site.locked
    lock = site.locked.lock._replace(built=built)
    return site._replace(locked=site.locked._replace(lock=lock))


def test_a_lock_whose_packages_lack_something_once_installed_is_refused(site: Site) -> None:
    site = with_lock_of(of_a_lock(site, present=False), None)
    for _ in range(2):
        error = site.fails("open", "lack something that they require")
        assert isinstance(error, LockError)
        assert "tensorflow 2.15.1 requires six>=1.12, which is not installed" in error.detail
    assert site.build()[0].changed


def test_a_drift_that_is_an_error_stops_the_build(site: Site) -> None:
    for present in (False, True):
        of_module = of_a_lock(site, present=present)
        with pytest.raises(LockError, match="this machine differs from the one") as caught:
            of_module.build()
        assert caught.value.detail.startswith("modules.gcc/12: loaded in the lock, none here")
        assert "remove the table [built] from" in caught.value.remedy
        assert not os.path.lexists(site.environment.prefix)
    # A lock that says nothing of a build refuses nothing.
    without = with_lock_of(of_module, None)
    first, _ = without.build()
    assert first.changed and not without.build()[0].changed
    # What was built so is not what the lock says.
    with pytest.raises(LockError, match="was not made with"):
        of_module.build()
    # Nor is it where the prefix points elsewhere meanwhile.
    site.environment.prefix.unlink()
    with pytest.raises(LockError, match="this machine differs from the one"):
        of_module.build()
    assert without.build()[0].generation == first.generation


# ---------------------------------------------------------------- what build and verify show


def test_lines_for_what_takes_long_or_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of verify: a run of ranks that fails beside a collector that is quick."""
    monkeypatch.setenv("COLUMNS", "80")
    clock = iter((100.0, 100.0, 101.0, 112.0, 142.0))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    parts = VerifyProgress()
    parts.tell("started", "extension files", "")
    parts.tell("started", "torch over MPI", "")
    parts.tell("finished", "extension files", "")
    parts.tell("failed", "torch over MPI", f"wrong values in alltoall{' and more' * 20}")
    parts.tell("finished", "torch over MPI", "")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "  failed: torch over MPI: wrong values in alltoall and more and more and more...",
        "  torch over MPI (42.0 s)",
    ]


def test_a_terminal_shows_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Lines(12) as lines:
        lines.step_started(5, Step("stack", "look"))
        lines.step_line("[1/78] Building \x1b[31m")
        lines.step_done(5, Step("stack", "look"), "", 1.0)
    with VerifyProgress() as parts:
        parts.tell("started", "torch over MPI", "")
        parts.tell("finished", "torch over MPI", "")
    shown = ["", "[ 5/12] stack: look", "[ 5/12] stack: compiled 1 of 78 objects"]
    shown += ["[ 5/12] stack: done (1.0 s)\n", "", "  running: torch over MPI", "", ""]
    assert [each.replace("\r", "") for each in terminal.getvalue().split("\x1b[K")] == shown
    # One that has gone away is no error.
    monkeypatch.setattr(terminal, "write", mock.Mock(side_effect=BrokenPipeError))
    VerifyProgress().tell("started", "torch over MPI", "")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, ["said by a probe", "compiled 7 of 78 objects"]),
        (
            {"verbose": True},
            ["noise", *["said by a probe"] * 2, "[7/78] Building", "[8/78] Building"],
        ),
        ({"quiet": True}, None),
    ],
)
def test_plain_lines_for_each_step(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, bool],
    shown: list[str] | None,
) -> None:
    clock = iter((100.0, 130.0, 131.0, 132.0))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    lines = choose(12, **{"quiet": False, "verbose": False, **options})
    lines.step_started(6, Step("wheel", "compile", (Command(("x",)),)))
    lines.step_line("noise")
    lines.step_line("hvdenv: said by a probe")
    lines.step_line("hvdenv: said by a probe")
    lines.step_line("[7/78] Building")
    lines.step_line("[8/78] Building")
    lines.step_done(6, Step("wheel", "compile"), "", 31.25)
    said = capsys.readouterr()
    assert said.out == ""
    first, last = "[ 6/12] wheel: compile", "[ 6/12] wheel: done (31.2 s)"
    expected = [] if shown is None else [first, *(f"        {each}" for each in shown), last]
    assert said.err.splitlines() == expected
