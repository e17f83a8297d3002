"""List recipes: those of hvdenv, and those in the recipe directories of the site file."""

from __future__ import annotations

import argparse

from hvdenv.base.errors import RecipeError
from hvdenv.cli.options import add_options
from hvdenv.model.recipe_files import folder_problems, known_recipes, read_layer, variants_of
from hvdenv.session.output import print_json, report
from hvdenv.session.recipe import site_keys
from hvdenv.session.request import site_file

EXAMPLES = """\
examples:
  hvdenv recipes
  hvdenv recipes --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "json", "site")


def run(arguments: argparse.Namespace) -> int:
    rows, code = [], 0
    folders = site_keys(site_file(arguments.site), "recipe_folders").recipe_folders
    for each in folder_problems(folders):
        report(f"warning: {each}; create it, or correct the site file")
    for name, path in known_recipes(folders).items():
        try:
            document = read_layer("recipe", path).values
        except RecipeError as error:  # the others are listed all the same
            report(f"error: {error}")
            code = error.exit_code
            continue
        row = {key: document.get(key, "") for key in ("site", "summary", "status")}
        rows.append({"name": name, **row, "variants": variants_of(document), "file": str(path)})
    if arguments.json:
        print_json(rows)
        return code
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        summary = " ".join(str(row["summary"]).split())
        print(f"{row['name']:{width}}  {summary} ({row['status']})")
        if row["variants"]:
            print(f"{'':{width}}  variants: {', '.join(row['variants'])}")
    return code
