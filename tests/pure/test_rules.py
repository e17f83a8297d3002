from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdenv.cli.check import refuse_blocked, told
from hvdenv.cli.main import main
from hvdenv.cli.prepare import choose_python
from hvdenv.errors import IncompatibleError, UsageError
from hvdenv.knowledge.observables import LOOKED_UP, observables
from hvdenv.knowledge.patches import all_patches
from hvdenv.knowledge.remedies import edits_of, propose
from hvdenv.knowledge.rules import Observables, Rule, all_rules, applies, each_of, judge
from hvdenv.model.cluster import Container, Job, Modules, Partition, Storage
from hvdenv.model.facts import Facts, Interpreter, Tool
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Conda, Framework, FrameworkPackage, Gpu, Mpi, Recipe
from hvdenv.plans.plan import choose_versions
from hvdenv.reading import RECIPE, read_file
from hvdenv.runner import Runner
from hvdenv.schema import decode, encode, parse_toml
from tests.shipped import CHOICES

FOLDER = Path(__file__).parents[1] / "cases/rules"
SHIPPED = Path(__file__).parents[1] / "cases/findings.toml"
RULES = {rule.id: rule for rule in all_rules()}


CASES = {
    rule: case
    for path in sorted(FOLDER.glob("*.toml"))
    for rule, case in parse_toml(path.read_text(encoding="utf-8")).items()
}


def case_of(rule: Rule) -> dict[str, Any]:
    """The cases of a rule: further hits and all misses say what differs from the first hit."""
    case = CASES[rule.id]
    first = case["hits"][0]
    return {
        **case,
        **{kind: [{**first, **each} for each in case[kind]] for kind in ("hits", "misses")},
    }


def seen(case: dict[str, Any]) -> Observables:
    return {k: frozenset(v) if isinstance(v, list) else v for k, v in case.items()}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.id)
def test_each_rule_has_cases_that_it_hits_and_that_it_must_not(rule: Rule) -> None:
    cases = case_of(rule)
    assert set(cases) >= {"hits", "misses"} and set(cases) <= {"hits", "misses", "recipe", "facts"}
    assert cases["hits"] and cases["misses"]
    for case in cases["hits"]:
        assert applies(rule, seen(case)), case
        # Each condition counts: without what it is about, the rule says nothing.
        for name in rule.when:
            if rule.when[name] != "none":
                assert not applies(rule, seen({k: v for k, v in case.items() if k != name}))
    for case in cases["misses"]:
        assert not applies(rule, seen(case)), case
    # And without a condition itself, it would say something where it must not.
    for condition, weaker in without_each_condition(rule):
        if condition != "any":
            assert any(applies(weaker, seen(case)) for case in cases["misses"]), condition


def without_each_condition(rule: Rule) -> Iterator[tuple[str, Rule]]:
    for name, conditions in rule.when.items():
        for condition in each_of(conditions):
            rest = tuple(each for each in each_of(conditions) if each != condition)
            yield condition, rule._replace(when={**rule.when, name: rest})


def test_each_case_is_of_a_rule() -> None:
    assert list(CASES) == list(RULES)


def test_rules_have_ids_of_their_own_and_say_all() -> None:
    assert len(RULES) == len(all_rules()) >= 100
    for rule in all_rules():
        assert all(rule._replace(edit={"x": "y"})), rule.id
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.id)


def test_what_is_only_said_does_not_block() -> None:
    """A build is refused for what was run, read in a source or documented, and for nothing else."""
    unsure = {rule.id for rule in all_rules() if rule.certainty in ("reported", "general")}
    assert unsure
    assert not unsure & {rule.id for rule in all_rules() if rule.severity == "block"}


def example(recipe: Recipe) -> Recipe:
    """A recipe about which everything is known that rules ask about."""
    return recipe._replace(
        partitions={"ml": Partition(arch="ppc64le", glibc="2.28", cuda="12.4", capability="90")},
        scheduler="slurm",
        job=Job(partition="ml", gpus_per_node=4, cpus_per_rank=8),
        conda=Conda(("defaults",)),
        modules=Modules(
            load=("cuda/12.4", "nccl/2.18", "openmpi/4.1.4", "python/3.11.1", "aws-ofi-nccl", "rocm/6.0"),
            build=("cmake/3.24", "gcc/12.2.0"),
        ),
        places=Storage(expires_days=30, environments="/scratch"),
        container=Container("ubuntu:22.04"),
        horovod=recipe.horovod._replace(
            cpu_operations="mpi", gpu=Gpu(operations="nccl", capabilities=("80",))
        ),
        packages={**recipe.packages, "protobuf": ">=4", "keras": ">=3"},
        frameworks={name: each._replace(cpu_index=None, package=None) for name, each in recipe.frameworks.items()},
    )  # fmt: skip


