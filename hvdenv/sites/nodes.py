"""What hvdenv runs on the hosts of a run by ssh: the check of an image, and the end of orphans.

Ranks end themselves at their deadline. After a failed run, hvdenv ends them earlier, and with them
the launcher's own processes, which may have no deadline. Processes of the run have its token in a
variable; others are not touched.
"""

import base64
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hvdenv.base.command import Command, Outcome
from hvdenv.base.errors import StepError
from hvdenv.base.runner import TOKEN_VARIABLE, Runner, end_marked, environment
from hvdenv.model.cluster import Container
from hvdenv.reports.report import Finding, Status
from hvdenv.sites.launchers import MpiVersion, parse_mpi_version

# With more connections at once, sshd begins to drop them.
_AT_ONCE = 8


def ask(queries: Mapping[str, Command], runner: Runner) -> dict[str, Outcome | str]:
    """Run a query for each host, several at a time: the outcome, or why there is none."""

    def run(query: Command) -> Outcome | str:
        try:
            outcome = runner.run(query)
        except StepError as error:
            return str(error)
        return f"no answer within {query.timeout:.0f} s" if outcome.timed_out else outcome

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            return dict(zip(queries, pool.map(run, queries.values()), strict=True))
        except BaseException:
            runner.stop()
            raise


def _by_ssh(host: str, line: str, connect_seconds: int = 10) -> tuple[str, ...]:
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_seconds}")
    return ("ssh", *options, host, line)


def _is_this_host(host: str) -> bool:
    name = os.uname().nodename
    return host in ("localhost", name, name.partition(".")[0])


# Each node reads all of the image, which has gigabytes.
_IMAGE_SECONDS = 600.0
_MARK = "@hvdenv-node "
# An application of one CUDA major release runs with these drivers and newer ones.
# Source: NVIDIA, CUDA Compatibility, Minor Version Compatibility, table 1.
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}

# Prints fields and their values, one in a line. Of an image that is a directory, names, kinds and
# sizes are hashed.
_SCRIPT = r"""
PATH={path}:"$PATH" image={image}
say() {{ printf '{mark}%s %s\n' "$1" "$(printf %s "$2" | tr -s '[:cntrl:] ' ' ' | tail -c 2000)"; }}
version() {{ command -v "$1" > /dev/null && timeout 20 "$1" --version < /dev/null 2>&1; }}
for tool in apptainer singularity ch-run mpirun; do say "$tool" "$(version "$tool")"; done
if [ -d "$image" ]; then
    say sha256 "$(cd "$image" && find . -type f -printf '%p %y %s\n' -o -printf '%p %y\n' | LC_ALL=C sort | sha256sum)"
else
    say problem "$(head -c 1 -- "$image" 2>&1 > /dev/null)"
    [ ! -r "$image" ] || say sha256 "$(sha256sum < "$image")"
fi
nvidia=/proc/driver/nvidia/version
[ ! -e $nvidia ] || say driver "$(sed -n 's/.*Kernel Module.* \([0-9]*\.[0-9.]*\) .*/\1/p' $nvidia | grep . || echo unknown)"
say gpus "$(ls -d /dev/nvidia[0-9]* /dev/kfd 2> /dev/null)"
say end
"""


class Requirements(NamedTuple):
    """What the nodes need.

    Attributes:
        mpi: the MPI in the image; None if its Horovod has none.
        launcher: the scheduler's launcher that starts the ranks; empty if it is mpirun.
    """

    container: Container
    mpi: MpiVersion | None = None
    launcher: str = ""

    @property
    def image(self) -> str:
        return str(self.container.image)


# What a node says, by field.
Node = Mapping[str, str]


