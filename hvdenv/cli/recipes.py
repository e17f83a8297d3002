"""List the recipes that come with hvdenv."""

from __future__ import annotations

import argparse

from hvdenv.cascade import read_layer, shipped_recipes
from hvdenv.cli.options import add_json, print_json
from hvdenv.recipe import variants_of

EXAMPLES = """\
examples:
  hvdenv recipes
  hvdenv recipes --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    rows = []
    for name, path in shipped_recipes().items():
        document = read_layer("recipe", path).values
        rows.append(
            {
                "name": name,
                "summary": document.get("summary", ""),
                "status": document.get("status", ""),
                "variants": variants_of(document),
                "file": str(path),
            }
        )
    if arguments.json:
        print_json(rows)
        return 0
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        print(f"{row['name']:{width}}  {row['summary']} ({row['status']})")
        if row["variants"]:
            print(f"{'':{width}}  variants: {', '.join(row['variants'])}")
    return 0