def example_facts(facts: Facts) -> Facts:
    return facts._replace(driver="535.1", memory=10**10, mpirun=Tool("/usr/bin/mpirun", "4.1.4"))


VERSIONS = {"horovod": "0.28.1", "torch": "2.13.0", "tensorflow": "2.15.1"}
# What each verb is said of.
KINDS: dict[str, tuple[type, ...]] = {
    "has": (frozenset,), "lacks": (frozenset,), "matches": (frozenset, str), "is": (str,),
    "is not": (str,), "below": (int,), "at least": (int,), "allows": (str,), "denies": (str,),
    "more than": (int,), "differs from": (str,), "newer than": (str,),
    "another major than": (str,), "newer major than": (str,),
}  # fmt: skip


def test_conditions_name_what_observables_has_and_fit_its_kind(
    recipe: Recipe, facts: Facts, python: Interpreter
) -> None:
    known: dict[str, Any] = dict(
        observables(example(recipe), example_facts(facts), python, VERSIONS)
    )
    known["nvcc"] = known["nvcc"] or ""
    for rule in all_rules():
        for name, conditions in rule.when.items():
            assert name in known, (rule.id, name)
            for condition in each_of(conditions):
                verb, _, operand = condition.rpartition(" ")
                verb = "matches" if condition.startswith("matches ") else verb
                if condition[0] in "<>=!~":
                    assert isinstance(known[name], str), (rule.id, name)
                elif condition not in ("any", "none"):
                    assert isinstance(known[name], KINDS[verb]), (rule.id, name)
                    if verb.endswith("than") or verb == "differs from":
                        assert operand in known, (rule.id, operand)


def test_the_cases_have_what_observables_has(
    recipe: Recipe, facts: Facts, python: Interpreter
) -> None:
    known = observables(example(recipe), example_facts(facts), python, VERSIONS)
    for rule in all_rules():
        for case in (*case_of(rule)["hits"], *case_of(rule)["misses"]):
            for name, value in seen(case).items():
                assert isinstance(value, type(known[name])), (rule.id, name)


def test_patches_that_rules_speak_of_are_there() -> None:
    conditions = [each for rule in all_rules() for each in each_of(rule.when.get("patches", ()))]
    assert {each.split()[1] for each in conditions} <= {patch.name for patch in all_patches()}
    assert conditions


EDITED = [rule for rule in all_rules() if rule.edit]


@pytest.mark.parametrize("rule", EDITED, ids=lambda rule: rule.id)
def test_after_its_edit_a_rule_says_nothing_any_more(
    rule: Rule, facts: Facts, tmp_path: Path
) -> None:
    """The recipe of the case is hit; with the edit in its text it is not."""
    case = case_of(rule)
    here = decode(Facts, {**encode(facts), **case.get("facts", {})})
    path = tmp_path / "mine.toml"
    path.write_text(f'format = 1\nname = "mine"\n{case["recipe"]}', encoding="utf-8")
    found = {each.id: each for each in judged(path, here)}
    assert rule.id in found, sorted(found)
    change = propose(load_recipe(str(path)), found[rule.id].edit)
    assert change.diff and not change.options
    path.write_text(change.after, encoding="utf-8")
    assert rule.id not in {each.id for each in judged(path, here)}, change.diff


def judged(path: Path, facts: Facts) -> tuple[Rule, ...]:
    resolved = load_recipe(str(path))
    python = choose_python(resolved, facts, Runner(), None)
    versions = choose_versions(resolved.recipe, python)
    return judge(observables(resolved.recipe, facts, python, versions))


ALL = ["+".join(filter(None, choice)) for choice in CHOICES]


