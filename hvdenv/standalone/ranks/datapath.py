"""The path of a rank's data: what libraries log about it, and which libraries are loaded.

rank.py sets VARIABLES to make libraries log it, and collects it from the rank's output with
Seen. rank_work.py calls run() after the first allreduces for the other facts. Both are in the
event ``path``, which hvdenv/verification/datapath.py judges. Runs on Python 3.6 and newer.
"""

import contextlib
import ctypes
import glob
import json
import os
import re
import sys
from typing import Dict, List

import events
from context import Context

VARIABLES = {
    "HOROVOD_LOG_LEVEL": "debug",
    "OMPI_MCA_pml_base_verbose": "10",
    "OMPI_MCA_mtl_base_verbose": "10",
    "OMPI_MCA_btl_base_verbose": "1",
    "UCX_LOG_LEVEL": "info",
    "I_MPI_DEBUG": "2",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT",
}
# Variables that redirect this output.
ELSEWHERE = ("NCCL_DEBUG_FILE", "UCX_LOG_FILE")

# Patterns of output lines; all groups of a pattern become one value.
_VALUES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("controller", r"Using (\w+) to perform controller operations\.$"),
        ("cpu", r"Using (\w+) to perform CPU operations\.$"),
        ("pml", r"\] selected (\w+) best priority"),
        ("btl", r"mca: bml: Using (\w+) btl for send to"),
        ("provider", r"mtl:ofi:prov(?:ider)?: (\S+)"),
        ("provider", r"libfabric provider: (\S+)"),
        (
            "ucx",
            r"UCX +INFO .{0,40}?(self |intra-node |inter-node )?(?:ep_cfg\[\d+\]: |cfg#\d{1,9} ?)(\w.*\))",
        ),
        ("nccl", r"[NR]CCL version (\d[\w.+-]*)"),
        ("network", r"NCCL INFO Using network (.+)"),
        (
            "comm",
            r"NCCL INFO (?:\w+ )?comm \S+ rank \d+ nranks (\d+)"
            r"(?: cudaDev \d+)?(?: nvmlDev \d+)?(?: (busId \w+))?.* - (?:Init )?COMPLETE",
        ),
        ("via", r"NCCL INFO (?:Channel|Ring) .* via ([\w ]+(?:/[A-Za-z ]+)?)"),
    )
)
# Lines that are due to VARIABLES alone, and that are left out of a rank's last lines.
_DEBUG_LINE = re.compile(
    r"\[\S+:\d+\] (mca: (base|bml): |mca:base:select|select: |selected \w+ best|check:select)"
    r"|UCX +INFO |NCCL INFO (Channel|Ring|Trees?) "
)
_SEEN_BYTES = 1100
_LINE = 500

# Libraries whose version matters, or of which there should be one copy, and those of GPUs that
# yardstick.c opens as well.
_LIBRARIES = re.compile(
    r"lib(mpi(ch|_ibm|_cray|_gnu_\w+|_intel_\w+)?|nccl|rccl|cudart|amdhip64|ucp|fabric|stdc\+\+)"
    r"(\.so|-[\w.]+\.so)"
)
_REPORTED = (
    "OMPI_MCA_pml",
    "OMPI_MCA_btl",
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "FI_PROVIDER",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_CPU_OPERATIONS",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES",
)


class Seen:
    """Values that libraries have printed so far, by name and without duplicates."""

    def __init__(self) -> None:
        self.values: Dict[str, List[str]] = {}

    def take(self, line: str) -> bool:
        """Read a line, and return whether it is due to VARIABLES alone."""
        for name, pattern in _VALUES:
            found = pattern.search(line[:_LINE])
            if found:
                value = " ".join(group.strip() for group in found.groups() if group)
                self._add(name, value[:120])
        return bool(_DEBUG_LINE.search(line[:_LINE]))

    def _add(self, name: str, value: str) -> None:
        values = self.values.setdefault(name, [])
        if value not in values:
            values.append(value)
            if len(json.dumps(self.values)) > _SEEN_BYTES:
                values.pop()


def libraries(maps: str = "/proc/self/maps") -> Dict[str, List[str]]:
    """Paths of the loaded libraries that matter here, by name."""
    found: Dict[str, List[str]] = {}
    with open(maps) as stream:
        for line in stream:
            path = line.split(None, 5)[-1].strip()
            name = _LIBRARIES.match(os.path.basename(path))
            if name and path not in found.setdefault(name.group(0).split(".so")[0], []):
                found[name.group(0).split(".so")[0]].append(path)
    return found


def mpi_version(loaded: Dict[str, List[str]]) -> str:
    """Name and version of the loaded MPI; empty if there is none, or if it cannot be asked."""
    text = ctypes.create_string_buffer(8192)  # Open MPI and MPICH have less
    for name in sorted(name for name in loaded if name.startswith("libmpi")):
        try:
            ask = ctypes.CDLL(loaded[name][0]).MPI_Get_library_version
            ask(text, ctypes.byref(ctypes.c_int()))
        except (OSError, AttributeError):
            continue
        return " ".join(text.value.decode("utf-8", "replace").split())[:120]
    return ""


def fast_networks(devices: str = "/sys/class") -> List[str]:
    """Adapters of InfiniBand, Omni-Path or Slingshot with an active port.

    Ethernet adapters with RDMA are left out: most of them are used without it.
    """
    found = []
    for port in sorted(glob.glob(os.path.join(devices, "infiniband", "*", "ports", "*"))):
        state, layer = (os.path.join(port, name) for name in ("state", "link_layer"))
        with contextlib.suppress(OSError), open(state) as first, open(layer) as second:
            if "ACTIVE" in first.read() and "InfiniBand" in second.read():
                found.append(port.split(os.sep)[-3])
    cards = sorted(glob.glob(os.path.join(devices, "cxi", "*")))
    return [*dict.fromkeys(found), *map(os.path.basename, cards)][:8]


def file_system(path: str) -> str:
    """Type and source of the file system of a path: ``ext4 /dev/sda1``."""
    device = os.stat(path).st_dev
    number = "{}:{}".format(os.major(device), os.minor(device))
    with open("/proc/self/mountinfo") as stream:
        for line in stream:
            mounted, _, source = line.partition(" - ")
            if mounted.split()[2] == number:
                return " ".join(source.split()[:2])[:200]
    return ""


def run(context: Context, gpu: events.Gpu) -> None:
    """Report the event ``path`` with the rank's GPU from gpus.py."""
    loaded = libraries()
    path = events.DataPath(
        gpu=gpu,
        mpi=mpi_version(loaded),
        fast=fast_networks(),
        variables={n: os.environ[n][:60] for n in _REPORTED if os.environ.get(n, "-1") != "-1"},
        libraries={name: paths[:2] for name, paths in loaded.items()},
        files=file_system(sys.modules["horovod"].__path__[0]),
    )
    context.report(path)
