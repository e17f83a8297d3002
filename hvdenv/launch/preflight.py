"""What running an image on several hosts takes, and whether they have it.

Pure: how a node is asked, how its answer is read, and the judgement. hvdenv/launch/nodes.py asks.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdenv import INSPECT_PROGRAMS
from hvdenv.command import Command
from hvdenv.errors import UsageError
from hvdenv.launch.launchers import MPI_KINDS, Mpi, parse_mpi_version
from hvdenv.model.cluster import Container, LauncherName
from hvdenv.model.recipe import Mpi as RecipeMpi
from hvdenv.reading import OWN, read_file
from hvdenv.reports.report import Finding, Status
from hvdenv.schema import Problem, decode

PROGRAM = INSPECT_PROGRAMS / "node.py"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# An image has gigabytes, and each node reads all of it.
SECONDS = 600.0
OLDEST = (3, 0)

# An application of one CUDA major release runs with these drivers and newer ones.
# Source: NVIDIA, CUDA Compatibility, Minor Version Compatibility, table 1.
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
# Launchers that start their helpers on other hosts by ssh, unless a scheduler starts them.
_BY_SSH: tuple[LauncherName, ...] = ("mpirun", "horovodrun-mpi", "horovodrun-gloo")


class Image(NamedTuple):
    """The image's file on one node.

    Attributes:
        size: in bytes.
        sha256: of its content.
        problem: why it cannot be read; empty if it can.
    """

    size: int = 0
    sha256: str = ""
    problem: str = ""


class Node(NamedTuple):
    """What a node says of itself.

    Attributes:
        name: as it calls itself.
        resolves: whether that name means an address there.
        tools: what programs that run images print as their version.
        image: the file of the image.
        mpirun: what ``mpirun --version`` prints.
        driver: version of the NVIDIA driver; empty without one.
        gpus: how many NVIDIA GPUs there are.
        rocm: whether there is an AMD GPU.
        peers: for each other host, why ssh does not get there; empty if it does.
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


class Wanted(NamedTuple):
    """What the nodes are to have.

    Attributes:
        container: the recipe's table.
        mpi: the MPI in the image; None if Horovod there has none.
        launcher: what starts the ranks.
        scheduled: whether all is in an allocation of a scheduler.
    """

    container: Container
    mpi: RecipeMpi | None
    launcher: LauncherName
    scheduled: bool

    @property
    def image(self) -> str:
        """The image's path."""
        return str(self.container.image)

    @property
    def ssh(self) -> bool:
        """Whether hosts have to reach each other by ssh."""
        return self.launcher in _BY_SSH and not self.scheduled


# A node, or why it could not be asked.
Answers = Mapping[str, Node | str]


