from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from hvdenv.cli.main import main
from hvdenv.errors import IncompatibleError, UsageError
from hvdenv.knowledge.observables import observables
from hvdenv.knowledge.patches import all_patches
from hvdenv.knowledge.remedies import Change, Trial, propose
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
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Conda, Gpu, Mpi, Recipe
from hvdenv.plans.plan import choose_versions
from hvdenv.reading import RECIPE, read_file
from hvdenv.runner import Runner
from hvdenv.schema import decode, encode, parse_toml
from hvdenv.session.judge import judge_recipe, refuse_blocked, suggest, told
from hvdenv.session.prepare import choose_python, prepare
from hvdenv.session.request import Gate, Request
from tests.commands import Hvdenv
from tests.merge import patched
from tests.shipped import CHOICES

FOLDER = Path(__file__).parents[1] / "cases/rules"
SHIPPED = Path(__file__).parents[1] / "cases/findings.toml"
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


def spoilt(condition: str, value: Observable | None) -> Observable | None:
    """A value that only just does not meet a condition; None if cases must state one."""
    verb, _, word = condition.rpartition(" ")
    if condition == "none":
        return "something"
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


def spoilt_version(specifier: str) -> str:
    """A version at one end of a range, outside of it."""
    ends = [each.version.removesuffix(".*") for each in SpecifierSet(specifier)]
    near = [near for end in ends for near in (end, f"{end}.dev0", f"{end}.1", f"{end}.9999")]
    wide = [f"{int(end.split('.')[0]) + 1}" for end in ends]
    return next(v for v in (*near, *wide) if not SpecifierSet(specifier).contains(v, True))


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.id)
def test_each_rule_hits_its_cases_and_each_of_its_conditions_counts(rule: Rule) -> None:
    assert {*CASES[rule.id]} <= {"hits", "misses", "recipe", "facts", "python"}
    hits, misses = cases_of(rule, "hits"), cases_of(rule, "misses")
    for case in misses:
        assert not applies(rule, case), case
    alone = [rule._replace(when=each, rows=()) for each in rule.alternatives()]
    assert all(any(applies(each, case) for each in alone) for case in hits), hits
    for each in alone:
        own = [case for case in hits if applies(each, case)]
        assert own, each.when
        _check_that_each_condition_counts(each, own, misses)


def _check_that_each_condition_counts(
    rule: Rule, hits: list[Observables], misses: list[Observables]
) -> None:
    for case in hits:
        # Without what a condition is about, the rule does not apply.
        for name in (name for name, condition in rule.when.items() if condition != "none"):
            assert not applies(rule, {k: v for k, v in case.items() if k != name})
    # Each condition alone keeps the rule from a case that meets all others.
    for name, condition, weaker in without_each_condition(rule):
        wrong = spoilt(condition, hits[0].get(name))
        near = [*misses, *([] if wrong is None else [{**hits[0], name: wrong}])]
        kept = [case for case in near if not applies(rule, case) and applies(weaker, case)]
        assert kept or condition == "any", condition


def without_each_condition(rule: Rule) -> Iterator[tuple[str, str, Rule]]:
    for name, conditions in rule.when.items():
        for condition in each_of(conditions):
            rest = tuple(each for each in each_of(conditions) if each != condition)
            yield name, condition, rule._replace(when={**rule.when, name: rest})


def test_each_case_is_of_a_rule() -> None:
    assert list(CASES) == list(RULES)


def test_rules_have_ids_of_their_own_and_say_all() -> None:
    assert len(RULES) == len(all_rules()) >= 100
    for rule in all_rules():
        assert all(
            rule._replace(when={"x": "any"}, rows=({},), edits=({"x": "y"},), values={"x": ()})
        ), rule.id
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
            load=(
                "cuda/12.4",
                "nccl/2.18",
                "cudnn/8.6",
                "openmpi/4.1.4",
                "python/3.11.1",
                "aws-ofi-nccl",
                "rocm/6.0",
            ),
            build=("cmake/3.24", "gcc/12.2.0"),
        ),
        places=Storage(expires_days=30, environments="/scratch"),
        container=Container("ubuntu:22.04"),
        horovod=recipe.horovod._replace(
            cpu_operations="mpi", gpu=Gpu(operations="nccl", capabilities=("80",))
        ),
        packages={**recipe.packages, "protobuf": ">=4", "keras": ">=3", "torchvision": ">=0"},
        frameworks={
            name: each._replace(cpu_index=None, package=None)
            for name, each in recipe.frameworks.items()
        },
    )


def example_facts(facts: Facts) -> Facts:
    return facts._replace(driver="535.1", memory=10**10, mpirun=Tool("/usr/bin/mpirun", "4.1.4"))


