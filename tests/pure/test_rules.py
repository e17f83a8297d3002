from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from hvdenv.base.errors import IncompatibleError, UsageError
from hvdenv.base.schema import decode, encode, parse_toml
from hvdenv.cli.main import main
from hvdenv.knowledge.observables import observables
from hvdenv.knowledge.patches import all_patches
from hvdenv.knowledge.rules import (
    Observable,
    Observables,
    Rule,
    all_rules,
    applies,
    each_of,
    judge,
)
from hvdenv.model.cluster import Container, Job, Modules, Partition, Storage
from hvdenv.model.facts import Facts, Interpreter, Tool
from hvdenv.model.recipe import Conda, Gpu, Recipe
from hvdenv.session import build
from hvdenv.session.judge import judge_edited, judge_recipe, refuse_blocked, suggest, told
from hvdenv.session.prepare import prepare
from hvdenv.session.request import Gate, Request
from tests.support.commands import Hvdenv
from tests.support.files import write
from tests.support.merge import patched
from tests.support.shipped import CHOICES

FOLDER = Path(__file__).parents[1] / "cases/rules"
SHIPPED = FOLDER.with_name("findings.toml")
RULES = {rule.id: rule for rule in all_rules()}


CASES = {
    rule: case
    for path in sorted(FOLDER.glob("*.toml"))
    for rule, case in parse_toml(path.read_text(encoding="utf-8")).items()
}


def cases_of(rule: Rule, kind: str) -> list[Observables]:
    """The hits or misses of a rule; all but the first hit say what differs from the first one."""
    first = CASES[rule.id]["hits"][0]
    return [
        {k: frozenset(v) if isinstance(v, list) else v for k, v in {**first, **each}.items()}
        for each in CASES[rule.id].get(kind, [])
    ]


def spoilt(condition: str, name: str, seen: Observables) -> Observable | None:
    """A value that only just does not meet a condition; None if cases must state one."""
    verb, _, word = condition.rpartition(" ")
    value = seen.get(name)
    if condition == "none":
        return "something"
    if condition.startswith("matches "):
        return frozenset() if isinstance(value, frozenset) else "of no pattern"
    if verb.endswith("than") or verb == "differs from":
        return seen[word]
    if isinstance(value, frozenset) and verb in ("has", "lacks"):
        return value - {word} if verb == "has" else value | {word}
    if verb in ("is", "is not"):
        return word if verb == "is not" else f"not {word}"
    if verb in ("below", "at least"):
        return int(word) - (verb == "at least")
    if verb == "outside":
        return f"=={word.partition('-')[0]}"
    if verb in ("allows", "denies"):
        return f"{'!=' if verb == 'allows' else '=='}{word}"
    return spoilt_version(condition) if condition[0] in "<>=!~" else None


def versions_near(specifier: str) -> list[str]:
    """Versions at the ends of a range, in it and outside of it."""
    ends = [each.version.removesuffix(".*") for each in SpecifierSet(specifier)]
    near = [near for end in ends for near in (end, f"{end}.dev0", f"{end}.1", f"{end}.9999")]
    return [*near, *(f"{int(end.split('.')[0]) + step}" for end in ends for step in (-1, 1))]


def spoilt_version(specifier: str) -> str:
    wanted = SpecifierSet(specifier)
    return next(v for v in versions_near(specifier) if not wanted.contains(v, True))


def hit_of(row: Rule, case: Observables) -> Observables:
    """A case with versions that a row is about."""
    fitting = {}
    for name, condition in row.when.items():
        if isinstance(condition, str) and condition.startswith("outside "):
            fitting[name] = "==999"
        elif isinstance(condition, str) and condition[0] in "<>=!~":
            wanted = SpecifierSet(condition)
            fitting[name] = next(v for v in versions_near(condition) if wanted.contains(v, True))
    return {**case, **fitting}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.id)
def test_each_rule_hits_its_cases_and_each_of_its_conditions_counts(rule: Rule) -> None:
    assert {*CASES[rule.id]} <= {"hits", "misses", "recipe", "facts", "python"}
    hits, misses = cases_of(rule, "hits"), cases_of(rule, "misses")
    for case in misses:
        assert not applies(rule, case), case
    alone = [rule._replace(when=each, rows=()) for each in rule.alternatives()]
    assert all(any(applies(each, case) for each in alone) for case in hits), hits
    for each in alone:
        own = [case for case in hits if applies(each, case)] or [hit_of(each, hits[0])]
        assert applies(each, own[0]), each.when
        _check_that_each_condition_counts(each, own, misses)


