"""Write what an environment is made of for other programs: a CycloneDX bill of materials, an
environment.yml for conda, a requirements.txt with hashes, or constraints for pip. No path,
user or host name of this machine is in it. What a format cannot hold is said at its top."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvdenv.cli.options import add_prefix, add_recipe, environment_of, resolved_of
from hvdenv.errors import UsageError

EXAMPLES = """\
examples:
  hvdenv export local --format cyclonedx --output local.cdx.json
  hvdenv export neuron --variant cpu --format environment.yml
  hvdenv export local --format requirements > requirements.txt
  hvdenv export --prefix ~/envs/horovod --format constraints
  hvdenv export --prefix ~/envs/horovod@3f2a9c81 --format constraints   an earlier generation

Horovod is built from source with patches; none of these files builds it. They say from what
and how; `hvdenv build` is what builds it again.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    from hvdenv.contents.exports import FORMATS

    add_recipe(parser, optional=True)
    add_prefix(parser)
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="write it there, not to standard output"
    )


def run(arguments: argparse.Namespace) -> int:
    from hvdenv.contents import exports
    from hvdenv.environments import installed
    from hvdenv.places import find_places, named_file, write_text

    places = find_places()
    if arguments.recipe:
        prefix = environment_of(arguments, resolved_of(arguments, shown=True), places).prefix
    elif arguments.prefix:
        prefix = arguments.prefix.expanduser().absolute()
    else:
        raise UsageError("which environment?", remedy="name a recipe, or a prefix with --prefix")
    text = exports.export(installed.named_contents(str(prefix), places).contents, arguments.format)
    if arguments.output:
        write_text(named_file(arguments.output), text)
        print(f"wrote {arguments.output}", file=sys.stderr)
    else:
        print(text, end="")
    return 0
