"""Solving and locking a conda environment on a local channel: hvdenv's way and conda-lock's.

    python benchmarks/solve.py [--records 60000] [--rounds 5] [--conda PROGRAM]

The channel is made up: as many records as asked for, with dependencies on older packages
as in real channels. hvdenv's way is conda_env.py --solve-only and hvdenv.locks.condalock.
conda-lock solves by the conda program that is named. Both begin without any cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv.locks import condalock

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.9", "3.10", "3.11", "3.12")
SPECS = ["python 3.11.*", *(f"package{number}" for number in range(3000, 3600, 40))]
LOCK = """
import json, subprocess, sys
from hvdenv.locks import condalock
probe, request, records, target = sys.argv[1:]
subprocess.run([sys.executable, probe, "--solve-only", request, records], check=True)
with open(request) as w, open(records) as r, open(target, "w") as t:
    t.write(condalock.render(json.load(r), json.load(w)))
"""


def records(number: int) -> Iterator[dict[str, Any]]:
    """Records of a channel: each package has versions, and a build for each Python or one."""
    chance = random.Random(28)
    names = 4000
    versions = max(1, number // (names * 5 // 2))
    for minor in PYTHONS:
        yield record("python", f"{minor}.9", "0", [])
    for index in range(names):
        needs = chance.sample(range(index), min(index, chance.randint(0, 6)))
        builds = PYTHONS if index % 2 else ("",)
        for version in range(versions):
            for minor in builds:
                depends = [f"package{each} >=1.{version // 2},<3" for each in needs]
                if minor:
                    depends.append(f"python >={minor},<{minor}.99a0")
                build = f"py{minor.replace('.', '')}_0" if minor else "0"
                yield record(f"package{index}", f"1.{version}", build, depends)


def record(name: str, version: str, build: str, depends: list[str]) -> dict[str, Any]:
    stem = f"{name}-{version}-{build}"
    return {
        "name": name,
        "version": version,
        "build": build,
        "build_number": 0,
        "subdir": "linux-64",
        "depends": depends,
        "constrains": [],
        "license": "MIT",
        "timestamp": 1_700_000_000_000,
        "size": len(stem) * 1000,
        "md5": hashlib.md5(stem.encode()).hexdigest(),
        "sha256": hashlib.sha256(stem.encode()).hexdigest(),
    }


def make_channel(folder: Path, number: int) -> int:
    """Write the index of a channel.

    Returns:
        How many records it has.
    """
    found = {f"{r['name']}-{r['version']}-{r['build']}.conda": r for r in records(number)}
    for subdir, packages in (("linux-64", found), ("noarch", {})):
        (folder / subdir).mkdir(parents=True)
        index = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages}
        (folder / subdir / "repodata.json").write_text(json.dumps(index))
    return len(found)


class Taken(NamedTuple):
    """What a program and all that it started took: seconds, MiB of the largest process."""

    seconds: float
    mebibytes: float


# Measures a program from a small process: Linux counts what a process has in memory as a peak of
# the programs that it starts, and who makes a channel has much.
WATCH = """
import os, sys, time
began = time.monotonic()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(f"\\n{status} {time.monotonic() - began} {usage.ru_maxrss / 1024}")
"""


def run(words: Sequence[str | Path], environment: Mapping[str, str]) -> Taken:
    """Run a program that must succeed."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", WATCH, *words],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    *output, found = done.stdout.splitlines()
    status, seconds, mebibytes = map(float, found.split())
    if status:
        sys.exit("\n".join([" ".join(map(str, words)), *output]))
    return Taken(seconds, mebibytes)


def with_home(home: Path) -> dict[str, str]:
    """The environment of a program with an empty home."""
    return {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(ROOT)}


def by_hvdenv(channel: str, folder: Path) -> Taken:
    spec = {"channels": [channel], "specs": SPECS, "platform": "linux-64", "virtual": {}}
    request, found = folder / "request.json", folder / "records.json"
    request.write_text(json.dumps(spec))
    probe = ROOT / "hvdenv/standalone/steps/conda_env.py"
    words = [probe, request, found, folder / "conda-lock.yml"]
    return run([sys.executable, "-c", LOCK, *words], with_home(folder))


def by_conda_lock(channel: str, folder: Path, program: Path) -> Taken:
    asked = {"channels": [channel], "dependencies": SPECS, "platforms": ["linux-64"]}
    (folder / "environment.yml").write_text(json.dumps(asked))
    return run(
        [
            sys.executable,
            "-m",
            "conda_lock",
            "lock",
            "--no-mamba",
            "--no-micromamba",
            "--conda",
            program,
            "--file",
            folder / "environment.yml",
            "--lockfile",
            folder / "conda-lock.yml",
        ],
        with_home(folder),
    )


def locked(folder: Path) -> set[tuple[str, str]]:
    found = condalock.parse((folder / "conda-lock.yml").read_text())
    return {(each.name, each.version) for each in found.packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conda", type=Path, help="a conda program")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        number = make_channel(top / "channel", options.records)
        ways: dict[str, Path | None] = {"hvdenv": None}
        if options.conda:
            ways[f"conda-lock, {options.conda.name}"] = options.conda
        taken: dict[str, list[Taken]] = {way: [] for way in ways}
        packages: dict[str, set[tuple[str, str]]] = {}
        for turn in range(options.rounds):
            for index, (way, program) in enumerate(ways.items()):
                folder = top / f"{turn}-{index}"
                folder.mkdir()
                channel = (top / "channel").as_uri()
                taken[way].append(
                    by_conda_lock(channel, folder, program)
                    if program
                    else by_hvdenv(channel, folder)
                )
                packages[way] = locked(folder)
    print(f"{number} records, load {os.getloadavg()[0]:.0f}")
    first = statistics.median(each.seconds for each in taken["hvdenv"])
    for way, each in taken.items():
        seconds = statistics.median(one.seconds for one in each)
        print(
            f"{way}: {seconds:.2f} s ({seconds / first:.1f} of hvdenv's), largest process "
            f"{max(one.mebibytes for one in each):.0f} MiB, {len(packages[way])} packages"
            + ("" if packages[way] == packages["hvdenv"] else ", not the same as hvdenv's")
        )


if __name__ == "__main__":
    main()
