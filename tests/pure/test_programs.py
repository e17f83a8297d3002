"""What ranks of a training program did is judged by their events alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.errors import UsageError
from hvdenv.reports.report import Finding
from hvdenv.standalone.ranks.events import (
    Call,
    DataSource,
    FileUse,
    Joined,
    Optimizer,
    ProgramEnd,
    RankEvent,
    Shown,
    TrainingStep,
)
from hvdenv.verification import program_start as start
from hvdenv.verification.program import Program
from hvdenv.verification.program_rules import judge
from tests.support.rank_events import event, exited, run, started
from tests.support.standalone import load

SIZE = 2
END = ProgramEnd([3], "enough", initialised=True)
Change = Callable[[int, list[RankEvent]], None]


def right(rank: int) -> list[RankEvent]:
    """What a rank reports of a program that is right, in three steps."""
    share = rank % SIZE
    return [
        Call("init", "train.py:3", 0),
        Joined(rank, SIZE, rank, SIZE),
        Call("broadcast_parameters", "train.py:9", 0),
        DataSource(1, "train.py:12", "DistributedSampler", 16, SIZE, share, 0, True),
        Optimizer(1, "SGD", "train.py:8", True, ["weight", "bias"]),
        *(
            TrainingStep(
                1,
                step,
                f"b{step}",
                f"a{step}",
                f"g{step}",
                batch=f"{step}{rank}",
                source=1,
                rate=0.2,
                own=[1.0, 3.0][share],
                reduced=2.0,
                tensors=["x", "y"],
            )
            for step in (1, 2, 3)
        ),
        Call("allreduce", "train.py:18", 3, 1),
        DataSource(1, "train.py:12", "DistributedSampler", 16, SIZE, share, 1, True),
        END,
    ]


def judged(*changes: Change, size: int = SIZE, reference: float = 0.1) -> list[Finding]:
    """The findings after changes to the events of each rank."""
    messages = []
    for rank in range(size):
        own = right(rank)
        for change in changes:
            change(rank, own)
        messages += [started(rank), *(event(rank, each) for each in own), exited(rank)]
    return judge(Program("train.py", run(*messages, size=size), {1: reference}))


def each(kind: type[RankEvent], only: int | None = None, **fields: Any) -> Change:
    """Replace fields of all events of a type, on all ranks or one; by a function of the rank, too."""

    def change(rank: int, own: list[RankEvent]) -> None:
        values = {key: each(rank) if callable(each) else each for key, each in fields.items()}
        if only in (None, rank):
            own[:] = [one._replace(**values) if isinstance(one, kind) else one for one in own]

    return change


def without(kind: type[RankEvent], text: str = "") -> Change:
    def change(rank: int, own: list[RankEvent]) -> None:
        own[:] = [one for one in own if not (isinstance(one, kind) and text in str(one))]

    return change


def also(*events: RankEvent, only: int | None = None) -> Change:
    def change(rank: int, own: list[RankEvent]) -> None:
        if only in (None, rank):
            own[-1:-1] = events

    return change


def steps(**fields: list[Any]) -> Change:
    """Replace fields of the training steps, each by a list with the value of each step."""

    def change(rank: int, own: list[RankEvent]) -> None:
        for place, one in enumerate(own):
            if isinstance(one, TrainingStep):
                values = {key: each[one.step - 1] for key, each in fields.items()}
                own[place] = one._replace(**values)

    return change


def lose_second_step(rank: int, own: list[RankEvent]) -> None:
    if rank == 1:
        own[:] = [one for one in own if not (isinstance(one, TrainingStep) and one.step == 2)]


SAVED = FileUse("/d/model.pt", True, True, False, "train.py:20", 40)
DECIDES = Shown("lets Plateau decide by 0.5", "train.py:19")
CASES: dict[str, tuple[tuple[Change, ...], str, str, str]] = {
    "all rank 0": (
        (each(Joined, rank=0, size=1, local_rank=0, local_size=1),), "init", "fail", "hvd.size() is 1 on 2 ranks"
    ),
    "an object sent in the same line": (
        (also(Call("broadcast_object", "train.py:9", 0)),),
        "start", "pass", "equal on all ranks before the first step (broadcast_parameters, train.py:9)",
    ),
    "joined": (
        (each(DataSource, only=1, batches=15), also(Call("join", "train.py:17", 3))),
        "steps", "pass", "different numbers of steps: they wait in hvd.join() (train.py:17)",
    ),
    "no init": ((without(Joined), each(ProgramEnd, initialised=False)), "init", "fail", "never calls"),
    "torch's own groups": (
        (without(Joined), each(ProgramEnd, initialised=False, other_groups=True)),
        "init", "unproven", "ranks communicate by torch.distributed",
    ),
    "before init": (
        (each(ProgramEnd, reason="exception", error="Horovod has not been initialized"),),
        "init", "fail", "before hvd.init()",
    ),
    "one GPU": ((each(ProgramEnd, device="GPU-1"),), "device", "fail", "rank 0 on n1, rank 1 on n1"),
    "not divided, one rank per host": (
        (each(Joined, local_size=1), each(DataSource, replicas=1, rank=0)), "data", "fail", "gives rank 0 of 2 share 0 of 1"
    ),
    "called alone": (
        (also(Call("allgather", "train.py:19", 3), only=0),), "steps", "fail", "rank 0 on n1 waits in allgather (train.py:19), which rank 1 on n1 never called"
    ),
    "objects of two types": (
        (also(Call("broadcast_object of dict", "train.py:9", 0), only=0),
         also(Call("broadcast_object of NoneType", "train.py:9", 0), only=1)),
        "steps", "fail", "rank 0 on n1 waits in broadcast_object of dict (train.py:9), which rank 1 on n1 never called",
    ),
    "warm-up": ((steps(rate=[0.1, 0.15, 0.2]),), "rate", "pass", "SGD (train.py:8) rises from 0.1 to 0.2, a warm-up"),
    "sum": ((each(TrainingStep, reduced=4.0),), "gradients", "pass", "the sum of the ranks' own. It makes steps 2 times longer"),
    "own GPUs": ((each(ProgramEnd, device=str),), "device", "pass", "of its own"),
    "other start": ((each(TrainingStep, before=str, after=str),), "start", "fail", "differ between ranks before the first step: they are changed after, or left out of, the broadcast in train.py:9"),
    "nothing sent": (
        (without(Call, "broadcast"), each(TrainingStep, before=str, after=str)),
        "start", "fail", "before the first step, and no tensors were broadcast",
    ),
    "other state": ((each(TrainingStep, state=str),), "start", "fail", "the state of SGD (train.py:8) differs"),
    "statistics": (
        (each(TrainingStep, buffers=lambda rank: [f"bn.running_mean {rank}", f"own{rank} 1"]),),
        "start", "pass", "BatchNorm differ between ranks (bn.running_mean)",
    ),
    "by seed": ((without(Call, "broadcast"),), "start", "pass", "nothing was broadcast"),
    "state alone": (
        (each(Call, operation="broadcast_optimizer_state"),),
        "start", "pass", "nothing was broadcast",
    ),
    "epoch alone": (
        (without(Call, "broadcast"), also(Call("broadcast", "train.py:9", 0, 1))),
        "start", "pass", "nothing was broadcast",
    ),
    "late": (
        (each(TrainingStep, before="", applied="", own=None, reduced=None),), "start", "pass", "from step 1"
    ),
    "own gradients": ((each(TrainingStep, applied=str),), "gradients", "fail", "differ between ranks"),
    "never": (
        (each(Optimizer, distributed=False), each(TrainingStep, batch="b")), "gradients", "fail", "because all ranks read the same"
    ),
    "flattened, and batches unknown": (
        (each(Optimizer, distributed=False), each(TrainingStep, batch=""), also(Call("allreduce", "train.py:17", 0, 99))),
        "gradients", "unproven", "in train.py:17: these may be the gradients or the parameters",
    ),
    "flattened": (
        (each(Optimizer, distributed=False),), "gradients", "pass", "stay equal, though"
    ),
    "halved": ((each(TrainingStep, reduced=1.0),), "gradients", "pass", "1/2 of the mean"),
    "never finite": ((each(TrainingStep, own=math.nan),), "gradients", "unproven", "infinite or NaN"),
    "infinite at first": (
        (steps(own=[math.inf, 2.0, 2.0]),), "gradients", "pass", "the mean of the ranks' own"
    ),
    "clipped": ((steps(reduced=[2.0, 1.0, 0.5]),), "gradients", "pass", "were changed"),
    "same batches": ((each(TrainingStep, batch="b"),), "data", "pass", "synthetic"),
    "rate unknown": ((each(TrainingStep, optimizer=2), each(Optimizer, number=2)), "rate", "skip", "on one rank is not known"),
    "a report is lost": ((lose_second_step,), "", "pass", "2 training steps"),
    "left": (
        (each(ProgramEnd, only=1, reason="exception", error="HorovodInternalError: shut down"),),
        "gradients", "pass", "the mean",
    ),
    "left within a pass": (
        (each(ProgramEnd, only=1, reason="exception", error="HorovodInternalError: shut down, after verify ended a pass"),),
        "", "pass", "3 training steps",
    ),
    "shortened": (
        (each(ProgramEnd, reason="exception", error="ValueError, after verify ended a pass early"),),
        "", "unproven", "are judged below",
    ),
    "other batches, not divided": (
        (steps(samples=[[1, 2], [3, 4], [5, 6]]), each(DataSource, replicas=None)),
        "data", "fail", "in other batches: 100%",
    ),
    "other batches, by chance": (
        (steps(samples=[[1, 2], [3, 4], [5, 6]]), each(DataSource, replicas=None, batches=5)),
        "data", "pass", "rather than a share of it, give each rank its own share",
    ),
    "samples that repeat": ((steps(samples=[[1], [1], [1]]),), "data", "pass", "different batches"),
    "no batches": ((each(TrainingStep, batch=""),), "data", "unproven", "could not be seen"),
    "wrong rank": ((each(DataSource, rank=0),), "data", "fail", "gives rank 1 of 2 share 0 of 2"),
    "whole": ((each(DataSource, replicas=None),), "data", "pass", "note: the ranks read different"),
    "uneven end": (
        (each(ProgramEnd, reason="end", steps=lambda rank: [3 + rank]),), "steps", "fail", "until the end"
    ),
    "both log": (
        (also(SAVED._replace(checkpoint=False)),), "checkpoint", "pass", "note: rank 0 on n1, rank 1"
    ),
    "local saves": ((also(SAVED._replace(local=True), only=0),), "checkpoint", "fail", "one rank of each"),
    "later": (
        (also(SAVED, only=0), also(SAVED._replace(write=False, clock=41), only=1)),
        "checkpoint", "pass", "only rank 0",
    ),
    "a callback before the average": (
        (also(Shown("lets EarlyStopping decide", "train.py:19"), only=0),),
        "metrics", "pass", "train.py:19 lets EarlyStopping decide: it has the metrics of rank 0",
    ),
    "printed decisions": (
        (also(DECIDES._replace(text='prints "loss to decide by 0.5"'), only=0),
         also(DECIDES._replace(text='prints "loss to decide by 1.5"'), only=1)),
        "metrics", "pass", "are combined in train.py:18",
    ),
    "one decision": ((also(DECIDES),), "metrics", "pass", "are combined in train.py:18"),
    "no steps": (
        (without(Optimizer), without(TrainingStep),
         each(ProgramEnd, steps=[])),
        "", "unproven", "no optimizer of PyTorch or Keras took one",
    ),
    "error": (
        (each(ProgramEnd, only=1, reason="exception", error="ValueError: no (train.py:5)"),),
        "", "fail", "rank 1 on n1: ValueError: no (train.py:5)",
    ),
}  # fmt: skip


def test_a_right_program_passes() -> None:
    found = judged()
    assert {one.status for one in found} == {"pass", "skip"}, found
    assert [one.check for one in found if "note" in one.message] == ["program-checkpoint"]


@pytest.mark.parametrize("name", CASES)
def test_each_mistake_has_its_finding(name: str) -> None:
    changes, check, status, says = CASES[name]
    found = judged(*changes)
    wanted = f"program-{check}" if check else "program"
    assert any(
        one.check == wanted and one.status == status and says in one.message for one in found
    ), found
    assert {one.check for one in found if one.status == "fail"} <= {wanted}, found


def test_a_single_rank_proves_nothing() -> None:
    found = judged(each(Joined, size=1, local_size=1), size=1)
    assert [(one.check, one.status) for one in found] == [
        ("program", "unproven"),
        ("program-init", "pass"),
    ]


def test_rates_loaded_from_a_checkpoint_of_the_other_run_prove_nothing() -> None:
    loaded = SAVED._replace(path="/d/model-1.pt", write=False)
    for read, rates in ((loaded, {}), (loaded._replace(path="/e/model.pt"), {1: 0.2})):
        alone = run(*(event(0, one) for one in (*right(0), read)), size=1)
        before = run(*(event(0, one) for one in (*right(0), SAVED)))
        assert start._rates_alone(alone, before) == rates


def test_hosts_that_each_read_all_data_share_samples_by_chance() -> None:
    def own_samples(rank: int, own: list[RankEvent]) -> None:
        steps(samples=[[9, rank], [rank + 10, rank + 20], [rank + 30, rank + 40]])(rank, own)

    def own_order(rank: int, own: list[RankEvent]) -> None:
        for place, one in enumerate(own):
            if isinstance(one, DataSource):
                own[place] = one._replace(epoch=(one.epoch or 0) + rank // 2)

    hosts = each(Joined, size=4, local_size=2)
    found = judged(hosts, own_order, own_samples, size=4, reference=0.05)
    assert not [one for one in found if one.status == "fail"], found
    (data,) = (one for one in found if one.check == "program-data")
    assert (data.status, data.message[:35]) == ("pass", "the ranks read different batches in")


@pytest.mark.parametrize("count", [3, 2])
def test_an_optimizer_beside_or_after_a_wrapped_one_has_to_be_wrapped(count: int) -> None:
    def second(rank: int, own: list[RankEvent]) -> None:
        steps = [one for one in own if isinstance(one, TrainingStep)]
        moved = [one._replace(optimizer=2, after=str(rank), applied=str(rank)) for one in steps]
        own[-1:-1] = [Optimizer(2, "Adam", "train.py:9"), *moved[:count]]

    reduced = Call("allreduce", "", 0, 99, gradient=True)
    again = Call("broadcast_parameters", "train.py:20", 3)
    (failed,) = (one for one in judged(second, also(reduced, again)) if one.status == "fail")
    assert "of Adam (train.py:9) differ between ranks after step 1" in failed.message
    assert failed.remedy.startswith("wrap the optimizer made in train.py:9 with")
    assert failed.remedy.endswith("use what it returns")


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("python train.py -x", "train.py -x"),
        ("python3.11 -u train.py -x", "train.py -x"),
        ("train.py -x", "train.py -x"),
        ("python -m pkg.train 1", "-m pkg.train 1"),
        ("horovodrun -np 2 python train.py", ""),
        ("python missing.py", ""),
        ("python -c 1", ""),
        ("bash run.sh", ""),
        ("python", ""),
    ],
)
def test_the_command_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, argv: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with nullcontext() if argv else pytest.raises(UsageError):
        request = start.read_command(words.split())
        assert request.argv == tuple(argv.split())
        assert request.name in argv


SCRIPT = b"""\
hvd.init()
if hvd.local_rank() == 0:
    save()
