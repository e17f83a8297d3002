"""Packages that are added to an environment, and the errors when versions would change."""

from __future__ import annotations

import re

import pytest

from hvdenv.building.run_step import attempt, perform
from hvdenv.cli.main import make_parser
from hvdenv.cli.options import read_request
from hvdenv.command import Command, Outcome
from hvdenv.contents.packages import Package
from hvdenv.contents.record import GenerationRecord, LockUse
from hvdenv.errors import IncompatibleError, LockError, StepError, UsageError
from hvdenv.locks import lockfile
from hvdenv.model.facts import Facts
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.plans.additions import Additions, added_to, parse, refusal
from hvdenv.plans.plan import Plan, make_plan, steps_of
from hvdenv.plans.step import Step
from hvdenv.runner import Runner
from hvdenv.schema import decode, encode
from hvdenv.session.lock import add_recorded_lock, make_resolution, recipe_locks
from hvdenv.session.prepare import Prepared, prepare
from hvdenv.session.progress import Silent
from hvdenv.session.request import Request
from tests.commands import Hvdenv

OWN = {"numpy": "1.26.4", "torch": "2.13.0+cpu", "horovod": "0.28.1"}
CONDA = Package("conda", "python", "3.11.7", "h955ad1f_0")


def chosen(*words: str, before: Additions | None = None, brought: str = "") -> Additions:
    """What is to be added where OWN, and what ``brought`` names, is there."""
    there = dict(each.split("==") for each in brought.split())
    return added_to(before, "d1", parse(words), {**OWN, **there}, (CONDA,))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["./a.whl"], "'./a.whl' .*Expected"),
        (["-r"], "'-r' .*Expected"),
        ([""], "'' .*Expected"),
        (["tqdm @ https://example.org/tqdm.whl"], "'tqdm @ https://example.org/tqdm.whl'.*a URL"),
        (["tqdm; python_version > '3'"], "tqdm; python_version > '3'.*a condition"),
        (["a.b>1", "A_b<3"], "A_b is named twice"),
    ],
)
def test_what_is_no_package(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert re.search(reason, caught.value.message)
    assert "\n" not in caught.value.message


def test_the_first_addition_keeps_all_that_is_there() -> None:
    found = chosen("tqdm>=4", "SciPy[x]<2")
    assert found == Additions(
        "d1", ("SciPy[x]<2", "tqdm>=4"), OWN, {}, ("python=3.11.7=h955ad1f_0",)
    )
    assert found.constraints == "horovod==0.28.1\nnumpy==1.26.4\ntorch==2.13.0+cpu\n"
    assert decode(Additions, encode(found)) == found
    odd = Additions("d1", ("tqdm",), {"numpy": "1.26.4", "site": "2021-site"})
    assert odd.kept == {"numpy": "1.26.4"}  # pip does not know the other version


def test_what_is_there_is_not_added_unless_an_extra_may_bring_something() -> None:
    assert chosen("NumPy>=1.20", "torch==2.13.0", "horovod").requirements == ()
    assert chosen("torch[optree]").requirements == ("torch[optree]",)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("numpy>=2", "numpy"),
        ("torch==2.9", "torch"),
        ("Horovod<0.28", "horovod"),
        ("numpy[x]>=2", "numpy"),
    ],
)
def test_another_version_of_what_the_recipe_gives(word: str, name: str) -> None:
    with pytest.raises(IncompatibleError, match=f"the environment has {name} ") as caught:
        chosen(word)
    assert caught.value.exit_code == 3 and OWN[name] in caught.value.message


def test_what_was_added_before_stays_unless_it_is_named() -> None:
    before = chosen("tqdm", "rich<15")
    brought = "tqdm==4.70.1 rich==14.0 mdurl==0.1"
    again = chosen("click", before=before, brought=brought)
    assert again.requirements == ("click", "rich<15", "tqdm")
    assert again.own == OWN
    assert again.earlier == {"mdurl": "0.1", "rich": "14.0", "tqdm": "4.70.1"}
    moved = chosen("tqdm>=5", "mdurl", before=before, brought=brought)
    assert moved.requirements == ("mdurl", "rich<15", "tqdm>=5")
    assert moved.earlier == {"rich": "14.0"}
    only = chosen("tqdm")
    named = chosen("tqdm>=4", before=only, brought="tqdm==4.70.1")
    assert named == only._replace(earlier={"tqdm": "4.70.1"})
    # Conda's packages are those of the recipe, not what is read anew.
    other = added_to(before, "d1", parse(["click"]), OWN, ())
    assert other.conda == ("python=3.11.7=h955ad1f_0",)


UNSOLVED = "Using Python 3.11\nerror: No solution found\n  cause: Because a depends on {}\n"


