"""Cases that only mean something with tensors in GPU memory; every rank runs this program.

Each rank computes from all ranks' inputs what it has to get. Prints one JSON line for each case
and rank; exit code 1 if one is wrong. Without a GPU, all but SyncBatchNorm run in the host's
memory, which proves the program, not the GPU.
"""

import json
import sys

import horovod.torch as hvd
import torch

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def data(rank, *shape, device):
    """What a rank puts in; every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(*shape, generator=generator).to(device)


def everyone(*shape, device):
    return [data(rank, *shape, device=device) for rank in range(hvd.size())]


def sync_batch_norm(device):
    """Forward and backward equal one BatchNorm over the samples of all ranks."""
    shape = (6, 4, 5, 5)
    inputs = everyone(*shape, device=device)
    whole = torch.cat(inputs).requires_grad_()
    mine = inputs[hvd.rank()].clone().requires_grad_()
    synced = hvd.SyncBatchNorm(4).to(device)
    alone = torch.nn.BatchNorm2d(4).to(device)
    got, want = synced(mine), alone(whole)
    part = slice(hvd.rank() * 6, hvd.rank() * 6 + 6)
    torch.testing.assert_close(got, want[part], **TOLERANCE)
    got.pow(3).sum().backward()
    want.pow(3).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[part], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(synced.running_mean, alone.running_mean, **TOLERANCE)
    torch.testing.assert_close(synced.running_var, alone.running_var, **TOLERANCE)


def gradients(device):
    """Gradients flow through allreduce, allgather, broadcast and alltoall.

    Those of allgather and broadcast are averages over the ranks: Horovod's convention.
    """
    rank, size = hvd.rank(), hvd.size()
    weights = everyone(size * 2, 3, device=device)

    def gradient(operation, weight):
        x = data(rank, size * 2, 3, device=device).requires_grad_()
        (operation(x) * weight).sum().backward()
        return x.grad

    mine, total = weights[rank], sum(weights)
    got = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, name="g.allreduce"), mine)
    torch.testing.assert_close(got, total, **TOLERANCE)
    got = gradient(lambda x: hvd.broadcast(x, 0, name="g.broadcast"), mine)
    torch.testing.assert_close(got, total / size if rank == 0 else 0 * total, **TOLERANCE)
    whole = data(99, size * size * 2, 3, device=device)
    got = gradient(lambda x: hvd.allgather(x, name="g.allgather"), whole)
    part = whole[rank * size * 2 : (rank + 1) * size * 2]
    torch.testing.assert_close(got, part, **TOLERANCE)
    got = gradient(lambda x: hvd.alltoall(x, name="g.alltoall"), mine)
    want = torch.cat([each[rank * 2 : rank * 2 + 2] for each in weights])
    torch.testing.assert_close(got, want, **TOLERANCE)


def splits_on_the_device(device):
    """An alltoall whose splits are in GPU memory."""
    rank, size = hvd.rank(), hvd.size()
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    inputs = everyone(int(splits.sum()), 2, device=device)
    got, received = hvd.alltoall(inputs[rank], splits=splits.to(device), name="splits")
    begin = int(splits[:rank].sum())
    want = torch.cat([each[begin : begin + rank + 1] for each in inputs])
    torch.testing.assert_close(got, want, **TOLERANCE)
    assert received.cpu().tolist() == [rank + 1] * size


def another_stream(device):
    """What a stream is still computing is finished before it is reduced."""
    streams = [torch.cuda.Stream(device) for _ in range(4)] if device.type == "cuda" else [None] * 4
    handles = []
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):  # None: no effect
            x = torch.ones(512, 512, device=device)
            for _ in range(50):
                x = (x @ x).clamp(max=1.0)
            x = x * (number + 1 + hvd.rank())
            handles.append(hvd.allreduce_async(x, op=hvd.Sum, name=f"stream.{number}"))
    for number, handle in enumerate(handles):
        want = sum(number + 1 + rank for rank in range(hvd.size()))
        assert hvd.synchronize(handle).unique().tolist() == [float(want)]


def half_precision(device):
    """float16 compression and float16 sums on the device."""
    values = everyone(1000, device=device)
    got = hvd.allreduce(
        values[hvd.rank()], op=hvd.Sum, name="fp16", compression=hvd.Compression.fp16
    )
    torch.testing.assert_close(got, sum(values), rtol=1e-2, atol=1e-2)
    whole = torch.arange(100, device=device).half()
    got = hvd.allreduce(whole, op=hvd.Sum, name="half")
    assert got.dtype == torch.float16
    assert torch.equal(got, whole * hvd.size())


def mixed_places(device):
    """Tensors of the host and of the GPU in one step, under names that do not meet."""
    on_host = hvd.allreduce_async(torch.ones(7), op=hvd.Sum, name="place.host")
    there = hvd.allreduce_async(torch.ones(7, device=device), op=hvd.Sum, name="place.device")
    for handle in (on_host, there):
        assert hvd.synchronize(handle).tolist() == [float(hvd.size())] * 7


CASES = (
    sync_batch_norm,
    gradients,
    splits_on_the_device,
    another_stream,
    half_precision,
    mixed_places,
)


def main():
    hvd.init()
    count = torch.cuda.device_count()
    device = torch.device("cuda", hvd.local_rank() % count) if count else torch.device("cpu")
    if count:
        torch.cuda.set_device(device)
    wrong = 0
    for case in CASES:
        facts = {
            "case": case.__name__,
            "rank": hvd.rank(),
            "size": hvd.size(),
            "device": str(device),
        }
        try:
            if case is sync_batch_norm and device.type != "cuda":
                facts.update(status="skip", message="Horovod's SyncBatchNorm needs a GPU")
            else:
                case(device)
                facts["status"] = "pass"
        except Exception as error:  # the other cases go on, on all ranks alike
            facts.update(status="fail", message=str(error)[:500])
            wrong += 1
        print(json.dumps(facts), flush=True)
    hvd.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
