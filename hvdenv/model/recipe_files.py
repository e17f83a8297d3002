"""Files of recipes and sites: where they are, and what they hold as it is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv import PACKAGE
from hvdenv.base.errors import HvdenvError, RecipeError, UsageError
from hvdenv.base.masking import learn
from hvdenv.base.reading import RECIPE, SITE, Content, read_file
from hvdenv.base.schema import (
    KeyPath,
    Problem,
    Table,
    brief,
    closest,
    dotted,
    line_of,
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

    def but(self, *keys: str) -> Layer:
        """The layer without some keys, which are not part of the merged recipe."""
        return self._replace(values={k: v for k, v in self.values.items() if k not in keys})

    def part(self, variant: str = "") -> Layer:
        """What a recipe sets itself, or one of its variants sets."""
        values = self.values["variants"][variant] if variant else self.values
        listed = values.get("without")
        return self._replace(
            name=f"variant {variant}" if variant else self.name,
            values=values,
            prefix=("variants", variant) if variant else (),
            without=tuple(each for each in listed if isinstance(each, str))
            if isinstance(listed, list)
            else (),
        ).but("variants", "extends", "without")

    def where(self, path: KeyPath) -> str:
        """File, line and key of a value."""
        path = (*self.prefix, *path)
        line = f"{self.file}:{line_of(self.text, path)}" if self.file else "--set"
        return f"{line}: {dotted(path)}"

    def error(self, message: str, path: KeyPath, remedy: str = "") -> RecipeError:
        return RecipeError(message, where=self.where(path), remedy=remedy)

    def explain(self, problem: Problem) -> RecipeError:
        return self.error(problem.message, problem.path)


def recipe_folder() -> Path:
    """Directory of the shipped recipes: in the wheel, or beside the package in a checkout."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(recipe_folder().glob("*.toml"))}


def find_recipe(name: str, folders: Iterable[str] = ()) -> Path:
    """The file of a recipe, by name or by path. A file at a path need not exist.

    A path has a slash or ends in .toml, so that nothing in the current directory
    shadows a shipped name.

    Args:
        folders: recipe directories of the site, which precede the shipped recipes.

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
            remedy="; ".join(
                (f"{hint}`hvdenv recipes` lists them{here}", *folder_problems(folders))
            ),
        )
    return known[name]


def known_recipes(folders: Iterable[str] = ()) -> dict[str, Path]:
    """Recipes by name: the shipped ones, and those of other directories."""
    others = [path for folder in folders for path in sorted(Path(folder).glob("*.toml"))]
    return {**shipped_recipes(), **{path.stem: path for path in reversed(others)}}


def folder_problems(folders: Iterable[str]) -> list[str]:
    """What to say about recipe directories that do not exist."""
    gone = [folder for folder in folders if not Path(folder).is_dir()]
    return [f"recipe_folders of the site file: {folder} is not a directory" for folder in gone]


def variants_of(document: Table) -> list[str]:
    variants = document.get("variants")
    return sorted(variants) if isinstance(variants, dict) else []


def read_layer(name: str, path: Path) -> Layer:
    """Read one file.

    Raises:
        RecipeError: it cannot be read or is not TOML.
    """
    try:
        content = read_file(path, SITE if name == "site" else RECIPE)
        return Layer(
            name, str(path), content.text, learnt(parse_toml(content.text)), content=content
        )
    except OSError as error:
        remedy = "check its path and permissions"
        if name != "site":
            remedy += "; `hvdenv recipes` lists the recipes that have a name"
        why = f"cannot read this file: {error.strerror}"
        raise RecipeError(why, where=str(path), remedy=remedy) from error
    except UnicodeDecodeError as error:
        why = "cannot read this file: it is not UTF-8 text"
        raise RecipeError(why, where=str(path), remedy="save it as UTF-8") from error
    except ValueError as error:
        raise _not_toml(path, str(error)) from error


def _not_toml(path: Path, message: str) -> RecipeError:
    line = re.search(r" \(at line (\d+), column \d+\)", message)
    if re.search("twice|overwrite|mutate", message):
        remedy = "a table or key may be stated once: merge it with the other one"
    else:
        remedy = "text needs quotes, and quotes and brackets must be closed" if line else ""
    return RecipeError(
        f"not valid TOML: {message.replace(line[0], '') if line else message}",
        where=f"{path}:{line[1]}" if line else str(path),
        remedy=remedy,
    )


def learnt(values: Table) -> Table:
    """The values of a file, whose secrets are masked from now on."""
    learn((path[-1], value) for path, value in leaves(values) if isinstance(value, str))
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


_MOST_BASES = 20  # in practice there are two


def with_bases(layer: Layer, folders: Sequence[str]) -> list[Layer]:
    """A recipe and those that it extends, base first.

    Raises:
        RecipeError: one of them cannot be read, has another format, or extends itself.
    """
    found = [layer]
    while base := _base(found[0], folders):
        if len(found) > _MOST_BASES:
            raise found[0].error(
                f"more than {_MOST_BASES} recipes extend one another",
                _EXTENDS,
                remedy="remove `extends` where a recipe extends itself, or copy keys of some recipes"
                " into others",
            )
        found.insert(0, base)
    return found


_EXTENDS = ("extends",)


def _base(layer: Layer, folders: Sequence[str]) -> Layer | None:
    """The recipe that a recipe extends; None if it extends none."""
    stated, name = layer.values.get("format"), layer.values.get("extends")
    if stated != FORMAT:
        raise layer.error(
            f"this hvdenv supports recipe format {FORMAT}, and the file "
            + ("states none" if stated is None else f"has {brief(stated)}"),
            ("format",),
            remedy=f"write `format = {FORMAT}` at its top, or use the version of hvdenv that the"
            " recipe was written for",
        )
    if name is None:
        return None
    if not isinstance(name, str):
        raise layer.error(
            f"expected the name or path of a recipe, found {brief(name)}",
            _EXTENDS,
            remedy='write a text, such as extends = "local"; `hvdenv recipes` lists names',
        )
    try:
        path = find_recipe(name, folders)
        if "/" in name or name.endswith(".toml"):
            path = Path(layer.file).parent / path
        return read_layer(f"recipe {path.stem}", path)
    except HvdenvError as error:
        raise layer.error(str(error), _EXTENDS) from error
