"""Known incompatibilities that a recipe meets on this machine, before anything is built."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hvdenv.cli.options import (
    Prepared,
    add_facts,
    add_json,
    add_prefix,
    add_python,
    add_recipe,
    prepare,
    print_json,
)
from hvdenv.errors import IncompatibleError
from hvdenv.plan import choose_versions
from hvdenv.rules import Rule, judge, observables

EXAMPLES = """\
examples:
  hvdenv check local
  hvdenv check local --python 3.12 --json
  hvdenv check local --facts compute-node.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_python(parser)
    add_prefix(parser)
    add_json(parser)
    add_facts(parser)


def run(arguments: argparse.Namespace) -> int:
    prepared = prepare(arguments, thorough=True)
    facts, python = prepared.facts, prepared.python
    rules = judge_recipe(prepared)
    blocked = any(rule.severity == "block" for rule in rules)
    if arguments.json:
        findings = [rule._asdict() for rule in rules]
        print_json({"facts": facts.origin, "python": python.path, "findings": findings})
    else:
        print(f"facts {facts.origin} on {facts.host}; Python {python.version} ({python.path})")
        for rule in rules:
            print(told(rule))
        print("the build would be refused" if blocked else "nothing stands in the way of a build")
    return IncompatibleError.exit_code if blocked else 0


def judge_recipe(prepared: Prepared) -> tuple[Rule, ...]:
    """The rules that apply, the worst first."""
    recipe, python = prepared.resolved.recipe, prepared.python
    versions = choose_versions(recipe, python)
    return judge(observables(recipe, prepared.facts, python, versions))


def told(rule: Rule) -> str:
    """A rule that applies, as text."""
    lines = [f"{rule.severity}: {rule.message} [{rule.id}]"]
    if rule.severity != "note":
        lines.append(f"  it would look like: {rule.symptom}")
    return "\n".join([*lines, f"  what to do: {rule.remedy}", f"  source: {rule.source}"])


def refuse_blocked(rules: Sequence[Rule], allowed: Sequence[str], *, quiet: bool) -> None:
    """Say what applies, and stop at what blocks.

    Args:
        rules: that apply.
        allowed: ids of blocking rules that the user wants to go past.
        quiet: do not say warnings.

    Raises:
        IncompatibleError: a rule blocks that was not allowed.
    """
    for rule in rules:
        if rule.severity == "warn" and not quiet:
            print(told(rule), file=sys.stderr)
    blocking = [rule for rule in rules if rule.severity == "block" and rule.id not in allowed]
    if blocking:
        raise IncompatibleError(
            "known incompatibility: " + blocking[0].message,
            detail="\n".join(told(rule) for rule in blocking),
            remedy="do what is said above; to build all the same: "
            + " ".join(f"--allow {rule.id}" for rule in blocking),
        )
