"""Pack an environment into one image, which hosts mount instead of reading its many files.

The image is beside the environment. run, job, shell and verify then use it: on each host, they
mount it in the place of the environment, for their own processes only."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hvdenv.cli.options import add, add_options, give, report
from hvdenv.cli.target import choose, named
from hvdenv.environments import generations, last_used
from hvdenv.errors import UsageError
from hvdenv.packing import image, use
from hvdenv.packing.manifest import Packed, default_image
from hvdenv.packing.use import Host
from hvdenv.places import find_places, named_file
from hvdenv.runner import Runner
from hvdenv.schema import encode

EXAMPLES = """\
examples:
  hvdenv pack local
  hvdenv pack local && hvdenv verify local          proves that all ranks run from the image
  hvdenv run local -n 4 --no-image -- python train.py    reads the environment's files instead
  hvdenv pack neuron --copy-to /dev/shm             hosts copy the image to memory first
  hvdenv pack neuron --to /scratch/me/neuron.sqsh   for: hvdenv run neuron --image FILE -- ...
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "prefix")
    add(
        parser, "--to FILE",
        "file of the image (default: beside the environment, where other commands find it)",
        type=Path,
    )  # fmt: skip
    add(
        parser, "--copy-to DIR",
        "folder in which each host keeps a copy of the image while a job runs, such as /dev/shm"
        " or '$TMPDIR'; nothing is left of it after a crash (default: hosts read the image where it is)",
        default="",
    )  # fmt: skip
    add_options(parser, "trust", "json")
    add(parser, "-q --quiet", "print errors only")


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.copy_to
    if folder and not folder.startswith(("/", "$")):
        raise UsageError(
            f"{folder!r} is not an absolute path", where="--copy-to",
            remedy="write an absolute path, or one that begins with a variable: '$TMPDIR'",
        )  # fmt: skip
    chosen = choose(arguments, built=True)
    if chosen.record is None:
        raise UsageError(
            "modules provide this environment, so hvdenv has nothing to pack",
            where=named(arguments),
            remedy="name an environment that hvdenv built; `hvdenv envs` lists them",
        )
    environment, runner = generations.at(chosen.prefix), Runner()
    identity = environment.active()
    last_used.note(find_places(), chosen.prefix)
    to = named_file(arguments.to) if arguments.to else default_image(environment, identity)
    cores = len(os.sched_getaffinity(0))
    packed = image.make(environment, identity, to, runner, cores=cores, copy_to=folder)
    host = use.detect(environment, runner)  # whether this host can mount it
    document = {
        "image": str(packed.image), "manifest": encode(packed.manifest), "host": encode(host),
    }  # fmt: skip
    give(arguments, document, str(packed.image))
    if not (arguments.json or arguments.quiet):
        report("\n".join(_lines(packed, host)))
    return 0


def _lines(packed: Packed, host: Host) -> list[str]:
    manifest = packed.manifest
    sizes = f"{manifest.bytes / 1e9:.2f} GB for {manifest.files} files of {manifest.unpacked_bytes / 1e9:.2f} GB"
    lines = [f"{sizes}, sha256 {manifest.sha256}"]
    lines += [f"also holds {each.at}" for each in manifest.mounts[1:]]
    if manifest.outside:
        lines.append(f"not in the image: {', '.join(manifest.outside)}")
    if host.lacks:
        lines.append(f"this host cannot mount it: it lacks {host.lacks}")
    else:
        lines.append(f"this host can mount it with {host.squashfuse}")
    return lines
