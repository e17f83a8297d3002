"""Compare two environments: packages, Horovod with its patches and flags, modules, toolchain,
wheel. diff runs nothing of either.

A and B are each a name that `hvdenv envs` lists (local+torch), or a prefix with a slash. @ and a
generation, or the first digits of one, may follow (default: the active one)."""

from __future__ import annotations

import argparse

from hvdenv.base.places import find_places
from hvdenv.cli.options import add, add_options
from hvdenv.environments import installed
from hvdenv.locks import difference
from hvdenv.session.output import print_json

EXAMPLES = """\
examples:
  hvdenv diff local local+torch
  hvdenv diff local@3f2a9c81 local           what changed since that generation
  hvdenv diff ~/envs/horovod /proj/group/envs/horovod --json
  hvdenv diff local local+torch --exit-code  1 if they differ

The output is the change from A to B. diff does not compare unknown hashes, such as that of pip.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "first A",
        "environment: a name or prefix; @GENERATION may follow",
    )
    add(parser, "second B", "what to compare it with, written the same way")
    add_options(parser, "json")
    add(parser, "--exit-code", "exit with 1 if they differ")


def run(arguments: argparse.Namespace) -> int:
    places = find_places()
    first, second = (
        installed.named_contents(each, places) for each in (arguments.first, arguments.second)
    )
    found = difference.compare(first.contents, second.contents)
    if arguments.json:
        names = {"a": first.label, "b": second.label}
        print_json({**names, **difference.document(found)})
    else:
        print(f"{first.label} -> {second.label}: {'they differ' if found else 'the same'}")
        print(difference.render(found), end="")
    return 1 if found and arguments.exit_code else 0
