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
    offered = {
        variant: each.part(variant)
        for each in bases
        for variant in variants_of(each.values)
        if isinstance(each.values["variants"][variant], dict)
    }
    lowest = [read_layer("default", DEFAULTS), *(each.part() for each in bases)]
    errors = [error for each in bases for error in _errors_of_parts(each)]
    if set(variants) - offered.keys():
        _refuse(errors)
    own = {each: _chosen(bases[-1], offered, each) for each in sorted(set(variants))}
    layers = [
        *lowest,
        *own.values(),
        *([site_layer.but("recipe_folders", "trust")] if site_layer else []),
        *(Layer("command line", "", "", learnt(assigned(text))) for text in overrides),
    ]
    _refuse_clashes(own.values())
    merged, setters = _merged(layers)
    recipe, wrong = decode_whole(merged)
    _refuse([*errors, *((_setter(each.path, setters) or top).explain(each) for each in wrong)])
    assert recipe
    return Resolved(
        recipe=recipe._replace(job=recipe.job._replace(gpus_per_node=_gpus_per_node(recipe))),
        variants=tuple(own),
        keyed=_keyed(lowest, own),
        origins={key: layer.name for key, layer in setters.items()},
        file=str(path),
        contents=_foreign_contents(layers),
        setters=setters,
    )


def _foreign_contents(layers: Iterable[Layer]) -> tuple[Content, ...]:
    """The contents of files that are not part of hvdenv, each once."""
    foreign = {
        layer.file: layer.content
        for layer in layers
        if layer.content and Path(layer.file).parent not in (DEFAULTS.parent, recipe_folder())
    }
    return tuple(foreign.values())


def _gpus_per_node(recipe: Recipe) -> int | None:
    """The recipe's number, or one for each rank where Horovod is built for GPUs."""
    job, partition = recipe.job, recipe.partition
    follows = recipe.horovod.gpu and partition and partition.gpus and job.gpu_option != "none"
    if job.gpus_per_node is not None or not (follows and partition):
        return job.gpus_per_node
    return min(job.ranks_per_node, partition.gpus)


def decode_whole(merged: Table) -> tuple[Recipe | None, list[Problem]]:
    """The recipe of merged layers, and all that is wrong with it.

    What its values show together is judged without those that are wrong.
    """
    try:
        recipe = decode(Recipe, merged)
    except Problem as problem:
        return None, [*problem.all, *_further(merged, problem)]
    return recipe, list(problems(recipe))


def _further(merged: Table, found: Problem) -> Iterator[Problem]:
    """What is wrong with the recipe as a whole, apart from the values found wrong."""
    wrong = [each.path for each in found.all]
    kept = {path for path, _ in leaves(merged)}
    # A key that seems to be missing may be the one that is misspelt.
    near = {each.path[:-1] for each in found.all if each.message.startswith("unknown key")}
    for each in problems(found.rest) if found.rest else ():
        known = any(path[: len(each.path)] == each.path for path in wrong)
        if not known and (each.path in kept or each.path[:-1] not in near):
            yield each


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
        above = "variant" if layer.prefix else "recipe"
        raise layer.error(f'no layer below this {above} sets "{key}"', ("without",))
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
        return offered[variant]
    raise UsageError(
        f'recipe "{recipe.values.get("name")}" has no variant "{variant}"{nearest(variant, offered)}',
        remedy=f"its variants are: {', '.join(sorted(offered)) or 'none'}",
    )


def _errors_of_parts(recipe: Layer) -> Iterator[RecipeError]:
    """Wrong types and names of keys in all variants of a file, chosen or not, and in `without`."""
    kinds = {"without": tuple[str, ...], "variants": dict[Name, Recipe]}
    for key in kinds.keys() & recipe.values.keys():
        try:
            check_part(kinds[key], recipe.values[key], (key,))
        except Problem as problem:
            yield from map(recipe.explain, problem.all)


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
