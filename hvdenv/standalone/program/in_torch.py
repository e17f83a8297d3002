"""Where a program for PyTorch takes steps, reduces gradients, and reads and saves data.

Runs on Python 3.6 and newer.
"""

import importlib
import itertools
import sys
from typing import Any, Dict, Generator, Iterator, List, Optional, Set, Tuple

from recorder import (
    Function,
    Optimizer,
    around,
    checksums,
    collectives,
    digest,
    hook,
    on,
    on_gpu,
    recorder,
    savers,
    within_horovod,
)
from source import stack

# Elements of a gradient that are projected.
SAMPLE = 2048
_REDUCTIONS = r"horovod\.torch\.mpi_ops"

savers("torch", "save")
savers("torch", "load", write=False, place=0)
collectives(_REDUCTIONS, "join")
collectives(
    r"horovod\.torch\.functions",
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "broadcast_object",
    "allgather_object",
)


class Seen:
    """What is known of the program's tensors.

    Attributes:
        own: projections of gradients before their reduction, by the address of the result.
        versions: of the gradients that are being averaged, as this began, by ids of parameters.
        gradients: addresses of the gradients of all parameters; empty if they may have changed.
        names: of parameters, by id.
        models: modules that were called, and the modules within these, by id.
        buffers: names and digests of what models have besides trained parameters, by their ids,
            before they were first called in training.
    """

    own: Dict[int, float] = {}
    versions: Dict[int, int] = {}
    gradients: Set[int] = set()
    names: Dict[int, str] = {}
    models: Dict[int, Tuple[Any, bool]] = {}
    buffers: Dict[int, List[str]] = {}


