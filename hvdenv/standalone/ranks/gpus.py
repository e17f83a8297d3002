"""Gives each rank a GPU: its own where Horovod has NCCL, else one that ranks may share.

A Horovod for CUDA without NCCL copies tensors into the host's memory and reduces them there.

Runs on Python 3.6 and up; needs numpy, which the frameworks bring.
"""

import glob
import os
from typing import Any, Dict, List, Optional, Tuple

import allreduce
import events
from context import Context


def choose(
    visible: int, there: int, local_rank: int, local_size: int, shared: bool = False
) -> Tuple[Optional[int], str]:
    """Which of the GPUs that a rank sees it takes.

    Args:
        visible: how many the framework sees.
        there: how many this host has for it.
        local_rank, local_size: the rank among those of its host.
        shared: whether several ranks may take one.

    Returns:
        Its index, or None; and why there is none.
    """
    if not there:
        return None, "there is no GPU here that this process may use"
    if not visible:
        return None, "the host has GPUs, but the framework sees none"
    if visible >= local_size or shared:
        return local_rank % visible, ""
    if visible == 1 and there >= local_size:  # the scheduler gives each rank one
        return 0, ""
    return None, "{} ranks on this host, and {} GPUs".format(local_size, min(visible, there))


def _count(context: Context) -> int:
    if context.framework == "torch":
        return context.native.cuda.device_count() if context.native.cuda.is_available() else 0
    return len(_tensorflow_gpus(context))


def _tensorflow_gpus(context: Context) -> List[Any]:
    config = getattr(context.native, "config", None)
    listed = getattr(config, "list_physical_devices", None)  # since 2.1
    return listed("GPU") if listed else []


def _prepare(context: Context, index: int) -> str:
    """Make a GPU the framework's; TensorFlow wants that before anything else."""
    if context.framework == "torch":
        context.native.cuda.set_device(index)
        return "cuda:{}".format(index)
    own = _tensorflow_gpus(context)[index]
    context.native.config.set_visible_devices(own, "GPU")
    context.native.config.experimental.set_memory_growth(own, True)
    return "/gpu:0"


def _all_have(context: Context, mine: bool) -> bool:
    """Whether all ranks say so: tensors on GPUs of some ranks only would wait for ever."""
    import numpy

    reduce_all = allreduce.REDUCERS[context.framework](context)
    vote = numpy.array([1.0 if mine else 0.0], dtype="float32")
    how = allreduce.operation_arguments(context.hvd, "Sum")
    total = reduce_all([("gpu.vote", vote, how)])["gpu.vote"]
    return int(total[0]) == int(context.hvd.size())


def devices(folder: str = "/dev") -> int:
    """How many GPUs of NVIDIA or AMD this process may use; schedulers lock others out."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return 0
    found = glob.glob(os.path.join(folder, "nvidia[0-9]*"))
    if not found and os.path.exists(os.path.join(folder, "kfd")):
        found = glob.glob(os.path.join(folder, "dri", "renderD*"))
    return sum(map(_opens, found))


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def hide() -> None:
    """Let no framework take memory of GPUs that are not used here; before its first tensor."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def take(context: Context, built: Dict[str, Optional[int]], device: str) -> events.Gpu:
    """Give the rank its GPU: context.gpu.

    Args:
        context: of rank_work.py, after init.
        built: what Horovod has, by name: extension.py's.
        device: ``gpu`` where ranks may use NCCL.

    Returns:
        An events.Gpu.
    """
    there, nccl = devices(), built.get("NCCL")
    if nccl and device != "gpu":
        hide()
        return events.Gpu()
    usable = nccl or built.get("CUDA") or built.get("ROCm")
    index, why = None, "Horovod has no NCCL here"
    if usable:
        numbers = context.hvd.local_rank(), context.hvd.local_size()
        index, why = choose(_count(context), there, *numbers, shared=not nccl)
    else:
        hide()
    taken = "" if index is None else _prepare(context, index)
    if not _all_have(context, bool(taken)) and taken:
        taken, why = "", "another rank has no GPU"
    context.gpu = taken
    return events.Gpu(device=taken, why=why, on_host=there)
