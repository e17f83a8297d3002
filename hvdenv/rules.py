"""Known incompatibilities: data in rules.toml, judged over a recipe and facts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from hvdenv.facts import Facts, Interpreter
from hvdenv.recipe import Recipe, Version
from hvdenv.schema import Pattern, decode, parse_toml

# What rules speak about: a version, a name, a number, or a set of names.
Observables = Mapping[str, str | int | frozenset[str]]

Condition = Annotated[
    str,
    Pattern(
        r"(has|lacks) \S+|(is|is not) \S+|(below|at least) \d+|any|none|[<>=!~][^ ].*",
        'a condition: a version specifier, "has X", "lacks X", "is X", "below 5", "any" or "none"',
    ),
]


class Rule(NamedTuple):
    """One known incompatibility.

    Attributes:
        id: stable name, for `--allow` and for talking about it.
        when: conditions by observable; all have to hold. An observable that is not
            known never makes a rule apply, except for the condition "none".
        severity: ``block`` refuses the build, ``warn`` and ``note`` only say it.
        message: what is wrong.
        symptom: what it would look like later.
        remedy: what to change in the recipe or on the machine.
        source: where the knowledge comes from.
        certainty: run here, read in the source, documented, or reported.
    """

    id: str
    when: dict[str, Condition]
    severity: Literal["block", "warn", "note"]
    message: str
    symptom: str
    remedy: str
    source: str
    certainty: Literal["run", "source", "documented", "reported"]


class _RuleFile(NamedTuple):
    rule: tuple[Rule, ...]


@lru_cache(maxsize=1)
def all_rules() -> tuple[Rule, ...]:
    """The rule base."""
    text = (Path(__file__).parent / "rules.toml").read_text(encoding="utf-8")
    return decode(_RuleFile, parse_toml(text)).rule


def observables(
    recipe: Recipe, facts: Facts, python: Interpreter | None, versions: Mapping[str, Version]
) -> Observables:
    """What rules may ask about.

    Args:
        recipe: the resolved recipe.
        facts: observed or declared.
        python: the interpreter chosen; None when none fits the recipe.
        versions: framework versions for that Python.
    """
    wanted = recipe.target.arch_flags.get(facts.machine, "").split()
    lacking = [
        flag for flag in wanted if facts.cpu_flags and not _instructions(flag) <= {*facts.cpu_flags}
    ]
    seen: dict[str, str | int | frozenset[str]] = {
        "horovod": recipe.horovod.version,
        "frameworks": frozenset(recipe.horovod.frameworks),
        "controllers": frozenset(recipe.horovod.controllers),
        "system": facts.system,
        "machine": facts.machine,
        "cores": facts.cores,
        "cpu_lacks": frozenset(lacking),
        **{name: version for name, version in versions.items() if name != "horovod"},
    }
    if python:
        seen["python"] = python.version
        seen["python_complete"] = "yes" if python.complete else "no"
    if recipe.mpi:
        seen["openmpi"] = recipe.mpi.version
    if facts.cxx and facts.cxx.version:
        seen["gcc"] = facts.cxx.version
    if facts.cxx:
        seen["cxx"] = facts.cxx.path
    if facts.glibc:
        seen["glibc"] = facts.glibc
    free = [left for left in (facts.disk_free, facts.quota_free) if left is not None]
    if free:
        seen["disk_free_mb"] = min(free) // 1_000_000
    if facts.inodes_free is not None:
        seen["inodes_free"] = facts.inodes_free
    return seen


# What /proc/cpuinfo calls the instructions of these compiler flags.
_IN_CPUINFO = {"lzcnt": "abm", "pclmul": "pclmulqdq", "rdrnd": "rdrand", "sse3": "pni"}


def _instructions(flag: str) -> frozenset[str]:
    """Instructions that code compiled with a flag may use, where the flag names them: -mavx does."""
    name = flag.removeprefix("-m").replace(".", "_")
    if not flag.startswith("-m") or "=" in name or name.startswith("no-") or name.isdecimal():
        return frozenset()
    return frozenset({_IN_CPUINFO.get(name, name)})


def applies(rule: Rule, seen: Observables) -> bool:
    """Whether every condition of a rule holds."""
    return all(_holds(condition, seen.get(name)) for name, condition in rule.when.items())


def _holds(condition: str, value: str | int | frozenset[str] | None) -> bool:
    empty = value is None or value == frozenset()
    if condition in ("any", "none"):
        return empty == (condition == "none")
    if value is None:
        return False
    verb, _, operand = condition.rpartition(" ")
    if isinstance(value, frozenset):
        return (operand in value) == (verb == "has")
    if isinstance(value, int):
        return (value < int(operand)) == (verb == "below")
    if verb in ("is", "is not"):
        return (value == operand) == (verb == "is")
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(condition).contains(value, prereleases=True)


def judge(seen: Observables) -> tuple[Rule, ...]:
    """The rules that apply, the worst first."""
    order = ("block", "warn", "note")
    hits = [rule for rule in all_rules() if applies(rule, seen)]
    return tuple(sorted(hits, key=lambda rule: order.index(rule.severity)))
