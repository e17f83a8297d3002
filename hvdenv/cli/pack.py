"""Pack an environment into one image, which hosts mount instead of reading its many files.

The image is beside the environment. run, job, shell and verify then use it: on each host, they
mount it in the place of the environment, for their own processes only."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdenv.base.command import Command
from hvdenv.base.places import named_file
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.cli.options import add, add_options, give, read_request
from hvdenv.environments import image
from hvdenv.environments.image import Packed
from hvdenv.session.chosen import choose_built
from hvdenv.session.output import report

EXAMPLES = """\
examples:
  hvdenv pack local
  hvdenv pack local && hvdenv verify local          proves that all ranks run from the image
  hvdenv run local -n 4 --no-image -- python train.py    reads the environment's files instead
  hvdenv pack neuron --to /scratch/me/neuron.sqsh   for: hvdenv run neuron --image FILE -- ...
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "prefix")
    add(
        parser,
        "--to FILE",
        "file of the image (default: beside the environment, where other commands find it)",
        type=Path,
    )
    add_options(parser, "trust", "json")
    add(parser, "-q --quiet", "print errors only")


def run(arguments: argparse.Namespace) -> int:
    environment, identity, record = choose_built(read_request(arguments))
    packed = image.default(environment, identity)
    if arguments.to:
        packed = Packed(named_file(arguments.to))
    runner = Runner()
    manifest = image.make(environment, record, packed.image, runner)
    before = image.before(packed, manifest, environment)
    problem = runner.run(Command((*before, "true"))).output.strip()
    document = {"image": str(packed.image), "manifest": encode(manifest), "problem": problem}
    give(arguments, document, str(packed.image))
    if arguments.json or arguments.quiet:
        return 0
    sizes = f"{manifest.bytes / 1e9:.2f} GB for {record.files} files of {record.bytes / 1e9:.2f} GB"
    report(f"{sizes}, sha256 {manifest.sha256}")
    for folder in manifest.mounts[1:]:
        report(f"also holds {folder}")
    report(problem or "this host can mount it")
    return 0
