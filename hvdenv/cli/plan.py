"""Show what build would run, in order, and why, without running it."""

from __future__ import annotations

import argparse

from hvdenv.base.errors import UsageError
from hvdenv.base.schema import encode
from hvdenv.cli.options import add, add_options, is_locked, read_request
from hvdenv.plans.plan import render_bash
from hvdenv.session.output import print_json
from hvdenv.session.prepare import describe, prepare

EXAMPLES = """\
examples:
  hvdenv plan local
  hvdenv plan local --format bash > build.sh    a script that needs no hvdenv
  hvdenv plan local --json                      the plan as data
  hvdenv plan local --facts node.json           for another machine
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe", "python", "prefix", "json")
    add(parser, "--format", choices=("text", "bash"), default="text")
    add_options(parser, "facts", "locked")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and arguments.format == "bash":
        raise UsageError("--json and --format bash exclude each other", remedy="omit one of them")
    request = read_request(arguments, anywhere=True)
    prepared = prepare(request, thorough=False)
    if is_locked(arguments):
        from hvdenv.session.lock import add_lock

        prepared = add_lock(request, prepared)
    plan = prepared.plan(alone=arguments.format == "bash")
    if arguments.json:
        print_json({"facts": encode(prepared.facts), **encode(prepared.place(plan))})
    elif arguments.format == "bash":
        print(render_bash(prepared.place(plan), prepared.environment.prefix), end="")
    else:
        print(describe(plan, prepared))
    return 0
