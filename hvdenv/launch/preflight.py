"""Whether hosts can run an image: the query, its answer, and the judgement. Nothing is run here."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from hvdenv import INSPECT_PROGRAMS
from hvdenv.command import Command
from hvdenv.launch.launchers import MPI_KINDS, Launcher, Mpi, named, parse_mpi_version
from hvdenv.model.cluster import Container, OwnLauncher
from hvdenv.model.recipe import Mpi as RecipeMpi
from hvdenv.reading import OWN, read_file
from hvdenv.reports.report import Finding, Status
from hvdenv.schema import Problem, decode

PROGRAM = INSPECT_PROGRAMS / "node.py"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# Each node reads all of the image, which has gigabytes.
SECONDS = 600.0
OLDEST_SINGULARITY = (3, 0)

# An application of one CUDA major release runs with these drivers and newer ones.
# Source: NVIDIA, CUDA Compatibility, Minor Version Compatibility, table 1.
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}


class Image(NamedTuple):
    """The image's file on one node.

    Attributes:
        size: in bytes.
        problem: why it cannot be read; empty if it can.
    """

    size: int = 0
    sha256: str = ""
    problem: str = ""


class Node(NamedTuple):
    """What a node reports about itself; see hvdenv/standalone/inspect/node.py.

    Attributes:
        resolves: whether it resolves that name to an address.
        tools: what programs that run images print as their version.
        mpirun: what ``mpirun --version`` prints.
        srun: what ``srun --mpi=list`` prints.
        driver: version of the NVIDIA driver; empty without one.
        gpus: how many NVIDIA GPUs there are.
        rocm: whether there is an AMD GPU.
        peers: for each other host, why ssh cannot reach it; empty if it can.
    """

    name: str
    resolves: bool
    tools: dict[str, str]
    image: Image
    mpirun: str
    driver: str
    gpus: int
    rocm: bool
    peers: dict[str, str]
    srun: str = ""


class Requirements(NamedTuple):
    """What the nodes need.

    Attributes:
        mpi: the MPI in the image; None if its Horovod has none.
    """

    container: Container
    mpi: RecipeMpi | None
    launcher: str
    scheduled: bool
    own: Mapping[str, OwnLauncher] = {}

    @property
    def starter(self) -> Launcher:
        return named(self.launcher, self.own)

    @property
    def image(self) -> str:
        return str(self.container.image)

    @property
    def ssh(self) -> bool:
        """Whether hosts must reach each other by ssh."""
        return self.starter.by_ssh and not self.scheduled


# For each host its report, or why there is none.
Answers = Mapping[str, Node | str]


def peers_of(host: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts that a host must reach: the first starts the others, and they report to it."""
    return tuple(hosts[1:]) if host == hosts[0] else (hosts[0],)


def node_query(
    host: str, image: str, peers: Sequence[str], path: str, *, python: str = ""
) -> Command:
    """The command that asks a node.

    Args:
        path: PATH of this process, which mpirun passes on to its ranks.
        python: the Python to ask with if the node is this host; empty to ask by ssh.
    """
    request = {"image": image, "peers": list(peers), "path": path.split(":") if path else []}
    argument = base64.b64encode(json.dumps(request).encode("ascii")).decode("ascii")
    if python:
        return Command((python, str(PROGRAM), argument), timeout=SECONDS)
    program = base64.b64encode(read_file(PROGRAM, OWN).data).decode("ascii")
    # One word without line breaks and exclamation marks, since the login shell may be csh.
    code = f"exec(__import__('base64').b64decode('{program}'))"
    remote = shlex.join(("python3", "-c", code, argument))
    return Command((*SSH, host, remote), timeout=SECONDS)


def parse_node(output: str) -> Node | None:
    """The answer in a node's output; None if there is none."""
    for line in output.splitlines():
        marker, _, payload = line.partition(" ")
        if marker == "@hvdenv-node":
            try:
                return decode(Node, json.loads(base64.b64decode(payload)))
            except (ValueError, Problem):
                return None
    return None


