"""What observe.py sees of a training program for PyTorch. Runs on Python 3.6 and newer."""

import importlib
import sys
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from observer import (
    batch_of,
    checksum,
    digest,
    observer,
    physical_gpu,
    replaces,
    watch,
    watch_calls,
)

# Elements of a gradient that are projected, and on how many directions.
SAMPLE, DIRECTIONS = 2048, 4
OPERATIONS = {0: "Average", 1: "Sum", 2: "Adasum"}
Vector = List[float]


class Stepping:
    """An optimizer while it takes a step: its own step(), and within it that of its base class.

    Attributes:
        depth: how many calls of step() are under way.
        number: as the optimizer is reported; 0 before its first step.
        facts: what its TrainingStep will state.
    """

    def __init__(self, site: str) -> None:
        self.site = site
        self.number = self.depth = 0
        self.restored = self.lost = False
        self.facts: Dict[str, Any] = {}


class TorchObserver:
    """What is known of the program's tensors.

    Attributes:
        own: projections of gradients before their reduction, by the address of the result.
        gradients: addresses of the gradients of all parameters; empty if they may have changed.
        names: of parameters, by id.
        models: ids of modules that were called.
        descendants: the modules within these, by id.
        broadcasting: within broadcast_optimizer_state, which takes a step that trains nothing.
        directions: of projections, by the length of a sample.
        buffers: names and digests of what models have besides trained parameters, by their ids,
            before they were first called in training.
    """

    def __init__(self) -> None:
        self.own: Dict[int, Vector] = {}
        self.gradients: Set[int] = set()
        self.names: Dict[int, str] = {}
        self.models: Set[int] = set()
        self.descendants: Dict[int, Any] = {}
        self.optimizers: List[Any] = []
        self.broadcasting = False
        self.directions: Dict[int, Any] = {}
        self.buffers: Dict[int, List[str]] = {}

    @property
    def torch(self) -> Any:
        """The module, which the program has imported."""
        return sys.modules["torch"]

    # Tensors

    def array(self, tensor: Any) -> Any:
        """An array that differs if a tensor does: the tensor itself, or of a GPU a sample and a sum."""
        numpy = importlib.import_module("numpy")
        torch = self.torch
        tensor = tensor.detach()
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        if tensor.device.type == "cpu":
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.contiguous().view(torch.int16)
            return tensor.numpy()
        flat = tensor.contiguous().reshape(-1)
        sample = flat[:: flat.numel() // 1024 or 1].double().cpu()
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
        total = int(flat.view(bits).sum(dtype=torch.int64)) if bits else 0
        return numpy.append(sample.numpy(), total & 0xFFFFFFFF)

    def arrays(self, data: Any) -> Iterator[Any]:
        """The tensors in lists and dictionaries as arrays."""
        if self.torch.is_tensor(data):
            yield self.array(data)
        elif isinstance(data, (list, tuple)):
            for each in data:
                yield from self.arrays(each)
        elif hasattr(data, "items"):
            for _, each in sorted(data.items()):
                yield from self.arrays(each)

    def checksums(self, data: Any) -> List[int]:
        """Numbers that differ if tensors in lists and dictionaries do."""
        return [checksum(each) for each in self.arrays(data)]

    def projected(self, tensor: Any) -> Vector:
        """A sample of a gradient on fixed directions: the mean of tensors has the mean of these."""
        numpy = importlib.import_module("numpy")
        flat = tensor.detach().reshape(-1)
        flat = flat[:: flat.numel() // SAMPLE or 1][:SAMPLE].double().cpu().numpy()
        if len(flat) not in self.directions:
            angles = numpy.outer(numpy.arange(1, DIRECTIONS + 1), numpy.arange(len(flat)) + 1.0)
            self.directions[len(flat)] = numpy.cos(angles * 0.7)
        found: Vector = (self.directions[len(flat)] @ flat).tolist()
        return found

    # Optimizers

    def made(self, optimizer: Any) -> None:
        """An optimizer exists: watch its class, and the classes that it is derived from."""
        optimizer._hvdenv = Stepping(observer.program.site())
        self.optimizers.append(optimizer)
        for kind in type(optimizer).__mro__:
            if "step" in kind.__dict__ and kind is not self.torch.optim.Optimizer:
                self.watch_steps(kind)

    def wrapped(self, optimizer: Any, distributed: Any) -> None:
        """Horovod has made an optimizer of another one, whose state it does not take over.

        Only a state that was loaded counts: a broadcast makes one, too, of zeros.
        """
        values = [value for state in optimizer.state.values() for value in state.values()]
        had = any(map(self.torch.is_tensor, values))
        distributed._hvdenv.lost = had and optimizer._hvdenv.restored and not distributed.state

    def restored(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """An optimizer gets a state."""
        if hasattr(optimizer, "_hvdenv") and not self.broadcasting:
            optimizer._hvdenv.restored, optimizer._hvdenv.lost = True, False

    def watch_steps(self, kind: Any) -> None:
        """Watch when the step() of a class begins and ends."""

        @replaces(kind, "step")
        def step(original: Any, optimizer: Any, *words: Any, **named: Any) -> Any:
            state = getattr(optimizer, "_hvdenv", None)
            # With Adasum, the base class takes a step for each parameter, within backward().
            alone = hasattr(optimizer, "_starting_models") and kind is not type(optimizer)
            if state is None or self.broadcasting or alone:
                return original(optimizer, *words, **named)
            state.depth += 1
            observer.guarded(self.begins, optimizer, state)
            try:
                return original(optimizer, *words, **named)
            finally:
                state.depth -= 1
                if not state.depth and sys.exc_info()[0] is None:
                    observer.guarded(self.ended, optimizer, state)

    def parameters(self, optimizer: Any) -> List[Any]:
        """Those of all its groups."""
        return [each for group in optimizer.param_groups for each in group["params"]]

    def begins(self, optimizer: Any, state: Stepping) -> None:
        """A step begins; the innermost one applies the gradients."""
        tensors = self.parameters(optimizer)
        if not state.number:
            state.number = self.report(optimizer, state, tensors)
        if not observer.observes(state.number):
            return
        first = not observer.steps[state.number]
        if first and state.depth == 1 and not hasattr(optimizer, "_starting_models"):
            state.facts["before"] = digest(self.checksums(tensors))
            sums = self.checksums([optimizer.state.get(each, {}) for each in tensors])
            state.facts["state"] = digest(sums) if sums else ""
            state.facts["buffers"] = [each for one in self.buffers.values() for each in one]
        applies = state.depth > 1 or not hasattr(optimizer, "_allreduce_delay")
        if applies and observer.shows_gradients():
            gradients = [each.grad for each in tensors if each.grad is not None]
            state.facts["applied"] = digest(self.checksums(gradients))
            self.project(gradients, state.facts)

    def project(self, gradients: List[Any], facts: Dict[str, Any]) -> None:
        """State projections of gradients, if all were seen before their reduction."""
        own = [self.own.get(each.data_ptr()) for each in gradients]
        if own and all(own):
            facts["own"] = [sum(column) for column in zip(*own)]
            facts["reduced"] = [sum(column) for column in zip(*map(self.projected, gradients))]

    def ended(self, optimizer: Any, state: Stepping) -> None:
        """A step has ended."""
        tensors = self.parameters(optimizer)
        if not observer.steps[state.number]:
            self.place(tensors)
        rate = optimizer.param_groups[0].get("lr")
        facts = dict(state.facts, rate=None if rate is None else float(rate))
        state.facts = {}
        self.own.clear()
        self.gradients.clear()
        observer.stepped(state.number, lambda: self.checksums(tensors), **facts)

    def report(self, optimizer: Any, state: Stepping, tensors: List[Any]) -> int:
        """Report an optimizer; returns its number."""
        names = getattr(optimizer, "_parameter_names", {})
        operation = getattr(optimizer, "op", None)
        return observer.optimizer(
            type(optimizer).__name__,
            state.site,
            [
                self.names.get(id(each)) or names.get(each) or "tensor {}".format(place)
                for place, each in enumerate(tensors)
            ],
            distributed=hasattr(optimizer, "_allreduce_delay"),
            operation=OPERATIONS.get(operation, "") if isinstance(operation, int) else "",
            lost=state.lost,
        )

    def place(self, tensors: List[Any]) -> None:
        """Keep which GPU the parameters are on, as all processes of the host would call it."""
        device = tensors[0].device if tensors else None
        if device is not None and device.type == "cuda":
            facts = self.torch.cuda.get_device_properties(device)
            observer.device = str(getattr(facts, "uuid", "")) or physical_gpu(device.index or 0)

    # Reductions

    def reduces(self, tensor: Any, output: Any, *_: Any, **__: Any) -> None:
        """A tensor is about to be reduced into another one, or into itself."""
        gradient = self.is_gradient(tensor)
        shown = gradient and observer.shows_gradients()
        if shown and tensor.is_floating_point() and not tensor.is_sparse:
            self.own[output.data_ptr()] = self.projected(tensor)
        observer.called("allreduce", tensor.numel(), gradient)

    def reduces_many(self, tensors: List[Any], outputs: List[Any], *_: Any, **__: Any) -> None:
        """The same for a group."""
        for tensor, output in zip(tensors, outputs):
            self.reduces(tensor, output)

    def broadcasts(self, tensor: Any, *_: Any, **__: Any) -> None:
        """A tensor is about to be broadcast; what models have is known only after that."""
        self.buffers.clear()
        observer.called("broadcast", tensor.numel())

    def is_gradient(self, tensor: Any) -> bool:
        """Whether Horovod's optimizer reduces it, or it is the gradient of a parameter."""
        frame: Optional[Any] = sys._getframe(3)
        for _ in range(9):
            if frame and frame.f_code.co_filename.endswith("horovod/torch/optimizer.py"):
                return True
            frame = frame.f_back if frame else None
        if not self.gradients:
            tensors = [each for one in self.optimizers for each in self.parameters(one)]
            self.gradients = {each.grad.data_ptr() for each in tensors if each.grad is not None}
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
        if id(module) not in self.models:
            self.models.add(id(module))
            self.descendants.update((id(child), child) for child in module.modules())
            del self.descendants[id(module)]
            for name, parameter in module.named_parameters():
                self.names.setdefault(id(parameter), name)
        if module.training and not observer.fed:
            tensors = [each for each in inputs if self.torch.is_tensor(each)]
            observer.batches.append(batch_of(self.arrays(tensors)))
        if module.training and not observer.most_steps and id(module) not in self.buffers:
            saved = module.state_dict(keep_vars=True).items()
            rest = [(k, v) for k, v in saved if self.torch.is_tensor(v) and not v.requires_grad]
            self.buffers[id(module)] = [
                "{} {}".format(k, digest(self.checksums(v))) for k, v in rest
            ]

    def supplied(self, batch: Any) -> None:
        """A loader has supplied a batch."""
        if not observer.phase:
            observer.batches.append(batch_of(self.arrays(batch)))

    def sampler_made(self, sampler: Any, *_: Any, **__: Any) -> None:
        """Keep whether a sampler is given the local rank."""
        sampler._hvdenv = observer.program.gives_local_rank("Sampler", 2, "rank")

    def passes(self, loader: Any) -> int:
        """Report that a loader starts a pass; returns the number of the source."""
        sampler = loader.sampler
        facts: Dict[str, Any] = {}
        replicas, rank = (getattr(sampler, name, None) for name in ("num_replicas", "rank"))
        if isinstance(replicas, int) and isinstance(rank, int):
            epoch = getattr(sampler, "epoch", None)
            facts = {
                "replicas": int(replicas),
                "rank": int(rank),
                "epoch": epoch if isinstance(epoch, int) else None,
                "shuffle": bool(getattr(sampler, "shuffle", False)),
                "local": bool(getattr(sampler, "_hvdenv", False)),
            }
        facts.update(batches=_length(loader), samples=_length(loader.dataset))
        return observer.passes(loader, type(sampler).__name__, **facts)


seen = TorchObserver()


def feed(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """The batches of a loader, which end early after enough steps."""
    while not number or observer.next_batch(number):
        try:
            batch = next(batches)
        except StopIteration:
            return
        observer.guarded(seen.supplied, batch)
        yield batch


def _length(value: Any) -> Optional[int]:
    try:
        return len(value)
    except Exception:  # an iterable data set has none, and says so in several ways
        return None


def watch_torch(module: Any) -> None:
    """Watch what `import torch` brings: savers, modules, optimizers and loaders."""
    watch(module, "save", lambda _, f, *__, **___: observer.file(f, True, saver=True))
    watch(module, "load", lambda f, *_, **__: observer.file(f, False, saver=True))

    def called(model: Any, inputs: Tuple[Any, ...]) -> None:
        if not inputs:  # arguments by name are in the frame that calls this
            inputs = tuple(sys._getframe(1).f_locals.get("kwargs", {}).values())
        observer.guarded(seen.model_called, model, inputs)

    register = getattr(module.nn.modules.module, "register_module_forward_pre_hook", None)
    if register:
        handle = register(called)
        # Compilers do not expect such hooks.
        watch(module, "compile", lambda *_, **__: handle.remove())

    @replaces(module.optim.Optimizer, "__init__")
    def make(original: Any, optimizer: Any, *words: Any, **named: Any) -> None:
        original(optimizer, *words, **named)
        observer.guarded(seen.made, optimizer)

    watch(module.optim.Optimizer, "load_state_dict", seen.restored)

    @replaces(module.utils.data.DataLoader, "__iter__")
    def iterate(original: Any, loader: Any) -> Iterator[Any]:
        number = observer.guarded(seen.passes, loader) or 0
        return feed(original(loader), number)

    watch(module.utils.data.distributed.DistributedSampler, "__init__", seen.sampler_made)


def watch_groups(module: Any) -> None:
    """Watch whether the program's ranks meet without Horovod."""
    meets = observer.communicates.add
    watch(module, "init_process_group", lambda *_, **__: meets("torch.distributed"))


def watch_operations(module: Any) -> None:
    """Watch horovod.torch.mpi_ops: all reductions pass through two of its functions."""
    watch(module, "_allreduce_async", seen.reduces)
    watch(module, "_grouped_allreduce_async", seen.reduces_many)
    watch_calls(module, "join")
    gather, broadcast = "_allgather_async", "_broadcast_async"
    watch(module, gather, lambda each, *_, **__: observer.called("allgather", each.numel()))
    watch(module, broadcast, seen.broadcasts)

    @replaces(module, "synchronize")
    def synchronize(original: Any, handle: Any) -> Any:
        result = original(handle)
        observer.clock += 1
        return result


def watch_wrapper(module: Any) -> None:
    """Watch horovod.torch.optimizer, whose optimizers begin without a state."""

    @replaces(module, "DistributedOptimizer")
    def wrap(original: Any, optimizer: Any, *words: Any, **named: Any) -> Any:
        distributed = original(optimizer, *words, **named)
        observer.guarded(seen.wrapped, optimizer, distributed)
        return distributed


def watch_functions(module: Any) -> None:
    """Watch horovod.torch.functions: what programs call before they train."""
    watch_calls(module, "broadcast_parameters", "broadcast_object", "allgather_object")

    @replaces(module, "broadcast_optimizer_state")
    def broadcast(original: Any, *words: Any, **named: Any) -> Any:
        observer.guarded(observer.called, "broadcast_optimizer_state")
        seen.broadcasting = True
        try:
            return original(*words, **named)
        finally:
            seen.broadcasting = False


ACTIONS = {
    r"torch": watch_torch,
    r"torch\.distributed\.distributed_c10d": watch_groups,
    r"horovod\.torch\.mpi_ops": watch_operations,
    r"horovod\.torch\.optimizer": watch_wrapper,
    r"horovod\.torch\.functions": watch_functions,
}