def peers_of(host: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """Whom a host has to reach: the first one starts the others, and they report to it."""
    return tuple(hosts[1:]) if host == hosts[0] else (hosts[0],)


def question(host: str, image: str, peers: Sequence[str], path: str, *, here: str = "") -> Command:
    """How a node is asked.

    Args:
        host: whom to ask.
        image: the image's file.
        peers: hosts that it has to reach.
        path: PATH here, which mpirun hands on to its ranks.
        here: the Python to ask with if the host is this one; by ssh otherwise.
    """
    asked = {"image": image, "peers": list(peers), "path": path.split(":") if path else []}
    argument = base64.b64encode(json.dumps(asked).encode("ascii")).decode("ascii")
    if here:
        return Command((here, str(PROGRAM), argument), timeout=SECONDS)
    program = base64.b64encode(read_file(PROGRAM, OWN).data).decode("ascii")
    # One word without line breaks and exclamation marks: it may be csh that reads it.
    code = f"exec(__import__('base64').b64decode('{program}'))"
    remote = shlex.join(("python3", "-c", code, argument))
    return Command((*SSH, host, remote), timeout=SECONDS)


def parse_node(output: str) -> Node | None:
    """The answer in what a node printed; None if there is none."""
    for line in output.splitlines():
        marker, _, payload = line.partition(" ")
        if marker == "@hvdenv-node":
            try:
                return decode(Node, json.loads(base64.b64decode(payload)))
            except (ValueError, Problem):
                return None
    return None


def judge_nodes(wanted: Wanted, answers: Answers) -> tuple[Finding, ...]:
    """All findings, host by host within each check."""
    nodes = {host: answer for host, answer in answers.items() if isinstance(answer, Node)}
    findings = [
        *_reached(answers),
        *_name(wanted, nodes),
        *_tool(wanted.container, nodes),
        *_image(wanted, nodes),
        *_mpi(wanted, nodes),
        *_gpu(wanted.container, nodes),
        *_ssh(wanted, nodes),
    ]
    return tuple(findings)


def lacking(answers: Answers) -> tuple[str, tuple[str, ...]]:
    """The host whose image counts, and the hosts that have none or another one.

    The first host that has one counts; the empty string if none has.
    """
    nodes = {host: answer for host, answer in answers.items() if isinstance(answer, Node)}
    source = next((host for host, node in nodes.items() if node.image.sha256), "")
    if not source:
        return "", tuple(nodes)
    whole = nodes[source].image.sha256
    return source, tuple(host for host, node in nodes.items() if node.image.sha256 != whole)


def copies(image: str, hosts: Sequence[str], *, slurm: bool) -> tuple[Command, ...]:
    """Commands that copy the image from here to the same path on hosts.

    Args:
        image: absolute path of the file, here and there.
        hosts: that lack it.
        slurm: whether this is inside a Slurm allocation: sbcast then copies to all nodes
            of it at once.

    Raises:
        UsageError: an older scp would have the path read by a shell there.
    """
    if not hosts:
        return ()
    if not re.fullmatch(r"/[A-Za-z0-9._/+=@%-]*", image):
        raise UsageError(
            "the path of the image has characters that a shell on another host could read",
            where=image,
            remedy="name one of letters, digits and . _ / + = @ % - with --image",
        )
    folder = str(Path(image).parent)
    if slurm:
        return (
            Command(("srun", "--ntasks-per-node=1", "mkdir", "-p", folder)),
            Command(("sbcast", "--force", "--preserve", image, image)),
        )
    return tuple(
        command
        for host in hosts
        for command in (
            Command((*SSH, host, shlex.join(("mkdir", "-p", folder)))),
            Command(("scp", "-p", *SSH[1:], image, f"{host}:{image}")),
        )
    )


def compatible(host: Mpi, image: Mpi) -> tuple[Status, str]:
    """Whether a host's mpirun can start programs that were linked to the image's MPI.

    mpirun and the library in the image talk to each other while ranks start, so the
    binary interface of the library alone does not decide.

    Returns:
        A status, and the reason.
    """
    # MPICH and what is made of it start by Hydra.
    kind = image.kind if image.kind in ("Open MPI", "Spectrum MPI", "Intel MPI") else "Hydra"
    theirs, ours = f"{host.kind} {host.version}".strip(), f"{image.kind} {image.version or '?'}"
    if host.kind == "unknown":
        return "unproven", "mpirun does not say which MPI it is of"
    if kind != host.kind:
        if {kind, host.kind} == {"Hydra", "Intel MPI"}:
            return "pass", f"{theirs} here and {ours} in the image: one binary interface (MPICH's)"
        return "fail", f"{theirs} here, {ours} in the image"
    if kind != "Open MPI":
        return "pass", f"{theirs} here, {ours} in the image"
    if not host.version or not image.version:
        return "unproven", f"{theirs} here, {ours} in the image"
    series = [version.split(".")[:2] for version in (host.version, image.version)]
    if "3.1.3" in (host.version, image.version):
        return "fail", "Open MPI 3.1.3 hangs under Horovod"
    if series[0] == series[1]:
        return "pass", f"{theirs} here, {ours} in the image: the same series"
    if series[0][0] == series[1][0]:
        return (
            "unproven",
            f"{theirs} here, {ours} in the image: of one major release, not of one series",
        )
    return "fail", f"{theirs} here, {ours} in the image: of different major releases"


def _reached(answers: Answers) -> Iterator[Finding]:
    for host, answer in answers.items():
        if isinstance(answer, Node):
            yield Finding("host", host, "pass", f"answers as {answer.name}")
        else:
            yield Finding(
                "host", host, "fail", "could not be asked", answer,
                "`ssh -o BatchMode=yes HOST python3 --version` has to work without a password;"
                " many sites allow that only within an allocation",
            )  # fmt: skip


def _name(wanted: Wanted, nodes: Mapping[str, Node]) -> Iterator[Finding]:
    if wanted.launcher != "horovodrun-gloo":
        return
    for host, node in nodes.items():
        if node.resolves:
            yield Finding("name", host, "pass", f"{node.name} means an address there")
        else:
            yield Finding(
                "name", host, "fail",
                f"its own name {node.name} means no address there: Gloo ends with a segmentation fault",
                "", "enter it in /etc/hosts or the name service, or start ranks by mpirun",
            )  # fmt: skip


def _tool(container: Container, nodes: Mapping[str, Node]) -> Iterator[Finding]:
    for host, node in nodes.items():
        text = node.tools.get(container.runtime, "")
        found = re.search(r"(?:^|\S{1,40} version )(\d+)\.(\d+)\S*", text)
        others = [name for name, said in node.tools.items() if said and name != container.runtime]
        if not text:
            remedy = (
                f"it has {others[0]}: --set container.runtime={others[0]}" if others
                else "load its module in the recipe, or ask the site for it"
            )  # fmt: skip
            yield Finding("tool", host, "fail", f"there is no {container.runtime}", "", remedy)
        elif not found:
            yield Finding("tool", host, "unproven", f"{container.runtime} names no version", text)
        elif container.runtime == "ch-run":
            yield Finding("tool", host, "pass", f"ch-run {found[0]}")
        # Apptainer counts from 1.0 anew, which is later than Singularity 3.9.
        elif found[0].startswith("apptainer") or (int(found[1]), int(found[2])) >= OLDEST:
            yield Finding("tool", host, "pass", found[0])
        else:
            yield Finding(
                "tool", host, "fail", f"{container.runtime} {found[0]} is older than 3.0 and reads no .sif",
                "", "load a newer one's module, or ask the site for it",
            )  # fmt: skip


def _image(wanted: Wanted, nodes: Mapping[str, Node]) -> Iterator[Finding]:
    path = wanted.image
    source, others = lacking(nodes)
    for host, node in nodes.items():
        image = node.image
        if image.problem:
            message = f"{path} cannot be read there: {image.problem}"
        elif host in others:
            message = f"{path} is another file than on {source}"
        else:
            yield Finding("image", host, "pass", f"{path}, {image.size} bytes, {image.sha256[:12]}")
            continue
        seen = (
            f"sha256 {image.sha256}\non {source}: {nodes[source].image.sha256}"
            if image.sha256
            else ""
        )
        remedy = (
            "the image has to be the same file at the same path on every node; --copy copies it from here"
            if source
            else "no host has it: build it with --build, or say where it lies with --image"
        )
        yield Finding("image", host, "fail", message, seen, remedy)


def _mpi(wanted: Wanted, nodes: Mapping[str, Node]) -> Iterator[Finding]:
    inside = wanted.mpi
    if inside is None or wanted.launcher == "horovodrun-gloo":
        return
    remedy = (
        f"load or install {inside.kind} {inside.version or ''} on the hosts, or build the image"
        " with theirs: --set mpi.version=..."
    )
    for host, node in nodes.items():
        if wanted.launcher == "srun":
            message = "srun starts the ranks: it has to offer what the image's MPI reads (PMIx)"
            yield Finding("mpi", host, "skip", message)
        elif not node.mpirun:
            yield Finding("mpi", host, "fail", "there is no mpirun", "", remedy)
        else:
            image = Mpi(MPI_KINDS[inside.kind], inside.version or "")
            status, message = compatible(parse_mpi_version(node.mpirun), image)
            evidence = "" if status == "pass" else node.mpirun
            yield Finding(
                "mpi", host, status, message, evidence, "" if status == "pass" else remedy
            )


def _gpu(container: Container, nodes: Mapping[str, Node]) -> Iterator[Finding]:
    judges: dict[str, Callable[[Container, Node], tuple[Status, str]]] = {
        "nvidia": _nvidia,
        "rocm": _rocm,
    }
    if container.gpu not in judges:
        return
    remedy = "ask the site for the driver, or name nodes that have GPUs"
    for host, node in nodes.items():
        status, message = judges[container.gpu](container, node)
        yield Finding("driver", host, status, message, "", "" if status == "pass" else remedy)


def _nvidia(container: Container, node: Node) -> tuple[Status, str]:
    if not node.driver:
        return "fail", "there is no NVIDIA driver"
    if not node.gpus:
        return "fail", f"NVIDIA driver {node.driver}, but no GPU"
    cuda = re.search(r"cuda:(\d+)\.", container.base or "")
    oldest = _OLDEST_DRIVERS.get(int(cuda[1]), 0) if cuda else 0
    major = re.match(r"\d+", node.driver)
    if cuda and oldest and major and int(major[0]) < oldest:
        return (
            "fail",
            f"NVIDIA driver {node.driver}; CUDA {cuda[1]} in the image needs {oldest} or newer",
        )
    return "pass", f"NVIDIA driver {node.driver}, {node.gpus} GPUs"


def _rocm(container: Container, node: Node) -> tuple[Status, str]:
    return ("pass", "there is an AMD GPU") if node.rocm else ("fail", "there is no /dev/kfd")


def _ssh(wanted: Wanted, nodes: Mapping[str, Node]) -> Iterator[Finding]:
    if not wanted.ssh:
        return
    for host, node in nodes.items():
        for peer, problem in node.peers.items():
            subject = f"{host} -> {peer}"
            if problem:
                yield Finding(
                    "ssh", subject, "fail", "ssh does not get there without a password", problem,
                    f"{wanted.launcher} starts ranks by ssh, from any host to any other: set up a key,"
                    " and the host's key in known_hosts; or start ranks by srun in an allocation",
                )  # fmt: skip
            else:
                yield Finding("ssh", subject, "pass", "ssh gets there without a password")