def _check_that_each_condition_counts(
    rule: Rule, hits: list[Observables], misses: list[Observables]
) -> None:
    for case in hits:
        # Without what a condition is about, the rule does not apply.
        for name in (name for name, condition in rule.when.items() if condition != "none"):
            assert not applies(rule, {k: v for k, v in case.items() if k != name})
    # Each condition alone keeps the rule from a case that meets all others.
    for name, conditions in rule.when.items():
        for condition in each_of(conditions):
            rest = tuple(each for each in each_of(conditions) if each != condition)
            weaker = rule._replace(when={**rule.when, name: rest})
            wrong = spoilt(condition, name, hits[0])
            near = [*misses, *([] if wrong is None else [{**hits[0], name: wrong}])]
            kept = [case for case in near if not applies(rule, case) and applies(weaker, case)]
            assert kept or condition == "any", condition


def test_rules_say_all_and_block_for_good_reasons() -> None:
    """A build is refused for what was run, read in a source or documented, and for nothing else."""
    assert list(CASES) == list(RULES)
    assert len(RULES) == len(all_rules()) >= 100
    for rule in all_rules():
        may_lack = rule._replace(when={"x": "any"}, rows=({},), values={"x": ()})
        assert all(may_lack._replace(edits=({"x": "y"},))), rule.id
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.id)
    unsure = {rule.id for rule in all_rules() if rule.certainty in ("reported", "general")}
    assert unsure
    assert not unsure & {rule.id for rule in all_rules() if rule.severity == "block"}


INDEX = "https://download.pytorch.org/whl/cu124"
MODULES = "cuda/12.4 nccl/2.18 cudnn/8.6 openmpi/4.1.4 python/3.11.1 aws-ofi-nccl rocm/6.0"


@pytest.fixture
def known(recipe: Recipe, facts: Facts, python: Interpreter) -> dict[str, Any]:
    """Everything that rules ask about, of a recipe that has it all."""
    example = recipe._replace(
        partitions={"ml": Partition(arch="ppc64le", glibc="2.28", cuda="12.4", capability="90")},
        scheduler="slurm",
        job=Job(partition="ml", gpus_per_node=4, cpus_per_rank=8, memory="64G"),
        mpi=recipe.mpi and recipe.mpi._replace(cxx="CC"),
        conda=Conda(("defaults",)),
        modules=Modules(load=tuple(MODULES.split()), build=("cmake/3.24", "gcc/12.2.0")),
        places=Storage(expires_days=30, environments="/scratch"),
        environment=recipe.environment._replace(run={"OMP_NUM_THREADS": "8"}),
        container=Container("nvidia/cuda:12.4.1-devel-ubuntu22.04"),
        horovod=recipe.horovod._replace(
            cpu_operations="mpi", gpu=Gpu(operations="nccl", capabilities=("80",))
        ),
        packages={**recipe.packages, "protobuf": ">=4", "keras": ">=3", "torchvision": ">=0"},
        frameworks={
            name: each._replace(cpu_index=None, package=None, extra_index=INDEX)
            for name, each in recipe.frameworks.items()
        },
    )
    here = facts._replace(driver="535.1", memory=10**10, mpirun=Tool("/usr/bin/mpirun", "4.1.4"))
    versions = {"horovod": "0.28.1", "torch": "2.13.0", "tensorflow": "2.15.1"}
    seen = dict(observables(example, here, python, versions))
    return {"frameworks.torch.cpu_index": INDEX, **seen, "nvcc": seen["nvcc"] or ""}


# What each verb is said of, if not of a text.
KINDS: dict[str, type | tuple[type, ...]] = {
    "has": frozenset,
    "lacks": frozenset,
    "matches": (frozenset, str),
    "below": int,
    "at least": int,
    "more than": int,
}