def compatible(host: Mpi, image: Mpi) -> tuple[Status, str]:
    """Whether a host's mpirun can start programs linked to the image's MPI, and why.

    mpirun and the library in the image talk to each other while ranks start, so the binary
    interface of the library alone does not decide.
    """
    # MPICH and MPIs based on it start ranks with Hydra.
    kind = image.kind if image.kind in ("Open MPI", "Spectrum MPI", "Intel MPI") else "Hydra"
    both = f"{f'{host.kind} {host.version}'.strip()} on the host, {image.kind} {image.version or '?'} in the image"
    if host.kind == "unknown":
        return "unproven", "mpirun does not report which MPI it belongs to"
    if kind != host.kind:
        if {kind, host.kind} == {"Hydra", "Intel MPI"}:
            return "pass", f"{both}: both have MPICH's binary interface"
        return "fail", both
    if kind != "Open MPI":
        return "pass", both
    if not host.version or not image.version:
        return "unproven", both
    series = [version.split(".")[:2] for version in (host.version, image.version)]
    if "3.1.3" in (host.version, image.version):
        return "fail", "Open MPI 3.1.3 hangs under Horovod"
    if series[0] == series[1]:
        return "pass", f"{both}: the same series"
    if series[0][0] == series[1][0]:
        return "unproven", f"{both}: the same major release, but not the same series"
    return "fail", f"{both}: different major releases"


class _Verdict(NamedTuple):
    status: Status
    message: str
    remedy: str = ""
    evidence: str = ""


def judge_nodes(required: Requirements, answers: Answers) -> tuple[Finding, ...]:
    """All findings, host by host within each check."""
    nodes = {host: answer for host, answer in answers.items() if isinstance(answer, Node)}
    source = next((host for host, node in nodes.items() if node.image.sha256), "")
    sha256 = nodes[source].image.sha256 if source else ""
    checks: dict[str, Callable[[Requirements, Node], _Verdict | None]] = {
        "name": _name,
        "tool": _tool,
        "image": partial(_image, source, sha256),
        "mpi": _mpi,
        "driver": _driver,
    }
    verdicts = [("host", host, _answer(answer)) for host, answer in answers.items()]
    for name, check in checks.items():
        found = ((host, check(required, node)) for host, node in nodes.items())
        verdicts += [(name, host, verdict) for host, verdict in found if verdict]
    for host, node in nodes.items() if required.ssh else ():
        verdicts += [
            ("ssh", f"{host} -> {peer}", _ssh(required, p)) for peer, p in node.peers.items()
        ]
    return tuple(
        Finding(check=check, subject=subject, **each._asdict()) for check, subject, each in verdicts
    )


def _answer(answer: Node | str) -> _Verdict:
    if isinstance(answer, Node):
        return _Verdict("pass", f"answers as {answer.name}")
    remedy = (
        "make `ssh -o BatchMode=yes HOST python3 --version` work without a password; many sites"
        " allow that only in an allocation"
    )
    return _Verdict("fail", "no answer", remedy, answer)


def _name(required: Requirements, node: Node) -> _Verdict | None:
    if required.starter.controller != "Gloo":
        return None
    if node.resolves:
        return _Verdict("pass", f"it resolves its name {node.name}")
    return _Verdict(
        "fail",
        f"it cannot resolve its own name {node.name}: Gloo crashes with a segmentation fault",
        "add it to /etc/hosts or the name service, or start ranks with mpirun",
    )


def _tool(required: Requirements, node: Node) -> _Verdict:
    runtime = required.container.runtime
    text = node.tools.get(runtime, "")
    found = re.search(r"(?:^|\S{1,40} version )(\d+)\.(\d+)\S*", text)
    if not text:
        others = [name for name, version in node.tools.items() if version]
        remedy = "load its module in the recipe, or ask the site's support for it"
        if others:
            remedy = f"it has {others[0]}: --set container.runtime={others[0]}"
        return _Verdict("fail", f"{runtime} is not installed", remedy)
    if not found:
        return _Verdict("unproven", f"{runtime} does not report a version", evidence=text)
    if runtime == "ch-run":
        return _Verdict("pass", f"ch-run {found[0]}")
    # Apptainer 1.0 is newer than Singularity 3.9.
    if found[0].startswith("apptainer") or (int(found[1]), int(found[2])) >= OLDEST_SINGULARITY:
        return _Verdict("pass", found[0])
    return _Verdict(
        "fail",
        f"{runtime} {found[0]} is older than 3.0 and cannot read .sif files",
        "load the module of a newer version, or ask the site's support for it",
    )


