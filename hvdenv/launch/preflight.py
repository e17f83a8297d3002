"""Whether hosts can run an image: the query, its answer, and the judgement. Nothing is run here."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from hvdenv.command import Command, Outcome
from hvdenv.launch.launchers import MPI_KINDS, Launcher, Mpi, named, parse_mpi_version
from hvdenv.launch.nodes import is_this_host
from hvdenv.model.cluster import Container, OwnLauncher
from hvdenv.model.recipe import Mpi as RecipeMpi
from hvdenv.reports.report import Finding, Status
from hvdenv.runner import environment

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# Each node reads all of the image, which has gigabytes.
SECONDS = 600.0
OLDEST_SINGULARITY = (3, 0)
_TOOLS = ("apptainer", "singularity", "ch-run")
_MARK = "@hvdenv-node "

# An application of one CUDA major release runs with these drivers and newer ones.
# Source: NVIDIA, CUDA Compatibility, Minor Version Compatibility, table 1.
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}

# Prints fields and their values, one in a line. Of an image that is a folder, names, kinds and
# sizes are hashed.
_SCRIPT = r"""
PATH={path}:"$PATH" image={image}
say() {{ printf '{mark}%s %s\n' "$1" "$(printf %s "$2" | tr -s '[:cntrl:] ' ' ' | tail -c 2000)"; }}
try() {{ command -v "$1" > /dev/null && timeout 20 "$@" < /dev/null 2>&1; }}
say name "$(uname -n)"
say address "$(getent hosts "$(uname -n)")"
for tool in {tools}; do say "$tool" "$(try "$tool" --version)"; done
if [ -d "$image" ]; then
    say sha256 "$(cd "$image" && find . -type f -printf '%p %y %s\n' -o -printf '%p %y\n' | LC_ALL=C sort | sha256sum)"
else
    say problem "$(head -c 1 -- "$image" 2>&1 > /dev/null)"
    [ ! -r "$image" ] || say sha256 "$(sha256sum < "$image")"
fi
say mpirun "$(try mpirun --version)"
say srun "$(try srun --mpi=list)"
nvidia=/proc/driver/nvidia/version
[ ! -e $nvidia ] || say driver "$(sed -n 's/.*Kernel Module.* \([0-9]*\.[0-9.]*\) .*/\1/p' $nvidia | grep . || echo unknown)"
for gpu in /dev/nvidia[0-9]* /dev/kfd; do [ ! -e "$gpu" ] || say gpu "$gpu"; done
for peer in {peers}; do
    said=$(try {ssh} "$peer" true) && said= || said="${{said:-cannot start ssh}}"
    say peer "$peer $said"
done
say end
"""


class Node(NamedTuple):
    """What a node reports about itself.

    Attributes:
        address: that it resolves its name to; empty if it does not.
        tools: what programs that run images print as their version.
        sha256: of the image; empty if it cannot be read.
        problem: why it cannot be read.
        mpirun: what ``mpirun --version`` prints.
        srun: what ``srun --mpi=list`` prints.
        driver: version of the NVIDIA driver; empty without one.
        gpus: the devices of GPUs.
        peers: for each other host, why ssh cannot reach it; empty if it can.
    """

    name: str
    address: str = ""
    tools: Mapping[str, str] = {}
    sha256: str = ""
    problem: str = ""
    mpirun: str = ""
    srun: str = ""
    driver: str = ""
    gpus: tuple[str, ...] = ()
    peers: Mapping[str, str] = {}


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


def node_query(
    host: str, hosts: Sequence[str], required: Requirements, *, here: bool | None = None
) -> Command:
    """The command that asks one of the hosts, by ssh unless it is this host."""
    # The first host starts the others, and they report to it.
    peers = hosts[1:] if host == hosts[0] else hosts[:1]
    script = _SCRIPT.format(
        path=shlex.quote(environment().get("PATH", "")),  # mpirun passes it on to its ranks
        image=shlex.quote(required.image), peers=shlex.join(peers if required.ssh else ()),
        ssh=shlex.join(SSH), tools=" ".join(_TOOLS), mark=_MARK,
    )  # fmt: skip
    # One word without line breaks and exclamation marks, since the login shell may be csh.
    encoded = base64.b64encode(script.encode("utf-8", "surrogateescape")).decode("ascii")
    words = ("sh", "-c", f"echo {encoded} | base64 -d | sh")
    here = is_this_host(host) if here is None else here
    return Command(words if here else (*SSH, host, shlex.join(words)), timeout=SECONDS)


def answer_of(said: Outcome | str) -> Node | str:
    """The report of a node, or why there is none."""
    return said if isinstance(said, str) else parse_node(said.output) or said.tail() or "no answer"


def parse_node(output: str) -> Node | None:
    """The answer in a node's output; None if there is none, or only a part."""
    lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    said = [(key, value.strip()) for key, _, value in (line.partition(" ") for line in lines)]
    texts = dict(said)
    if not {"name", "end"} <= texts.keys():
        return None
    peers = (value.partition(" ") for key, value in said if key == "peer")
    return Node(
        **{name: texts.get(name, "") for name in ("name", "address", "mpirun", "srun", "driver")},
        tools={name: texts.get(name, "") for name in _TOOLS},
        sha256=texts.get("sha256", "").partition(" ")[0],
        problem=texts.get("problem", "").rpartition(": ")[2],
        gpus=tuple(value for key, value in said if key == "gpu"),
        peers={host: problem for host, _, problem in peers},
    )


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


