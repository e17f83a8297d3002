"""What holds for every recipe that comes with hvdenv, and for the documents they follow."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from hvdenv.errors import RecipeError, UsageError
from hvdenv.knowledge.flags import horovod_variables
from hvdenv.knowledge.patches import releases
from hvdenv.model.cluster import Job
from hvdenv.model.layers import Resolved, load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.schema import decode, encode
from hvdenv.sites.batch import check
from tests.commands import Hvdenv
from tests.files import write
from tests.shipped import CHOICES, OFFERED

NAMES = sorted(OFFERED)
CLUSTERS = [name for name in NAMES if not name.startswith("local")]

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

# Modules that the sites' documents load without a version.
WITHOUT_VERSION = {"aws-ofi-rccl", "cmake", "craype-accel-amd-gfx90a", "evp-patch"}


def of(name: str, *variants: str) -> Recipe:
    return load_recipe(name, variants=[each for each in variants if each]).recipe


def exclude_each_other(name: str, variants: tuple[str, ...]) -> bool:
    return any(len(group & set(variants)) > 1 for group in EXCLUSIVE.get(name, []))


@pytest.mark.parametrize("name", NAMES)
def test_every_combination_of_variants_resolves_or_is_known_to_clash(name: str) -> None:
    offered = OFFERED[name]
    for length in range(len(offered) + 1):
        for variants in itertools.combinations(offered, length):
            if exclude_each_other(name, variants):
                with pytest.raises(UsageError, match="both set"):
                    load_recipe(name, variants=variants)
            else:
                assert load_recipe(name, variants=variants).variants == variants


@pytest.mark.parametrize("name", NAMES)
def test_sources_and_notes_name_public_pages(name: str) -> None:
    recipe = of(name)
    assert recipe.sources
    for url in (*recipe.sources, *(note.source for note in recipe.notes)):
        assert re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+(/\S*)?", url), url
    for url in recipe.sources:
        if url.startswith("https://github.com/"):
            assert re.search(r"/(blob|tree)/[0-9a-f]{40}(/|$)", url), f"{url} names no commit"


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_names_its_site_and_is_not_called_tested_by_its_recipe(name: str) -> None:
    recipe = of(name)
    assert recipe.site
    assert recipe.deviations
    assert ("retired" in recipe.site) == (recipe.status == "decommissioned")


@pytest.mark.parametrize("name", NAMES)
def test_deviations_say_what_instead_and_why(name: str) -> None:
    deviations = of(name).deviations
    assert len({each.document for each in deviations}) == len(deviations)
    for each in deviations:
        assert all(text.strip() == text for text in each)
        assert min(len(each.document), len(each.recipe)) > 2
        assert len(each.reason) > 20
        assert each.reason not in (each.document, each.recipe)


@pytest.mark.parametrize(("name", "variant"), CHOICES, ids="+".join)
def test_modules_have_versions(name: str, variant: str) -> None:
    modules = of(name, variant).modules
    if modules is None:
        return
    names = (*modules.load, *modules.build, *modules.unload)
    assert len(set(names)) == len(names)
    for each in names:
        assert "/" in each or each in WITHOUT_VERSION, each
    assert not set(modules.build) & set(modules.load)


@pytest.mark.parametrize(("name", "variant"), CHOICES, ids="+".join)
def test_jobs_fit_their_partition(name: str, variant: str) -> None:
    recipe = of(name, variant)
    if recipe.dialect is None:
        assert not recipe.partitions
        return
    assert recipe.partitions
    assert set(recipe.job.requires) <= set(Job._fields)
    job = recipe.job._replace(account=recipe.job.account or "project")
    partition = check(job, recipe.dialect, recipe.partitions)
    assert (partition is None) == (job.partition is None)
    if partition and partition.cores and job.cpus_per_rank:
        assert job.cpus_per_rank * job.ranks_per_node <= partition.cores


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_recipe_has_the_account_of_a_documents_author(name: str) -> None:
    for variant in ("", *OFFERED[name]):
        assert of(name, variant).job.account is None


@pytest.mark.parametrize(("name", "variant"), CHOICES, ids="+".join)
def test_horovod_reads_what_the_recipe_asks_for(name: str, variant: str) -> None:
    recipe = of(name, variant)
    for arch in {each.arch for each in recipe.partitions.values()} or {"x86_64"}:
        variables = horovod_variables(recipe, arch)
        assert any(variables.get(f"HOROVOD_WITH_{each}") for each in ("PYTORCH", "TENSORFLOW"))
        assert any(key.startswith("HOROVOD_GPU") for key in variables) == bool(recipe.horovod.gpu)
    assert not any(key.startswith("HOROVOD_GPU") for key in recipe.environment.run)


@pytest.mark.parametrize(("name", "variant"), CHOICES, ids="+".join)
def test_a_record_gives_the_recipe_back(name: str, variant: str) -> None:
    recipe = of(name, variant)
    assert decode(Recipe, json.loads(json.dumps(encode(recipe)))) == recipe


@pytest.mark.parametrize(("name", "variant"), CHOICES, ids="+".join)
def test_what_is_said_to_be_present_is_brought_by_something(name: str, variant: str) -> None:
    recipe = of(name, variant)
    used = [recipe.frameworks[each].provider for each in recipe.horovod.frameworks]
    if recipe.horovod.provider == "present":
        assert set(used) == {"present"}
    if "present" in used:
        assert recipe.modules is not None
        assert recipe.modules.load or recipe.modules.source
    if "conda" in used:
        assert recipe.python.provider == "conda"


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_channel_of_anaconda(name: str) -> None:
    """Their terms bind institutions: who wants them names them in a site file."""
    for variant in ("", *OFFERED[name]):
        conda = of(name, variant).conda
        assert not conda or not {"defaults", "main", "anaconda", "r"} & set(conda.channels)


def test_neuron_for_cpus_asks_the_channel_for_python_only() -> None:
    recipe = of("neuron", "cpu")
    assert recipe.horovod.gpu is None
    assert recipe.conda is not None
    assert recipe.conda.packages == {}
    assert {each.provider for each in recipe.frameworks.values()} == {"pip"}


# ---------------------------------------------------------------- docs/reference/recipe-format.md

REFERENCE = (Path(__file__).parents[2] / "docs/reference/recipe-format.md").read_text(
    encoding="utf-8"
)


def test_the_reference_says_what_a_site_file_may_set(tmp_path: Path) -> None:
    site = write(tmp_path / "site.toml", "horovod.version = '0.28.1'\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("local", site=site)
    said = REFERENCE.split("\n### Site files\n")[1].split("```")[0]
    for name in caught.value.remedy.removeprefix("it can set ").split(", "):
        assert f"`{name}`" in said or name == "recipe_folders"


# ---------------------------------------------------------------- docs/how-to/add-your-cluster.md

GUIDE = (Path(__file__).parents[2] / "docs/how-to/add-your-cluster.md").read_text(encoding="utf-8")


def block(start: str) -> str:
    """The block of code of the guide that begins with a text."""
    (found,) = re.findall(rf"```\w*\n({re.escape(start)}.*?)```", GUIDE, flags=re.DOTALL)
    return str(found)


@pytest.fixture
def fenn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recipe that the guide shows, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fenn.toml").write_text(block("format = 1"), encoding="utf-8")
    return "./fenn.toml"


@pytest.mark.parametrize("variant", [(), ("--variant", "cpu")])
def test_the_recipe_of_the_guide(fenn: str, variant: tuple[str, ...], hvdenv: Hvdenv) -> None:
    facts = ("--facts", str(Path(__file__).parents[1] / "cases" / "facts.json"))
    hvdenv("show", fenn, *variant)
    hvdenv("check", fenn, *variant, *facts)
    hvdenv("plan", fenn, *variant, *facts)
    script = hvdenv("job", fenn, *variant, "--account", "phys", "--", "python", "train.py").out
    assert ("--gres=gpu:a100:4" in script) == (not variant)
    assert "srun -n 8 --cpus-per-task=16 --mpi=pmix python train.py" in script


def test_the_short_recipe_of_the_guide(tmp_path: Path) -> None:
    """It works as pasted."""
    file = write(tmp_path / "fenn.toml", block("# fenn.toml"))
    assert load_recipe(str(file)).recipe.horovod.provider == "present"


def test_hashes_belong_to_the_versions() -> None:
    pinned = [of(name, variant).horovod for name, variant in CHOICES]
    built = [horovod for horovod in pinned if horovod.provider == "source"]
    given = {(horovod.version, horovod.sha256) for horovod in built if horovod.sha256}
    assert len(given) >= 4
    assert given <= {(version, release.sha256) for version, release in releases().items()}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with nothing but Python and coreutils, in a shell that knows no modules."""
    listed = (
        "basename cat chmod cp cut date dirname env head ls mkdir mv rm sort stat tail tr uname"
    )
    for program in listed.split():
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    (tmp_path / "python3").symlink_to(sys.executable)
    # Some recipes need these.
    for minor in ("3.10", "3.12"):
        python = tmp_path / f"python{minor}"
        python.write_text(f"#!/bin/sh\necho {minor}.9 True True\n")
        python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in [*os.environ]:
        if name.startswith(("LMOD", "MODULE", "SLURM", "PBS", "LSB", "COBALT")):
            monkeypatch.delenv(name)


