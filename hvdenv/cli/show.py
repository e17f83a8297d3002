"""Show a recipe after its layers are merged, and which layer sets each value."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hvdenv.base.errors import UsageError
from hvdenv.base.schema import dotted, encode, json_schema
from hvdenv.cli.options import add, add_options, read_request
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import leaves
from hvdenv.session.output import print_json
from hvdenv.session.recipe import open_recipe

EXAMPLES = """\
examples:
  hvdenv show local
  hvdenv show local --variant torch
  hvdenv show local --set mpi.version=5.0.11 --json
  hvdenv show --schema > recipe.schema.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "json")
    add(parser, "--schema", "print the JSON Schema of recipe files")


def run(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        print_json(recipe_schema())
        return 0
    if not arguments.recipe:
        raise UsageError("show needs a recipe", remedy="`hvdenv recipes` lists them")
    resolved = open_recipe(read_request(arguments, anywhere=True))
    values = encode(resolved.recipe)
    if arguments.json:
        print_json({"recipe": values, "variants": resolved.variants, "origins": resolved.origins})
        return 0
    origins = resolved.origins
    deviations, notes = values.pop("deviations", []), values.pop("notes", [])
    rows = [
        (key := dotted(path), _toml(value), origins.get(key, "default"))
        for path, value in leaves(values)
        if value != {} and (dotted(path) in origins or path[0] != "schedulers")
    ]
    width = max(len(f"{key} = {value}") for key, value, _ in rows if len(value) < 60)
    for key, value, origin in rows:
        print(f"{f'{key} = {value}':{width}}  # {origin}")
    for deviation in deviations:
        print(f"\ndeviation from: {deviation['document']}")
        print(f"  instead: {deviation['recipe']}\n  because: {deviation['reason']}")
    for note in notes:
        print(f"\nnote: {note['text']}\n  source: {note['source']}")
    return 0


def recipe_schema() -> dict[str, object]:
    """The JSON Schema of recipe files: values may come from the default layer or a variant."""

    variant = json_schema(Recipe, whole=False)
    own = {
        "variants": {"type": "object", "additionalProperties": variant},
        "extends": {"type": "string"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hvdenv recipe",
        **variant,
        "properties": {**variant["properties"], **own},
        "required": ["format", "name", "summary", "status"],
    }


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
