"""Gives each rank a GPU of its own, where Horovod has NCCL and all ranks can have one.

Runs on Python 3.6 and up; needs numpy, which the frameworks bring.
"""

import glob
import os

import rank_allreduce


def choose(visible, there, local_rank, local_size):
    """Which of the GPUs that a rank sees is its own.

    Args:
        visible: how many the framework sees.
        there: how many this host has for it.
        local_rank, local_size: the rank among those of its host.

    Returns:
        Its index, or None; and why there is none.
    """
    if not there:
        return None, "there is no GPU here that this process may use"
    if not visible:
        return None, "the host has GPUs, but the framework sees none"
    if visible >= local_size:
        return local_rank, ""
    if visible == 1 and there >= local_size:  # the scheduler gives each rank one
        return 0, ""
    return None, "{} ranks on this host, and {} GPUs".format(local_size, min(visible, there))


def _count(context):
    if context.framework == "torch":
        return context.native.cuda.device_count() if context.native.cuda.is_available() else 0
    return len(_tensorflow_gpus(context))


def _tensorflow_gpus(context):
    config = getattr(context.native, "config", None)
    listed = getattr(config, "list_physical_devices", None)  # since 2.1
    return listed("GPU") if listed else []


def _prepare(context, index):
    """Make a GPU the framework's; TensorFlow wants that before anything else."""
    if context.framework == "torch":
        context.native.cuda.set_device(index)
        return "cuda:{}".format(index)
    own = _tensorflow_gpus(context)[index]
    context.native.config.set_visible_devices(own, "GPU")
    context.native.config.experimental.set_memory_growth(own, True)
    return "/gpu:0"


def _all_have(context, mine):
    """Whether all ranks say so: tensors on GPUs of some ranks only would wait for ever."""
    import numpy

    reduce_all = rank_allreduce.REDUCERS[context.framework](context)
    vote = numpy.array([1.0 if mine else 0.0], dtype="float32")
    how = rank_allreduce.operation_arguments(context.hvd, "Sum")
    total = reduce_all([("gpu.vote", vote, how)])["gpu.vote"]
    return int(total[0]) == context.hvd.size()


def devices(folder="/dev"):
    """How many GPUs of NVIDIA or AMD this process may use; schedulers lock others out."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return 0
    found = glob.glob(os.path.join(folder, "nvidia[0-9]*"))
    if not found and os.path.exists(os.path.join(folder, "kfd")):
        found = glob.glob(os.path.join(folder, "dri", "renderD*"))
    return sum(map(_opens, found))


def _opens(path):
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def hide():
    """Let no framework take memory of GPUs that are not used here; before its first tensor."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def take(context, built):
    """Give the rank its GPU: context.gpu.

    Args:
        context: of rank_work.py, after init.
        built: whether Horovod has NCCL.

    Returns:
        ``device``, empty if there is none; ``why`` that is so; and how many GPUs are
        ``there`` on the host.
    """
    there = devices()
    if not built:
        hide()
    index, why = None, "Horovod has no NCCL here"
    if built:
        hvd = context.hvd
        index, why = choose(_count(context), there, hvd.local_rank(), hvd.local_size())
    device = "" if index is None else _prepare(context, index)
    if not _all_have(context, bool(device)) and device:
        device, why = "", "another rank has no GPU"
    context.gpu = device
    return {"device": device, "why": why, "there": there}