def machine_of(resolved: Resolved) -> str:
    partition = resolved.recipe.partition
    return partition.arch if partition else os.uname().machine


@pytest.mark.parametrize(("name", "variant"), CHOICES)
@pytest.mark.usefixtures("bare")
def test_what_builds_nothing_works_on_any_machine(name: str, variant: str, hvdenv: Hvdenv) -> None:
    resolved = load_recipe(name, variants=[variant] if variant else [])
    words = (name, *(("--variant", variant) if variant else ()))
    clusters = resolved.recipe.scheduler is not None

    # Without a cluster, a compiler must be here.
    checked = json.loads(hvdenv("check", *words, "--json", code=(0 if clusters else 3)).out)
    blocking = {each["id"] for each in checked["findings"] if each["severity"] == "block"}
    # local-cuda names a directory that not every machine has, and the Python here may have no headers.
    assert blocking - {"folder-is-missing", "python-incomplete"} == (
        set() if clusters else {"no-compiler"}
    )
    assert not clusters or not blocking
    assert ("modules_not_examined" in checked) == (resolved.recipe.modules is not None)

    text = hvdenv("plan", *words, "--json").out
    plan, machine = json.loads(text), machine_of(resolved)
    assert plan["facts"]["machine"] == machine
    assert plan["facts"]["origin"] == ("declared" if clusters else "observed")
    assert "-mavx" not in text or machine == "x86_64"

    if clusters:
        account = ("--account", "a") if "account" in resolved.recipe.job.requires else ()
        assert "python train.py" in hvdenv("job", *words, *account, "--", "python", "train.py").out
    assert "python train.py" in hvdenv("run", *words, "--dry-run", "--", "python", "train.py").out
