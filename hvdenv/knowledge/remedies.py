"""The remedies of rules as changes of a recipe."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv.base.reading import RECIPE, read_text
from hvdenv.base.schema import parse_toml
from hvdenv.model.layers import Resolved
from hvdenv.model.recipe_files import leaves


class Change(NamedTuple):
    """A change after which the rules no longer apply.

    Attributes:
        file, before: the recipe's file and its text; empty for a new recipe.
        options: ``--set`` options for keys that the recipe's file cannot change, because a
            variant of another file, the site file or the command line sets them.
    """

    file: str
    before: str
    after: str
    options: tuple[str, ...]

    @property
    def diff(self) -> str:
        """The change of the file as a unified diff; empty if there is none."""
        old, new = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        name = self.file or "a recipe of your own"
        lines = difflib.unified_diff(old, new, self.file or "/dev/null", name)
        return "".join(lines)

    def document(self) -> dict[str, object]:
        return {"diff": self.diff, "options": self.options}

    def lines(self, title: str) -> Iterator[str]:
        if self.file and self.diff:
            yield f"{title}:"
            yield self.diff.rstrip("\n")
        elif self.after and not self.file:
            yield f"{title}, as your own recipe (a file with any name that ends in .toml):"
            yield self.after.rstrip("\n")
        if self.options:
            options = " ".join(f"--set {shlex.quote(each)}" for each in self.options)
            yield f"options that fix it: {options}"


def propose(resolved: Resolved, edits: Mapping[str, str]) -> Change:
    """The edits as a change of the recipe.

    Args:
        resolved: the recipe; a shipped one is extended, not changed.
        edits: values for keys as TOML; an empty one removes the key.
    """
    own = Path(resolved.file) in {each.path for each in resolved.contents}
    before = read_text(resolved.file, RECIPE) if own else ""
    name = resolved.recipe.name
    extending = f'format = 1\nname = "{name}-changed"\nextends = "{name}"\n'
    start = text = before if own else extending
    options = []
    for key, value in edits.items():
        document = parse_toml(text)
        path = _path(key, resolved.origins, document)
        found = any(f"{each}.".startswith(f"{key}.") for each in resolved.setters)
        if path and found and not value and _edited(text, path, "") == text:
            # A recipe below sets it.
            path, value = ("without",), json.dumps([*document.get("without", ()), key])
        changed = _edited(text, path, value) if path else None
        if changed is not None:
            text = changed
        elif value:
            options.append(f"{key}={value}")
    after = text if own or text != start else ""
    return Change(resolved.file if own else "", before, after, tuple(options))


def _path(
    key: str, origins: Mapping[str, str], document: Mapping[str, Any]
) -> tuple[str, ...] | None:
    """Where to set a key in the document; None if another layer overrides it."""
    layers = {layer for name, layer in origins.items() if name == key or name.startswith(f"{key}.")}
    path = tuple(key.split("."))
    variant = next((layer[8:] for layer in layers if layer.startswith("variant ")), "")
    if variant:
        inside = variant in document.get("variants", {})
        return ("variants", variant, *path) if inside else None
    return None if layers & {"site", "command line"} else path


def _edited(text: str, path: tuple[str, ...], value: str) -> str | None:
    """The text with one key set, or removed if the value is empty; None if it cannot be expressed."""
    import tomlkit

    document = tomlkit.parse(text)
    table: Any = document
    for name in path[:-1]:
        if name not in table:
            if not value:
                return text
            table[name] = tomlkit.table(is_super_table=name != path[-2])
        table = table[name]
    if value:
        table[path[-1]] = tomlkit.value(value)
    else:
        table.pop(path[-1], None)
    changed = tomlkit.dumps(document)
    if value and not _differ_only_in(path, text, changed):
        document = tomlkit.parse(text)
        document.append(tomlkit.key(list(path)), tomlkit.value(value))
        changed = tomlkit.dumps(document)
    return changed if _differ_only_in(path, text, changed) else None


def _differ_only_in(path: tuple[str, ...], before: str, after: str) -> bool:
    def rest(text: str) -> dict[tuple[str, ...], Any]:
        values = dict(leaves(parse_toml(text)))
        return {k: v for k, v in values.items() if k[: len(path)] != path and v != {}}

    try:
        return rest(before) == rest(after)
    except ValueError:
        return False
