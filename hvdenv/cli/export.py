"""Write a bill of materials of an environment: CycloneDX 1.6 in JSON, for audits.

It lists all packages with their hashes, and the source, patches and flags of Horovod, and states
whether Horovod's published vulnerabilities are open in it (VEX). It contains no path, user name or
host name of this machine."""

from __future__ import annotations

import argparse

from hvdenv.base.errors import UsageError
from hvdenv.base.places import find_places
from hvdenv.cli.options import add_options, read_request
from hvdenv.environments import installed
from hvdenv.session.chosen import choose

EXAMPLES = """\
examples:
  hvdenv export local > local.cdx.json
  hvdenv export neuron --variant cpu > neuron.cdx.json
  hvdenv export --prefix ~/envs/horovod@3f2a9c81     an earlier generation

Lists for pip and conda come from these programs themselves:
  hvdenv run local -- python -m pip freeze
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "prefix")


def run(arguments: argparse.Namespace) -> int:
    places = find_places()
    if arguments.recipe:
        prefix = choose(read_request(arguments)).prefix
    elif arguments.prefix:
        prefix = arguments.prefix.expanduser().absolute()
    else:
        raise UsageError("which environment?", remedy="name a recipe, or a prefix with --prefix")
    # The library takes a second to import.
    from hvdenv.locks import cyclonedx

    print(cyclonedx.render(installed.named_contents(str(prefix), places).contents), end="")
    return 0