def test_conditions_name_what_observables_has_and_fit_its_kind(known: dict[str, Any]) -> None:
    for rule in all_rules():
        for name, conditions in (pair for each in rule.alternatives() for pair in each.items()):
            assert name in known, (rule.id, name)
            for condition in each_of(conditions):
                verb, _, operand = condition.rpartition(" ")
                verb = "matches" if condition.startswith("matches ") else verb
                if condition not in ("any", "none"):
                    assert isinstance(known[name], KINDS.get(verb, str)), (rule.id, name)
                if verb.endswith("than") or verb == "differs from":
                    assert operand in known, (rule.id, operand)
        for case in (*cases_of(rule, "hits"), *cases_of(rule, "misses")):
            for name, value in case.items():
                assert isinstance(value, type(known[name])), (rule.id, name)


def test_patches_that_rules_speak_of_are_there() -> None:
    conditions = [each for rule in all_rules() for each in each_of(rule.when.get("patches", ()))]
    assert {each.split()[1] for each in conditions} <= {patch.name for patch in all_patches()}
    assert conditions


# What an edit of python.version can choose instead.
PYTHONS = [Interpreter(f"/{name}", f"3.{name}.1") for name in range(10, 14)]
EDITED = [rule for rule in all_rules() if rule.edits]


def write_recipe(path: Path, text: str) -> Path:
    """A recipe named `mine` that extends `local`, if it does not say which one."""
    base = "" if "extends = " in text else 'extends = "local"\n'
    return write(path, f'format = 1\nname = "mine"\n{base}{text}')


@pytest.mark.parametrize("rule", EDITED, ids=lambda rule: rule.id)
def test_after_its_edit_a_rule_says_nothing_any_more(
    rule: Rule, facts: Facts, tmp_path: Path
) -> None:
    """The recipe of the case is hit; with the edit it is not, nor with all that `check` suggests."""
    case = CASES[rule.id]
    here = decode(Facts, {**encode(facts), **case.get("facts", {})})
    if "python" in case:
        here = here._replace(interpreters=(Interpreter("/p", case["python"]), *PYTHONS))
    file = write(tmp_path / "facts.json", json.dumps(encode(here)))
    path = write_recipe(tmp_path / "mine.toml", case["recipe"])
    request = Request(Gate(), str(path), facts=file, anywhere=True)
    prepared = prepare(request, thorough=True)
    rules = judge_recipe(prepared)
    found = {each.id: each for each in rules}
    assert rule.id in found, sorted(found)
    hit = found[rule.id]
    assert "\n  where: " in told(hit, prepared.resolved)
    for name, words in hit.values.items():
        named = all(word.replace(">=0", "any") in hit.message for word in words)
        assert named or name.endswith("provider"), hit.message
    tried = [judge_edited(request, prepared, edit, {}) for edit in hit.edits]
    assert any(after is not None and rule.id not in ids(after) for after in tried)
    if rule.severity != "note":
        suggested = suggest(request, prepared, rules)
        edits = [e for name, e in suggested.items() if found[name].severity != "note"]
        after = judge_edited(request, prepared, dict(ChainMap(*reversed(edits))), {})
        assert after is not None and rule.id not in ids(after)
        assert ids(after, "block") <= ids(rules, "block")
        assert ids(after, "warn") <= ids(rules, "warn") or ids(after, "block") < ids(rules, "block")


def ids(rules: Sequence[Rule], severity: str = "") -> set[str]:
    return {each.id for each in rules if severity in ("", each.severity)}


Check = Callable[..., str]


