"""Finding recipes and merging their layers: default, recipe, variant, site, command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from hvdenv import PACKAGE
from hvdenv.errors import HvdenvError, RecipeError, UsageError
from hvdenv.masking import holds_secret, learn
from hvdenv.model import horovodrun, template
from hvdenv.model.cluster import (
    Job,
    Launch,
    LauncherName,
    Network,
    Partition,
    SiteKeys,
    Storage,
)
from hvdenv.model.dialect import OF_LAUNCHERS, SHIPPED
from hvdenv.model.dialect import problems as problems_of_schedulers
from hvdenv.model.recipe import Framework, Recipe
from hvdenv.reading import RECIPE, SITE, Content, read_file
from hvdenv.schema import (
    MOST_PROBLEMS,
    Problem,
    Table,
    check_part,
    closest,
    decode,
    dotted,
    is_text,
    line_of,
    nearest,
    parse_toml,
)

DEFAULTS = Path(__file__).parent / "defaults.toml"
FORMAT = 1


class Layer(NamedTuple):
    """One source of values.

    Attributes:
        name: what `hvdenv show` calls it: default, recipe, variant X, site, command line.
        file: path of the file, empty for the command line.
        prefix: path of the values in the file (a variant's table).
        without: dotted keys of the layers below to remove first.
        content: of the file, as read; None for the command line.
    """

    name: str
    file: str
    text: str
    values: Table
    prefix: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    content: Content | None = None


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
    offered: tuple[str, ...]
    origins: dict[str, str]
    file: str
    contents: tuple[Content, ...] = ()
    site: Layer | None = None
    setters: Mapping[str, Layer] = {}

    def where(self, key: str) -> str:
        """File, line and key of a value, also where a recipe below or the site file sets it."""
        return _where(tuple(key.split(".")), self.setters) or f"{self.file}: {key}"


def recipe_folder() -> Path:
    """Folder of the shipped recipes: in the wheel, or beside the package in a checkout."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(recipe_folder().glob("*.toml"))}


def find_recipe(name: str, folders: Iterable[str] = ()) -> Path:
    """The file of a recipe, by name or by path. A file at a path need not exist.

    A path has a slash or ends in .toml, so that nothing in the current folder
    shadows a shipped name.

    Args:
        folders: recipe folders of the site, which precede the shipped recipes.

    Raises:
        UsageError: there is no recipe of this name.
    """
    if "/" in name or name.endswith(".toml"):
        return Path(name)
    known = known_recipes(folders)
    if name not in known:
        # Environments are named recipe+variant, so users try that name.
        recipe, *variants = name.split("+")
        close = recipe if recipe in known else closest(recipe, known)
        meant = " ".join([close, *(f"--variant {each}" for each in variants if each)])
        hint = f'did you mean "{meant}"? ' if close else ""
        here = (
            f"; for the file {name}.toml write ./{name}.toml"
            if os.path.isfile(f"{name}.toml")
            else ""
        )
        raise UsageError(
            f'there is no recipe named "{name}"',
            remedy=f"{hint}`hvdenv recipes` lists them{here}",
        )
    return known[name]


def known_recipes(folders: Iterable[str] = ()) -> dict[str, Path]:
    """Recipes by name: the shipped ones, and those of other folders."""
    others = [path for folder in folders for path in sorted(Path(folder).glob("*.toml"))]
    return {**shipped_recipes(), **{path.stem: path for path in reversed(others)}}


def variants_of(document: dict[str, object]) -> list[str]:
    variants = document.get("variants")
    return sorted(variants) if isinstance(variants, dict) else []


def read_layer(name: str, path: Path) -> Layer:
    """Read one file.

    Raises:
        RecipeError: it cannot be read or is not TOML.
    """
    try:
        content = read_file(path, SITE if name == "site" else RECIPE)
        text = content.text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(
            f"cannot read this file: {reason}",
            where=str(path),
            remedy="save it as UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else "check its path and permissions"
            + ("" if name == "site" else "; `hvdenv recipes` lists the recipes that have a name"),
        ) from error
    try:
        return Layer(name, str(path), text, _learnt(parse_toml(text)), content=content)
    except ValueError as error:
        message = str(error)
        line = re.search(r" \(at line (\d+), column \d+\)", message)
        again = re.search("twice|overwrite|mutate", message)
        raise RecipeError(
            f"not valid TOML: {message.replace(line[0], '') if line else message}",
            where=f"{path}:{line[1]}" if line else str(path),
            remedy="a table or key may be stated once: merge it with the other one"
            if again
            else "text needs quotes, and quotes and brackets must be closed"
            if line
            else "",
        ) from error


def _learnt(values: Table) -> Table:
    """The values of a file, whose secrets are masked from now on."""
    texts = ((path[-1], value) for path, value in leaves(values) if isinstance(value, str))
    learn(texts)
    return values


def load_recipe(
    name: str,
    *,
    variants: Sequence[str] = (),
    site: Path | None = None,
    overrides: Iterable[str] = (),
) -> Resolved:
    """Read a recipe and all layers above it.

    Args:
        overrides: `key=value` from the command line, the value in TOML.

    Raises:
        RecipeError, UsageError: with file, line, key and the nearest known key.
    """
    site_layer = _site_layer(site) if site else None
    folders = own_keys(site_layer, "recipe_folders").recipe_folders
    path = find_recipe(name, folders)
    bases = _with_bases(read_layer("recipe", path), folders)
    offered = {variant: each for each in bases for variant in variants_of(each.values)}
    lowest = [
        read_layer("default", DEFAULTS),
        *(_but(each, "variants", "extends") for each in bases),
    ]
    own = {variant: _variant(bases[-1], offered, variant) for variant in sorted(set(variants))}
    layers = [
        *lowest,
        *own.values(),
        *([_but(site_layer, "recipe_folders", "trust")] if site_layer else []),
        *(
            Layer("command line", "", text.replace("=", " = ", 1), _learnt(assigned(text)))
            for text in overrides
        ),
    ]
    _refuse_clashes(layers)
    recipe, origins = _decoded(layers, bases)
    foreign = {
        layer.file: layer.content
        for layer in layers
        if layer.content and Path(layer.file).parent not in (DEFAULTS.parent, recipe_folder())
    }
    return Resolved(
        recipe=recipe._replace(job=recipe.job._replace(gpus_per_node=_gpus_per_node(recipe))),
        variants=tuple(own),
        keyed=_keyed(lowest, own),
        offered=tuple(sorted(offered)),
        origins={key: layer.name for key, layer in origins.items()},
        file=str(path),
        contents=tuple(foreign.values()),
        site=site_layer,
        setters=origins,
    )


def _decoded(layers: Sequence[Layer], bases: Sequence[Layer]) -> tuple[Recipe, dict[str, Layer]]:
    """The recipe of merged layers, and the layer that sets each key.

    Raises:
        RecipeError: names everything that is wrong in them, and in the variants of the bases.
    """
    errors = [error for each in bases for error in _errors_of_variants(each)]
    merged, origins = _combined(layers)
    try:
        recipe = decode(Recipe, merged)
        problems = _problems_of_whole(recipe)
    except Problem as problem:
        problems = [*problem.all, *_further(merged, problem.all)]
    _refuse([*errors, *(_explain(each, bases[-1], origins) for each in problems)])
    return recipe, origins


def _gpus_per_node(recipe: Recipe) -> int | None:
    """The recipe's number, or one for each rank where Horovod is built for GPUs."""
    job, partition = recipe.job, recipe.partitions.get(recipe.job.partition or "")
    follows = recipe.horovod.gpu and partition and partition.gpus and job.gpu_option != "none"
    if job.gpus_per_node is not None or not (follows and partition):
        return job.gpus_per_node
    return min(job.ranks_per_node, partition.gpus)


def _combined(layers: Iterable[Layer]) -> tuple[Table, dict[str, Layer]]:
    """The values of all layers, and for each dotted key the layer that set it."""
    merged: Table = {}
    origins: dict[str, Layer] = {}
    for layer in layers:
        for key in layer.without:
            _remove(merged, key, layer, origins)
        _merge(merged, layer.values, layer, origins)
    return merged, origins


def _further(merged: Table, found: Iterable[Problem]) -> list[Problem]:
    """What is wrong with the recipe as a whole, if it can be read without the values found wrong."""
    wrong = [each.path for each in found]
    stand_ins = {"name": "x", "summary": "", "status": "documented"}
    try:
        recipe = decode(Recipe, {**stand_ins, **_without(merged, wrong)})
    except Problem:
        return []
    kept = {path for path, _ in leaves(_without(merged, wrong))}
    # A key that seems to be missing may be the one that is misspelt.
    near = {each.path[:-1] for each in found if each.message.startswith("unknown key")}
    return [
        each
        for each in _problems_of_whole(recipe)
        if not any(path[: len(each.path)] == each.path for path in wrong)
        and (each.path in kept or each.path[:-1] not in near)
    ]


def _without(value: Any, paths: Sequence[tuple[str | int, ...]]) -> Any:
    """The tables without the values at some paths; an item of a list takes the list with it."""
    if not isinstance(value, dict):
        return value
    gone = {path[0] for path in paths if len(path) == 1 or isinstance(path[1], int)}
    return {
        key: _without(each, [path[1:] for path in paths if path[0] == key])
        for key, each in value.items()
        if key not in gone
    }


def _keyed(lowest: Sequence[Layer], own: Mapping[str, Layer]) -> tuple[str, ...]:
    """The variants without which the environment would be another one.

    Judged without site and command line, so that the same variants always have one name.
    """
    kept, whole = dict(own), _environment_part([*lowest, *own.values()])
    for variant in own if whole else ():
        others = {name: layer for name, layer in kept.items() if name != variant}
        if _environment_part([*lowest, *others.values()]) == whole:
            kept = others
    return tuple(kept)


def _environment_part(layers: Iterable[Layer]) -> tuple[object, ...] | None:
    """What of a recipe decides its environment; None if it is not a recipe without other layers."""
    try:
        recipe = decode(Recipe, _combined(layers)[0])
    except (Problem, RecipeError):
        return None
    target = recipe.partitions.get(recipe.job.partition or "", Partition())
    plain = recipe._replace(
        summary="", status="documented", sources=(), site="", scheduler=None, job=Job(),
        launch=Launch(), network=Network(), places=Storage(), container=None, references=(), schedulers={},
        deviations=(), notes=(), partitions={},
    )  # fmt: skip
    # Horovod is compiled for the GPUs of all partitions.
    gpus = {each.capability for each in recipe.partitions.values() if each.capability}
    return plain, target.arch, target.glibc, target.cuda, gpus


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


def _check_format(base: Layer) -> None:
    found = base.values.get("format")
    if found != FORMAT:
        line = line_of(base.text, ("format",))
        raise RecipeError(
            f"this hvdenv supports recipe format {FORMAT}, and the file "
            + ("states none" if found is None else f"has {found!r}"),
            where=f"{base.file}:{line}: format",
            remedy=f"write `format = {FORMAT}` at its top, or use the version of hvdenv that the recipe was written for",
        )


_MOST_BASES = 20  # in practice there are two


def _with_bases(layer: Layer, folders: Sequence[str]) -> list[Layer]:
    """The recipe and those that it extends, base first."""
    found = [layer]
    while True:
        _check_format(found[0])
        parent = found[0].values.get("extends")
        if parent is None:
            return found
        where = f"{found[0].file}:{line_of(found[0].text, ('extends',))}: extends"
        if not isinstance(parent, str):
            raise RecipeError(
                f"expected the name or path of a recipe, found {parent!r}", where=where,
                remedy='write a text, such as extends = "local"; `hvdenv recipes` lists names',
            )  # fmt: skip
        try:
            path = find_recipe(parent, folders)
            if "/" in parent or parent.endswith(".toml"):
                path = Path(found[0].file).parent / path
            layer = read_layer(f"recipe {path.stem}", path)
        except HvdenvError as error:
            raise RecipeError(str(error), where=where) from error
        if any(os.path.realpath(path) == os.path.realpath(each.file) for each in found):
            raise RecipeError(
                f"{parent} extends this recipe, too: that is a cycle", where=where,
                remedy="remove `extends` here or there",
            )  # fmt: skip
        if len(found) > _MOST_BASES:
            raise RecipeError(
                f"more than {_MOST_BASES} recipes extend one another", where=where,
                remedy="copy the keys of some of them into this recipe",
            )  # fmt: skip
        found.insert(0, layer)


def _errors_of_variants(layer: Layer) -> Iterator[RecipeError]:
    """Wrong types and names of keys in all variants, chosen or not."""
    variants = layer.values.get("variants", {})
    if not isinstance(variants, dict):
        where = f"{layer.file}:{line_of(layer.text, ('variants',))}: variants"
        raise RecipeError(
            f"expected a table for each variant, found {variants!r}", where=where,
            remedy="write each variant as a table: [variants.NAME]",
        )  # fmt: skip
    for variant in variants:
        try:
            found = _variant(layer, {variant: layer}, variant)
            check_part(Recipe, found.values)
        except RecipeError as error:
            yield error
        except Problem as problem:
            yield from (_of_variant(each, found, variant) for each in problem.all)


def _of_variant(problem: Problem, found: Layer, variant: str) -> RecipeError:
    """A problem of a variant; a table that no recipe has may be the rest of its name."""
    error, key = _explain(problem, found, {}), str(problem.path[0])
    if len(problem.path) > 1 or key in Recipe._fields or not isinstance(found.values[key], dict):
        return error
    hint = f'; a name with a dot needs quotes: variants."{variant}.{key}"'
    return RecipeError(error.message.partition(";")[0] + hint, where=error.where)


def _but(layer: Layer, *keys: str) -> Layer:
    """A layer without some keys, which are not part of the merged recipe."""
    return layer._replace(values={k: v for k, v in layer.values.items() if k not in keys})


def _variant(base: Layer, offered: Mapping[str, Layer], variant: str) -> Layer:
    if variant not in offered:
        known = ", ".join(sorted(offered)) or "none"
        raise UsageError(
            f'recipe "{base.values.get("name")}" has no variant "{variant}"{nearest(variant, offered)}',
            remedy=f"its variants are: {known}",
        )
    base, prefix = offered[variant], ("variants", variant)
    values = base.values["variants"][variant]

    def refused(message: str, *below: str) -> RecipeError:
        path = (*prefix, *below)
        return RecipeError(message, where=f"{base.file}:{line_of(base.text, path)}: {dotted(path)}")

    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", variant):
        raise refused("the name of a variant may contain only a-z, 0-9, _ and -")
    if not isinstance(values, dict):
        raise refused(f"expected a table, found {values!r}")
    without = values.get("without", [])
    if not isinstance(without, list) or not all(isinstance(key, str) for key in without):
        raise refused(f"expected a list of keys, found {without!r}", "without")
    kept = {key: value for key, value in values.items() if key != "without"}
    return Layer(
        name=f"variant {variant}",
        file=base.file,
        text=base.text,
        values=kept,
        prefix=prefix,
        without=tuple(without),
        content=base.content,
    )


def _remove(into: Table, key: str, layer: Layer, origins: dict[str, Layer]) -> None:
    """Remove a table or value that a layer lists in `without`."""
    *parents, last = key.split(".")
    table: Any = into
    for parent in parents:
        table = table.get(parent) if isinstance(table, dict) else None
    if not isinstance(table, dict) or last not in table:
        line = line_of(layer.text, (*layer.prefix, "without"))
        raise RecipeError(
            f'no layer below this variant sets "{key}"',
            where=f"{layer.file}:{line}: {dotted(layer.prefix)}.without",
        )
    del table[last]
    for below in [o for o in origins if o == key or o.startswith(f"{key}.")]:
        del origins[below]


# Keys that differ between sites. The recipe decides what Horovod is built for.
_OF_A_SITE = (
    "build_tools", "conda", "environment", "frameworks", "job", "launch", "modules", "mpi",
    "network", "packages", "places", "python", "recipe_folders", "references", "schedulers", "target",
    "trust",
)  # fmt: skip


def _site_layer(path: Path) -> Layer:
    layer = read_layer("site", path)
    unknown = [key for key in layer.values if key not in _OF_A_SITE]
    _refuse(
        [
            RecipeError(
                f"a site file cannot set this{nearest(key, _OF_A_SITE)}",
                where=f"{path}:{line_of(layer.text, (key,))}: {key}",
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
        raise _explain(problem, site, {}) from problem


def assigned(text: str) -> Table:
    """``KEY=VALUE`` as a table of the recipe; a value that is not TOML is a text.

    Raises:
        UsageError: it is neither.
    """
    key, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError("it has no =")
        try:
            values = parse_toml(f"{key} = {value}")
            (path, found), *others = leaves(values)
            plain = not (others or isinstance(found, (str, list, dict))) and is_text(Recipe, path)
        except ValueError:
            plain = True
        if plain:  # 0.28 and 00:10:00 are a number and a time to TOML
            values = parse_toml(f"{key} = '{value.strip()}'")
    except ValueError as error:
        raise UsageError(
            f"--set {text}: {error}",
            remedy="write KEY=VALUE, for example --set mpi.version=5.0.11",
        ) from error
    return values


def leaves(
    values: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Dotted keys and values below a table; lists are values."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _refuse_clashes(layers: Sequence[Layer]) -> None:
    """Variants have no order, so two of them must not set one key to different values."""
    seen: dict[tuple[str, ...], tuple[Any, str]] = {}
    for layer in layers:
        if not layer.name.startswith("variant "):
            continue
        for path, value in leaves(layer.values):
            other = seen.setdefault(path, (value, layer.name))
            if other[0] != value:
                raise UsageError(
                    f"{other[1]} and {layer.name} both set {dotted(path)}, to different values",
                    remedy="use only one of them, or set the key with --set",
                )


def _merge(
    into: Table,
    values: Table,
    layer: Layer,
    origins: dict[str, Layer],
    path: tuple[str, ...] = (),
) -> None:
    for key, value in values.items():
        where = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key, {}), dict):
            _merge(into.setdefault(key, {}), value, layer, origins, where)
        else:
            if isinstance(into.get(key), dict):
                for below in [o for o in origins if o.startswith(f"{dotted(where)}.")]:
                    del origins[below]
            into[key] = value
            origins[dotted(where)] = layer


def _explain(problem: Problem, base: Layer, origins: Mapping[str, Layer]) -> RecipeError:
    return RecipeError(problem.message, where=_where(problem.path, origins, base))


def _where(
    path: tuple[str | int, ...], origins: Mapping[str, Layer], base: Layer | None = None
) -> str:
    """File, line and key of the nearest value on a path; of ``base`` if no layer sets any."""
    layer = base
    for length in range(len(path), 0, -1):
        key = dotted(path[:length])
        inside = [origins[o] for o in origins if o.startswith(f"{key}.")]
        found = origins.get(key) or next((o for o in inside if o.name != "default"), None)
        if found or inside:
            layer = found or base
            break
    if layer is None:
        return ""
    line = f"{layer.file}:{line_of(layer.text, layer.prefix + path)}" if layer.file else "--set"
    return f"{line}: {dotted(path)}"


# Packages that require exactly one release of a framework.
_COMPANIONS: Mapping[str, Framework] = {
    "torchvision": "torch", "torchaudio": "torch", "torchtext": "torch",
    "tensorflow-text": "tensorflow", "tensorflow-addons": "tensorflow",
}  # fmt: skip


def _problems_of_packages(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Packages that would install a second copy of a framework."""
    for name in recipe.packages:
        framework = _COMPANIONS.get(name.lower().replace("_", "-"))
        package = recipe.frameworks.get(framework) if framework else None
        if package and package.provider == "source":
            yield (
                f"packages.{name}",
                f"pip would install a second {framework} for it, beside the one that is built from"
                " source",
            )


def _problems_of_launchers(recipe: Recipe) -> Iterator[Problem]:
    for name, own in recipe.launch.launchers.items():
        path = ("launch", "launchers", name)
        if name in get_args(LauncherName):
            yield Problem(path, f"hvdenv has a launcher {name}: give this one another name")
        for key, known in (("command", OF_LAUNCHERS), ("export", ("name",))):
            if message := template.problem(getattr(own, key), known, words=True):
                yield Problem((*path, key), message)
        words = template.split(own.command)
        if "{program}" not in words:
            yield Problem((*path, "command"), "it must contain {program}, which the ranks run")
        for field in ("hosts", "host_names", "hostfile"):
            mark = f"{{{field}}}"
            if any(mark in word and word != mark for word in words):
                yield Problem((*path, "command"), f"{mark} must be a word of its own")


def _problems_of_whole(recipe: Recipe) -> list[Problem]:
    """Problems that only several values together show."""
    wrong = (
        *_wrong_horovod(recipe),
        *_wrong_python(recipe),
        *_wrong_names(recipe),
        *_secrets(recipe),
    )
    texts = dict(wrong) | dict(_problems_of_packages(recipe))
    return [
        *(Problem(tuple(key.split(".")), text) for key, text in texts.items()),
        *problems_of_schedulers(recipe.schedulers),
        *(
            Problem(("launch", "horovodrun", number), message)
            for number, message in horovodrun.problems(recipe.launch.horovodrun)
        ),
        *_problems_of_launchers(recipe),
        *(
            Problem(("references", number, key), message)
            for number, reference in enumerate(recipe.references)
            for key, message in reference.problems
        ),
    ]


# A key, and what is wrong with its value.
_Wrong = Iterator[tuple[str, str]]


def _wrong_horovod(recipe: Recipe) -> _Wrong:
    horovod, mpi = recipe.horovod, recipe.mpi
    if not horovod.frameworks:
        yield "horovod.frameworks", "at least one framework is needed"
    if not horovod.controllers:
        yield (
            "horovod.controllers",
            "at least one controller is needed: without MPI and Gloo, Horovod compiles, but its"
            " ranks cannot communicate",
        )
    if horovod.provider == "source" and not horovod.sha256:
        needed = 'the provider "source" needs the sha256 of Horovod\'s source archive'
        yield "horovod.sha256", needed
    if horovod.provider == "source" and recipe.python.provider in ("prefix", "modules"):
        yield (
            "horovod.provider",
            "hvdenv does not install into an environment of the site: use a venv over it"
            ' (python.system_site_packages) or the provider "clone", or set this to "present"',
        )
    if "mpi" in horovod.controllers and not mpi:
        yield "mpi", 'horovod.controllers has "mpi", so the recipe needs a table [mpi]'
    if mpi and mpi.package and not mpi.version:
        yield "mpi.version", "a package from the index needs a version"


def _wrong_python(recipe: Recipe) -> _Wrong:
    python, frameworks = recipe.python, recipe.frameworks
    if python.provider in ("prefix", "clone") and not python.prefix:
        needed = f'the provider "{python.provider}" needs the folder of the site\'s environment'
        yield "python.prefix", needed
    if python.provider == "conda" and not recipe.conda:
        yield "conda", 'the provider "conda" needs a table [conda] with channels'
    if (python.from_modules or python.provider == "modules") and not recipe.modules:
        yield "modules", "the Python comes from modules, so the recipe needs a table [modules]"
    for name in (each for each in recipe.horovod.frameworks if each not in frameworks):
        needed = f'horovod.frameworks has "{name}", so the recipe needs [frameworks.{name}]'
        yield f"frameworks.{name}", needed
    for name, package in frameworks.items():
        if package.provider == "source" and not package.source:
            needed = f'the provider "source" needs a table [frameworks.{name}.source]'
            yield f"frameworks.{name}.source", needed


def _secrets(recipe: Recipe) -> _Wrong:
    """Variables whose names say that they are secret: other users read recipes and records."""
    of_recipe = recipe.environment
    tables = {"environment.build": of_recipe.build, "environment.run": of_recipe.run}
    for name, package in recipe.frameworks.items():
        if package.source:
            tables[f"frameworks.{name}.source.build"] = package.source.build
    for table, variables in tables.items():
        for variable in (each for each, value in variables.items() if holds_secret(each, value)):
            yield (
                f"{table}.{variable}",
                "other users read recipes and the records of environments, so neither may contain"
                f" a secret: remove {variable} here, and export it in your shell",
            )


def _wrong_names(recipe: Recipe) -> _Wrong:
    """Names of a scheduler, launcher or partition that nothing has."""
    scheduler, names = recipe.scheduler, (*recipe.schedulers, *SHIPPED)
    if scheduler and scheduler not in names:
        yield (
            "scheduler",
            f"there is no scheduler {scheduler}{nearest(scheduler, names)}; known are"
            f" {', '.join(names)}, and [schedulers.NAME] adds one",
        )
    launcher, known = recipe.launch.launcher, (*get_args(LauncherName), *recipe.launch.launchers)
    if launcher not in known:
        yield (
            "launch.launcher",
            f"there is no launcher {launcher}{nearest(launcher, known)}; known are"
            f" {', '.join(known)}, and [launch.launchers.NAME] adds one",
        )
    partition, partitions = recipe.job.partition, recipe.partitions
    if partition and partition not in partitions:
        near, quote = nearest(partition, partitions), '"' * ("." in partition)
        yield "job.partition", f"there is no [partitions.{quote}{partition}{quote}]{near}"
