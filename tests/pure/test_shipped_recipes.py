"""What holds for every recipe that comes with hvdenv, and for the documents they follow."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.errors import RecipeError, UsageError
from hvdenv.base.schema import decode, encode, parse_toml
from hvdenv.knowledge.flags import horovod_variables
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from tests.support.commands import Hvdenv
from tests.support.files import programs, write
from tests.support.shipped import CHOICES, OFFERED

NAMES = sorted(OFFERED)
DOCS = Path(__file__).parents[2] / "docs"
MINORS = ("3.10", "3.12")

# Variants that say different things of one matter. All others can be taken together.
EXCLUSIVE = {
    "alvis": [{"pytorch", "tensorflow"}],
    "cirrus": [{"cpu", "gpu"}],
    "local": [{"tensorflow", "torch"}],
    "neuron": [{"cpu", "nccl"}],
    "singularity": [{"cpu", "gpu"}],
    "taurus": [{"alpha", "conda", "module", "module-018", "venv"}, {"mpi", "nccl"}],
    "theta": [{"pytorch", "tensorflow"}],
    "thetagpu": [{"conda", "pytorch", "tensorflow"}],
}


@cache
def of(name: str, *variants: str) -> Recipe:
    return load_recipe(name, variants=[each for each in variants if each]).recipe


@pytest.fixture(params=CHOICES, ids=lambda choice: "+".join(filter(None, choice)))
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """Each shipped recipe alone, and with each of its variants."""
    return of(*request.param)


@pytest.mark.parametrize("name", NAMES)
def test_every_combination_of_variants_resolves_or_is_known_to_clash(name: str) -> None:
    for length in range(len(OFFERED[name]) + 1):
        for variants in itertools.combinations(OFFERED[name], length):
            if any(len(group & {*variants}) > 1 for group in EXCLUSIVE.get(name, [])):
                with pytest.raises(UsageError, match="both set"):
                    load_recipe(name, variants=variants)
            else:
                assert load_recipe(name, variants=variants).variants == variants


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_public_pages_and_where_it_differs_from_them(name: str) -> None:
    recipe = of(name)
    assert recipe.name == name
    assert recipe.sources and not load_recipe(name).contents
    for url in (*recipe.sources, *(note.source for note in recipe.notes)):
        assert re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+(/\S*)?", url), url
    for url in recipe.sources:
        if url.startswith("https://github.com/"):
            assert re.search(r"/(blob|tree)/[0-9a-f]{40}(/|$)", url), f"{url} names no commit"
    if not name.startswith("local"):
        assert recipe.site and recipe.deviations
        assert ("retired" in recipe.site) == (recipe.status == "decommissioned")
    # That of a document's author is not everybody's.
    assert recipe.job.account is None
    assert bool(recipe.dialect) == bool(recipe.partitions)
    assert len({each.document for each in recipe.deviations}) == len(recipe.deviations)
    for each in recipe.deviations:
        assert all(text.strip() == text for text in each)
        assert min(len(each.document), len(each.recipe)) > 2
        assert len(each.reason) > 20
        assert each.reason not in (each.document, each.recipe)


def test_horovod_reads_what_the_recipe_asks_for(recipe: Recipe) -> None:
    for arch in {each.arch for each in recipe.partitions.values()} or {"x86_64"}:
        variables = horovod_variables(recipe, arch)
        assert any(variables.get(f"HOROVOD_WITH_{each}") for each in ("PYTORCH", "TENSORFLOW"))
        assert any(key.startswith("HOROVOD_GPU") for key in variables) == bool(recipe.horovod.gpu)
    assert not any(key.startswith("HOROVOD_GPU") for key in recipe.environment.run)


def test_a_record_gives_the_recipe_back(recipe: Recipe) -> None:
    assert decode(Recipe, json.loads(json.dumps(encode(recipe)))) == recipe


def test_what_is_said_to_be_present_is_brought_by_something(recipe: Recipe) -> None:
    used = {recipe.frameworks[each].provider for each in recipe.horovod.frameworks}
    if recipe.horovod.provider == "present":
        assert used == {"present"}
    if "present" in used:
        assert recipe.modules and (recipe.modules.load or recipe.modules.source)
    if "conda" in used:
        assert recipe.python.provider == "conda"


def test_the_reference_says_what_a_site_file_may_set(tmp_path: Path) -> None:
    site = write(tmp_path / "site.toml", "horovod.version = '0.28.1'\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("local", site=site)
    page = (DOCS / "reference/recipe-format.md").read_text(encoding="utf-8")
    said = page.split("\n### Site files\n")[1].split("```")[0]
    for name in caught.value.remedy.removeprefix("it can set ").split(", "):
        assert f"`{name}`" in said or name == "recipe_folders"


# ---------------------------------------------------------------- docs/how-to/add-your-cluster.md

GUIDE = (DOCS / "how-to/add-your-cluster.md").read_text(encoding="utf-8")


def block(start: str) -> str:
    """The block of code of the guide that begins with a text."""
    (found,) = re.findall(rf"```\w*\n({re.escape(start)}.*?)```", GUIDE, flags=re.DOTALL)
    return str(found)


@pytest.mark.parametrize("variant", [(), ("--variant", "cpu")])
def test_the_recipe_of_the_guide(
    tmp_path: Path, cases: Path, variant: tuple[str, ...], hvdenv: Hvdenv
) -> None:
    fenn = str(write(tmp_path / "fenn.toml", block("format = 1")))
    facts = ("--facts", str(cases / "facts.json"))
    hvdenv("show", fenn, *variant)
    hvdenv("check", fenn, *variant, *facts)
    hvdenv("plan", fenn, *variant, *facts)
    script = hvdenv("job", fenn, *variant, "--account", "phys", "--", "python", "train.py").out
    assert ("--gres=gpu:a100:4" in script) == (not variant)
    assert "srun -n 8 --cpus-per-task=16 --mpi=pmix --quit-on-interrupt python train.py" in script


def test_the_short_recipe_of_the_guide(tmp_path: Path) -> None:
    """It works as pasted."""
    file = write(tmp_path / "fenn.toml", block("# fenn.toml"))
    assert load_recipe(str(file)).recipe.horovod.provider == "present"


LISTED = "basename cat chmod cp cut date dirname env head ls mkdir mv rm sort stat tail tr uname"


@pytest.fixture
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with nothing but Python and coreutils, in a shell that knows no modules."""
    for program in LISTED.split():
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    (tmp_path / "python3").symlink_to(sys.executable)
    # Some recipes need these.
    programs(tmp_path, **{f"python{minor}": f"echo {minor}.9 True True" for minor in MINORS})
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in [*os.environ]:
        if name.startswith(("LMOD", "MODULE", "SLURM", "PBS", "LSB", "COBALT")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("name", "variant"), CHOICES)