def node_query(host: str, required: Requirements) -> Command:
    """The command that asks a host, by ssh unless it is this host."""
    script = _SCRIPT.format(
        path=shlex.quote(environment().get("PATH", "")),  # mpirun passes it on to its ranks
        image=shlex.quote(required.image),
        mark=_MARK,
    )
    # One word without line breaks and exclamation marks, since the login shell may be csh.
    encoded = base64.b64encode(script.encode("utf-8", "surrogateescape")).decode("ascii")
    words = ("sh", "-c", f"echo {encoded} | base64 -d | sh")
    here = _is_this_host(host)
    return Command(words if here else _by_ssh(host, shlex.join(words)), timeout=_IMAGE_SECONDS)


def parse_node(answer: Outcome | str) -> Node | str:
    """What a node says, or why there is no answer; a part of one is none."""
    if isinstance(answer, str):
        return answer
    lines = [line for line in answer.output.splitlines() if line.startswith(_MARK)]
    pairs = (line.removeprefix(_MARK).partition(" ") for line in lines)
    said = {field: value.strip() for field, _, value in pairs}
    return said if "end" in said else answer.tail() or "no answer"


def judge_nodes(required: Requirements, answers: Mapping[str, Node | str]) -> Iterator[Finding]:
    """All findings, host by host."""
    nodes = {host: answer for host, answer in answers.items() if not isinstance(answer, str)}
    source = next((host for host, node in nodes.items() if node.get("sha256")), "")
    for host, answer in answers.items():
        if isinstance(answer, str):
            yield Finding(
                "host",
                host,
                "fail",
                "no answer",
                evidence=answer,
                remedy="make `ssh -o BatchMode=yes HOST true` work without a password; many sites allow"
                " that only in an allocation",
            )
            continue
        yield Finding("host", host, "pass", "answers")
        yield _judge_runtime(required.container.runtime, host, answer)
        yield _judge_image(required.image, host, answer, source, nodes)
        if required.mpi:
            yield _judge_mpi(required.mpi, required.launcher, host, answer)
        if required.container.gpu != "none":
            yield _judge_gpu(required.container, host, answer)


def _judge_runtime(runtime: str, host: str, node: Node) -> Finding:
    if node[runtime]:
        return Finding("tool", host, "pass", node[runtime])
    others = [name for name in ("apptainer", "singularity", "ch-run") if node[name]]
    remedy = "load its module in the recipe, or ask the site's support for it"
    if others:
        remedy = f"it has {others[0]}: --set container.runtime={others[0]}"
    return Finding("tool", host, "fail", f"{runtime} is not installed", remedy=remedy)


def _judge_image(
    path: str, host: str, node: Node, source: str, nodes: Mapping[str, Node]
) -> Finding:
    """Compare the image with that of the first host that has it."""
    found, expected = (
        each.get("sha256", "").split(" ")[0] for each in (node, nodes.get(source, {}))
    )
    if found and found == expected:
        return Finding("image", host, "pass", f"{path}, sha256 {found[:12]}")
    remedy = "no host has it: build it with --build, or give its path with --image"
    if source:
        copy = shlex.join(("scp", "-p", f"{source}:{path}", f"{host}:{path}"))
        remedy = (
            f"every node needs the same file at the same path: {copy}, or sbcast in a Slurm job"
        )
    if not found:
        why = node.get("problem", "").rpartition(": ")[2]
        return Finding("image", host, "fail", f"cannot read {path}: {why}", remedy=remedy)
    hashes = f"sha256 {found}\non {source}: {expected}"
    message = f"{path} differs from the file on {source}"
    return Finding("image", host, "fail", message, evidence=hashes, remedy=remedy)


def _judge_mpi(image: MpiVersion, launcher: str, host: str, node: Node) -> Finding:
    if launcher:
        message = f"only a run shows whether {launcher} has the PMI that {image.kind} needs"
        return Finding("mpi", host, "unproven", message, remedy="run `hvdenv verify` in a job")
    remedy = (
        f"load or install {image.kind} {image.version} on the hosts, or build the image with"
        " theirs: --set mpi.version=..."
    )
    if not node["mpirun"]:
        return Finding("mpi", host, "fail", "mpirun is not installed", remedy=remedy)
    status, message = compatible(parse_mpi_version(node["mpirun"]), image)
    if status == "pass":
        return Finding("mpi", host, status, message)
    return Finding("mpi", host, status, message, evidence=node["mpirun"], remedy=remedy)


