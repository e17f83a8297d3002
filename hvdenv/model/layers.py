"""Merging the layers of a recipe: default, recipe, variant, site, command line."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv.base.errors import RecipeError, UsageError
from hvdenv.base.reading import Content
from hvdenv.base.schema import (
    MOST_PROBLEMS,
    KeyPath,
    Problem,
    Table,
    check_part,
    decode,
    dotted,
    nearest,
    parse_toml,
)
from hvdenv.model.cluster import Partition, SiteKeys
from hvdenv.model.recipe import Name, Recipe
from hvdenv.model.recipe_checks import problems
from hvdenv.model.recipe_files import (
    DEFAULTS,
    Layer,
    find_recipe,
    learnt,
    leaves,
    read_layer,
    recipe_folder,
    variants_of,
    with_bases,
)


class Resolved(NamedTuple):
    """A recipe after all layers are merged.

    Attributes:
        variants: names of the chosen variants, sorted.
        keyed: those of them that change the environment, and not only its jobs.
        contents: of files that are not part of hvdenv (the recipe, the site file), as read.
        setters: for each dotted key, the layer that set it.
    """

    recipe: Recipe
    variants: tuple[str, ...]
    keyed: tuple[str, ...]
    origins: dict[str, str]
    file: str
    contents: tuple[Content, ...] = ()
    site: Layer | None = None
    setters: Mapping[str, Layer] = {}

    def where(self, key: str) -> str:
        """File, line and key of a value, also where a recipe below or the site file sets it."""
        path = tuple(key.split("."))
        layer = _setter(path, self.setters)
        return layer.where(path) if layer else f"{self.file}: {key}"


def load_recipe(
    name: str,
    *,
    variants: Sequence[str] = (),
    site: Path | None = None,
    overrides: Iterable[str] = (),
    text: str | None = None,
) -> Resolved:
    """Read a recipe and all layers above it.

    Args:
        overrides: `key=value` from the command line, the value in TOML.
        text: what the file would contain; None reads it.

    Raises:
        RecipeError, UsageError: with file, line, key and the nearest known key.
    """
    site_layer = _site_layer(site) if site else None
    folders = own_keys(site_layer, "recipe_folders").recipe_folders
    path = find_recipe(name, folders)
    top = (
        read_layer("recipe", path)
        if text is None
        else Layer("recipe", str(path), text, parse_toml(text))
    )
    bases = with_bases(top, folders)
    offered = {variant: each for each in bases for variant in variants_of(each.values)}
    lowest = [read_layer("default", DEFAULTS), *map(_without_variants, bases)]
    own = {each: _chosen(bases[-1], offered, each) for each in sorted(set(variants))}
    layers = [
        *lowest,
        *own.values(),
        *([site_layer.but("recipe_folders", "trust")] if site_layer else []),
        *(Layer("command line", "", "", learnt(assigned(text))) for text in overrides),
    ]
    _refuse_clashes(own.values())
    recipe, setters = _decoded(layers, bases)
    foreign = {
        layer.file: layer.content
        for layer in layers
        if layer.content and Path(layer.file).parent not in (DEFAULTS.parent, recipe_folder())
    }
    return Resolved(
        recipe=recipe._replace(job=recipe.job._replace(gpus_per_node=_gpus_per_node(recipe))),
        variants=tuple(own),
        keyed=_keyed(lowest, own),
        origins={key: layer.name for key, layer in setters.items()},
        file=str(path),
        contents=tuple(foreign.values()),
        site=site_layer,
        setters=setters,
    )


def _gpus_per_node(recipe: Recipe) -> int | None:
    """The recipe's number, or one for each rank where Horovod is built for GPUs."""
    job, partition = recipe.job, recipe.partition
    follows = recipe.horovod.gpu and partition and partition.gpus and job.gpu_option != "none"
    if job.gpus_per_node is not None or not (follows and partition):
        return job.gpus_per_node
    return min(job.ranks_per_node, partition.gpus)