def test_a_conflict_is_said_in_the_words_of_uv() -> None:
    outcome = Outcome(Command(()), 1, UNSOLVED.format("numpy>=2 and\n   numpy==1.26.4"), 0.0)
    error = refusal(outcome, chosen("a"))
    assert (error.exit_code, error.where) == (3, "a")
    said = "No solution found cause: Because a depends on numpy>=2 and numpy==1.26.4"
    assert error.detail == said
    missing = Outcome(Command(()), 1, UNSOLVED.format("b and there is no b"), 0.0)
    assert refusal(missing, chosen("a")).exit_code == 5


def plan(recipe: Recipe, facts: Facts, additions: Additions | None = None) -> Plan:
    maker = steps_of(recipe, facts, facts.interpreters[0])
    return make_plan(maker._replace(additions=additions))


def test_what_is_installed_keeps_its_version(recipe: Recipe, facts: Facts) -> None:
    additions = chosen("tqdm>=4")._replace(new={"tqdm": "4.66.1", "rich": "13.0"})
    found, plain = ({s.name: s for s in plan(recipe, facts, a).steps} for a in (additions, None))
    names = list(found)
    after = names.index("installation") + 1
    assert names[after : after + 2] == ["additions-resolution", "additions"]
    assert names[:after] + names[after + 2 :] == list(plain)
    for name in ("resolution", "additions-resolution"):
        requested = found[name].requested
        assert requested and requested.pins == additions.kept
        # A package for CPUs has the same index as the framework that it goes with.
        assert "--cpu-index" in requested.sources
    assert requested and requested.requirements == ("tqdm==4.66.1", "rich==13.0")
    assert str(requested.listed) in found["additions"].commands[0].argv
    base = plain["resolution"].requested
    assert base and not base.pins


def test_another_addition_or_version_is_another_plan(recipe: Recipe, facts: Facts) -> None:
    one = chosen("tqdm")._replace(new={"tqdm": "4.1"})
    others = [None, one._replace(new={"rich": "1.0"}), one._replace(earlier={"tqdm": "4.0"})]
    digests = {plan(recipe, facts, each).digest for each in (one, *others)}
    assert len(digests) == 4
    assert plan(recipe, facts).wheel_inputs == plan(recipe, facts, one).wheel_inputs


def test_conda_is_asked_for_what_is_there(facts: Facts) -> None:
    steps = plan(load_recipe("neuron").recipe, facts, chosen("tqdm")).steps
    (files,) = (step.files for step in steps if step.name == "environment")
    (conda,) = (file.text for file in files if file.path.name == "conda.json")
    assert '"python=3.11.7=h955ad1f_0"' in conda


class Told(Silent):
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step_line(self, line: str) -> None:
        self.lines.append(line)


def test_an_attempt_ends_with_what_fails() -> None:
    say, stop = Command(("echo", "said")), Command(("sh", "-c", "echo why; exit 3"))
    told, runner = Told(), Runner()
    assert attempt(Step("ask", "", (say, say)), runner, told).output == "saidsaid"
    failed = attempt(Step("ask", "", (say, stop, say)), runner, told)
    assert (failed.returncode, failed.output) == (3, "why")
    assert told.lines == ["said", "said", "said", "why"]
    with pytest.raises(StepError, match="ask failed"):
        perform([Step("ask", "", (stop,))], runner, told)
    perform([Step("ask", "", (say,))], runner, told)


def prepared_for(*words: str) -> tuple[Request, Prepared]:
    words = ("install", "local", "--python", "3.11", *words)
    request = read_request(make_parser("install").parse_args(words))
    return request, prepare(request, thorough=False)


def test_a_generation_of_a_lock_gets_that_lock_again() -> None:
    request, prepared = prepared_for("tqdm")
    assert add_recorded_lock(request, prepared, GenerationRecord()) == prepared
    inputs = make_resolution(prepared).inputs(())
    folder = lockfile.lock_folder(recipe_locks(request, prepared).root, inputs)
    record = GenerationRecord(lock=LockUse(lockfile.read_lock(folder).digest))
    found = add_recorded_lock(request, prepared, record)
    assert found.locked and found.locked.folder == folder
    with pytest.raises(LockError, match="is not here, or was rewritten"):
        add_recorded_lock(request, prepared, GenerationRecord(lock=LockUse("0" * 64)))
    request, other = prepared_for("--set", "packages.tqdm=>=4", "a")
    with pytest.raises(LockError, match="not what the recipe asks for now"):
        add_recorded_lock(request, other, record)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("local", "tqdm"), 2, "with the same options: hvdenv build local\n"),
        (("thetagpu", "tqdm"), 3, "no Python environment of its own"),
        (("local", "tqdm", "-r"), 2, ""),
    ],
)
def test_where_nothing_can_be_added(
    words: tuple[str, ...], code: int, said: str, hvdenv: Hvdenv
) -> None:
    assert said in hvdenv("install", *words, code=code).err
