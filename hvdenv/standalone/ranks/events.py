"""The events that ranks report: their types, and how they are written into a launcher's output.

The programs that run as ranks import this file, and so does hvdenv, which reads the lines
(hvdenv/verification/rank_run.py). Runs on Python 3.6 and newer.

Each event is written as one or more lines of at most 500 bytes:

    @hvdenv TOKEN CRC32 SOURCE.EVENT.PART.PARTS.PAYLOAD

SOURCE identifies the process, EVENT counts from 0, PART from 0 to PARTS - 1. The joined payloads
are JSON in base64 without padding: launchers prefix lines, programs colour them and hvdenv masks
what looks like a password, and each of these would change JSON.

Launchers cut the output of ranks and mix the pieces: srun cuts lines after 1024 bytes, mpirun
wherever 4096 bytes or the terminal's buffer end, horovodrun after 1000 bytes. So lines are
short, and each is written twice in a row: one cut damages only one of the two.
"""

import base64
import contextlib
import json
import os
import socket
import zlib
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Union

PART_BYTES = 380
# What launchers tell a rank, first of all its number: an MPI knows it better than a scheduler.
LAUNCHER_VARIABLES = (
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_NTASKS",
)
# The sizes of messages that benchmarks measure, in bytes.
BENCH_SIZES = [1024 * 4**power for power in range(9)]


class Started(NamedTuple):
    """The rank's supervisor runs; `variables` is what the launcher says about the rank."""

    variables: Dict[str, str] = {}


class ExtensionFacts(NamedTuple):
    """What one framework's part of Horovod is, as inspect/extension.py reports it.

    Attributes:
        framework: ``torch``, ``tensorflow`` or ``mxnet``.
        python: path of the interpreter.
        horovod: the package's directory; empty without one.
        path: where the extension file belongs.
        size: its bytes; 0 if it does not exist.
        size_by_header: the bytes that its own header states; 0 if unknown.
        sources: hash of all Python files of the package.
        others: the framework's extensions for other Pythons.
        shadowed: packages that PYTHONPATH puts before the environment's own, and where from.
        left_out: packages of the user (~/.local) that would come before them, and where from.
        built_with: the framework version in metadata.json; None before Horovod 0.21.1.
        gpus: devices of NVIDIA on the host.
        installed: the framework's version.
        version: Horovod's version.
        built: the answer of each ``*_built()``; None where it cannot be asked.
        error: the exception of the import, with its traceback in `traceback`.
    """

    framework: str = ""
    python: str = ""
    python_version: str = ""
    horovod: str = ""
    path: str = ""
    size: int = 0
    size_by_header: int = 0
    sources: str = ""
    others: List[str] = []
    shadowed: Dict[str, str] = {}
    left_out: Dict[str, str] = {}
    built_with: Optional[str] = None
    gpus: int = 0
    installed: str = ""
    version: str = ""
    built: Dict[str, Optional[int]] = {}
    error: str = ""
    traceback: str = ""


class RendezvousFacts(NamedTuple):
    """What the servers of horovodrun accept, as inspect/rendezvous.py reports it.

    Attributes:
        patched: whether this Horovod can sign requests.
        accepted: the advisories whose request is accepted without a signature.
        error: why nothing could be found out, with its traceback in `traceback`.
    """

    patched: bool = False
    accepted: List[str] = []
    error: str = ""
    traceback: str = ""