def test_findings_of_the_shipped_recipes(
    cases: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    """Each finding of a shipped recipe is meant. `pytest tests/pure --regenerate` writes them anew."""
    lines = []
    for name in ALL:
        recipe, _, variant = name.partition("+")
        words = ["check", recipe, "--facts", str(cases / "facts.json"), "--json"]
        code = main([*words, *(["--variant", variant] if variant else [])])
        found = json.loads(capsys.readouterr().out)["findings"]
        blocks = any(each["severity"] == "block" for each in found)
        assert code == (3 if blocks else 0)
        severities = {each["id"]: each["severity"] for each in found}
        assert severities.pop("horovod-end-of-life") == "note"
        ids = ", ".join(f'"{severity}: {rule}"' for rule, severity in severities.items())
        lines.append(f'"{name}" = [{ids}]')
    said = (
        "\n".join(lines).replace(', "', ',\n    "').replace('["', '[\n    "').replace('"]', '",\n]')
    )
    if pytestconfig.getoption("--regenerate"):
        SHIPPED.write_text(said + "\n", encoding="utf-8")
    assert parse_toml(said) == parse_toml(SHIPPED.read_text(encoding="utf-8"))


def test_the_compiler_of_the_modules_counts_and_not_the_machines(
    recipe: Recipe, facts: Facts, python: Interpreter
) -> None:
    modules = Modules(load=("gcc/10.2.0", "cuda/11.4"))
    seen = observables(recipe._replace(modules=modules), facts._replace(cxx=None), python, {})
    assert (seen["cxx"], seen["gcc"]) == ("of the modules", "10.2.0")
    hidden = recipe._replace(modules=Modules(load=("GCCcore/.11.2.0",)))
    assert observables(hidden, facts, python, {})["gcc"] == "11.2.0"
    unnamed = recipe._replace(modules=Modules(load=("PrgEnv-gnu",)))
    assert "gcc" not in observables(unnamed, facts, python, {})
    present = recipe._replace(horovod=recipe.horovod._replace(provider="present"))
    assert observables(present, facts._replace(cxx=None), python, {})["cxx"] == "not needed"


def test_observables(recipe: Recipe, facts: Facts, python: Interpreter) -> None:
    versions = {"horovod": "0.28.1", "torch": "2.13.0"}
    assert observables(recipe, facts._replace(quota_free=7_000_000_000), python, versions) == {
        "status": "tested",
        "patches": frozenset(
            {
                "any-folder", "cmake4-gloo", "cuda-on-request", "cuda13-cxx17", "elastic-sync",
                "gcc13-includes", "gcc14-flatbuffers", "gloo-process-sets", "gloo-reducescatter",
                "gloo-rendezvous", "lean-compile", "mpich-hydra", "openmpi5-horovodrun",
                "python312-distutils", "relocatable", "reproducible", "safe-rendezvous",
                "torch-cxx17", "torch-operation-names",
            }
        ),
        "horovod": "0.28.1",
        "horovod_provider": "source",
        "horovod_archive": "known",
        "horovod_newest": "0.28.1",
        "horovod_hash_of": "0.28.1",
        "horovod_hash": recipe.horovod.sha256,
        "build_contradicted": frozenset(),
        **LOOKED_UP,
        "frameworks": frozenset({"tensorflow", "torch"}),
        "controllers": frozenset({"mpi", "gloo"}),
        "torch": "2.13.0",
        "torch_package": "torch",
        "torch_provider": "pip",
        "torch_build": "cpu",
        "tensorflow_package": "tensorflow-cpu",
        "tensorflow_provider": "pip",
        "tensorflow_build": "cpu",
        "system": "Linux",
        "machine": "x86_64",
        "cores": 8,
        "arch_flags": frozenset({"-mf16c", "-mavx", "-mfma"}),
        "cpu_lacks": frozenset(),
        "variables": frozenset(),
        "python": "3.11.7",
        "python_minor": "3.11",
        "python_complete": "yes",
        "python_provider": "venv",
        "python_wanted": ">=3.10,<3.14",
        "mpi": "openmpi",
        "openmpi": "4.1.8",
        "mpi_package": "openmpi",
        "mpi_cuda_aware": "no",
        "gcc": "12.2.0",
        "cxx": "/usr/bin/g++",
        "build_variables": frozenset(),
        "run_variables": frozenset(),
        "glibc": "2.36",
        "disk_free_mb": 7000,
        "disk_needed_mb": 3300,
        "tmp_free_mb": 20_000,
        "tmp_needed_mb": 660,
        "inodes_free": 5_000_000,
        "job_nodes": 1,
        "ranks_per_node": 1,
        "exclusive": "no",
        "launcher": "mpirun",
        "srun_mpi": "unset",
        "exports": frozenset({"PATH", "LD_LIBRARY_PATH"}),
        "mca": frozenset(),
        "mpi_threads_disable": "no",
        "network_use": frozenset(),
        "network_both": frozenset(),
        "interfaces": 0,
        "packages": frozenset({"cffi", "cloudpickle", "numpy", "psutil", "pyyaml"}),
        **{f"wanted_{n}": s for n, s in {**recipe.packages, **recipe.build_tools}.items()},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("frameworks", "provider", "free", "refused"),
    [
        (("torch",), "pip", 2_000_000_000, False),
        (("torch",), "pip", 1_500_000_000, True),
        (("tensorflow", "torch"), "pip", 2_000_000_000, True),
        (("torch",), "modules", 1_000_000_000, False),
        (("torch",), "source", 6_000_000_000, True),
    ],
)
def test_the_space_that_is_asked_for_is_that_of_the_frameworks(
    recipe: Recipe,
    facts: Facts,
    python: Interpreter,
    frameworks: tuple[Framework, ...],
    provider: Any,
    free: int,
    refused: bool,
) -> None:
    packages = {name: each._replace(provider=provider) for name, each in recipe.frameworks.items()}
    recipe = recipe._replace(
        frameworks=packages, horovod=recipe.horovod._replace(frameworks=frameworks)
    )
    found = judge(observables(recipe, facts._replace(disk_free=free), python, VERSIONS))
    assert ("disk-low" in {rule.id for rule in found}) == refused


def test_a_full_tmpdir_is_noticed_before_the_build(
    recipe: Recipe, facts: Facts, python: Interpreter
) -> None:
    found = judge(observables(recipe, facts._replace(tmp_free=10_000_000), python, VERSIONS))[0]
    assert (found.id, found.severity) == ("tmp-low", "block")
    assert "needs about 660 MB in TMPDIR, and 10 MB are free there" in found.message


def test_observables_that_are_not_there_are_left_out(recipe: Recipe, facts: Facts) -> None:
    bare = facts._replace(cxx=None, glibc="", disk_free=None, inodes_free=None)
    known = observables(recipe._replace(mpi=None), bare, None, {})
    assert not {"python", "openmpi", "gcc", "cxx", "glibc", "disk_free_mb", "inodes_free"} & set(
        known
    )


@pytest.mark.parametrize(
    ("wanted", "build", "cuda"),
    [
        (FrameworkPackage("2.13.0"), "cuda", "13.0"),
        (FrameworkPackage("2.0.1"), "cuda", "11.7"),
        (FrameworkPackage("2.6.0"), "cuda", "12.4"),
        (FrameworkPackage("1.13.1+cu116"), "cuda", "11.6"),
        (FrameworkPackage("2.0.1+cpu"), "cpu", ""),
        (FrameworkPackage("2.0.1", cpu_index="https://x/cpu"), "cpu", ""),
        (FrameworkPackage("2.5.1", extra_index="https://x/whl/cu121"), "cuda", "12.1"),
        (FrameworkPackage("2.5.1", extra_index="https://x/simple"), "", ""),
        (FrameworkPackage("2.0.1", package="torch-rocm"), "rocm", ""),
        (FrameworkPackage("2.5.1", wheelhouse="/wheels"), "", ""),
        (FrameworkPackage("1.12.0", provider="conda"), "cuda", "11.3"),
        (FrameworkPackage("1.4.0"), "", ""),
        (FrameworkPackage("2.0.1", provider="present"), "", ""),
    ],
)
def test_what_a_framework_is_built_for(
    recipe: Recipe, facts: Facts, wanted: FrameworkPackage, build: str, cuda: str
) -> None:
    changed = recipe._replace(
        frameworks={"torch": wanted},
        horovod=recipe.horovod._replace(frameworks=("torch",)),
        conda=Conda((), {"cudatoolkit": "11.3.*"}),
    )
    known = observables(changed, facts, None, {"torch": str(wanted.version)})
    assert (known.get("torch_build", ""), known.get("torch_cuda", "")) == (build, cuda)


@pytest.mark.parametrize(
    ("changes", "cuda", "nvcc"),
    [
        ({"modules": Modules(load=("cuda/11.4",))}, "11.4", True),
        ({"modules": Modules(load=("NCCL/2.12.12-CUDA-11.7.0",))}, "11.7", True),
        # Not CUDA: the release of NVIDIA's HPC SDK that an MPI was built with.
        ({"modules": Modules(load=("openmpi/4.1.3-ucx-1.11.1-cuda-21.11_11.5",))}, None, True),
        ({"conda": Conda((), {"cuda-nvcc": "12.4.*"})}, None, True),
        ({"conda": Conda((), {"cudatoolkit": "11.3.*"})}, None, False),
        ({"build_tools": {"nvidia-cuda-nvcc": "==13.0.*"}}, None, True),
        ({"container": Container("nvidia/cuda:11.8.0-devel-ubuntu22.04")}, None, True),
        ({}, None, False),
    ],
)
def test_the_cuda_toolkit(
    recipe: Recipe, facts: Facts, changes: dict[str, Any], cuda: str | None, nvcc: bool
) -> None:
    gpu = recipe.horovod._replace(gpu=Gpu(operations="nccl"))
    known = observables(recipe._replace(horovod=gpu, **changes), facts, None, {})
    assert known.get("cuda") == cuda
    assert ("nvcc" in known) == nvcc


def test_the_cuda_toolkit_of_a_folder_an_image_and_a_machine(recipe: Recipe, facts: Facts) -> None:
    def cuda_of(facts: Facts, **gpu: Any) -> object:
        wanted = recipe.horovod._replace(gpu=Gpu(operations="nccl", **gpu))
        base = recipe._replace(horovod=wanted, container=container)
        return observables(base, facts, None, {}).get("cuda")

    container: Container | None = Container("nvidia/cuda:11.8.0-devel-ubuntu22.04")
    assert cuda_of(facts) is None
    assert cuda_of(facts._replace(host="nvidia/cuda:11.8.0-devel-ubuntu22.04")) == "11.8.0"
    container = None
    assert cuda_of(facts, cuda_home="/usr/local/cuda-12.4") == "12.4"
    assert cuda_of(facts, cuda_home="$NVHPC_ROOT/cuda/11.6") == "11.6"
    assert cuda_of(facts._replace(nvcc=Tool("/usr/bin/nvcc", "13.0"))) == "13.0"


@pytest.mark.parametrize(
    ("compiled", "there", "missing"),
    [
        (("70", "80"), "80", None),
        (("80",), "86", None),
        (("86",), "80", "80"),
        (("70",), "80", "80"),
        ((), "80", None),
        (("90",), "100", "100"),
    ],
)
def test_capabilities_that_the_partition_needs(
    recipe: Recipe, facts: Facts, compiled: tuple[str, ...], there: str, missing: str | None
) -> None:
    changed = recipe._replace(
        partitions={"gpu": Partition(capability=there)},
        job=Job(partition="gpu"),
        horovod=recipe.horovod._replace(gpu=Gpu(operations="nccl", capabilities=compiled)),
    )
    assert observables(changed, facts, None, {}).get("capability_missing") == missing


def test_what_conda_or_the_site_brings_is_not_pips_to_choose(recipe: Recipe, facts: Facts) -> None:
    assert "wanted_numpy" in observables(recipe, facts, None, {})
    by_conda = recipe._replace(conda=Conda((), {"numpy": "1.23.*"}))
    assert "wanted_numpy" not in observables(by_conda, facts, None, {})
    by_site = recipe._replace(python=recipe.python._replace(system_site_packages=True))
    assert "wanted_numpy" not in observables(by_site, facts, None, {})


@pytest.mark.parametrize(
    ("flags", "cpu", "lacking"),
    [
        ("-mf16c -mavx -mfma", ("avx",), {"-mf16c", "-mfma"}),
        ("-mf16c -mavx -mfma", (), set()),  # nothing is known of the processor
        ("-msse4.2 -mpclmul", ("sse4_2", "pclmulqdq"), set()),
        ("-msse4.2 -mpclmul", ("avx",), {"-msse4.2", "-mpclmul"}),
        ("-O3 -march=haswell -mtune=generic -mno-avx512f -m64", ("avx",), set()),
        ("", ("avx",), set()),
    ],
)
def test_what_the_processor_lacks(
    recipe: Recipe, facts: Facts, flags: str, cpu: tuple[str, ...], lacking: set[str]
) -> None:
    target = recipe.target._replace(arch_flags={"x86_64": flags})
    known = observables(recipe._replace(target=target), facts._replace(cpu_flags=cpu), None, {})
    assert known["cpu_lacks"] == frozenset(lacking)


def test_the_worst_comes_first(recipe: Recipe, facts: Facts, python: Interpreter) -> None:
    found = judge(
        observables(
            recipe._replace(mpi=Mpi("openmpi", "5.0.11")), facts._replace(disk_free=1, cxx=None), python,
            {"horovod": "0.28.1", "tensorflow": "2.18.1"},
        )
    )  # fmt: skip
    severities = [rule.severity for rule in found]
    assert severities == sorted(severities, key=["block", "warn", "note"].index)
    assert [rule.id for rule in found if rule.severity == "block"] == ["no-compiler", "disk-low"]


def test_a_compiler_without_a_known_version_is_a_compiler(recipe: Recipe, facts: Facts) -> None:
    known = observables(recipe, facts._replace(cxx=Tool("/opt/bin/g++")), None, {})
    assert known["cxx"] == "/opt/bin/g++"
    assert "gcc" not in known


def write(facts: Facts, tmp_path: Path, **changes: Any) -> str:
    from hvdenv.schema import encode

    path = tmp_path / "facts.json"
    path.write_text(json.dumps(encode(facts._replace(**changes))))
    return str(path)


def test_check_of_a_machine_where_nothing_stands_in_the_way(
    facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "local", "--facts", write(facts, tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("facts declared on login1; Python 3.11.7 (/usr/bin/python3.11)")
    assert "no known problem prevents a build" in said


def test_check_exits_3_when_a_rule_blocks(
    facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(facts, tmp_path, disk_free=1_000_000, cpu_flags=("avx",))
    assert main(["check", "local", "--facts", file]) == 3
    said = capsys.readouterr().out
    assert "[disk-low]" in said
    assert "[cpu-lacks-target-flags]" in said
    assert "hvdenv would refuse to build this" in said
    assert main(["check", "local", "--facts", file, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert {each["id"]: each["severity"] for each in found["findings"]}["disk-low"] == "block"


def test_allow_gets_past_a_rule_and_only_past_that(capsys: pytest.CaptureFixture[str]) -> None:
    rules = (RULES["disk-low"], RULES["not-linux"], RULES["keras-3"])
    with pytest.raises(IncompatibleError) as caught:
        refuse_blocked(rules, ["disk-low"], quiet=False)
    assert RULES["not-linux"].message in str(caught.value)
    assert "--allow not-linux" in str(caught.value)
    assert RULES["disk-low"].message not in str(caught.value)
    refuse_blocked(rules, ["disk-low", "not-linux"], quiet=False)
    assert capsys.readouterr().err.count(told(RULES["keras-3"])) == 2


def test_quiet_says_no_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    refuse_blocked((RULES["keras-3"],), [], quiet=True)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_what_was_found_is_named() -> None:
    variables = frozenset({"HOROVOD_GPU_ALLGATHER=MPI", "HOROVOD_WITH_TORCH=1", "NCCL_DEBUG=INFO"})
    hits = {rule.id: rule for rule in judge({"run_variables": variables})}
    found = hits["build-variables-at-run-time"]
    assert found.message.endswith("HOROVOD_GPU_ALLGATHER=MPI, HOROVOD_WITH_TORCH=1")
    assert found.edit == {
        "environment.run.HOROVOD_GPU_ALLGATHER": "",
        "environment.run.HOROVOD_WITH_TORCH": "",
    }
    assert "remove from the recipe: environment.run.HOROVOD_WITH_TORCH" in told(found)


def test_what_was_found_in_sets_comes_before_words() -> None:
    said: Observables = {
        "modules": frozenset({"PyTorch/2.0.1"}), "torch_provider": "pip", "cxx": "g++",
    }  # fmt: skip
    (found,) = judge(said)
    assert "(PyTorch/2.0.1)" in found.message


def test_an_id_that_no_rule_has_cannot_be_allowed(
    facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="disk-lo: no rule has") as caught:
        refuse_blocked((), ["disk-lo"], quiet=True)
    assert 'did you mean "disk-low' in str(caught.value)
    assert main(["check", "local", "--facts", write(facts, tmp_path), "--allow", "x-y"]) == 2
    assert "no rule has this name" in capsys.readouterr().err


def test_check_goes_past_what_is_allowed(
    facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "local", "--facts", write(facts, tmp_path, disk_free=1), "--json"]
    assert main(words) == 3
    capsys.readouterr()
    assert main([*words, "--allow", "disk-low"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {each["id"]: each["allowed"] for each in found}["disk-low"] is True
    assert sum(each["allowed"] for each in found) == 1


MINE = """\
# Mine.
format = 1
name = "mine"
extends = "local"

[launch]
launcher = "horovodrun-mpi"  # as ever
mca.pml = "ucx"

[variants.new]
frameworks.torch.version = "2.2.2"
"""


def test_the_remedy_is_a_diff_of_the_recipe(
    facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    words = ["check", str(path), "--variant", "new", "--facts", write(facts, tmp_path)]
    assert main(words) == 3
    said = capsys.readouterr().out
    assert f"--- {path}\n+++ {path}\n@@" in said
    assert '-launcher = "horovodrun-mpi"  # as ever\n+launcher = "mpirun"' in said
    # The variant sets it, so it is changed there.
    assert '-frameworks.torch.version = "2.2.2"\n' in said
    assert '+frameworks.torch.version = "2.8.0"\n' in said
    assert '    in the recipe: launch.launcher = "mpirun"' in said
    assert main([*words, "--json"]) == 3
    change = json.loads(capsys.readouterr().out)["change"]
    assert change["diff"] in said
    assert change["options"] == []


def test_what_lies_over_the_recipe_is_mended_by_options(
    facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "launch.launcher=horovodrun-mpi", "--set", "launch.mca.pml=ucx"]
    assert main(["check", "local", *words, "--facts", write(facts, tmp_path)]) == 3
    said = capsys.readouterr().out
    assert "options that fix it: --set 'launch.launcher=\"mpirun\"'" in said
    assert "diff" not in said and "+++" not in said


def test_a_shipped_recipe_is_extended_and_not_changed(
    facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(facts, tmp_path, cpu_flags=("avx",))
    assert main(["check", "local", "--facts", file]) == 3
    said = capsys.readouterr().out
    start = said.index("as your own recipe")
    text = said[start:].split("\n", 1)[1].rsplit("hvdenv would refuse to build this", 1)[0]
    own = tmp_path / "own.toml"
    own.write_text(text)
    assert parse_toml(text)["extends"] == "local"
    assert main(["check", str(own), "--facts", file]) == 0


def test_edits_that_contradict_each_other() -> None:
    first = RULES["tensorflow-headers-moved"]
    second = RULES["keras-3"]
    assert edits_of([first, second]) == first.edit
    assert edits_of([second, first]) == second.edit
    assert edits_of([first, RULES["licensed-channels"]]) == {
        **first.edit,
        **RULES["licensed-channels"].edit,
    }


@pytest.mark.parametrize(
    ("text", "key", "value", "after"),
    [
        ('a.b = "x"\n', "a.c.d", '"y"', 'a.b = "x"\n\n[a.c]\nd = "y"\n'),
        # A table would swallow what follows.
        ('a.b = "x"\nd = 1\n', "a.c.d", '"y"', 'a.b = "x"\nd = 1\na.c.d = "y"\n'),
        ('[a]\nb = "x"\n', "a.c", '"y"', '[a]\nb = "x"\nc = "y"\n'),
        ("", "a.b.c", '"y"', '[a.b]\nc = "y"\n'),
        ('[a.b]\nc = "x" # why\nd = 1\n', "a.b.c", '["y"]', '[a.b]\nc = ["y"] # why\nd = 1\n'),
        ('[a.b]\nc = "x"\nd = 1\n', "a.b.c", "", "[a.b]\nd = 1\n"),
        ('a = { b = "x", c = 1 }\n', "a.b", '"y"', 'a = { b = "y", c = 1 }\n'),
    ],
)
def test_an_edit_keeps_the_rest_of_the_text(
    tmp_path: Path, text: str, key: str, value: str, after: str
) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    contents = (read_file(path, RECIPE),)
    resolved = load_recipe("local")._replace(file=str(path), contents=contents, origins={})
    assert propose(resolved, {key: value}).after == after


def test_the_build_records_what_was_allowed() -> None:
    from hvdenv.cli import perform_build

    assert perform_build._findings((RULES["disk-low"], RULES["keras-3"]), ["disk-low"]) == (
        {"rule": "disk-low", "severity": "block", "allowed": True},
        {"rule": "keras-3", "severity": "warn"},
    )
