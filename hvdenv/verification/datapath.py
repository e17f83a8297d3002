"""By which path the data of ranks went, from what they report of it (standalone/ranks/datapath.py)."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hvdenv.reports.report import RankRecord, Status
from hvdenv.standalone.ranks.events import DataPath
from hvdenv.verification.rank_judgement import Judgement, causes_by_rank, slow_rank
from hvdenv.verification.rank_run import Rank, RankRun

# Within a host only; what remains of a list goes between hosts as well.
_WITHIN = {
    "self",
    "vader",
    "sm",
    "smcuda",
    "sysv",
    "posix",
    "cma",
    "knem",
    "xpmem",
    "mm",
    "memory",
    "cuda_copy",
    "cuda_ipc",
    "gdr_copy",
    "rocm_copy",
    "rocm_ipc",
}
_TCP = re.compile(r"tcp|sockets|udp", re.I)
_LANES = re.compile(r"(?P<place>self|intra-node|inter-node)?.*?\btag\((?P<lanes>[^()]*)\)")


class Transports(NamedTuple):
    """What carries data, in words and from host to host, as far as the libraries say."""

    name: str = ""
    between: tuple[str, ...] = ()

    @property
    def only_tcp(self) -> bool:
        """Whether nothing but TCP goes from host to host."""
        return bool(self.between) and all(_TCP.match(one) for one in self.between)


def mpi_transports(logged: Mapping[str, Sequence[str]]) -> Transports:
    """How MPI sends, from what its libraries logged."""
    pml, providers = "".join(logged.get("pml", ())[-1:]), tuple(logged.get("provider", ()))
    if pml == "ob1":
        btls = tuple(logged.get("btl", ()))
        between = tuple(btl for btl in btls if btl not in _WITHIN)
        return Transports(f"pml ob1, btl {', '.join(sorted(btls))}", between)
    if pml == "ucx" or (not pml and "ucx" in logged):  # MPICH has no pml
        lanes = _ucx(logged.get("ucx", ()))
        return Transports(
            f"{'pml ' if pml else ''}ucx, {', '.join(lanes) or 'within hosts'}", lanes
        )
    if providers:
        name = f"libfabric {', '.join(providers)}"
        return Transports(f"pml {pml}, {name}" if pml else name, providers)
    return Transports(f"pml {pml}" if pml else "")


def _ucx(lines: Sequence[str]) -> tuple[str, ...]:
    """What UCX uses between hosts: ``rc_mlx5/mlx5_0:1``."""
    found: dict[str, None] = {}
    for line in lines:
        lanes = _LANES.match(line)
        if lanes and lanes["place"] in (None, "inter-node"):
            used = [lane for lane in lanes["lanes"].split() if lane.split("/")[0] not in _WITHIN]
            found.update(dict.fromkeys(used))
    return tuple(found)


def nccl_transports(logged: Mapping[str, Sequence[str]]) -> Transports:
    """How NCCL sends, from what it said; ``NET/`` is what goes between hosts."""
    ways = tuple("SHM" if "shared memory" in way else way.strip() for way in logged.get("via", ()))
    nets = tuple(way.removeprefix("NET/") for way in ways if way.startswith("NET/"))
    between = tuple("tcp" if net == "Socket" else net for net in nets)
    return Transports(", ".join(sorted(set(ways))), between)


def uses_nccl(run: RankRun) -> bool:
    """Whether NCCL joined all ranks of a run: Horovod asks it to only when it reduces with it."""
    logged = [rank.path.logged.get("comm", ()) for rank in run.ranks]
    sizes = [{comm.partition(" ")[0] for comm in each} for each in logged]
    return bool(sizes) and all(str(run.size) in each for each in sizes)


def operations(run: RankRun) -> frozenset[str]:
    return run.operations | ({"NCCL"} if uses_nccl(run) else set())


def why_no_nccl(run: RankRun) -> tuple[Status, str]:
    """Why no rank used NCCL: ``fail`` where GPUs were there to use, else ``unproven``."""
    for rank in run.ranks:
        gpu = rank.path.gpu
        if gpu.device:
            why = f"tensors were on {gpu.device} of {rank.name}, but NCCL connected no ranks"
            return "fail", why
        if gpu.on_host and "the framework sees none" in gpu.why:
            return "fail", f"GPUs were requested, but {rank.name} used its CPU: {gpu.why}"
        if gpu.why:
            return "unproven", f"{rank.name}: {gpu.why}"
    return "unproven", "the ranks did not report whether they saw GPUs"


def judge_path(run: RankRun, meant: Mapping[str, str], mount: str = "") -> Judgement:
    """Whether the data of a run with right reductions went the way that it should.

    Args:
        meant: parameters of Open MPI that the recipe sets.
        mount: of the image from which all ranks should run; empty without one.
    """
    if not (mount or any(rank.last(DataPath) for rank in run.ranks)):
        return Judgement("skip", "the ranks did not report how their data was sent")
    evidence = "\n".join(_lines(run.ranks))
    if shared := _shared_gpus(run.ranks):
        return Judgement(
            "fail",
            shared,
            evidence,
            "give each rank of a host its own GPU: start as many ranks as GPUs on each host, and do not"
            " set CUDA_VISIBLE_DEVICES to the same value for all ranks",
        )
    if mount and (missed := _outside(run.ranks, mount)):
        return Judgement(
            "fail",
            missed,
            evidence,
            "provide what the ranks report as missing on these hosts (squashfuse, /dev/fuse, user"
            " namespaces); or use the environment without its image: --no-image",
        )
    words = [_carried(run), *(["all ranks ran from the image"] if mount else [])]
    slow = _slow(run)
    if slow and meant.keys().isdisjoint(("pml", "btl", "mtl")):
        return Judgement("fail", f"{slow}; {words[0]}", evidence, _faster(run))
    words += [f"{slow}, as the recipe requests"] * bool(slow)
    return Judgement("pass", "; ".join(words), evidence)


def _outside(ranks: Sequence[Rank], mount: str) -> str:
    """Which ranks did not run from an image; empty if all did."""
    found = {rank.name: rank.path.files for rank in ranks}
    missed = [name for name, files in found.items() if mount not in files.split()]
    if not missed:
        return ""
    read = f"{missed[0]} read {found[missed[0]] or 'files that it did not report'}"
    return f"{len(missed)} of {len(found)} ranks did not run from the image: {read}"


def _lines(ranks: Sequence[Rank]) -> Iterator[str]:
    for rank in ranks[:8]:
        yield f"{rank.name}:"
        path = rank.path
        for name in ("logged", "libraries", "variables"):
            for key, value in getattr(path, name).items():
                yield f"    {name} {key}: {value if isinstance(value, str) else ', '.join(value)}"
        yield f"    GPU: {path.gpu.device or path.gpu.why}"
        known = {"files of Horovod": path.files, "MPI": path.mpi}
        known["fast adapters"] = ", ".join(path.fast)
        yield from (f"    {name}: {value}" for name, value in known.items() if value)


def _carried(run: RankRun) -> str:
    operations = ", ".join(sorted(run.operations)) or "an operation that Horovod did not log"
    text = f"{run.controller} negotiated, {operations} reduced in host memory"
    on_gpus = uses_nccl(run)
    if not on_gpus and any(rank.path.gpu.device for rank in run.ranks):
        text += ", also tensors of GPUs, which Horovod copied to the host and back"
    if transports := _transports(run, run.ranks):
        text += f" ({transports})"
    if on_gpus:
        logged = _all_logged(run.ranks)
        version = next((printed.split("+")[0] for printed in logged.get("nccl", ())), "")
        ways = nccl_transports(logged).name or "no transport named"
        text += f", NCCL {version} on GPUs ({ways})"
    return text


def _transports(run: RankRun, ranks: Sequence[Rank]) -> str:
    """How ranks send tensors in the memory of the host; empty if they did not report it."""
    if not any(rank.last(DataPath) for rank in ranks):
        return ""
    if run.controller == "MPI" or "MPI" in run.operations:
        return mpi_transports(_all_logged(ranks)).name or "this MPI does not report how it sends"
    names = {rank.path.variables.get("HOROVOD_GLOO_IFACE", "") for rank in ranks}
    interfaces = sorted(names - {""})
    return f"TCP on {', '.join(interfaces) or 'any interface'}"


def rank_records(framework: str, run: RankRun) -> Iterator[RankRecord]:
    slowest, note = slow_rank(run) or (None, "")
    for rank, cause in zip(run.ranks, causes_by_rank(run), strict=True):
        joined = rank.joined
        nccl = nccl_transports(_all_logged([rank])).name if uses_nccl(run) else ""
        transports = [_transports(run, [rank]), nccl and f"NCCL {nccl}"]
        yield RankRecord(
            rank=rank.number,
            host=rank.host,
            local_rank=joined.local_rank if joined else None,
            pid=rank.pid,
            device=(rank.path.gpu.device or "cpu") if rank.last(DataPath) else "",
            framework=framework,
            controller=run.controller,
            status="fail" if cause else "pass",
            cause=cause,
            note=note if rank is slowest else "",
            seconds=rank.exited.seconds if rank.exited else None,
            data_path="; ".join(filter(None, transports)),
        )


def _all_logged(ranks: Sequence[Rank]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for rank in ranks:
        for name, values in rank.path.logged.items():
            found.setdefault(name, {}).update(dict.fromkeys(values))
    return {name: tuple(values) for name, values in found.items()}


def _shared_gpus(ranks: Sequence[Rank]) -> str:
    """Which ranks are on one GPU; empty if none are."""
    used = Counter(
        (rank.host, comm.split("busId ")[1])
        for rank in ranks
        for comm in dict.fromkeys(rank.path.logged.get("comm", ()))
        if "busId " in comm
    )
    for (host, bus), count in used.items():
        if count > 1:
            return f"several ranks on {host} use the same GPU (bus {bus})"
    return ""


def _slow(run: RankRun) -> str:
    """Where data goes by TCP though the hosts have something faster; empty if it does not."""
    fast = [set(rank.path.fast) for rank in run.ranks]
    if len({rank.host for rank in run.ranks}) < 2 or not all(fast):
        return ""
    logged = _all_logged(run.ranks)
    if uses_nccl(run):
        name, slow = "NCCL", nccl_transports(logged).only_tcp
    else:
        name, slow = "MPI", run.operations == {"MPI"} and mpi_transports(logged).only_tcp
    adapters = ", ".join(sorted(set.union(*fast)))
    return f"{name} uses TCP although the hosts have {adapters}" if slow else ""


def _faster(run: RankRun) -> str:
    variables = {pair for rank in run.ranks for pair in rank.path.variables.items()}
    others = ("CUDA_VISIBLE_DEVICES", "HOROVOD_GLOO_IFACE", "HOROVOD_CPU_OPERATIONS")
    if asked := {f"{name}={value}" for name, value in variables if name not in others}:
        return f"unset these variables, which request TCP: {', '.join(sorted(asked))}"
    if run.launcher == "horovodrun-mpi":
        return "horovodrun sets `-mca pml ob1` itself: use the launcher mpirun"
    return (
        "use an MPI with UCX or libfabric for this network (the site's module), and check that users"
        " may use the adapter (/dev/infiniband, ulimit -l)"
    )