def _decoded(layers: Sequence[Layer], bases: Sequence[Layer]) -> tuple[Recipe, dict[str, Layer]]:
    """The recipe of merged layers, and the layer that sets each key.

    Raises:
        RecipeError: names everything that is wrong in them, and in the variants of the bases.
    """
    errors = [error for each in bases for error in _errors_of_variants(each)]
    merged, setters = _merged(layers)
    recipe, wrong = decode_whole(merged)
    errors += [(_setter(each.path, setters) or bases[-1]).explain(each) for each in wrong]
    _refuse(errors)
    assert recipe
    return recipe, setters


def decode_whole(merged: Table) -> tuple[Recipe | None, list[Problem]]:
    """The recipe of merged layers, and all that is wrong with it."""
    try:
        recipe = decode(Recipe, merged)
    except Problem as problem:
        return None, [*problem.all, *_further(merged, problem.all)]
    return recipe, list(problems(recipe))


def _further(merged: Table, found: Iterable[Problem]) -> list[Problem]:
    """What is wrong with the recipe as a whole, if it can be read without the values found wrong."""
    wrong = [each.path for each in found]
    rest = _without(merged, wrong)
    try:
        recipe = decode(Recipe, _with_stand_ins(rest))
    except Problem:
        return []
    kept = {path for path, _ in leaves(rest)}
    # A key that seems to be missing may be the one that is misspelt.
    near = {each.path[:-1] for each in found if each.message.startswith("unknown key")}
    return [
        each
        for each in problems(recipe)
        if not any(path[: len(each.path)] == each.path for path in wrong)
        and (each.path in kept or each.path[:-1] not in near)
    ]


# Of what is required, so that the rest can be read.
_STAND_INS: Table = {
    "name": "x",
    "summary": "",
    "status": "documented",
    "python": {"version": "==3.10.*"},
    "horovod": {"version": "1.0", "frameworks": [], "controllers": []},
}


def _with_stand_ins(rest: Table) -> Table:
    tables = {name: {**_STAND_INS[name], **rest.get(name, {})} for name in ("python", "horovod")}
    versions = {name: {"version": "1.0", **of} for name, of in rest.get("frameworks", {}).items()}
    return {**_STAND_INS, **rest, **tables, "frameworks": versions}


def _without(value: Any, paths: Sequence[KeyPath]) -> Any:
    """The tables without the values at some paths; an item of a list takes the list with it."""
    if not isinstance(value, dict):
        return value
    gone = {path[0] for path in paths if len(path) == 1 or isinstance(path[1], int)}
    return {
        key: _without(each, [path[1:] for path in paths if path[0] == key])
        for key, each in value.items()
        if key not in gone
    }


def _refuse(errors: Sequence[RecipeError]) -> None:
    """Report all errors as one, in the order of their lines."""
    found = {error.where: error for error in errors}  # a variant and the merged recipe share some
    in_order = sorted(found.values(), key=lambda error: _file_and_line(error.where))
    if len(in_order) < 2:
        for error in in_order:
            raise error
        return
    first, *others = in_order[:MOST_PROBLEMS]
    more = len(in_order) >= MOST_PROBLEMS
    raise RecipeError(
        first.message,
        where=first.where,
        detail="\n".join(map(str, others)),
        remedy=f"fix these {len(others) + 1} errors"
        + (f" and check again: hvdenv reports at most {MOST_PROBLEMS} at a time" if more else ""),
    )


def _file_and_line(where: str) -> tuple[str, int]:
    found = re.match(r"(.*?):(\d+): ", where)
    return (found[1], int(found[2])) if found else (where, 0)


def _merged(layers: Iterable[Layer]) -> tuple[Table, dict[str, Layer]]:
    """The values of all layers, and for each dotted key the layer that set it.

    Raises:
        RecipeError: a layer removes a key that no layer below it sets.
    """
    merged: Table = {}
    setters: dict[str, Layer] = {}
    for layer in layers:
        for key in layer.without:
            _remove(merged, key, layer, setters)
        _merge(merged, layer.values, layer, setters)
    return merged, setters


