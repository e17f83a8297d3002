"""Assigns GPUs to ranks: one each if Horovod has NCCL, else shared ones.

A Horovod for CUDA without NCCL copies tensors into the host's memory and reduces them there.
Runs on Python 3.6 and newer with numpy, which the frameworks require.
"""

import glob
import os
from typing import Any, Dict, List, Optional, Tuple

import events
from context import Context


def choose(
    visible: int, on_host: int, local_rank: int, local_size: int, shared: bool = False
) -> Tuple[Optional[int], str]:
    """Choose a rank's GPU.

    Args:
        visible: the number of GPUs that the framework sees.
        on_host: the number that this process may use.
        shared: whether several ranks may share a GPU.

    Returns:
        The index of the GPU, or None and the reason.
    """
    if not on_host:
        return None, "there is no GPU here that this process may use"
    if not visible:
        return None, "the host has GPUs, but the framework sees none"
    if visible >= local_size or shared:
        return local_rank % visible, ""
    if visible == 1 and on_host >= local_size:  # the scheduler gives each rank one
        return 0, ""
    return None, "{} ranks on this host, and {} GPUs".format(local_size, min(visible, on_host))


def _count(context: Context) -> int:
    if context.framework == "torch":
        return context.native.cuda.device_count() if context.native.cuda.is_available() else 0
    return len(_tensorflow_gpus(context))


def _tensorflow_gpus(context: Context) -> List[Any]:
    config = getattr(context.native, "config", None)
    listed = getattr(config, "list_physical_devices", None)  # since 2.1
    return listed("GPU") if listed else []


def _prepare(context: Context, index: int) -> str:
    """Select a GPU in the framework, which TensorFlow requires before any other call."""
    if context.framework == "torch":
        context.native.cuda.set_device(index)
        return "cuda:{}".format(index)
    own = _tensorflow_gpus(context)[index]
    context.native.config.set_visible_devices(own, "GPU")
    context.native.config.experimental.set_memory_growth(own, True)
    return "/gpu:0"


def devices(folder: str = "/dev") -> int:
    """The number of GPUs of NVIDIA or AMD that the scheduler lets this process use."""
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
    """Keep frameworks from allocating memory on unused GPUs; call it before the first tensor."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def take(context: Context, built: Dict[str, Optional[int]], device: str) -> events.Gpu:
    """Set context.gpu, after hvd.init().

    Args:
        context: the rank's.
        built: the components of Horovod, as extension.py reports them.
        device: ``gpu`` if ranks may use NCCL.
    """
    on_host, nccl = devices(), built.get("NCCL")
    if nccl and device != "gpu":
        hide()
        return events.Gpu()
    usable = nccl or built.get("CUDA") or built.get("ROCm")
    index, why = None, "Horovod has no NCCL here"
    if usable:
        numbers = context.hvd.local_rank(), context.hvd.local_size()
        index, why = choose(_count(context), on_host, *numbers, shared=not nccl)
    else:
        hide()
    taken = "" if index is None else _prepare(context, index)
    # Otherwise the ranks without one would hang.
    if not context.on_all(bool(taken)) and taken:
        taken, why = "", "another rank has no GPU"
    context.gpu = taken
    return events.Gpu(device=taken, why=why, on_host=on_host)