VERSIONS = {"horovod": "0.28.1", "torch": "2.13.0", "tensorflow": "2.15.1"}
# What each verb is said of.
KINDS: dict[str, tuple[type, ...]] = {
    "has": (frozenset,),
    "lacks": (frozenset,),
    "matches": (frozenset, str),
    "is": (str,),
    "is not": (str,),
    "below": (int,),
    "at least": (int,),
    "allows": (str,),
    "denies": (str,),
    "outside": (str,),
    "more than": (int,),
    "differs from": (str,),
    "newer than": (str,),
    "another major than": (str,),
    "newer major than": (str,),
}


def test_conditions_name_what_observables_has_and_fit_its_kind(
    recipe: Recipe, facts: Facts, python: Interpreter
) -> None:
    known: dict[str, Any] = dict(
        observables(example(recipe), example_facts(facts), python, VERSIONS)
    )
    known["nvcc"] = known["nvcc"] or ""
    for rule in all_rules():
        for name, conditions in (pair for each in rule.alternatives() for pair in each.items()):
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


@pytest.mark.parametrize("rule", EDITED, ids=lambda rule: rule.id)
def test_after_its_edit_a_rule_says_nothing_any_more(
    rule: Rule, facts: Facts, tmp_path: Path
) -> None:
    """The recipe of the case is hit; with the edit in its text it is not."""
    case = CASES[rule.id]
    here = decode(Facts, {**encode(facts), **case.get("facts", {})})
    if "python" in case:
        here = here._replace(interpreters=(Interpreter("/p", case["python"]), *PYTHONS))
    path, base = tmp_path / "mine.toml", 'extends = "local"\n'
    text = case["recipe"] if "extends = " in case["recipe"] else base + case["recipe"]
    path.write_text(f'format = 1\nname = "mine"\n{text}', encoding="utf-8")
    found = {each.id: each for each in judged(path, here)}
    assert rule.id in found, sorted(found)
    told_of = told(found[rule.id], load_recipe(str(path)))
    assert "\n  where: " in told_of, told_of
    message = found[rule.id].message
    for name, words in found[rule.id].values.items():
        assert name.endswith("_provider") or all(
            word.replace(">=0", "any") in message for word in words
        ), message
    mine = load_recipe(str(path))
    changes = [propose(mine, edit) for edit in found[rule.id].edits]
    assert all(change.diff and not change.options for change in changes)
    assert any(rule.id not in left_after(change, path, here) for change in changes)
    if rule.severity != "note":
        path.write_text(f'format = 1\nname = "mine"\n{text}', encoding="utf-8")
        assert rule.id not in after_all_suggestions(path, here, tmp_path / "facts.json")


def left_after(change: Change, path: Path, facts: Facts) -> set[str]:
    """What applies to a changed recipe; everything if this machine has no Python for it."""
    path.write_text(change.after, encoding="utf-8")
    try:
        return {each.id for each in judged(path, facts)}
    except IncompatibleError:
        return {*RULES}


def after_all_suggestions(
    path: Path, facts: Facts, file: Path, overrides: tuple[str, ...] = ()
) -> dict[str, str]:
    """What `check` reports once its suggestions are followed: each reports less, so they end."""
    file.write_text(json.dumps(encode(facts)), encoding="utf-8")
    seen = [(len(RULES), 0)]
    while True:
        request = Request(Gate(), str(path), overrides=overrides, facts=file, anywhere=True)
        prepared = prepare(request, thorough=True)
        rules = judge_recipe(prepared)
        weight = Trial({}, rules).weight
        assert weight < seen[-1], [rule.id for rule in rules]
        seen.append(weight)
        change = suggest(request, prepared, rules).change
        if change is None:
            return {rule.id: rule.severity for rule in rules}
        overrides = (*overrides, *change.options)
        if change.after:
            path = path if change.file else file.with_name("own.toml")
            path.write_text(change.after, encoding="utf-8")


def judged(path: Path, facts: Facts) -> tuple[Rule, ...]:
    resolved = load_recipe(str(path))
    python = choose_python(resolved, facts, Runner(), None)
    versions = choose_versions(resolved.recipe, python)
    return judge(observables(resolved.recipe, facts, python, versions))


ALL = ["+".join(filter(None, choice)) for choice in CHOICES]


def test_findings_of_the_shipped_recipes(
    cases: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[Path, str], None]
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
    golden(SHIPPED, said + "\n")


