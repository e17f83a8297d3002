"""Finding recipes and merging their layers: default, recipe, variant, site, command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv.errors import RecipeError, UsageError
from hvdenv.recipe import FORMAT, Recipe, variants_of
from hvdenv.schema import Problem, decode, dotted, line_of, parse_toml

PACKAGE = Path(__file__).parent

Document = dict[str, Any]


class Layer(NamedTuple):
    """One source of values.

    Attributes:
        name: what `hvdenv show` calls it: default, recipe, variant X, site, command line.
        file: path of the file, empty for the command line.
        text: the file's text, to find lines in.
        values: its values.
        prefix: keys under which the values stand in the file (a variant's table).
    """

    name: str
    file: str
    text: str
    values: Document
    prefix: tuple[str, ...] = ()


class Resolved(NamedTuple):
    """A recipe with the layers it came from.

    Attributes:
        recipe: the typed result.
        variants: names of the variants taken, sorted.
        offered: names of all variants of the recipe.
        origins: for each dotted key, the layer that set it.
        file: path of the recipe's file.
        foreign_files: files that do not come with hvdenv: the recipe, the site file.
    """

    recipe: Recipe
    variants: tuple[str, ...]
    offered: tuple[str, ...]
    origins: dict[str, str]
    file: str
    foreign_files: tuple[str, ...]


def recipe_folder() -> Path:
    """Where the shipped recipes lie: in the wheel, or beside the package in a checkout."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Shipped recipes by name."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.toml"))}


def find_recipe(name: str) -> Path:
    """The file of a recipe, by name or by path.

    A path has a slash or ends in .toml, so that nothing in the current folder
    shadows a shipped name. Whether there is a file is seen when it is read.

    Raises:
        UsageError: there is no recipe of this name.
    """
    if "/" in name or name.endswith(".toml"):
        return Path(name)
    shipped = shipped_recipes()
    if name not in shipped:
        import difflib

        close = difflib.get_close_matches(name, shipped, 1)
        hint = f'did you mean "{close[0]}"? ' if close else ""
        here = (
            f"; for the file {name}.toml write ./{name}.toml"
            if os.path.isfile(f"{name}.toml")
            else ""
        )
        raise UsageError(
            f'there is no recipe named "{name}"',
            remedy=f"{hint}`hvdenv recipes` lists them{here}",
        )
    return shipped[name]


def read_layer(name: str, path: Path) -> Layer:
    """Read one file.

    Raises:
        RecipeError: it cannot be read or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(
            f"cannot read this file: {reason}",
            where=str(path),
            remedy="look at its path and permissions; `hvdenv recipes` lists the recipes that need no path",
        ) from error
    try:
        return Layer(name, str(path), text, parse_toml(text))
    except ValueError as error:
        raise RecipeError(f"not valid TOML: {error}", where=str(path)) from error


def resolve(
    name: str,
    *,
    variants: Sequence[str] = (),
    site: Path | None = None,
    overrides: Iterable[str] = (),
) -> Resolved:
    """Read a recipe and everything that is laid over it.

    Args:
        name: a recipe's name or path.
        variants: variants to take; their order does not matter.
        site: a site file.
        overrides: `key=value` from the command line, the value in TOML.

    Raises:
        RecipeError, UsageError: with file, line, key and the nearest known key.
    """
    path = find_recipe(name)
    base = read_layer("recipe", path)
    _check_format(base)
    chosen = sorted(set(variants))
    layers = [
        read_layer("default", PACKAGE / "defaults.toml"),
        base._replace(values={k: v for k, v in base.values.items() if k != "variants"}),
        *(_variant(base, variant) for variant in chosen),
        *([_site_layer(site)] if site else []),
        *(_override(text) for text in overrides),
    ]
    _refuse_clashes(layers)
    merged: Document = {}
    origins: dict[str, Layer] = {}
    for layer in layers:
        _merge(merged, layer.values, layer, origins)
    merged.setdefault("mpi", None)
    try:
        recipe = decode(Recipe, merged)
    except Problem as problem:
        raise _explain(problem, base, origins) from problem
    _check_whole(recipe, base, origins)
    return Resolved(
        recipe,
        tuple(chosen),
        tuple(variants_of(base.values)),
        {key: layer.name for key, layer in origins.items()},
        str(path),
        tuple(
            file
            for file in dict.fromkeys(layer.file for layer in layers)
            if file and Path(file).parent not in (PACKAGE, recipe_folder())
        ),
    )


def _check_format(base: Layer) -> None:
    found = base.values.get("format")
    if found != FORMAT:
        line = line_of(base.text, ("format",))
        raise RecipeError(
            f"this hvdenv reads recipe format {FORMAT}, the file says {found!r}",
            where=f"{base.file}:{line}: format",
            remedy=f"write `format = {FORMAT}` at its top, or use the hvdenv that the recipe is for",
        )


def _variant(base: Layer, variant: str) -> Layer:
    offered = base.values.get("variants", {})
    if variant not in variants_of(base.values):
        known = ", ".join(variants_of(base.values)) or "none"
        raise UsageError(
            f'recipe "{base.values.get("name")}" has no variant "{variant}"',
            remedy=f"its variants are: {known}",
        )
    prefix = ("variants", variant)
    values, where = offered[variant], f"{base.file}:{line_of(base.text, prefix)}: {dotted(prefix)}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", variant):
        raise RecipeError("the name of a variant has a-z, 0-9, _ and - only", where=where)
    if not isinstance(values, dict):
        raise RecipeError(f"expected a table, found {values!r}", where=where)
    return Layer(f"variant {variant}", base.file, base.text, values, prefix)


def _site_layer(path: Path) -> Layer:
    layer = read_layer("site", path)
    allowed = {"python", "frameworks", "mpi", "target", "build_tools", "packages"}
    for key in layer.values:
        if key not in allowed:
            raise RecipeError(
                "a site file cannot set this",
                where=f"{path}:{line_of(layer.text, (key,))}: {key}",
                remedy=f"it can set {', '.join(sorted(allowed))}",
            )
    return layer


def _override(text: str) -> Layer:
    key, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError("there is no = in it")
        try:
            values = parse_toml(f"{key} = {value}")
        except ValueError:
            values = parse_toml(f"{key} = '{value}'")
    except ValueError as error:
        raise UsageError(
            f"--set {text}: {error}",
            remedy="write KEY=VALUE, for example --set mpi.version=5.0.11",
        ) from error
    return Layer("command line", "", f"{key} = {value}", values)


def _leaves(
    values: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Dotted keys and values below a table; lists are values."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _refuse_clashes(layers: Sequence[Layer]) -> None:
    """Two variants that set one key differently have no meaning without an order."""
    seen: dict[tuple[str, ...], tuple[Any, str]] = {}
    for layer in layers:
        if not layer.name.startswith("variant "):
            continue
        for path, value in _leaves(layer.values):
            other = seen.setdefault(path, (value, layer.name))
            if other[0] != value:
                raise UsageError(
                    f"{other[1]} and {layer.name} both set {dotted(path)}, to different values",
                    remedy="take one of them, or set the key with --set",
                )


def _merge(
    into: Document,
    values: Document,
    layer: Layer,
    origins: dict[str, Layer],
    path: tuple[str, ...] = (),
) -> None:
    for key, value in values.items():
        where = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key, {}), dict):
            _merge(into.setdefault(key, {}), value, layer, origins, where)
        else:
            into[key] = value
            for below in [origin for origin in origins if origin.startswith(f"{dotted(where)}.")]:
                del origins[below]
            origins[dotted(where)] = layer


def _explain(problem: Problem, base: Layer, origins: Mapping[str, Layer]) -> RecipeError:
    """A problem as an error that names file, line and key."""
    layer = base
    for length in range(len(problem.path), 0, -1):
        key = dotted(problem.path[:length])
        inside = [origins[o] for o in origins if o.startswith(f"{key}.")]
        found = origins.get(key) or next((o for o in inside if o.name != "default"), None)
        if found or inside:
            layer = found or base
            break
    where = (
        f"{layer.file}:{line_of(layer.text, layer.prefix + problem.path)}: "
        if layer.file
        else "--set: "
    )
    return RecipeError(problem.message, where=where + dotted(problem.path))


def _check_whole(recipe: Recipe, base: Layer, origins: Mapping[str, Layer]) -> None:
    """What no single value shows."""
    for path, wrong, message in (
        (
            ("horovod", "frameworks"),
            not recipe.horovod.frameworks,
            "at least one framework is needed",
        ),
        (
            ("horovod", "controllers"),
            not recipe.horovod.controllers,
            "at least one controller is needed: without MPI and Gloo Horovod compiles, but no two ranks can meet",
        ),
        (
            ("mpi",),
            "mpi" in recipe.horovod.controllers and recipe.mpi is None,
            'horovod.controllers has "mpi", so the recipe needs a table [mpi]',
        ),
        *(
            (
                ("frameworks", framework),
                framework not in recipe.frameworks,
                f'horovod.frameworks has "{framework}", so the recipe needs [frameworks.{framework}]',
            )
            for framework in recipe.horovod.frameworks
        ),
    ):
        if wrong:
            raise _explain(Problem(path, message), base, origins)
