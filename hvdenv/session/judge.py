"""What known rules say about a recipe on this machine, and how it is reported."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from hvdenv.base.errors import HvdenvError, IncompatibleError, UsageError
from hvdenv.base.runner import Runner, environment
from hvdenv.base.schema import Table, encode, nearest, parse_toml
from hvdenv.knowledge.flags import horovod_variables
from hvdenv.knowledge.observables import observables
from hvdenv.knowledge.rules import KEYS, Edit, Rule, all_rules, judge
from hvdenv.model.cluster import Job
from hvdenv.model.layers import Resolved, decode_whole
from hvdenv.model.recipe import Recipe, executed_paths
from hvdenv.plans.plan import choose_versions
from hvdenv.session.output import report
from hvdenv.session.prepare import Prepared, choose_python
from hvdenv.session.request import Request
from hvdenv.sites.batch import Purpose, own_job, own_where, refusals


def judge_recipe(
    prepared: Prepared, wrong: Mapping[str, frozenset[str]] = MappingProxyType({})
) -> tuple[Rule, ...]:
    """The rules that apply, most severe first; ``wrong`` is what look_up() found."""
    recipe, python = prepared.resolved.recipe, prepared.python
    versions = choose_versions(recipe, python)
    looked_up = {
        **wrong,
        "folders_missing": _missing_folders(prepared),
        "job_here": _job_here(prepared),
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


def _job_here(prepared: Prepared) -> frozenset[str]:
    """Variables that show that check runs in a job, which has GPUs that the scheduler chose."""
    if "CUDA_VISIBLE_DEVICES" not in prepared.facts.variables:
        return frozenset()
    ids = {each.job_id for each in prepared.resolved.recipe.dialects.values()}
    return frozenset(ids & environment().keys())


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
    purposes: tuple[Purpose, ...] = ("build", "verify")
    own = ((own_job(job, each), own_where(job, each, where)) for each in purposes)
    jobs = ((job, where), *own)
    refused = (refusals(each, recipe.dialect, recipe.partitions, (), at) for each, at in jobs)
    return frozenset(f"{each.where}: {each.message}" for several in refused for each in several)


_KEY = re.compile(r"[a-z_]{3,20}(?:\.[A-Za-z_][\w-]{0,40}){1,3}")


def _keys_of(rule: Rule) -> Iterator[str]:
    for name, words in rule.values.items():
        key = KEYS.get(name, name)
        names = (word.partition("=")[0] for word in words) if key.endswith(".") else ("",)
        yield from (f"{key}{each}" for each in names)


def _places(rule: Rule, resolved: Resolved) -> str:
    """File and line of the keys that a rule is about and this recipe sets."""
    named = _KEY.findall(f"{rule.message} {rule.remedy}")
    edited_keys = (key for edit in rule.edits for key in edit)
    keys = dict.fromkeys((*edited_keys, *named, *_keys_of(rule)))
    own = {key for key, layer in resolved.setters.items() if layer.name != "default"}
    tables = {key.rpartition(".")[0] for key in own if key.startswith("target.")}
    places = [resolved.where(key) for key in keys if key in own | tables]
    return ", ".join(place for place in places if place not in rule.message)


def edited(recipe: Recipe, edits: Mapping[str, str]) -> Recipe | None:
    """The recipe with values for keys, as TOML, and without the keys whose value is empty; None if it is none."""
    document: Table = encode(recipe)
    for key, value in edits.items():
        *parents, last = key.split(".")
        table = document
        for parent in parents:
            table = table.setdefault(parent, {}) if value else table.get(parent, {})
        table.pop(last, None)
        if value:
            table[last] = parse_toml(f"value = {value}")["value"]
    changed, wrong = decode_whole(document)
    return None if wrong else changed


def suggest(
    request: Request,
    prepared: Prepared,
    rules: Sequence[Rule],
    wrong: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> dict[str, Edit]:
    """By the id of a rule, the one of its edits that helps, after those of the rules before it.

    An edit helps if its rule no longer applies, and no other as bad does that did not before.
    """
    edits: Edit = {}
    now, helping = tuple(rules), dict[str, Edit]()
    for rule in (rule for rule in rules if rule.edits):
        before = {each.id for each in now}
        bad = ("block",) if rule.severity == "block" else ("block", "warn")
        for edit in rule.edits if rule.id in before else ():
            after = judge_edited(request, prepared, {**edits, **edit}, wrong)
            new = {each.id for each in after or () if each.severity in bad} - before
            if after is None or new or any(each.id == rule.id for each in after):
                continue
            helping[rule.id] = edit
            if rule.severity != "note":
                edits, now = {**edits, **edit}, after
            break
    return helping


def judge_edited(
    request: Request, prepared: Prepared, edits: Edit, wrong: Mapping[str, frozenset[str]]
) -> tuple[Rule, ...] | None:
    """The rules that apply after edits; None if there is no such recipe, or no Python for it."""
    recipe = edited(prepared.resolved.recipe, edits)
    if recipe is None:
        return None
    resolved = prepared.resolved._replace(recipe=recipe)
    try:
        python = choose_python(resolved, prepared.facts, Runner(), request.python)
        return judge_recipe(prepared._replace(resolved=resolved, python=python), wrong)
    except HvdenvError:
        return None


def told(
    rule: Rule,
    resolved: Resolved | None = None,
    suggested: Mapping[str, Edit] | None = None,
) -> str:
    lines = [f"{rule.severity}: {rule.message} [{rule.id}]"]
    if rule.severity != "note":
        lines.append(f"  symptom: {rule.symptom}")
    if resolved and (places := _places(rule, resolved)):
        lines.append(f"  where: {places}")
    lines.append(f"  what to do: {rule.remedy}")
    edit = rule.only_edit() if suggested is None else suggested.get(rule.id, {})
    lines += [
        f"    {each}" for key, value in edit.items() for each in _change(key, value, resolved)
    ]
    return "\n".join([*lines, f"  source: {rule.source} ({rule.certainty})"])


def _change(key: str, value: str, resolved: Resolved | None) -> Iterator[str]:
    """What to write into a recipe, or to remove from it, if it or one below it sets the key."""
    if value:
        yield f"in the recipe: {key} = {value}"
        return
    setters = resolved.setters if resolved else {}
    found = [layer for each, layer in setters.items() if f"{each}.".startswith(f"{key}.")]
    if found and found[0].name.startswith("recipe "):  # one below it
        yield f'in the recipe: without = ["{key}"]'
    elif found or not resolved:
        yield f"remove from the recipe: {key}"


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
    rules: Sequence[Rule],
    allowed: Sequence[str],
    resolved: Resolved | None = None,
    suggested: Mapping[str, Edit] | None = None,
    *,
    quiet: bool,
) -> None:
    """Print warnings, and stop if a rule blocks that is not allowed, or if an allowed id is unknown."""
    refuse_unknown(allowed)
    for rule in rules:
        if rule.severity == "warn" and not quiet:
            report(told(rule, resolved, suggested))
    if blocking := blocking_rules(rules, allowed):
        raise IncompatibleError(
            "known incompatibility: " + blocking[0].message,
            detail="\n".join(told(rule, resolved, suggested) for rule in blocking),
            remedy="follow the remedies above; to build anyway: "
            + " ".join(f"--allow {rule.id}" for rule in blocking),
        )
