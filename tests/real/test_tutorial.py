"""Tarn, the cluster of the docs: each command on these pages runs, and prints what they show."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.standin import Cluster
from tests.support.clusters import Names, install_software, write_modules
from tests.support.modulesystems import cache_folder, install, write_module
from tests.support.wheels import store_for

DOCS = Path(__file__).parents[2] / "docs"
TARN = Names("gcc/12.3.0", "", "openmpi/4.1.8", "cmake/3.27.6")
# What differs from run to run and from machine to machine, in the order of replacement.
CHANGING = (
    (r"\d+(\.\d+)? s\b", "N s"),
    (r"\b[0-9a-f]{12}\b", "DIGEST"),
    (r"\b(job |allocation |train-)\d+", r"\1N"),
    (r"\d+ pass;", "N pass;"),
    (r"Lmod [\d.]+", "Lmod N"),
    (r"\bPython 3[\d.]+", "Python 3"),
    (r"==3\.\d+\.\d+", "==3"),
    (r"[\d.]+ (GB|MB|files)", r"N \1"),
)
SUMS = re.compile(r"rank \d of 4 on \w+: sum [\d.]+")
STATES = re.compile(r"^job \d+: .*\n", re.M)


class Shown(NamedTuple):
    """A command of the page, and what the page shows under it."""

    command: str
    output: str


def shown(page: str) -> Iterator[Shown]:
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            here = re.match(r".*<<'END'\n(?:.*\n)*?END\n", part)
            end = here.end() if here else part.index("\n") + 1
            yield Shown(part[:end].strip(), part[end:])


def in_general(text: str) -> str:
    for pattern, replacement in CHANGING:
        text = re.sub(pattern, replacement, text)
    return text


def disagreement(output: str, wanted: str) -> str:
    """The first line of the page that is not in the output, with what is there; or empty.

    A line of three dots stands for any lines. Ranks may print in any order, MPI forwards a line and
    its end in two pieces at times, and states of a job are noticed at any time.
    """
    output, wanted = STATES.sub("", output), STATES.sub("", wanted)
    if sorted(SUMS.findall(output)) == sorted(SUMS.findall(wanted)):
        output, wanted = SUMS.sub("", output), SUMS.sub("", wanted)
    output, wanted = re.sub(r"\n+", "\n", output), re.sub(r"\n+", "\n", wanted)
    pattern = ""
    for line in in_general(wanted).splitlines():
        pattern += "(?:.*\n)*?" if line == "..." else f"{re.escape(line)}\n"
        if not re.match(pattern, in_general(output)):
            return line
    return "" if re.fullmatch(pattern, in_general(output)) else "the end"


@pytest.fixture(scope="module")
def tarn(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of the page."""
    software, python = install_software(home), tmp_path_factory.mktemp("python")
    for name in ("python", "python3"):
        (python / name).symlink_to(Path(sys.executable).resolve())
    shared = [home, tmp_path_factory.getbasetemp(), Path(sys.prefix), DOCS.parent]
    with Cluster(
        hosts=("tarn01", "tarn02"),
        partitions=("batch",),
        gpus=0,
        modules=install("lmod", cache_folder(tmp_path_factory)),
        shared=[*shared, Path(sys.base_prefix)],
    ) as cluster:
        write_modules(cluster.modulefiles, software, TARN)
        write_module(cluster.modulefiles, "python/3.11", prepend_path={"PATH": python})
        cluster.environ |= cluster.start_grid_engine("all.q")
        yield cluster


class Reader(NamedTuple):
    """Somebody on Tarn's login node.

    Attributes:
        cluster: Tarn.
        home: HVDENV_HOME.
        folder: where the reader works.
    """

    cluster: Cluster
    home: Path
    folder: Path

    def types(self, command: str) -> str:
        """What a command prints, with the paths of the page."""
        program = f"{Path(sys.executable).parent}:{self.cluster.environ['PATH']}"
        variables = {**self.cluster.environ, "PATH": program, "HVDENV_HOME": str(self.home)}
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=variables,
            text=True,
            timeout=900,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        paths = {
            str(self.folder): "/home/ann",
            str(self.home): "/home/ann/.local/share/hvdenv",
            str(Path(sys.executable).parent): "/home/ann/hvdenv/bin",
            socket.gethostname(): "login",
        }
        return re.sub("|".join(map(re.escape, paths)), lambda found: paths[found[0]], done.stdout)


@pytest.fixture(scope="module")
def reader(tarn: Cluster, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    place = tmp_path_factory.mktemp("reader")
    reader = Reader(tarn, place / "hvdenv", place / "ann")
    reader.home.mkdir()
    reader.folder.mkdir()
    # What was fetched and compiled for other tests.
    (reader.home / "cache").symlink_to(home / "cache")
    shutil.copy(DOCS / "tarn/horovod.md", reader.folder)
    yield reader
    tarn.run(["scancel", "--user=root"], check=False)
    tarn.run(["qdel", "-f", "-u", "root"], check=False)


@pytest.mark.parametrize("name", ["tutorial-cluster.md", "how-to/run-jobs.md"])
def test_each_command_prints_what_the_page_shows(
    reader: Reader, local_prefix: Path, name: str
) -> None:
    """The second page uses what the first one made."""
    page = (DOCS / name).read_text(encoding="utf-8")
    for name, text in re.findall(
        r"^Save this .*`([\w.]+)`:\n\n```\w+\n(.*?)^```$", page, re.M | re.S
    ):
        (reader.folder / name).write_text(text)
    wrong = []
    for each in shown(page):
        if each.command.startswith("hvdenv build"):
            plan = json.loads(reader.types("hvdenv plan ./tarn.toml --json 2>&-"))
            wheels, inputs = reader.home / "cache/wheels", plan["wheel_inputs"]
            store_for(wheels, inputs, local_prefix, without="tensorflow")
        output = reader.types(each.command)
        if missing := disagreement(output, each.output):
            wrong.append(f"$ {each.command}\nno line: {missing}\n{output}")
    assert not wrong, "\n".join(wrong)