def _verdict(problem: str, good: str, remedy: str) -> _Verdict:
    return _Verdict("fail", problem, remedy) if problem else _Verdict("pass", good)


def judge_nodes(required: Requirements, answers: Answers) -> tuple[Finding, ...]:
    """All findings, host by host within each check."""
    nodes = {host: answer for host, answer in answers.items() if isinstance(answer, Node)}
    source = next((host for host, node in nodes.items() if node.sha256), "")
    checks: dict[str, Callable[[Requirements, Node], _Verdict | None]] = {
        "name": _name,
        "tool": _tool,
        "image": partial(_image, source, nodes.get(source)),
        "mpi": _mpi,
        "driver": _driver,
    }
    found = [("host", host, _answer(answer)) for host, answer in answers.items()]
    found += [
        (name, h, check(required, n)) for name, check in checks.items() for h, n in nodes.items()
    ]
    found += [
        ("ssh", f"{host} -> {peer}", _ssh(required, problem))
        for host, node in nodes.items()
        for peer, problem in node.peers.items()
    ]  # fmt: skip
    return tuple(Finding(name, host, **each._asdict()) for name, host, each in found if each)


def _answer(answer: Node | str) -> _Verdict | None:
    if isinstance(answer, Node):
        return _Verdict("pass", f"answers as {answer.name}")
    remedy = (
        "make `ssh -o BatchMode=yes HOST true` work without a password; many sites allow that only"
        " in an allocation"
    )
    return _Verdict("fail", "no answer", remedy, answer)


def _name(required: Requirements, node: Node) -> _Verdict | None:
    if required.starter.controller != "Gloo":
        return None
    problem = f"it cannot resolve its own name {node.name}: Gloo crashes with a segmentation fault"
    remedy = "add it to /etc/hosts or the name service, or start ranks with mpirun"
    return _verdict("" if node.address else problem, f"it resolves its name {node.name}", remedy)


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
    # Apptainer 1.0 is newer than Singularity 3.9.
    any_fits = runtime == "ch-run" or found[0].startswith("apptainer")
    old = not any_fits and (int(found[1]), int(found[2])) < OLDEST_SINGULARITY
    problem = f"{runtime} {found[0]} is older than 3.0 and cannot read .sif files" if old else ""
    remedy = "load the module of a newer version, or ask the site's support for it"
    return _verdict(problem, found[0], remedy)


def _image(source: str, first: Node | None, required: Requirements, node: Node) -> _Verdict:
    """Compare the image with that of the first host that has it."""
    path = required.image
    if first and node.sha256 == first.sha256:
        return _Verdict("pass", f"{path}, sha256 {node.sha256[:12]}")
    remedy = "no host has it: build it with --build, or give its path with --image"
    if first:
        copy = shlex.join(("scp", "-p", f"{source}:{path}", f"{node.name}:{path}"))
        remedy = (
            f"every node needs the same file at the same path: {copy}, or sbcast in a Slurm job"
        )
    if not (first and node.sha256):
        return _Verdict("fail", f"cannot read {path}: {node.problem}", remedy)
    hashes = f"sha256 {node.sha256}\non {source}: {first.sha256}"
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
    more = () if status == "pass" else (remedy, node.mpirun)
    return _Verdict(status, message, *more)


def _driver(required: Requirements, node: Node) -> _Verdict | None:
    gpu, cuda = required.container.gpu, re.search(r"cuda:(\d+)\.", required.container.base or "")
    if gpu == "none":
        return None
    oldest = _OLDEST_DRIVERS.get(int(cuda[1]), 0) if cuda else 0
    major, driver = re.match(r"\d+", node.driver), f"NVIDIA driver {node.driver}"
    devices, problem = [each for each in node.gpus if "nvidia" in each], ""
    good = f"{driver}, {len(devices)} GPUs"
    if gpu == "rocm":
        good = "an AMD GPU"
        problem = "" if "/dev/kfd" in node.gpus else "no AMD GPU: /dev/kfd does not exist"
    elif not node.driver:
        problem = "no NVIDIA driver"
    elif not devices:
        problem = f"{driver}, but no GPU"
    elif cuda and major and int(major[0]) < oldest:
        problem = f"{driver}; CUDA {cuda[1]} in the image needs {oldest} or newer"
    return _verdict(problem, good, "ask the site's support for the driver, or name nodes with GPUs")


def _ssh(required: Requirements, problem: str) -> _Verdict:
    remedy = (
        f"{required.launcher} starts ranks by ssh, from any host to any other: set up a key, and"
        " the host's key in known_hosts; or start ranks with srun in an allocation"
    )
    said = "ssh does not work without a password" if problem else ""
    return _verdict(said, "ssh works without a password", remedy)._replace(evidence=problem)