OBSERVED = json.loads((FOLDER.parent / "observables.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", OBSERVED, ids=lambda case: case["about"])
def test_what_rules_see_of_a_recipe_and_a_machine(
    case: dict[str, Any], recipe: Recipe, facts: Facts, python: Interpreter
) -> None:
    """Cases change the recipe `local` and the facts; null stands for what is not known.

    The first one has all that is known.
    """
    changed = decode(Recipe, patched(encode(recipe), case.get("recipe", {})))
    here = decode(Facts, patched(encode(facts), case.get("facts", {})))
    chosen = python if case is OBSERVED[0] else None
    known = observables(changed, here, chosen, case.get("versions", {}))
    plain = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in known.items()}
    names = plain if case is OBSERVED[0] else case["seen"]
    assert {name: plain.get(name) for name in names} == case["seen"]


def test_the_worst_comes_first(recipe: Recipe, facts: Facts, python: Interpreter) -> None:
    found = judge(
        observables(
            recipe._replace(mpi=Mpi("openmpi", "5.0.11")),
            facts._replace(disk_free=1, cxx=None),
            python,
            {"horovod": "0.28.1", "tensorflow": "2.18.1"},
        )
    )
    severities = [rule.severity for rule in found]
    assert severities == sorted(severities, key=["block", "warn", "note"].index)
    assert [rule.id for rule in found if rule.severity == "block"] == ["no-compiler", "disk-low"]


def test_texts_of_what_was_found() -> None:
    """Sentences with commas are not joined by commas, and values have the names of their keys."""
    told = {
        rule: judge({**cases_of(RULES[rule], "hits")[0], **more})
        for rule, more in {
            "job-does-not-fit": {"job_refused": frozenset({"a: 1, 2", "b: 3"})},
            "needed-from-nowhere": {"unprovided": frozenset({"NCCL"})},
            "static-nccl-with-stub-driver": {},
            "horovod-release-is-old": {},
            "no-mpirun-of-cray": {},
        }.items()
    }
    found = {name: next(e for e in rules if e.id == name) for name, rules in told.items()}
    assert found["job-does-not-fit"].message.endswith("own job: a: 1, 2; b: 3")
    assert "does not find NCCL" in found["needed-from-nowhere"].symptom
    assert "horovod.gpu.nccl_link unset" in found["static-nccl-with-stub-driver"].message
    assert "status" not in found["horovod-release-is-old"].values
    assert found["no-mpirun-of-cray"].message.startswith("launch.launcher is mpirun, but")


Check = Callable[..., str]


@pytest.fixture
def check(facts: Facts, tmp_path: Path, hvdenv: Hvdenv) -> Check:
    """Calls `hvdenv check` for a machine with other facts; returns all output."""

    def check(*words: str, code: int = 0, **changes: Any) -> str:
        path = tmp_path / "facts.json"
        path.write_text(json.dumps(encode(facts._replace(**changes))))
        return "".join(hvdenv("check", *words, "--facts", str(path), code=code))

    return check


def test_check_of_a_machine_where_nothing_stands_in_the_way(check: Check) -> None:
    said = check("local")
    assert said.startswith("facts declared on login1; Python 3.11.7 (/usr/bin/python3.11)")
    assert "no known problem prevents a build" in said
    assert said.endswith(" prevents a build (3 notes)\n")


def test_check_exits_3_when_a_rule_blocks(check: Check) -> None:
    short: dict[str, Any] = {"disk_free": 1_000_000, "cpu_flags": ("avx",)}
    said = check("local", code=3, **short)
    assert "[disk-low]" in said
    assert "[cpu-lacks-target-flags]" in said
    assert "hvdenv would refuse to build this" in said
    assert said.endswith(" the build would fail (2 blocks, 3 notes)\n")
    found = json.loads(check("local", "--json", code=3, **short))["findings"]
    assert {each["id"]: each["severity"] for each in found}["disk-low"] == "block"


def test_check_reports_what_a_plan_would_refuse(check: Check) -> None:
    said = check(
        "local-cuda",
        "--set",
        "horovod.version=0.24.3",
        "--set",
        "horovod.gpu.nccl_link=shared",
        code=3,
    )
    assert "torch's NCCL is requested together with another NCCL" in said
    assert "[plan-is-refused]" in said


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
    names = ("HOROVOD_GPU_ALLGATHER", "HOROVOD_WITH_TORCH")
    assert found.edits == ({f"environment.run.{name}": "" for name in names},)
    assert "remove from the recipe: environment.run.HOROVOD_WITH_TORCH" in told(found)


def test_what_was_found_in_sets_comes_before_words() -> None:
    said: Observables = {
        "modules": frozenset({"PyTorch/2.0.1"}),
        "torch_provider": "pip",
        "cxx": "g++",
    }
    (found,) = judge(said)
    assert "(PyTorch/2.0.1)" in found.message


