"""What observe.py sees of a training program for PyTorch. Runs on Python 3.6 and newer."""

import importlib
import sys
from typing import Any, Dict, Iterator, List, Optional, Tuple

from observe import checksum, digest, observer, physical_gpu, watch

# Elements of a gradient that are projected, and on how many directions.
SAMPLE, DIRECTIONS = 2048, 4


class Stepping:
    """An optimizer while it takes a step: its own step(), and within it that of its base class.

    Attributes:
        depth: how many calls of step() are under way.
        number: as the optimizer is reported; 0 before its first step.
    """

    def __init__(self, site: str) -> None:
        self.site = site
        self.number = self.depth = 0
        self.before = self.applied = self.state = ""
        self.reduced: List[float] = []


class TorchObserver:
    """What is known of the program's tensors.

    Attributes:
        own: projections of gradients before their reduction, by the address of the result.
        names: of parameters, by id.
        descendants: ids of modules within modules that were called.
        broadcasting: within broadcast_optimizer_state, which takes a step that trains nothing.
    """

    def __init__(self) -> None:
        self.torch: Any = None
        self.own: Dict[int, List[float]] = {}
        self.gradients: Dict[int, int] = {}
        self.names: Dict[int, str] = {}
        self.descendants: Dict[int, Any] = {}
        self.optimizers: List[Any] = []
        self.broadcasting = False
        self.weights: Dict[int, Any] = {}

    def checksum(self, tensor: Any) -> int:
        """A number that differs if a tensor does."""
        torch = self.torch
        tensor = tensor.detach()
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        if tensor.device.type == "cpu":
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.contiguous().view(torch.int16)
            return checksum(tensor.numpy())
        flat = tensor.contiguous().reshape(-1)
        sample = flat[:: flat.numel() // 1024 or 1].float().cpu()
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
        total = int(flat.view(bits).sum(dtype=torch.int64)) if bits else 0
        return (checksum(sample.numpy()) * 31 + total) & 0xFFFFFFFF

    def projected(self, tensor: Any) -> List[float]:
        """A sample of a gradient on fixed directions: the mean of tensors has the mean of these."""
        numpy = importlib.import_module("numpy")
        flat = tensor.detach().reshape(-1)
        flat = flat[:: flat.numel() // SAMPLE or 1][:SAMPLE].double().cpu().numpy()
        if len(flat) not in self.weights:
            angles = numpy.outer(numpy.arange(1, DIRECTIONS + 1), numpy.arange(len(flat)) + 1.0)
            self.weights[len(flat)] = numpy.cos(angles * 0.7)
        found: List[float] = (self.weights[len(flat)] @ flat).tolist()
        return found

    # Optimizers

    def made(self, optimizer: Any) -> None:
        """An optimizer exists: watch its class, and the classes that it is derived from."""
        optimizer._hvdenv = Stepping(observer.site(sys._getframe(2)))
        self.optimizers.append(optimizer)
        for kind in type(optimizer).__mro__:
            step = kind.__dict__.get("step")
            if step and kind is not self.torch.optim.Optimizer and not hasattr(step, "_hvdenv"):
                setattr(kind, "step", self.watched(step, kind))  # noqa: B010

    def watched(self, step: Any, kind: Any) -> Any:
        """The step() of a class, which tells when it begins and ends."""

        def wrapper(optimizer: Any, *words: Any, **named: Any) -> Any:
            state = getattr(optimizer, "_hvdenv", None)
            # With Adasum, the base class takes a step for each parameter, within backward().
            alone = hasattr(optimizer, "_starting_models") and kind is not type(optimizer)
            if state is None or self.broadcasting or alone:
                return step(optimizer, *words, **named)
            state.depth += 1
            observer.guarded(self.begins, optimizer, state)
            try:
                return step(optimizer, *words, **named)
            finally:
                state.depth -= 1
                if not state.depth and sys.exc_info()[0] is None:
                    observer.guarded(self.ended, optimizer, state)

        wrapper.__dict__.update(step.__dict__)
        wrapper._hvdenv = True  # type: ignore[attr-defined]
        wrapper.__name__ = "step"
        return wrapper

    def parameters(self, optimizer: Any) -> List[Any]:
        """Those of all its groups."""
        return [each for group in optimizer.param_groups for each in group["params"]]

    def begins(self, optimizer: Any, state: Stepping) -> None:
        """A step begins; the innermost one applies the gradients."""
        if not state.number:
            self.name(optimizer, state)
        if not observer.observes(state.number):
            return
        tensors = self.parameters(optimizer)
        first = not observer.steps[state.number]
        if first and state.depth == 1 and not hasattr(optimizer, "_starting_models"):
            state.before = digest([self.checksum(each) for each in tensors])
            sums = list(self.state(optimizer))
            state.state = digest(sums) if sums else ""
        applies = state.depth > 1 or not hasattr(optimizer, "_allreduce_delay")
        if applies and observer.shows_gradients():
            have = [each.grad for each in tensors if each.grad is not None]
            state.applied = digest([self.checksum(each) for each in have])
            state.reduced = self.total(have, [self.projected(each) for each in have])

    def total(self, gradients: List[Any], found: List[List[float]]) -> List[float]:
        """The sum of projections, if all gradients were seen before their reduction."""
        if not gradients or any(each.data_ptr() not in self.own for each in gradients):
            return []
        return [sum(column) for column in zip(*found)]

    def state(self, optimizer: Any) -> Iterator[int]:
        """Checksums of the tensors of an optimizer's state."""
        for each in self.parameters(optimizer):
            for _, value in sorted(optimizer.state.get(each, {}).items()):
                if self.torch.is_tensor(value):
                    yield self.checksum(value)

    def ended(self, optimizer: Any, state: Stepping) -> None:
        """A step has ended."""
        tensors = self.parameters(optimizer)
        facts: Dict[str, Any] = {"before": "", "after": ""}
        if observer.observes(state.number):
            sums = [self.checksum(each) for each in tensors]
            facts.update(before=state.before, after=digest(sums), applied=state.applied)
            state.before = state.applied = ""
            if observer.shows_tensors(state.number):
                facts["tensors"] = ["{:08x}".format(each) for each in sums[:500]]
            own = [self.own.get(each.grad.data_ptr()) for each in tensors if each.grad is not None]
            if state.reduced and all(own):
                facts["own"] = [sum(column) for column in zip(*own)]
                facts["reduced"] = state.reduced
            if observer.steps[state.number] == 0:
                facts["state"] = state.state
                self.place(tensors)
            rate = optimizer.param_groups[0].get("lr")
            facts["rate"] = float(rate) if rate is not None else None
        self.own.clear()
        self.gradients.clear()
        observer.stepped(state.number, **facts)

    def name(self, optimizer: Any, state: Stepping) -> None:
        """Report an optimizer at its first step."""
        tensors = self.parameters(optimizer)
        of_horovod = getattr(optimizer, "_parameter_names", {})
        names = [
            self.names.get(id(each)) or of_horovod.get(each) or "tensor {}".format(place)
            for place, each in enumerate(tensors[:500])
        ]
        operation = getattr(optimizer, "op", None)
        state.number = observer.optimizer(
            kind=type(optimizer).__name__,
            site=state.site,
            distributed="horovod" in type(optimizer).step.__module__
            or hasattr(optimizer, "_allreduce_delay"),
            operation={0: "Average", 1: "Sum", 2: "Adasum"}.get(operation, "")
            if isinstance(operation, int)
            else "",
            names=names,
        )

    def place(self, tensors: List[Any]) -> None:
        """Keep which GPU the parameters are on, as all processes of the host would call it."""
        device = tensors[0].device if tensors else None
        if device is not None and device.type == "cuda":
            facts = self.torch.cuda.get_device_properties(device)
            observer.device = str(getattr(facts, "uuid", "")) or physical_gpu(device.index or 0)

    # Reductions

    def reduces(self, tensor: Any, output: Any, *_: Any, **named: Any) -> None:
        """A tensor is about to be reduced into another one, or into itself."""
        gradient = self.is_gradient(tensor)
        shown = gradient and observer.shows_gradients()
        if shown and tensor.is_floating_point() and not tensor.is_sparse:
            self.own[output.data_ptr()] = self.projected(tensor)
        observer.called("allreduce", tensor.numel(), gradient)

    def reduces_many(self, tensors: List[Any], outputs: List[Any], *_: Any, **named: Any) -> None:
        """The same for a group."""
        for tensor, output in zip(tensors, outputs):
            self.reduces(tensor, output)

    def is_gradient(self, tensor: Any) -> bool:
        """Whether Horovod's optimizer reduces it, or it is the gradient of a parameter."""
        frame: Optional[Any] = sys._getframe(3)
        for _ in range(8):
            if frame and frame.f_code.co_filename.endswith("horovod/torch/optimizer.py"):
                return True
            frame = frame.f_back if frame else None
        if not self.gradients:
            for optimizer in self.optimizers:
                for each in self.parameters(optimizer):
                    if each.grad is not None:
                        self.gradients[each.grad.data_ptr()] = 1
        return tensor.data_ptr() in self.gradients

    # Data

    def model_called(self, module: Any, inputs: Tuple[Any, ...]) -> None:
        """A module is called; the outermost one of a model in training reads the batch."""
        if id(module) in self.descendants or observer.phase:
            return
        cuda = self.torch.cuda
        if cuda.is_initialized() and cuda.is_current_stream_capturing():
            return
        if next(module.parameters(), None) is None:
            return  # such as a loss
        if id(module) not in self.names:
            for child in module.modules():
                if child is not module:
                    self.descendants[id(child)] = child
            for name, parameter in module.named_parameters():
                self.names.setdefault(id(parameter), name)
            self.names[id(module)] = ""
        if module.training:
            tensors = [each for each in inputs if self.torch.is_tensor(each)]
            observer.batches += [self.checksum(each) for each in tensors]

    def supplied(self, batch: Any) -> None:
        """A loader has supplied a batch; the model may read it by arguments that have names."""
        if observer.phase:
            return
        if self.torch.is_tensor(batch):
            observer.batch.append(self.checksum(batch))
        elif isinstance(batch, (list, tuple)):
            for each in batch:
                self.supplied(each)
        elif hasattr(batch, "items"):
            for _, each in sorted(batch.items()):
                self.supplied(each)


seen = TorchObserver()


class Feed:
    """The iterator of a loader, which ends early after enough steps."""

    def __init__(self, inner: Any, number: int) -> None:
        self._inner, self._number = inner, number

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Any:
        if self._number and not observer.next_batch(self._number):
            raise StopIteration
        found = next(self._inner)
        observer.guarded(seen.supplied, found)
        return found

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _length(value: Any) -> Optional[int]:
    try:
        return len(value)
    except Exception:  # an iterable data set has none, and says so in several ways
        return None


def sampler_made(sampler: Any, *_: Any, **__: Any) -> None:
    """Keep whether a sampler is given the local rank."""
    frame = sys._getframe(2)
    sampler._hvdenv_local = observer.gives_local_rank(frame, "Sampler", 2, "rank")


def begin_pass(loader: Any) -> int:
    """Report that a loader starts a pass; returns the number of the source."""
    sampler = loader.sampler
    replicas, rank = (getattr(sampler, name, None) for name in ("num_replicas", "rank"))
    facts: Dict[str, Any] = {}
    if isinstance(replicas, int) and isinstance(rank, int):
        epoch = getattr(sampler, "epoch", None)
        facts = {
            "replicas": int(replicas),
            "rank": int(rank),
            "epoch": epoch if isinstance(epoch, int) else None,
            "shuffle": bool(getattr(sampler, "shuffle", False)),
            "local": bool(getattr(sampler, "_hvdenv_local", False)),
        }
    return observer.passes(
        id(loader),
        loader,
        kind=type(sampler).__name__,
        batches=_length(loader),
        samples=_length(loader.dataset),
        **facts,
    )


def watch_torch(module: Any) -> None:
    """Watch what `import torch` brings: savers, modules, optimizers and loaders."""
    seen.torch = module
    watch(module, "save", lambda _, f, *words, **named: observer.file(f, True, saver=True))
    watch(module, "load", lambda f, *words, **named: observer.file(f, False, saver=True))
    register = getattr(module.nn.modules.module, "register_module_forward_pre_hook", None)
    if register:

        def called(model: Any, inputs: Tuple[Any, ...]) -> None:
            if not inputs:  # arguments by name are in the frame that calls this
                inputs = tuple(sys._getframe(1).f_locals.get("kwargs", {}).values())
            observer.guarded(seen.model_called, model, inputs)

        handle = register(called)
        # Compilers do not expect such hooks.
        watch(module, "compile", lambda *_, **__: handle.remove())
    optimizer = module.optim.Optimizer
    make = optimizer.__init__

    def make_watched(self: Any, *words: Any, **named: Any) -> None:
        make(self, *words, **named)
        observer.guarded(seen.made, self)

    optimizer.__init__ = make_watched
    sampler = module.utils.data.distributed.DistributedSampler
    watch(sampler, "__init__", sampler_made)
    loader = module.utils.data.DataLoader
    iterate = loader.__iter__

    def iterate_watched(self: Any) -> Feed:
        number = observer.guarded(begin_pass, self) or 0
        return Feed(iterate(self), number)

    loader.__iter__ = iterate_watched


def watch_groups(module: Any) -> None:
    """Watch whether the program's ranks meet without Horovod."""
    watch(
        module,
        "init_process_group",
        lambda *_, **__: observer.communicates.add("torch.distributed"),
    )


def watch_operations(module: Any) -> None:
    """Watch horovod.torch.mpi_ops: all reductions pass through two of its functions."""
    watch(module, "_allreduce_async", seen.reduces)
    watch(module, "_grouped_allreduce_async", seen.reduces_many)
    watch(module, "join", lambda *_, **__: observer.called("join"))
    for name in ("_allgather_async", "_broadcast_async"):
        operation = name.strip("_").rpartition("_")[0]
        watch(
            module,
            name,
            lambda tensor, *_, _name=operation, **__: observer.called(_name, tensor.numel()),
        )
    synchronize = module.synchronize

    def synchronized(handle: Any) -> Any:
        result = synchronize(handle)
        observer.clock += 1
        return result

    module.synchronize = synchronized


def watch_functions(module: Any) -> None:
    """Watch horovod.torch.functions: what programs call before they train."""
    for name in ("broadcast_parameters", "broadcast_object", "allgather_object"):
        watch(module, name, lambda *_, _name=name, **__: observer.called(_name))
    broadcast = module.broadcast_optimizer_state

    def broadcast_optimizer_state(*words: Any, **named: Any) -> Any:
        observer.guarded(observer.called, "broadcast_optimizer_state")
        seen.broadcasting = True
        try:
            return broadcast(*words, **named)
        finally:
            seen.broadcasting = False

    module.broadcast_optimizer_state = broadcast_optimizer_state


ACTIONS = {
    r"torch": watch_torch,
    r"torch\.distributed\.distributed_c10d": watch_groups,
    r"horovod\.torch\.mpi_ops": watch_operations,
    r"horovod\.torch\.functions": watch_functions,
}