args.first, size = hvd.local_rank() == 0, hvd.size()
if args.first and epoch % 2:
    save()
if hvd.local_rank() == 0 and hvd.rank() == 0:
    save()
def write():
    if hvd.local_rank() != 0:
        return
    save()
if size:
    save()
sampler = DistributedSampler(
    data, num_replicas=hvd.size(), rank=hvd.local_rank()
)
dataset.shard(hvd.size(), hvd.rank())
dataset.shard(hvd.size(), hvd.local_rank())
for batch in loader:
    train(batch)
for step, batch in enumerate(loader):
    if step == 9:
        break
for batch in islice(loader, 9):
    train(batch)
"""


def test_the_source_says_where_the_local_rank_decides() -> None:
    source = load("source").Source(SCRIPT)
    assert [line for line in range(1, 27) if source.decides(line)] == [3, 6, 11, 12]
    assert [line for line in range(1, 27) if source.gives(line)] == [15, 16, 19]
    assert [line for line in range(1, 27) if source.reads_all(line)] == [20]


def test_names_of_checkpoints() -> None:
    models = "model.pt ck-1.pth.tar weights.h5 checkpoint model.pt.tmp ckpt-1.data-00000-of-00001"
    others = "train.log mnist.gz events.out.tfevents.1 metrics.json"
    holds_a_model = load("recorder").holds_a_model
    assert all(holds_a_model(f"/d/{name}") for name in models.split())
    assert not any(holds_a_model(f"/d/{name}") for name in others.split())