@pytest.fixture
def check(facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Calls `hvdenv check` for a machine with other facts; returns all output."""

    def check(*words: str, code: int | None = 0, **changes: Any) -> str:
        path = write(tmp_path / "facts.json", json.dumps(encode(facts._replace(**changes))))
        ended = main(["check", *words, "--facts", str(path)])
        said = "".join(capsys.readouterr())
        expected = 3 if '"severity": "block"' in said else 0
        assert ended == (expected if code is None else code), said
        return said

    return check


def test_findings_of_the_shipped_recipes(check: Check, golden: Callable[[Path, str], None]) -> None:
    """Each finding of a shipped recipe is meant. `pytest tests/pure --regenerate` writes them anew.

    A variant that is not there has the findings of its recipe.
    """
    said = ""
    alone: dict[str, dict[str, str]] = {}
    for name, variant in CHOICES:
        words = [name, "--json", *(["--variant", variant] if variant else [])]
        found = json.loads(check(*words, code=None))["findings"]
        severities = {each["id"]: each["severity"] for each in found}
        assert severities.pop("horovod-end-of-life") == "note"
        if severities != alone.setdefault(name, severities if not variant else {}) or not variant:
            listed = [f'"{severity}: {rule}"' for rule, severity in severities.items()]
            rows = "".join(f"\n    {each}," for each in listed)
            said += f'"{"+".join(filter(None, (name, variant)))}" = [{rows}\n]\n'
    golden(SHIPPED, said)


OBSERVED = json.loads((FOLDER.parent / "observables.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", OBSERVED, ids=lambda case: case["about"])
def test_what_rules_see_of_a_recipe_and_a_machine(
    case: dict[str, Any], recipe: Recipe, facts: Facts, python: Interpreter
) -> None:
    """Cases change the recipe `local` and the facts; null stands for what is not known.

    The first one has all that is known but for most keys of the recipe.
    """
    changed = decode(Recipe, patched(encode(recipe), case.get("recipe", {})))
    here = decode(Facts, patched(encode(facts), case.get("facts", {})))
    chosen = python if case is OBSERVED[0] else None
    known = observables(changed, here, chosen, case.get("versions", {}))
    plain = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in known.items()}
    names = {*case["seen"]}
    if case is OBSERVED[0]:
        names |= {name for name in plain if "." not in name} - {*Recipe._fields}
    assert {name: plain.get(name) for name in names} == case["seen"]


@pytest.mark.parametrize(
    ("rule", "seen", "said"),
    [
        # Sentences with commas are not joined by commas, and values have the names of their keys.
        (
            "job-does-not-fit",
            {"job_refused": frozenset({"a: 1, 2", "b: 3"})},
            "own job: a: 1, 2; b: 3",
        ),
        ("needed-from-nowhere", {"unprovided": frozenset({"NCCL"})}, "does not find NCCL"),
        ("static-nccl-with-stub-driver", {}, "horovod.gpu.nccl_link unset"),
        ("no-mpirun-of-cray", {}, "launch.launcher is mpirun, but"),
        ("horovod-module-beside-a-build", {}, "or remove Horovod/0.28.1-foss from modules.load"),
    ],
)
def test_texts_of_what_was_found(rule: str, seen: Observables, said: str) -> None:
    (found,) = (e for e in judge({**cases_of(RULES[rule], "hits")[0], **seen}) if e.id == rule)
    assert said in found.message + found.symptom + found.remedy


def test_what_was_found_is_named() -> None:
    variables = frozenset({"HOROVOD_GPU_ALLGATHER=MPI", "HOROVOD_WITH_TORCH=1", "NCCL_DEBUG=INFO"})
    hits = {rule.id: rule for rule in judge({"environment.run": variables})}
    found = hits["build-variables-at-run-time"]
    assert found.message.endswith("HOROVOD_GPU_ALLGATHER=MPI, HOROVOD_WITH_TORCH=1")
    names = ("HOROVOD_GPU_ALLGATHER", "HOROVOD_WITH_TORCH")
    assert found.edits == ({f"environment.run.{name}": "" for name in names},)
    assert "remove from the recipe: environment.run.HOROVOD_WITH_TORCH" in told(found)
    # What was found in sets comes before words.
    pytorch = frozenset({"PyTorch/2.0.1"})
    (found,) = judge({"modules.load": pytorch, "torch_provider": "pip", "cxx": "g++"})
    assert "(PyTorch/2.0.1)" in found.message


def test_check_of_a_machine_where_nothing_stands_in_the_way(check: Check) -> None:
    said = check("local")
    assert said.startswith("facts declared on login1; Python 3.11.7 (/usr/bin/python3.11)")
    assert "no known problem prevents a build" in said
    assert said.endswith(" prevents a build\n")


def test_rules_are_reported_although_no_index_can_be_asked(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, nothing can be written in HVDENV_HOME."""
    monkeypatch.setenv("HVDENV_HOME", str(write(tmp_path / "home/cache", "").parent))
    said = check("local", code=3, disk_free=0)
    assert "[disk-low]" in said
    assert re.search("not looked up: packages: .*(Not a directory|File exists)", said)


def test_check_exits_3_when_a_rule_blocks(check: Check) -> None:
    short: dict[str, Any] = {"disk_free": 1_000_000, "cpu_flags": ("avx",)}
    said = check("local", code=3, **short)
    assert "[disk-low]" in said
    assert "[cpu-lacks-target-flags]" in said
    assert "hvdenv would refuse to build this" in said
    assert said.endswith(" the build would fail\n")
    words = ["local", "--json", "--set", "environment.run.HOROVOD_GPU_ALLGATHER=MPI"]
    found = json.loads(check(*words, code=3, **short))["findings"]
    severities = [each["severity"] for each in found]
    assert set(severities) == {"block", "warn", "note"}
    assert severities == sorted(severities, key=["block", "warn", "note"].index)
    # What is allowed is passed.
    found = json.loads(check("local", "--json", "--allow", "disk-low", disk_free=1))["findings"]
    assert [each["id"] for each in found if each["allowed"]] == ["disk-low"]


def test_check_reports_what_a_plan_would_refuse(check: Check) -> None:
    old = ("--set", "horovod.version=0.24.3", "--set", "horovod.gpu.nccl_link=shared")
    said = check("local-cuda", *old, code=3)
    assert "torch's NCCL is requested together with another NCCL" in said
    assert "[plan-is-refused]" in said


def test_allow_gets_past_a_rule_and_only_past_that(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = (RULES["disk-low"], RULES["not-linux"], RULES["keras-3"])
    with pytest.raises(IncompatibleError) as caught:
        refuse_blocked(rules, ["disk-low"], quiet=False)
    assert RULES["not-linux"].message in str(caught.value)
    assert "--allow not-linux" in str(caught.value)
    assert RULES["disk-low"].message not in str(caught.value)
    refuse_blocked(rules, ["disk-low", "not-linux"], quiet=False)
    assert capsys.readouterr().err.count(told(RULES["keras-3"])) == 2
    refuse_blocked((RULES["keras-3"],), [], quiet=True)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UsageError, match='disk-lo: no rule has [^"]*did you mean "disk-low'):
        refuse_blocked((), ["disk-lo"], quiet=True)
    assert "no rule has this name" in check("local", "--allow", "x-y", code=2)
    # The build records it.
    assert build._findings(rules[::2], ["disk-low"]) == (
        {"rule": "disk-low", "severity": "block", "allowed": True},
        {"rule": "keras-3", "severity": "warn"},
    )


def test_in_a_job_the_scheduler_chooses_the_gpus(
    hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    note = "note: CUDA_VISIBLE_DEVICES is set in this shell"
    assert note in hvdenv("check", "local", "--offline").out
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "CUDA_VISIBLE_DEVICES" not in hvdenv("check", "local", "--offline").out


def test_the_remedy_names_lines_of_the_recipe(check: Check, tmp_path: Path) -> None:
    mine = 'launch = { launcher = "horovodrun-mpi", mca.pml = "ucx" }\n'
    path = write_recipe(tmp_path / "mine.toml", mine)
    said = check(str(path), code=3)
    assert f"where: {path}:4: launch.launcher" in said
    assert '    in the recipe: launch.launcher = "mpirun"\n' in said
    base = 'environment.run.HOROVOD_GPU = "CUDA"\nenvironment.run.HOROVOD_RANK = "0"\n'
    said = check(str(write_recipe(tmp_path / "below.toml", base)), code=3)
    assert "    remove from the recipe: environment.run.HOROVOD_RANK\n" in said
    # What a recipe below sets, one's own removes.
    own = 'extends = "./below.toml"\n'
    said = check(str(write_recipe(path, own)), code=3)
    keys = ['["environment.run.HOROVOD_RANK"]', '["environment.run.HOROVOD_GPU"]']
    assert all(f"    in the recipe: without = {key}\n" in said for key in keys)
    check(str(write_recipe(path, own + "without = " + "".join(keys).replace("][", ", "))))


def test_no_suggestion_leads_to_another_finding(check: Check) -> None:
    """torch 2.8 would have TensorFlow's string ABI, but cannot run on the nodes of neuron."""
    words = ["neuron", "--variant", "cpu", "--set", "frameworks.torch.version=2.4.0"]
    said = check(*words, code=3)
    assert '    in the recipe: horovod.controllers = ["mpi"]\n' in said
    assert "frameworks.torch.version = " not in said
    gloo = ("--set", "launch.launcher=horovodrun-gloo")
    said = check(*words, *gloo, code=3)
    assert "frameworks.torch.version = " not in said and "horovod.controllers = " not in said
    said = check("local", *gloo, "--set", "scheduler=slurm", "--set", "job.nodes=2")
    assert "[horovodrun-needs-ssh]" in said and "launch.launcher = " not in said
