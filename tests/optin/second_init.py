"""A rank that shuts Horovod down and initialises it again with a process set, many times."""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch


def total(name: str, **among: hvd.ProcessSet) -> float:
    """The sum of the ranks' numbers, each plus one."""
    return float(hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum, name=name, **among))


hvd.init()
rank, size = hvd.rank(), hvd.size()
for number in range(int(sys.argv[1])):
    hvd.init()  # without effect
    hvd.shutdown()
    assert not hvd.is_initialized()
    most = hvd.ProcessSet(list(range(size - 1)))
    hvd.init(process_sets=[most])
    assert (hvd.rank(), hvd.size()) == (rank, size)
    if most.included():
        assert total(f"most {number}", process_set=most) == sum(range(size))
    # Last, since a rank outside of the set would shut Horovod down.
    assert total(f"all {number}") == sum(range(size + 1))
hvd.shutdown()
