"""Write the contents of an environment for other programs: a CycloneDX bill of materials, an
environment.yml for conda, a requirements.txt with hashes, or constraints for pip.

The file contains no path, user name or host name of this machine. A comment at its top lists what
the format cannot express."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdenv.cli.options import add, add_options, environment_of, report, resolved_of
from hvdenv.contents import exports
from hvdenv.contents.exports import FORMATS
from hvdenv.environments import installed
from hvdenv.errors import UsageError
from hvdenv.places import find_places, named_file, write_text

EXAMPLES = """\
examples:
  hvdenv export local --format cyclonedx --output local.cdx.json
  hvdenv export neuron --variant cpu --format environment.yml
  hvdenv export local --format requirements > requirements.txt
  hvdenv export --prefix ~/envs/horovod --format constraints
  hvdenv export --prefix ~/envs/horovod@3f2a9c81 --format constraints   an earlier generation

None of these files can build Horovod, which hvdenv builds from source with patches. They record
its source, patches and flags; `hvdenv build` reproduces it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "prefix")
    add(parser, "--format", choices=FORMATS, required=True)
    add(parser, "--output FILE", "write to a file instead of standard output", type=Path)


def run(arguments: argparse.Namespace) -> int:
    places = find_places()
    if arguments.recipe:
        prefix = environment_of(arguments, resolved_of(arguments, shown=True)).prefix
    elif arguments.prefix:
        prefix = arguments.prefix.expanduser().absolute()
    else:
        raise UsageError("which environment?", remedy="name a recipe, or a prefix with --prefix")
    text = exports.export(installed.named_contents(str(prefix), places).contents, arguments.format)
    if arguments.output:
        write_text(named_file(arguments.output), text)
        report(f"wrote {arguments.output}")
    else:
        print(text, end="")
    return 0
