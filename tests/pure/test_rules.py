from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdenv.cli.check import refuse_blocked, told
from hvdenv.cli.main import main
from hvdenv.errors import IncompatibleError
from hvdenv.facts import Facts, Interpreter, Tool
from hvdenv.recipe import Mpi, Recipe
from hvdenv.rules import Observables, all_rules, applies, judge, observables
from hvdenv.schema import parse_toml

CASES = Path(__file__).parents[1] / "cases/rules"
RULES = {rule.id: rule for rule in all_rules()}


def seen(case: dict[str, Any]) -> Observables:
    return {k: frozenset(v) if isinstance(v, list) else v for k, v in case.items()}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.id)
def test_each_rule_has_cases_that_it_hits_and_that_it_must_not(rule: Any) -> None:
    cases = parse_toml((CASES / f"{rule.id}.toml").read_text(encoding="utf-8"))
    assert sorted(cases) == ["hits", "misses"]
    for case in cases["hits"]:
        assert applies(rule, seen(case)), case
        # Each condition counts: without what it is about, the rule says nothing.
        for name in rule.when:
            if rule.when[name] != "none":
                assert not applies(rule, seen({k: v for k, v in case.items() if k != name}))
    for case in cases["misses"]:
        assert not applies(rule, seen(case)), case


def test_each_case_is_of_a_rule() -> None:
    assert {path.stem for path in CASES.iterdir()} == set(RULES)


def test_rules_have_ids_of_their_own_and_say_all() -> None:
    assert len(RULES) == len(all_rules()) >= 16
    for rule in all_rules():
        assert all(rule._replace(when={"x": "any"})), rule.id
        assert rule.when


def test_conditions_name_what_observables_has(
    recipe: Recipe, facts: Facts, python: Interpreter
) -> None:
    versions = {"horovod": "0.28.1", "torch": "2.13.0", "tensorflow": "2.15.1"}
    known = observables(recipe, facts, python, versions)
    assert {name for rule in all_rules() for name in rule.when} <= set(known)


def test_observables(recipe: Recipe, facts: Facts, python: Interpreter) -> None:
    versions = {"horovod": "0.28.1", "torch": "2.13.0"}
    assert observables(recipe, facts._replace(quota_free=7_000_000_000), python, versions) == {
        "horovod": "0.28.1",
        "torch": "2.13.0",
        "frameworks": frozenset({"tensorflow", "torch"}),
        "controllers": frozenset({"mpi", "gloo"}),
        "system": "Linux",
        "machine": "x86_64",
        "cores": 8,
        "cpu_lacks": frozenset(),
        "python": "3.11.7",
        "python_complete": "yes",
        "openmpi": "4.1.8",
        "gcc": "12.2.0",
        "cxx": "/usr/bin/g++",
        "glibc": "2.36",
        "disk_free_mb": 7000,
        "inodes_free": 5_000_000,
    }


def test_observables_that_are_not_there_are_left_out(recipe: Recipe, facts: Facts) -> None:
    bare = facts._replace(cxx=None, glibc="", disk_free=None, inodes_free=None)
    known = observables(recipe._replace(mpi=None), bare, None, {})
    assert not {"python", "openmpi", "gcc", "cxx", "glibc", "disk_free_mb", "inodes_free"} & set(
        known
    )


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
    assert "nothing stands in the way of a build" in said


def test_check_exits_3_when_a_rule_blocks(
    facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(facts, tmp_path, disk_free=1_000_000, cpu_flags=("avx",))
    assert main(["check", "local", "--facts", file]) == 3
    said = capsys.readouterr().out
    assert "[disk-low]" in said
    assert "[cpu-lacks-target-flags]" in said
    assert "the build would be refused" in said
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
