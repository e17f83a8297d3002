"""What known rules say about a recipe on this machine, and how it is reported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hvdenv.errors import IncompatibleError, UsageError
from hvdenv.knowledge.flags import horovod_variables
from hvdenv.knowledge.observables import observables
from hvdenv.knowledge.rules import Rule, all_rules, judge
from hvdenv.model.cluster import Job
from hvdenv.model.layers import Resolved
from hvdenv.model.recipe import executed_paths
from hvdenv.plans.plan import choose_versions
from hvdenv.schema import nearest
from hvdenv.session.output import report
from hvdenv.session.prepare import Prepared
from hvdenv.sites.batch import own_job, refusals


def judge_recipe(
    prepared: Prepared, wrong: Mapping[str, frozenset[str]] = MappingProxyType({})
) -> tuple[Rule, ...]:
    """The rules that apply, most severe first; ``wrong`` is what look_up() found."""
    recipe, python = prepared.resolved.recipe, prepared.python
    versions = choose_versions(recipe, python)
    looked_up = {
        **wrong,
        "folders_missing": _missing_folders(prepared),
        "job_refused": _job_refused(prepared),
        "plan_refused": plan_refused(prepared),
    }
    return judge(observables(recipe, prepared.facts, python, versions, looked_up))


def _missing_folders(prepared: Prepared) -> frozenset[str]:
    """Directories of the recipe that this machine lacks, if the recipe is for it and not for an image."""
    recipe = prepared.resolved.recipe
    if prepared.facts.origin != "observed" or recipe.container:
        return frozenset()
    return frozenset(
        f"{prepared.resolved.where(key)} = {path}"
        for key, path in executed_paths(recipe)
        # Without the script of modules.init, hvdenv looks for others.
        if path.startswith("/") and not key.startswith("modules.") and not os.path.exists(path)
    )


def plan_refused(prepared: Prepared) -> frozenset[str]:
    """Why no plan can be made: what this release of Horovod would ignore or reject."""
    try:
        horovod_variables(prepared.resolved.recipe, prepared.facts.machine)
    except IncompatibleError as error:
        return frozenset({f"{error.where}: {error.message} ({error.remedy})"})
    return frozenset()


def _job_refused(prepared: Prepared) -> frozenset[str]:
    """Why the site could not run the recipe's jobs. What each user adds to them does not count."""
    recipe = prepared.resolved.recipe
    if not recipe.dialect:
        return frozenset()
    unknown = tuple(each for each in recipe.job.requires if each not in Job._fields)
    job, where = recipe.job._replace(requires=unknown), prepared.resolved.where
    jobs = (job, own_job(job, "build"), own_job(job, "verify"))
    refused = (refusals(each, recipe.dialect, recipe.partitions, where=where) for each in jobs)
    return frozenset(f"{each.where}: {each.message}" for several in refused for each in several)


_KEY = re.compile(r"[a-z_]{3,20}(?:\.[A-Za-z_][\w-]{0,40}){1,3}")


def _places(rule: Rule, resolved: Resolved) -> str:
    """File and line of the keys that a rule names and this recipe sets."""
    keys = dict.fromkeys((*rule.edit, *_KEY.findall(f"{rule.message} {rule.remedy}")))
    set_by = {key: layer.name for key, layer in resolved.setters.items()}
    places = [resolved.where(key) for key in keys if set_by.get(key, "default") != "default"]
    return ", ".join(place for place in places if place not in rule.message)


def told(rule: Rule, resolved: Resolved | None = None) -> str:
    lines = [f"{rule.severity}: {rule.message} [{rule.id}]"]
    if rule.severity != "note":
        lines.append(f"  symptom: {rule.symptom}")
    if resolved and (places := _places(rule, resolved)):
        lines.append(f"  where: {places}")
    lines.append(f"  what to do: {rule.remedy}")
    for key, value in rule.edit.items():
        if resolved and not value and key not in resolved.setters:
            continue
        lines.append(
            f"    in the recipe: {key} = {value}" if value else f"    remove from the recipe: {key}"
        )
    return "\n".join([*lines, f"  source: {rule.source} ({rule.certainty})"])


def refuse_unknown(allowed: Sequence[str]) -> None:
    """Stop at an id that no rule has."""
    known = [rule.id for rule in all_rules()]
    for name in allowed:
        if name not in known:
            raise UsageError(
                f"--allow {name}: no rule has this name{nearest(name, known)}",
                remedy="`hvdenv check RECIPE` shows the names",
            )


def blocking_rules(rules: Sequence[Rule], allowed: Sequence[str]) -> list[Rule]:
    return [rule for rule in rules if rule.severity == "block" and rule.id not in allowed]


def refuse_blocked(
    rules: Sequence[Rule], allowed: Sequence[str], resolved: Resolved | None = None, *, quiet: bool
) -> None:
    """Print warnings, and stop if a rule blocks that is not allowed, or if an allowed id is unknown."""
    refuse_unknown(allowed)
    for rule in rules:
        if rule.severity == "warn" and not quiet:
            report(told(rule, resolved))
    if blocking := blocking_rules(rules, allowed):
        raise IncompatibleError(
            "known incompatibility: " + blocking[0].message,
            detail="\n".join(told(rule, resolved) for rule in blocking),
            remedy="follow the remedies above; to build anyway: "
            + " ".join(f"--allow {rule.id}" for rule in blocking),
        )