def _image(source: str, sha256: str, required: Requirements, node: Node) -> _Verdict:
    path, image = required.image, node.image
    if image.sha256 and image.sha256 == sha256:
        return _Verdict("pass", f"{path}, {image.size} bytes, {sha256[:12]}")
    if not source:
        remedy = "no host has it: build it with --build, or give its path with --image"
    else:
        copy = shlex.join(("scp", "-p", f"{source}:{path}", f"{node.name}:{path}"))
        remedy = (
            f"every node needs the same file at the same path: {copy}, or sbcast in a Slurm job"
        )
    if image.problem:
        return _Verdict("fail", f"cannot read {path}: {image.problem}", remedy)
    hashes = f"sha256 {image.sha256}\non {source}: {sha256}"
    return _Verdict("fail", f"{path} differs from the file on {source}", remedy, hashes)


# What a program of an MPI can get its rank from; srun lists what it has.
_PMI: dict[str, tuple[str, ...]] = {
    "openmpi": ("pmix", "pmi2"), "mpich": ("pmi2", "pmix", "cray_shasta"),
    "mvapich": ("pmi2", "pmix"), "intel": ("pmi2", "pmix"), "cray-mpich": ("cray_shasta", "pmi2"),
    "spectrum": ("pmix",),
}  # fmt: skip


def _started_by_scheduler(launcher: str, mpi: RecipeMpi, node: Node) -> _Verdict:
    """Whether a scheduler's launcher speaks the PMI of the image's MPI."""
    wanted = _PMI[mpi.kind]
    if mpi.kind == "openmpi" and (mpi.version or "").startswith("5"):
        wanted = ("pmix",)
    image = f"{mpi.kind} {mpi.version or ''}".strip()
    needs = f"{image} in the image needs {' or '.join(wanted)}"
    listed = set(re.findall(r"\b(?:pmix|pmi2|cray_shasta)\b", node.srun))
    if launcher != "srun" or "none" not in node.srun:
        unknown = f"{needs}, and {launcher} does not list what it has"
        return _Verdict("unproven", unknown, "run `hvdenv verify` in a job", node.srun)
    both = f"{needs}, and srun has {', '.join(sorted(listed)) or 'none'}"
    if listed.isdisjoint(wanted):
        remedy = "start the ranks with --launcher mpirun, or ask the site for that plugin of Slurm"
        return _Verdict("fail", both, remedy, node.srun)
    return _Verdict("pass", both)


def _mpi(required: Requirements, node: Node) -> _Verdict | None:
    mpi = required.mpi
    launcher = required.starter
    if mpi is None or launcher.controller != "MPI":
        return None
    if launcher.schedulers:
        return _started_by_scheduler(required.launcher, mpi, node)
    remedy = (
        f"load or install {mpi.kind} {mpi.version or ''} on the hosts, or build the image"
        " with theirs: --set mpi.version=..."
    )
    if not node.mpirun:
        return _Verdict("fail", "mpirun is not installed", remedy)
    image = Mpi(MPI_KINDS[mpi.kind], mpi.version or "")
    status, message = compatible(parse_mpi_version(node.mpirun), image)
    if status == "pass":
        return _Verdict(status, message)
    return _Verdict(status, message, remedy, node.mpirun)


def _driver(required: Requirements, node: Node) -> _Verdict | None:
    gpu = required.container.gpu
    if gpu == "none":
        return None
    problem, good = "" if node.rocm else "no AMD GPU: /dev/kfd does not exist", "an AMD GPU"
    if gpu == "nvidia":
        problem, good = _nvidia(required.container, node)
    if problem:
        remedy = "ask the site's support for the driver, or name nodes with GPUs"
        return _Verdict("fail", problem, remedy)
    return _Verdict("pass", good)


def _nvidia(container: Container, node: Node) -> tuple[str, str]:
    """What is wrong, and what is good."""
    driver = f"NVIDIA driver {node.driver}"
    cuda = re.search(r"cuda:(\d+)\.", container.base or "")
    oldest = _OLDEST_DRIVERS.get(int(cuda[1]), 0) if cuda else 0
    major = re.match(r"\d+", node.driver)
    if not node.driver:
        return "no NVIDIA driver", ""
    if not node.gpus:
        return f"{driver}, but no GPU", ""
    if cuda and major and int(major[0]) < oldest:
        return f"{driver}; CUDA {cuda[1]} in the image needs {oldest} or newer", ""
    return "", f"{driver}, {node.gpus} GPUs"


def _ssh(required: Requirements, problem: str) -> _Verdict:
    if not problem:
        return _Verdict("pass", "ssh works without a password")
    return _Verdict(
        "fail",
        "ssh does not work without a password",
        f"{required.launcher} starts ranks by ssh, from any host to any other: set up a key, and"
        " the host's key in known_hosts; or start ranks with srun in an allocation",
        problem,
    )