def test_in_a_job_the_scheduler_chooses_the_gpus(
    hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (
        "note: CUDA_VISIBLE_DEVICES is set in this shell"
        in hvdenv("check", "local", "--offline")[0]
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "CUDA_VISIBLE_DEVICES" not in hvdenv("check", "local", "--offline")[0]


def test_an_id_that_no_rule_has_cannot_be_allowed(check: Check) -> None:
    with pytest.raises(UsageError, match="disk-lo: no rule has") as caught:
        refuse_blocked((), ["disk-lo"], quiet=True)
    assert 'did you mean "disk-low' in str(caught.value)
    assert "no rule has this name" in check("local", "--allow", "x-y", code=2)


def test_check_goes_past_what_is_allowed(check: Check) -> None:
    check("local", "--json", code=3, disk_free=1)
    said = check("local", "--json", "--allow", "disk-low", disk_free=1)
    found = json.loads(said)["findings"]
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


def test_the_remedy_is_a_diff_of_the_recipe(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    said = check(str(path), "--variant", "new", code=3)
    assert f"--- {path}\n+++ {path}\n@@" in said
    assert '-launcher = "horovodrun-mpi"  # as ever\n+launcher = "mpirun"' in said
    # The variant sets it, so it is changed there.
    assert '-frameworks.torch.version = "2.2.2"\n' in said
    assert '+frameworks.torch.version = "2.8.0"\n' in said
    assert '    in the recipe: launch.launcher = "mpirun"' in said
    change = json.loads(check(str(path), "--variant", "new", "--json", code=3))["change"]
    assert change["diff"] in said
    assert change["options"] == []


def test_the_remedy_keeps_the_syntax_of_toml_1_1(check: Check, tmp_path: Path) -> None:
    """An inline table over several lines, with a comma after the last key."""
    path = tmp_path / "mine.toml"
    lines = 'launch = {\n    launcher = "horovodrun-mpi",\n    mca.pml = "ucx",\n}\n'
    path.write_text('format = 1\nname = "mine"\nextends = "local"\n' + lines)
    said = check(str(path), code=3)
    assert f"where: {path}:4" in said
    assert '-    launcher = "horovodrun-mpi",\n+    launcher = "mpirun",\n' in said


def test_what_lies_over_the_recipe_is_mended_by_options(check: Check) -> None:
    words = ["--set", "launch.launcher=horovodrun-mpi", "--set", "launch.mca.pml=ucx"]
    said = check("local", *words, code=3)
    assert "options that fix it: --set 'launch.launcher=\"mpirun\"'" in said
    assert "+++" not in said


def test_a_shipped_recipe_is_extended_and_not_changed(check: Check, tmp_path: Path) -> None:
    said = check("local", code=3, cpu_flags=("avx",))
    start = said.index("as your own recipe")
    text = said[start:].split("\n", 1)[1].rsplit("hvdenv would refuse to build this", 1)[0]
    own = tmp_path / "own.toml"
    own.write_text(text)
    assert parse_toml(text)["extends"] == "local"
    check(str(own), cpu_flags=("avx",))


def test_no_suggestion_leads_to_another_finding(check: Check) -> None:
    """torch 2.8 would have TensorFlow's string ABI, but cannot run on the nodes of neuron."""
    words = ["neuron", "--variant", "cpu", "--set", "frameworks.torch.version=2.4.0"]
    said = check(*words, code=3)
    assert '    in the recipe: horovod.controllers = ["mpi"]\n' in said
    assert "frameworks.torch.version = " not in said
    said = check(*words, "--set", "launch.launcher=horovodrun-gloo", code=3)
    assert '\n[horovod]\ncontrollers = ["mpi"]\n' in said
    assert "\noptions that fix it: --set 'launch.launcher=\"mpirun\"'\n" in said
    words = [
        each
        for key in ("launch.launcher=horovodrun-gloo", "scheduler=slurm", "job.nodes=2")
        for each in ("--set", key)
    ]
    assert 'recipe: launch.launcher = "srun" leads to: srun-with-plain-openmpi\n' in check(
        "local", *words
    )


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


def test_each_part_of_a_diff_names_its_table(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[a]\n# 1\n# 2\n# 3\n# 4\nb = "x"\n')
    contents = (read_file(path, RECIPE),)
    resolved = load_recipe("local")._replace(file=str(path), contents=contents, origins={})
    assert "\n@@ -3,4 +3,4 @@ [a]\n # 2\n" in propose(resolved, {"a.b": '"y"'}).diff


def test_the_build_records_what_was_allowed() -> None:
    from hvdenv.session import build

    assert build._findings((RULES["disk-low"], RULES["keras-3"]), ["disk-low"]) == (
        {"rule": "disk-low", "severity": "block", "allowed": True},
        {"rule": "keras-3", "severity": "warn"},
    )