@pytest.mark.usefixtures("_bare")
def test_what_builds_nothing_works_on_any_machine(name: str, variant: str, hvdenv: Hvdenv) -> None:
    recipe = of(name, variant)
    words = (name, *(("--variant", variant) if variant else ()))

    # Without a cluster, a compiler must be here.
    checked = json.loads(hvdenv("check", *words, "--json", code=0 if recipe.scheduler else 3).out)
    blocking = {each["id"] for each in checked["findings"] if each["severity"] == "block"}
    assert all("edit" in each and "edits" not in each for each in checked["findings"])
    if recipe.scheduler:
        assert not blocking
    else:
        # local-cuda names a directory that not every machine has, and the Python here may have no headers.
        assert blocking - {"folder-is-missing", "python-incomplete"} == {"no-compiler"}
    assert ("modules_not_examined" in checked) == (recipe.modules is not None)

    text = hvdenv("plan", *words, "--json").out
    facts, partition = json.loads(text)["facts"], recipe.partition
    assert facts["machine"] == (partition.arch if partition else os.uname().machine)
    assert facts["origin"] == ("declared" if recipe.scheduler else "observed")
    assert "-mavx" not in text or facts["machine"] == "x86_64"

    train = ("--", "python", "train.py")
    if recipe.scheduler:
        account = ("--account", "a") if "account" in recipe.job.requires else ()
        assert "python train.py" in hvdenv("job", *words, *account, *train).out
    assert "python train.py" in hvdenv("run", *words, "--dry-run", *train).out