def _merge(
    into: Table, values: Table, layer: Layer, setters: dict[str, Layer], above: KeyPath = ()
) -> None:
    for name, value in values.items():
        path = (*above, name)
        if isinstance(value, dict) and isinstance(into.get(name, {}), dict):
            _merge(into.setdefault(name, {}), value, layer, setters, path)
        else:
            if isinstance(into.get(name), dict):
                _forget(dotted(path), setters)
            into[name] = value
            setters[dotted(path)] = layer


def _remove(into: Table, key: str, layer: Layer, setters: dict[str, Layer]) -> None:
    """Remove a table or value that a layer lists in `without`."""
    *parents, last = key.split(".")
    table: Any = into
    for parent in parents:
        table = table.get(parent) if isinstance(table, dict) else None
    if not isinstance(table, dict) or last not in table:
        whole = layer._replace(prefix=())
        above = "variant" if layer.prefix else "recipe"
        raise whole.error(f'no layer below this {above} sets "{key}"', (*layer.prefix, "without"))
    del table[last]
    _forget(key, setters)


def _forget(key: str, setters: dict[str, Layer]) -> None:
    for each in [each for each in setters if each == key or each.startswith(f"{key}.")]:
        del setters[each]


def _setter(path: KeyPath, setters: Mapping[str, Layer]) -> Layer | None:
    """The layer that sets the nearest value on a path; None if no layer sets any."""
    for length in range(len(path), 0, -1):
        key = dotted(path[:length])
        below = (layer for each, layer in setters.items() if each.startswith(f"{key}."))
        inside = [setters[key]] if key in setters else list(below)
        if inside:
            return next((each for each in inside if each.name != "default" or key in setters), None)
    return None


# Keys that decide no environment, but how and where it is used, and what is said about it.
_OF_NO_ENVIRONMENT = frozenset({
    "summary", "status", "sources", "site", "scheduler", "schedulers", "job", "launch", "network",
    "places", "container", "deviations", "notes", "partitions",
})  # fmt: skip


def _keyed(lowest: Sequence[Layer], own: Mapping[str, Layer]) -> tuple[str, ...]:
    """The variants without which the environment would be another one.

    Judged without site and command line, so that the same variants always have one name.
    """
    kept, whole = dict(own), _environment_part([*lowest, *own.values()])
    for variant in own:
        others = {name: layer for name, layer in kept.items() if name != variant}
        with suppress(RecipeError):  # another variant removes what this one sets
            if _environment_part([*lowest, *others.values()]) == whole:
                kept = others
    return tuple(kept)


def _environment_part(layers: Iterable[Layer]) -> tuple[object, ...]:
    """What of a recipe decides its environment."""
    merged, _ = _merged(layers)
    partitions = _table(merged, "partitions")
    target = _table(partitions, str(_table(merged, "job").get("partition")))
    decisive = [target.get(each, getattr(Partition(), each)) for each in ("arch", "glibc", "cuda")]
    # Horovod is compiled for the GPUs of all partitions.
    gpus = {str(_table(partitions, name).get("capability")) for name in partitions} - {"None"}
    rest = {key: each for key, each in merged.items() if key not in _OF_NO_ENVIRONMENT}
    return rest, decisive, gpus


def _table(values: Table, key: str) -> Table:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _chosen(recipe: Layer, offered: Mapping[str, Layer], variant: str) -> Layer:
    """A variant that the user chose."""
    if variant in offered:
        try:
            return _variant(offered[variant], variant)
        except Problem as problem:
            raise offered[variant].explain(problem) from problem
    raise UsageError(
        f'recipe "{recipe.values.get("name")}" has no variant "{variant}"{nearest(variant, offered)}',
        remedy=f"its variants are: {', '.join(sorted(offered)) or 'none'}",
    )


def _without_variants(recipe: Layer) -> Layer:
    """The layer of a recipe itself."""
    try:
        without = decode(tuple[str, ...], recipe.values.get("without", []), ("without",))
    except Problem as problem:
        raise recipe.explain(problem) from problem
    return recipe.but("variants", "extends", "without")._replace(without=without)