def projected(tensor: Any) -> float:
    """A sample of a gradient on a fixed direction: the mean of tensors has the mean of these."""
    numpy = importlib.import_module("numpy")
    flat = tensor.detach().reshape(-1)
    flat = flat[:: flat.numel() // SAMPLE or 1][:SAMPLE].double().cpu().numpy()
    return float(numpy.cos(numpy.arange(1, len(flat) + 1) * 0.7) @ flat)


# Optimizers


@on("torch", "optim.Optimizer.__init__")
def makes(optimizer: Any, *_: Any, **__: Any) -> Iterator[None]:
    """An optimizer is made: watch its class, and the classes that it is derived from."""
    yield
    recorder.made(optimizer)
    for kind in type(optimizer).__mro__:
        if "step" in kind.__dict__ and kind is not sys.modules["torch"].optim.Optimizer:
            hook(kind, "step", steps)


@on("torch", "optim.Optimizer.load_state_dict")
def restores(optimizer: Any, *_: Any, **__: Any) -> None:
    """An optimizer gets a state."""
    one = recorder.optimizers.get(id(optimizer))
    if one and not within_horovod():
        one.restored, one.lost = True, False


@on(r"horovod\.torch\.optimizer", "DistributedOptimizer")
def wraps(optimizer: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
    """Horovod makes an optimizer of another one, whose state it does not take over.

    Only a state that was loaded counts: a broadcast makes one, too, of zeros.
    """
    distributed = yield
    values = [value for state in optimizer.state.values() for value in state.values()]
    had = any(map(sys.modules["torch"].is_tensor, values)) and recorder.made(optimizer).restored
    recorder.made(distributed).lost = had and not distributed.state


def steps(original: Function, optimizer: Any, *words: Any, **named: Any) -> Any:
    """Called instead of step() of an optimizer's class, and of those that it is derived from."""
    one = recorder.optimizers.get(id(optimizer))
    # With Adasum, the base class takes a step for each parameter, within backward().
    part = is_adasum(optimizer) and not original.__module__.startswith("horovod")
    # To broadcast a state, Horovod makes one by a step.
    if one is None or part or within_horovod():
        return original(optimizer, *words, **named)
    one.depth += 1
    recorder.guarded(begins, one)
    try:
        result = original(optimizer, *words, **named)
    finally:
        one.depth -= 1
    if not one.depth:
        recorder.guarded(ended, one)
    return result


def is_adasum(optimizer: Any) -> bool:
    """Whether an optimizer combines changes of parameters, rather than gradients."""
    return hasattr(optimizer, "_starting_models")


def parameters(optimizer: Any) -> List[Any]:
    """Those of all its groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def begins(one: Optimizer) -> None:
    """A step begins; the innermost one applies the gradients."""
    optimizer, tensors = one.optimizer, parameters(one.optimizer)
    distributed = hasattr(optimizer, "_allreduce_delay")
    if not one.number:
        known = getattr(optimizer, "_parameter_names", {})
        names = [
            Seen.names.get(id(each)) or known.get(each) or "tensor {}".format(place)
            for place, each in enumerate(tensors)
        ]
        recorder.trains(one, tensors, names, distributed=distributed)
    one.tensors = tensors
    if one.steps >= recorder.wanted:
        return
    if not one.steps and one.depth == 1 and not is_adasum(optimizer):
        states = [optimizer.state.get(each, {}) for each in tensors]
        one.facts["before"] = digest(checksums(tensors))
        one.facts["state"] = digest(checksums(states))
        one.facts["buffers"] = list(itertools.chain(*Seen.buffers.values()))
    if recorder.shows_gradients() and (one.depth > 1 or not distributed):
        gradients = [each.grad for each in tensors if each.grad is not None]
        one.facts["applied"] = digest(checksums(gradients))
        own = [Seen.own.pop(address(each), None) for each in gradients]
        if own and None not in own:  # all were seen before their reduction
            one.facts["own"] = sum(filter(None, own))
            one.facts["reduced"] = sum(map(projected, gradients))


def ended(one: Optimizer) -> None:
    """A step has ended."""
    device = one.tensors[0].device if one.tensors else None
    if not one.steps and device is not None and device.type == "cuda":
        facts = sys.modules["torch"].cuda.get_device_properties(device)
        recorder.device = str(getattr(facts, "uuid", "")) or on_gpu(device.index or 0)
    rate = one.optimizer.param_groups[0].get("lr")
    one.facts["rate"] = None if rate is None else float(rate)
    Seen.gradients.clear()
    recorder.stepped(one)


# Reductions


def address(gradient: Any) -> int:
    """Where a gradient is; a sparse one has no single place."""
    return 0 if gradient.is_sparse else int(gradient.data_ptr())


@on(
    r"horovod\.torch\.optimizer",
    "_DistributedOptimizer._allreduce_grad_async",
    "_DistributedOptimizer._grouped_allreduce_grad_async",
)
def averages(_: Any, given: Any) -> Iterator[None]:
    """Horovod's optimizer begins to average the gradient of a parameter, or those of a group."""
    yield
    if sys.modules["horovod.torch.mpi_ops"].rocm_built():  # it divides the sums in place, later
        return
    for each in given if isinstance(given, tuple) else [given]:
        Seen.versions[id(each)] = each.grad._version


@on(r"horovod\.torch\.optimizer", "_DistributedOptimizer.synchronize")
def averaged(optimizer: Any) -> Iterator[None]:
    """Horovod's optimizer waits for the averages; until then, nothing may change a gradient."""
    begun = [each for each in parameters(optimizer) if id(each) in Seen.versions]
    if any(getattr(each.grad, "_version", 0) > Seen.versions[id(each)] for each in begun):
        recorder.called("early_change")
    yield
    for each in begun:
        del Seen.versions[id(each)]


@on(r"torch\.optim\.lr_scheduler", "ReduceLROnPlateau.step")
def decides(_: Any, metrics: Any, *__: Any, **___: Any) -> None:
    """A schedule decides by a metric."""
    recorder.shows("lets ReduceLROnPlateau decide by {:.4g}".format(float(metrics)))


@on(_REDUCTIONS, "_allreduce_async", "_grouped_allreduce_async")
def reduces(given: Any, results: Any, *_: Any, **__: Any) -> None:
    """A tensor, or a group, is about to be reduced into another one, or into itself."""
    pairs = zip(given, results) if isinstance(given, (list, tuple)) else [(given, results)]
    for tensor, result in pairs:
        gradient = is_gradient(tensor)
        shown = gradient and recorder.shows_gradients()
        if shown and tensor.is_floating_point() and not tensor.is_sparse:
            Seen.own[result.data_ptr()] = projected(tensor)
        recorder.called("allreduce", tensor.numel(), gradient)


@on(_REDUCTIONS, "_allgather_async")
def gathers(tensor: Any, *_: Any, **__: Any) -> None:
    """A tensor is about to be gathered."""
    recorder.called("allgather", tensor.numel())


@on(_REDUCTIONS, "_broadcast_async")
def broadcasts(tensor: Any, *_: Any, **__: Any) -> None:
    """A tensor is about to be broadcast; what models have is known only after that."""
    Seen.buffers.clear()
    recorder.called("broadcast", tensor.numel())


@on(_REDUCTIONS, "synchronize")
def synchronizes(*_: Any, **__: Any) -> Iterator[None]:
    """An operation of all ranks ends."""
    yield
    recorder.clock += 1


@on(r"torch\.distributed\.distributed_c10d", "init_process_group")
def meets(*_: Any, **__: Any) -> None:
    """The program's ranks meet without Horovod."""
    recorder.other_groups = True


def is_gradient(tensor: Any) -> bool:
    """Whether Horovod's optimizer reduces it, or it is the gradient of a parameter."""
    callers = (each.f_code.co_filename for each in itertools.islice(stack(), 16))
    if any(each.endswith("horovod/torch/optimizer.py") for each in callers):
        return True
    if not Seen.gradients:
        optimizers = (each.optimizer for each in recorder.optimizers.values())
        tensors = [each for one in optimizers for each in parameters(one)]
        Seen.gradients.update(address(each.grad) for each in tensors if each.grad is not None)
    return tensor.data_ptr() in Seen.gradients


# Data


@around("torch", "")
def watch_models(torch: Any) -> None:
    """See each call of a module."""
    register = getattr(torch.nn.modules.module, "register_module_forward_pre_hook", None)
    if register:
        handle = register(lambda *words: recorder.guarded(model_called, *words))

        def compiles(original: Function, *words: Any, **named: Any) -> Any:
            handle.remove()  # compilers do not expect such hooks
            return original(*words, **named)

        hook(torch, "compile", compiles)


def model_called(module: Any, inputs: Tuple[Any, ...]) -> None:
    """A module is called; the outermost one of a model in training reads the batch."""
    torch, key = sys.modules["torch"], id(module)
    _, outermost = Seen.models.get(key, (module, True))
    if not outermost or recorder.phase:
        return
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if capturing or next(module.parameters(), None) is None:  # without any, it is a loss
        return
    if key not in Seen.models:
        Seen.models.update((id(each), (each, each is module)) for each in module.modules())
        for name, parameter in module.named_parameters():
            Seen.names.setdefault(id(parameter), name)
    if module.training and not recorder.fed:
        recorder.read(inputs)
    if module.training and not recorder.most_steps and key not in Seen.buffers:
        saved = module.state_dict(keep_vars=True).items()
        rest = [(k, v) for k, v in saved if torch.is_tensor(v) and not v.requires_grad]
        Seen.buffers[key] = ["{} {}".format(k, digest(checksums(v))) for k, v in rest]


@on("torch", "utils.data.distributed.DistributedSampler.__init__")
def shares(sampler: Any, *_: Any, **__: Any) -> None:
    """Keep whether a sampler is given the local rank."""
    sampler._hvdenv = recorder.program.gives_local_rank()


@around("torch", "utils.data.DataLoader.__iter__")
def loads(original: Function, loader: Any) -> Iterator[Any]:
    """A loader starts a pass."""
    number = recorder.guarded(passes, loader) or 0
    return feed(original(loader), number)


def passes(loader: Any) -> int:
    """Report that a loader starts a pass; returns the number of the source."""
    sampler = loader.sampler
    facts: Dict[str, Any] = {"batches": _length(loader)}
    replicas, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    if isinstance(replicas, int) and isinstance(rank, int):
        epoch = getattr(sampler, "epoch", None)
        facts.update(
            replicas=replicas,
            rank=rank,
            epoch=epoch if isinstance(epoch, int) else None,
            shuffle=bool(getattr(sampler, "shuffle", False)),
            local=bool(getattr(sampler, "_hvdenv", False)),
        )
    return recorder.passes(loader, type(sampler).__name__, **facts)


def feed(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """The batches of a loader, which end early after enough steps."""
    while not number or recorder.next_batch(number):
        try:
            batch = next(batches)
        except StopIteration:
            return
        recorder.guarded(recorder.read, batch)
        yield batch


def _length(loader: Any) -> Optional[int]:
    try:
        return len(loader)
    except Exception:  # that of an iterable data set has none, and says so in several ways
        return None
