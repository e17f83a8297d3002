"""What one host shows: this one, or a compute node, where a job calls this module."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

from hvdenv.command import OWN_PYTHON, Command
from hvdenv.drafting.values import COMMAND, INFERRED, Found, Left, Origin, Value, at
from hvdenv.model.cluster import Architecture
from hvdenv.model.facts import Facts
from hvdenv.model.observe import ask, observe
from hvdenv.places import home_folder, write_json
from hvdenv.reading import SYSTEM, read_text
from hvdenv.runner import Runner
from hvdenv.schema import encode
from hvdenv.sites.batch import counted

SECONDS = 15.0
_INDEX = "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10).read(100)"
_INDEX_URL = "https://pypi.org/simple/pip/"


class Seen(NamedTuple):
    """What a host shows.

    Attributes:
        capabilities: compute capabilities of its NVIDIA GPUs without dots.
        cuda: the newest CUDA that the driver supports.
        interfaces: InfiniBand, Omni-Path and Slingshot that are up.
        indexed: whether the package index is reached.
    """

    facts: Facts
    capabilities: tuple[str, ...] = ()
    cuda: str = ""
    interfaces: tuple[str, ...] = ()
    indexed: bool = False


def answer(runner: Runner, *argv: str) -> str:
    """The output of a program; empty if it fails or does not exist."""
    outcome = ask(runner, *argv, seconds=SECONDS) if shutil.which(argv[0]) else None
    return outcome.output if outcome else ""


def look(runner: Runner) -> Seen:
    facts = observe(home_folder(), runner, thorough=True)
    query = ("--query-gpu=compute_cap,driver_version", "--format=csv,noheader")
    listed = answer(runner, "nvidia-smi", *query)
    gpus = re.findall(r"^(\d{1,3}\.\d), *([\d.]{1,20})", listed, re.M)
    cuda = re.search(r"CUDA Version: (\d{1,3}\.\d{1,2})", answer(runner, "nvidia-smi"))
    index = runner.run(Command((OWN_PYTHON, "-c", _INDEX, _INDEX_URL), timeout=SECONDS))
    return Seen(
        facts=facts._replace(driver=gpus[0][1] if gpus else facts.driver),
        capabilities=tuple(sorted({capability for capability, _ in gpus})),
        cuda=cuda[1] if cuda else "",
        interfaces=tuple(_interfaces()),
        indexed=bool(index),
    )


def _interfaces() -> Iterator[str]:
    """Interfaces between nodes: InfiniBand and Omni-Path by their type, Slingshot by its name."""
    for folder in sorted(Path("/sys/class/net").glob("*")):
        try:
            kind = read_text(folder / "type", SYSTEM).strip()
            state = read_text(folder / "operstate", SYSTEM).strip()
        except OSError:
            continue
        if (kind == "32" or folder.name.startswith("hsn")) and state == "up":
            yield folder.name


def drafted(seen: Seen, *, compute: bool) -> Found:
    """What a host shows, as values of a recipe and for people.

    Args:
        compute: whether it is a node of the job's partition.
    """
    facts = seen.facts
    origin = Origin(f"{'compute node' if compute else 'this host'} {facts.host}")
    weight = COMMAND if compute else INFERRED
    values = [Value(at("network.use"), each, origin, weight, item=True) for each in seen.interfaces]
    stated = {
        "arch": facts.machine if facts.machine in get_args(Architecture) else "",
        "glibc": facts.glibc,
        "capability": seen.capabilities[0].replace(".", "") if len(seen.capabilities) == 1 else "",
        "cuda": seen.cuda,
    }
    if compute:
        values += [
            Value(("partitions", "", key), fact, origin, weight)
            for key, fact in stated.items()
            if fact
        ]
    # Reported even if the host has values, which would replace what has the same origin.
    told = origin._replace(text="as a whole")
    return Found(tuple(values), tuple(Left(told, each, True) for each in _told(seen)))


def _told(seen: Seen) -> Iterator[str]:
    facts = seen.facts
    compiler = f"{facts.cxx.path} {facts.cxx.version}" if facts.cxx else "none"
    yield f"{facts.machine}, glibc {facts.glibc}, {facts.cores} cores, g++: {compiler}"
    if facts.gpus or seen.capabilities:
        names, capabilities = ", ".join(sorted({*facts.gpus})), ", ".join(seen.capabilities)
        count = counted(len(facts.gpus), "GPU")
        yield f"{count} ({names}), capability {capabilities}, driver {facts.driver}"
    else:
        yield "no GPU"
    yield f"{_INDEX_URL} {'is' if seen.indexed else 'is not'} reached"


if __name__ == "__main__":
    found = look(Runner())
    write_json(Path(sys.argv[1]), encode(found), 0o600)
    print(f"looked at {found.facts.host}", flush=True)