def _variant(recipe: Layer, variant: str) -> Layer:
    """The layer of a variant.

    Raises:
        Problem: it is not one; its path is that in the file of the recipe.
    """
    path = ("variants", variant)
    decode(Name, variant, path)
    values = dict(decode(dict[str, Any], recipe.values["variants"][variant], path))
    without = decode(tuple[str, ...], values.pop("without", []), (*path, "without"))
    return recipe._replace(name=f"variant {variant}", values=values, prefix=path, without=without)


def _errors_of_variants(recipe: Layer) -> Iterator[RecipeError]:
    """Wrong types and names of keys in all variants, chosen or not."""
    variants = recipe.values.get("variants", {})
    if not isinstance(variants, dict):
        yield recipe.error(
            f"expected a table for each variant, found {variants!r}",
            ("variants",),
            remedy="write each variant as a table: [variants.NAME]",
        )
        return
    for variant in variants:
        layer = recipe
        try:
            layer = _variant(recipe, variant)
            check_part(Recipe, layer.values)
        except Problem as problem:
            yield from (_error_of_variant(each, layer, variant) for each in problem.all)


def _error_of_variant(problem: Problem, layer: Layer, variant: str) -> RecipeError:
    """A problem of a variant; a table that no recipe has may be the rest of its name."""
    key = str(problem.path[0])
    if len(problem.path) > 1 or key in Recipe._fields or not _table(layer.values, key):
        return layer.explain(problem)
    hint = f'; a name with a dot needs quotes: variants."{variant}.{key}"'
    return layer.error(problem.message.partition(";")[0] + hint, problem.path)


def _refuse_clashes(variants: Iterable[Layer]) -> None:
    """Variants have no order, so two of them must not set one key to different values."""
    seen: dict[tuple[str, ...], tuple[Any, str]] = {}
    for layer in variants:
        for path, value in leaves(layer.values):
            other = seen.setdefault(path, (value, layer.name))
            if other[0] != value:
                raise UsageError(
                    f"{other[1]} and {layer.name} both set {dotted(path)}, to different values",
                    remedy="use only one of them",
                )


# Keys that differ between sites. The recipe decides what Horovod is built for.
_OF_A_SITE = (
    "build_tools", "conda", "environment", "frameworks", "job", "launch", "modules", "mpi",
    "network", "packages", "places", "python", "recipe_folders", "schedulers", "target",
    "trust",
)  # fmt: skip


def _site_layer(path: Path) -> Layer:
    layer = read_layer("site", path)
    unknown = [key for key in layer.values if key not in _OF_A_SITE]
    _refuse(
        [
            layer.error(
                f"a site file cannot set this{nearest(key, _OF_A_SITE)}",
                (key,),
                remedy=f"it can set {', '.join(_OF_A_SITE)}",
            )
            for key in unknown[:MOST_PROBLEMS]
        ]
    )
    return layer


def own_keys(site: Layer | None, *keys: str) -> SiteKeys:
    """Some keys of a site file that count without a recipe; the others have their defaults.

    Raises:
        RecipeError: they are malformed.
    """
    named = {k: v for k, v in site.values.items() if k in keys} if site else {}
    try:
        return decode(SiteKeys, named)
    except Problem as problem:
        assert site
        _refuse([site.explain(each) for each in problem.all])
        raise


def assigned(text: str) -> Table:
    """``KEY=VALUE`` as a table of the recipe.

    A value is TOML if that fits the key, or a text: 0.28 and 00:10:00 are a number and a time to
    TOML. A value that does not fit is what TOML says.

    Raises:
        UsageError: it is neither.
    """
    key, _, value = text.partition("=")
    found, reason = list[Table](), "it has no ="
    for written in (value, f"'{value.strip()}'") if "=" in text else ():
        try:
            found.append(parse_toml(f"{key} = {written}"))
            check_part(Recipe, found[-1])
            return found[-1]
        except ValueError as error:
            reason = str(error)
        except Problem:
            if value.lstrip()[:1] in ('"', "'"):  # a text, which does not fit
                break
    if found:
        return found[0]
    raise UsageError(
        f"--set {text}: {reason}",
        remedy="write KEY=VALUE, for example --set mpi.version=5.0.11",
    )