class Joined(NamedTuple):
    """The rank's place among all, as Horovod states it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: Optional[int] = None
    cross_size: Optional[int] = None


class Stage(NamedTuple):
    """What the rank tries next."""

    stage: str
    detail: str = ""


class Result(NamedTuple):
    """The outcome of the allreduces.

    Attributes:
        tests: how many reductions were compared.
        wrong: how many of them were wrong.
        cases: what was wrong in the first few.
        own: in how many wrong ones the rank got its own input back.
        busy: seconds of its own work, without waiting for other ranks or for a core.
        enabled: the controllers that are enabled according to Horovod.
    """

    tests: int
    wrong: int
    cases: List[str] = []
    own: int = 0
    busy: float = 0.0
    enabled: List[str] = []


class Gpu(NamedTuple):
    """The GPU that a rank uses.

    Attributes:
        device: as the framework names it; empty without one.
        why: the reason for having none.
        on_host: how many GPUs of the host the process may use.
    """

    device: str = ""
    why: str = ""
    on_host: int = 0


class DataPath(NamedTuple):
    """How the data of a rank went to the others, as far as libraries say.

    Attributes:
        mpi: what the MPI library calls itself.
        fast: active adapters of InfiniBand, Omni-Path or Slingshot.
        variables: those of the rank's environment that choose a transport.
        libraries: paths of the loaded libraries, by name.
        logged: what Horovod and other libraries printed about it, by kind.
        files: type and source of the file system that Horovod was imported from.
    """

    gpu: Gpu = Gpu()
    mpi: str = ""
    fast: List[str] = []
    variables: Dict[str, str] = {}
    libraries: Dict[str, List[str]] = {}
    logged: Dict[str, List[str]] = {}
    files: str = ""


class Skipped(NamedTuple):
    """How many cases of an operation were not tried; `dtype` is empty if the reason is no type."""

    dtype: str
    why: str
    cases: int


class Operation(NamedTuple):
    """The outcome of one of Horovod's operations.

    Attributes:
        right, wrong: how many cases.
        types: those of the right cases.
        cases: what was wrong in the first few.
        ended: why Horovod could not go on; empty if it could.
        unproven: why these ranks cannot try what this Horovod can do.
    """

    operation: str
    right: int
    wrong: int
    types: List[str] = []
    skipped: List[Skipped] = []
    cases: List[str] = []
    ended: str = ""
    unproven: str = ""


class Training(NamedTuple):
    """The outcome of one part of the training.

    Attributes:
        part: such as ``DistributedOptimizer``.
        skip: why it cannot work with these versions; then nothing else is stated.
        losses: the rank's own, the first and the last.
        difference: largest distance of a parameter from the one that one process computes.
        bound: what rounding explains of that.
        like: what the difference looks like.
        checksums: of parameters and state, by the point in time.
    """

    part: str
    seconds: float
    skip: str = ""
    steps: int = 0
    losses: List[float] = []
    difference: float = 0.0
    bound: float = 0.0
    like: str = ""
    checksums: Dict[str, str] = {}


class Timed(NamedTuple):
    """Allreduces of one size that were repeated for some time.

    Attributes:
        size: bytes of the message.
        seconds: of one: minimum, quartiles and maximum.
    """

    size: int
    ranks: int
    seconds: List[float]
    device: str = ""

    @property
    def median(self) -> float:
        return self.seconds[2]

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / self.median

    @property
    def bandwidth(self) -> float:
        """The bus bandwidth in GB/s as nccl-tests define it; 0 for one rank.

        Every rank must send and receive 2 (n - 1) / n of the message, whatever the algorithm,
        so the figure can be compared with the hardware's.
        """
        return 2 * (self.ranks - 1) / self.ranks * self.rate / 1e9


class Call(NamedTuple):
    """The first call of one of Horovod's operations from one place of a training program.

    Attributes:
        operation: such as ``init``, ``allreduce`` or, without a name, ``broadcast_object of dict``; or
            an ``early_change`` (in_torch.py).
        site: file and line in the program; empty if a library called it, or for a process set.
        step: how many training steps came before.
        elements: of the tensor.
        gradient: whether an optimizer of Horovod, or a loop over gradients, made it.
    """

    operation: str
    site: str
    step: int
    elements: int = 0
    gradient: bool = False


class Optimizer(NamedTuple):
    """An optimizer that takes steps.

    Attributes:
        kind: name of its class.
        site: where the program makes it.
        distributed: whether Horovod wraps it.
        names: of its first 500 tensors.
        lost: whether a state was loaded into the optimizer that Horovod wraps, which this one lacks.
    """

    number: int
    kind: str
    site: str
    distributed: bool = False
    names: List[str] = []
    lost: bool = False


class TrainingStep(NamedTuple):
    """One step of an optimizer. Equal tensors have equal digests; an empty digest is unknown.

    Attributes:
        optimizer: its number.
        step: counted from 1 for each optimizer.
        before, after: digests of the parameters; the former of the first step only.
        applied: digest of the gradients that the step applies, in some steps.
        state: digest of the optimizer's state before its first step.
        batch: digest of what the model has read since the last step.
        samples: the least digests of single samples among these; empty if they are unknown.
        buffers: names and digests of what the model has besides trained parameters, before it was
            first called; of the first step only.
        source: number of the DataSource that supplied it; 0 if unknown.
        rate: learning rate; None if unknown.
        own, reduced: projections of the gradients before and after their reduction, on the same
            direction; None if they were not seen.
        tensors: the digest of each parameter after the step, in some steps.
    """

    optimizer: int
    step: int
    before: str = ""
    after: str = ""
    applied: str = ""
    state: str = ""
    batch: str = ""
    source: int = 0
    rate: Optional[float] = None
    own: Optional[float] = None
    reduced: Optional[float] = None
    tensors: List[str] = []
    samples: List[int] = []
    buffers: List[str] = []


class DataSource(NamedTuple):
    """A pass over data begins.

    Attributes:
        number: the same for each pass over one loader.
        site: where the program begins it.
        kind: name of the class that says what is read: a sampler, or else the loader.
        batches: how many; None if unknown.
        replicas, rank, epoch, shuffle: of a sampler that reads a share of the data.
        local: whether that sampler was given the local rank as its rank.
        whole: whether a loop without ``break`` reads it.
    """

    number: int
    site: str
    kind: str
    batches: Optional[int] = None
    replicas: Optional[int] = None
    rank: Optional[int] = None
    epoch: Optional[int] = None
    shuffle: bool = False
    local: bool = False
    whole: bool = True


class FileUse(NamedTuple):
    """A file that the program writes, or a checkpoint that it reads.

    Attributes:
        checkpoint: whether a model is saved there, as far as its name or its writer tells.
        local: whether a comparison of the local rank decides about it.
        clock: how many operations of all ranks had ended.
    """

    path: str
    write: bool
    checkpoint: bool
    local: bool
    site: str
    clock: int


class Shown(NamedTuple):
    """What uses a metric: the site ``prints "loss 0.3"``, or ``lets EarlyStopping decide``."""

    text: str
    site: str


class ProgramEnd(NamedTuple):
    """The training program has ended, or was ended after enough steps.

    Attributes:
        steps: of each optimizer.
        reason: ``enough``, ``end`` or ``exception``.
        error: the exception, with where it was raised.
        device: the GPU of the parameters, as its host knows it; empty without one.
        initialised: whether Horovod was.
        other_groups: whether ranks have met by torch.distributed.
        unobserved: why steps could not be seen; empty if they could.
    """

    steps: List[int]
    reason: str
    error: str = ""
    device: str = ""
    initialised: bool = False
    other_groups: bool = False
    unobserved: str = ""


class Overdue(NamedTuple):
    """The deadline is near and the rank still runs.

    Attributes:
        stage, detail: the last Stage.
        tail: last lines of its output, with its stacks.
        stopped: whether a signal has stopped it.
        stalled: the ranks and tensors for which Horovod waits.
    """

    stage: str
    detail: str
    tail: str
    seconds: float
    stopped: bool = False
    stalled: str = ""


class Exited(NamedTuple):
    """The rank's end.

    Attributes:
        stage, detail: the last Stage.
        code: exit status as subprocess states it.
        signal: name of the signal that ended it.
        ended_by: ``deadline``, ``launcher`` or ``the launcher is gone``; empty if it ended itself.
        tail: last lines of its output, unless the code is 0.
        full: directories of temporary files without space.
    """

    stage: str
    detail: str
    code: int
    signal: str
    ended_by: str
    seconds: float
    tail: str = ""
    full: List[str] = []


RankEvent = Union[
    Started, ExtensionFacts, Joined, Stage, Result, DataPath, Operation, Training,
    Timed, Call, Optimizer, TrainingStep,
    DataSource, FileUse, Shown, ProgramEnd, Overdue, Exited,
]  # fmt: skip
# A JSON object: its key `event` is the name of the event's type.
Table = Dict[str, Any]


def to_table(event: RankEvent) -> Table:
    """The event as a JSON object, without the fields that have their default."""
    return dict(_plain(event), event=type(event).__name__)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not hasattr(value, "_asdict"):
        return value
    missing = object()
    return {
        name: _plain(each)
        for name, each in value._asdict().items()
        if value._field_defaults.get(name, missing) != each
    }


class EventWriter:
    """Writes events to standard output, from where the launcher passes them on."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.source = base64.b16encode(os.urandom(4)).decode("ascii")
        self.count = 0
        self.written: List[str] = []

    def emit(self, table: Table) -> None:
        """Write one event of this process; a launcher that no longer reads is not an error."""
        with contextlib.suppress(OSError):
            for line in self.lines(dict(table, host=socket.gethostname(), pid=os.getpid())):
                self.written.append(line)
                os.write(1, "\n{0}\n{0}\n".format(line).encode("ascii"))

    def repeat(self) -> None:
        """Write all events once more.

        Open MPI gives ranks a terminal and mixes what it reads from several of these. With four
        ranks on a busy machine, 2 % of the lines were damaged, and of one in 30,000 both copies.
        """
        with contextlib.suppress(OSError):
            for line in self.written:
                os.write(1, "\n{}\n".format(line).encode("ascii"))

    def lines(self, table: Table) -> Iterator[str]:
        """The lines of one event with its `host` and `pid`."""
        whole = base64.b64encode(json.dumps(table).encode("ascii")).rstrip(b"=").decode("ascii")
        parts = [whole[at : at + PART_BYTES] for at in range(0, len(whole), PART_BYTES)]
        for number, part in enumerate(parts):
            rest = ".".join(map(str, (self.source, self.count, number, len(parts), part)))
            crc = zlib.crc32(rest.encode("ascii")) & 0xFFFFFFFF
            yield "@hvdenv {} {:08x} {}".format(self.token, crc, rest)
        self.count += 1