# ---------------------------------------------------------------- commands of the documents

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture
def _environment_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is passed on to ranks is not what happens to be set where the tests run."""
    for name in os.environ.keys() - {"PATH", "HOME", "HVDENV_HOME"}:
        monkeypatch.delenv(name)
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, "/site/lib")
    monkeypatch.setenv("SHELL", "/bin/bash")


DOCUMENTS: dict[str, dict[str, Any]] = {
    path.stem: parse_toml(path.read_text(encoding="utf-8"))
    for path in sorted((CASES / "documents").glob("*.toml"))
}
COMMANDS = [
    pytest.param(document["recipe"], command, id=f"{name}-{number}")
    for name, document in DOCUMENTS.items()
    for number, command in enumerate(document["command"])
]
# What commands printed.
PRINTED: dict[tuple[str, ...], str] = {}


def output(recipe: str, command: dict[str, Any], hvdenv: Hvdenv) -> str:
    """What the commands of hvdenv print that a command of a document is done by."""
    called, arguments = command["covered_by"], command.get("arguments", [])
    words = [called, recipe, *(f"--variant={name}" for name in command.get("variants", []))]
    container = load_recipe(recipe).recipe.container
    if called != "show" and not (container and container.image):
        words += ["--prefix", "/scratch/envs/horovod"]
    words += ["--dry-run"] if called in ("run", "shell") else []
    words += ["--facts", str(CASES / "facts.json")] if called == "plan" else arguments
    if tuple(words) not in PRINTED:
        said = hvdenv(*words).out
        said += hvdenv(*words, "--format", "bash").out if called == "plan" else ""
        if called == "shell":  # what the shell reads at its start belongs to it
            files = Path(os.environ["HVDENV_HOME"], "shells").rglob("bashrc")
            said += "".join(file.read_text(encoding="utf-8") for file in files)
        PRINTED[tuple(words)] = said
    return PRINTED[tuple(words)]


@pytest.mark.parametrize(("recipe", "command"), COMMANDS)
@pytest.mark.usefixtures("_environment_of_a_cluster")
def test_a_command_of_a_document_is_covered(
    recipe: str, command: dict[str, Any], hvdenv: Hvdenv
) -> None:
    """By texts that commands of hvdenv print, or a reason."""
    how, covered_by = command["how"], command["covered_by"]
    assert set(command) <= {"line", "variants", "arguments", "covered_by", "how"}
    assert command["line"]
    assert ("arguments" in command) == (covered_by in ("job", "run", "shell"))
    if covered_by in ("plan", "job", "run", "shell", "show"):
        assert isinstance(how, list) and how
        said = output(recipe, command, hvdenv)
        assert [text for text in how if text not in said] == [], said
    elif covered_by == "deviation":
        chosen = load_recipe(recipe, variants=command.get("variants", [])).recipe
        assert how in {each.document for each in chosen.deviations}
    else:
        assert covered_by in ("needless", "reader")
        assert len(how.split()) >= 3


@pytest.mark.parametrize("name", DOCUMENTS)
def test_most_of_a_document_is_done_and_not_explained_away(name: str) -> None:
    """The image of the last one is another today, so its definition is other all over."""
    document = DOCUMENTS[name]
    assert set(document) - {"step"} == {"recipe", "documents", "command"}
    assert set(document["documents"]) <= set(load_recipe(document["recipe"]).recipe.sources)
    covered = [each["covered_by"] for each in document["command"]]
    done = [each for each in document["command"] if isinstance(each["how"], list)]
    assert covered.count("reader") <= len(covered) / 4
    assert len(done) / len(covered) > (0.15 if name == "singularity" else 0.55)


def test_the_documents_are_there() -> None:
    expected = {"neuron", "taurus", "alvis", "theta", "thetagpu", "singularity"}
    assert DOCUMENTS.keys() == expected <= set(OFFERED)
    assert len(OFFERED) >= 13


def test_a_step_of_a_document_is_explained_and_proven() -> None:
    """The how-to has the functions of Horovod that the step calls, and the finding about it."""
    text = (DOCS / "how-to/make-a-program-distributed.md").read_text(encoding="utf-8")
    for step in (step for document in DOCUMENTS.values() for step in document.get("step", ())):
        called = re.findall(r"hvd\.[\w.]+|BroadcastGlobal\w+", step["line"])
        assert called
        assert all(each.removeprefix("hvd.keras.callbacks.") in text for each in called), step
        assert f"`{step['finding']}`" in text, step