def _judge_gpu(container: Container, host: str, node: Node) -> Finding:
    driver, gpus = node.get("driver", ""), node["gpus"].split()
    cuda = re.search(r"cuda:(\d+)\.", container.base or "")
    oldest = _OLDEST_DRIVERS.get(int(cuda[1]), 0) if cuda else 0
    major = re.match(r"\d+", driver)
    devices = [each for each in gpus if "nvidia" in each]
    message, problem = f"NVIDIA driver {driver}, {len(devices)} GPUs", ""
    if container.gpu == "rocm":
        message = "an AMD GPU"
        problem = "" if "/dev/kfd" in gpus else "no AMD GPU: /dev/kfd does not exist"
    elif not driver:
        problem = "no NVIDIA driver"
    elif not devices:
        problem = f"NVIDIA driver {driver}, but no GPU"
    elif cuda and major and int(major[0]) < oldest:
        problem = f"NVIDIA driver {driver}; CUDA {cuda[1]} in the image needs {oldest} or newer"
    if not problem:
        return Finding("driver", host, "pass", message)
    remedy = "ask the site's support for the driver, or name nodes with GPUs"
    return Finding("driver", host, "fail", problem, remedy=remedy)


def compatible(host: MpiVersion, image: MpiVersion) -> tuple[Status, str]:
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


_ANSWER = "@hvdenv-ended"
# For any POSIX shell. It can read only the processes of its user, which are the ones to end.
_END_MARKED = (
    "for pid in $(grep -lsz '^{name}={token}' /proc/[0-9]*/environ | cut -d/ -f3);"
    " do kill -9 $pid 2>/dev/null && echo {answer} $pid; done; echo {answer}"
)


def end_orphans(hosts: Sequence[str], runner: Runner, seconds: float) -> Iterator[Finding]:
    """End the orphans of a failed run on its hosts, or on this one if there are none.

    All hosts together have ``seconds`` to answer. Yields one finding about those that answered,
    and one for each that did not.
    """
    others = {h: _end_query(h, runner.token, seconds) for h in hosts if not _is_this_host(h)}
    ended: dict[str, int] = {}
    # The runner of a run that was stopped starts nothing.
    for host, answer in ask(others, Runner(runner.environment(Command(())))).items():
        lines = [] if isinstance(answer, str) else answer.output.splitlines()
        if _ANSWER in lines:
            ended[host] = sum(line.startswith(f"{_ANSWER} ") for line in lines)
            continue
        why = (
            answer
            if isinstance(answer, str)
            else answer.tail(3) or f"exit code {answer.returncode}"
        )
        yield Finding(
            check="orphans",
            subject=host,
            status="unproven",
            message=f"unconfirmed whether ranks still run on {host}: {why}",
            remedy=f"ranks end themselves at their deadline; once {host} is reachable, check it for"
            " processes named rank.py and rank_work.py",
        )
    ended[os.uname().nodename] = len(end_marked(runner.token))
    found = [f"{count} on {host}" for host, count in ended.items() if count]
    message = f"no processes of this run are left on {', '.join(ended)}"
    if found:
        message += f"; hvdenv ended: {', '.join(found)}"
    yield Finding(check="orphans", subject="hosts", status="pass", message=message)


def _end_query(host: str, token: str, seconds: float) -> Command:
    """Ends the marked processes of a host."""
    script = _END_MARKED.format(name=TOKEN_VARIABLE, token=token, answer=_ANSWER)
    line = f"sh -c {shlex.quote(script)}"
    return Command(_by_ssh(host, line, max(int(seconds), 1)), timeout=seconds)
