"""What is seen of a training program, whatever its framework. Runs on Python 3.6 and newer.

A module for each framework says where in it something happens, by hooks, and reads its tensors.
The recorder reports it as the events of ranks/events.py.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import json
import opcode
import os
import re
import sys
import threading
import time
import traceback
import zlib
from typing import Any, Callable, Dict, Iterator, List, Set, Tuple

import events
from source import Program, caller, stack

# After the steps that were asked for: how long the program may go on at least, and how many steps.
TAIL_SECONDS, TAIL_STEPS = 20.0, 2
LEAVING_SECONDS = 3.0
MOST_EVENTS, MOST_NAMES, MOST_SAMPLES = 200, 500, 32
# Below these, all bytes of a tensor are hashed; above, a sample and a sum of all bits.
WHOLE_BYTES = 1 << 18
# Files that hold models, by their names. Archives and locks of downloads are none.
_CHECKPOINT = re.compile(
    r"(?i)\.(?:pth?|ckpt|h5|hdf5|keras|npz?|pkl|pickle|safetensors|tar|index|onnx|pb"
    r"|data-\d{1,5}-of-\d{1,5})(?:\.(?:tar|tmp|part))?\Z"
)
# Files of no interest: locks, Python's own, and programs that libraries generate.
_NO_DATA = re.compile(r"\.lock$|\.pyc|\.py$|^/(?:proc|dev|sys)/|/__pycache__/")
_METRIC = re.compile(r"(?i)(?:loss|acc(?:uracy)?|error|mse|auc|f1|score)\w{0,12}\W{1,4}\d{0,6}\.\d")
_SENDERS = "horovod/torch/functions.py", "horovod/tensorflow/functions.py"
_OF_TENSORS = "broadcast_parameters", "broadcast_variables"
_PATH_NAMES = "f", "filepath", "file_prefix", "save_path", "path"
Function = Callable[..., Any]
# What a model or a loader has read: checksums of its arrays, and of its single samples.
Batch = Tuple[List[int], List[int]]


class Optimizer:
    """An optimizer of the program.

    Attributes:
        site: where it is made.
        number: as it is reported; 0 before its first step.
        steps: how many it has taken.
        tensors: what it trains.
        depth: how many calls of its step() are under way: its own, and within it its base class's.
        counter: how many steps Keras has counted at the last look; None if it has not yet.
        restored: whether it was given a state.
        lost: whether Horovod has made it from one with a state, which it lacks.
        facts: what its next TrainingStep states.
    """

    def __init__(self, optimizer: Any, site: str) -> None:
        self.optimizer = optimizer
        self.site = site
        self.number = self.steps = self.depth = 0
        self.tensors: List[Any] = []
        self.counter: Any = None
        self.restored = self.lost = False
        self.facts: Dict[str, Any] = {}


class Recorder:
    """What was seen so far, and the way to report it.

    Attributes:
        wanted: how many steps are observed.
        short: whether the program is ended right after these.
        clock: counts operations of all ranks.
        phase: 0 while steps are observed; then 1 until the pass over the data has ended, and 2 in
            the next pass.
        known: what was reported once, by kind.
        optimizers: by the ids of the program's objects.
        fed: number of the data source that supplied the last batch.
        feeding: numbers of those that supplied any for a step.
        batches: what loaders have supplied since the last step or, where none is known, what models
            have read.
        of_some: a function of Horovod is called for a process set.
        by_local_rank: a callback saves that was made where the local rank is compared.
        other_groups: ranks have met by torch.distributed.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self.began = time.monotonic()
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.program = Program("", os.getcwd())
        self.wanted, self.short = 20, False
        self.clock = self.fed = self.phase = 0
        self.left = TAIL_STEPS
        self.initialised = self.over = self.by_local_rank = self.of_some = False
        self.other_groups = False
        self.known: Dict[str, Set[Any]] = {}
        self.optimizers: Dict[int, Optimizer] = {}
        self.device = self.unobserved = ""
        self.batches: List[Batch] = []
        self.feeding: Set[int] = set()
        self.sources: Dict[int, int] = {}
        self.leave: Callable[[], Any] = lambda: None

    @property
    def watches(self) -> bool:
        """Whether this is the process of the rank, rather than one that it forked, and is observed."""
        return not self.over and os.getpid() == self.pid

    @property
    def most_steps(self) -> int:
        """The steps of the optimizer that has taken most."""
        return max((each.steps for each in self.optimizers.values()), default=0)

    # Reporting

    def emit(self, event: Any) -> None:
        """Report an event."""
        if os.getpid() == self.pid and self.descriptor >= 0:
            line = (json.dumps(events.to_table(event)) + "\n").encode("ascii")
            with self.lock:
                while line:
                    line = line[os.write(self.descriptor, line) :]

    def guarded(self, function: Function, *words: Any, **named: Any) -> Any:
        """Call a function of ours; an error of ours must not reach the program."""
        if not self.watches:
            return None
        try:
            return function(*words, **named)
        except Exception:
            self.unobserved = self.unobserved or traceback.format_exc(limit=-3)[-600:]
        return None

    def is_new(self, kind: str, key: Any) -> bool:
        """Whether something is seen for the first time, and not too much of its kind was."""
        known = self.known.setdefault(kind, set())
        new = key not in known and len(known) < MOST_EVENTS
        if new:
            known.add(key)
        return new

    # What all frameworks have

    def called(self, operation: str, elements: int = 0, gradient: bool = False) -> None:
        """Report a call of Horovod, or what comes of it, once for each place."""
        self.clock += operation != "early_change"  # which a rank may do alone
        site = "" if gradient or self.of_some or within_horovod() else self.program.site()
        if self.is_new("call", (operation, site, gradient)):
            self.emit(events.Call(operation, site, self.most_steps, elements, gradient))

    def file(self, path: Any, write: bool, saver: bool = False) -> None:
        """Report a file that the program opens, or that a `saver` of models does."""
        path = getattr(path, "name", "") if hasattr(path, "seek") else path  # an open file
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        name = os.path.abspath(os.fsdecode(path))
        # Before training, files with such names are data that are downloaded.
        checkpoint = saver or (self.most_steps > 0 and holds_a_model(name))
        if not (write or checkpoint) or _NO_DATA.search(name):
            return
        site = self.program.site()
        if not site or (os.path.isdir(name) and not saver):
            return
        if self.is_new("file", (name, write)):
            local = self.most_steps > 0 and (
                self.by_local_rank or self.program.decided_by_local_rank()
            )
            self.emit(events.FileUse(name, write, checkpoint, local, site, self.clock))

    def printed(self, text: str) -> None:
        """The program prints a line, perhaps with a metric."""
        if _METRIC.search(text):
            self.shows('prints "{}"'.format(text.strip()[:120]))

    def shows(self, text: str) -> None:
        """Report what uses a metric, the first time at each place."""
        site = self.program.site() if self.most_steps else ""
        if site and self.is_new("shown", site):
            self.emit(events.Shown(text, site))

    # Data

    def passes(self, data: Any, kind: str, looped: bool = True, **facts: Any) -> int:
        """Report that a pass over data begins; returns the number of its source."""
        number = self.sources.setdefault(id(data), len(self.sources) + 1)
        if self.phase == 1 and number in self.feeding:
            self.phase = 2
        site = self.program.site()
        if site and self.is_new("pass", object()):  # each one, but not too many
            whole = self.program.reads_all() if looped else True
            self.emit(events.DataSource(number, site, kind, whole=whole, **facts))
        return number

    def next_batch(self, number: int) -> bool:
        """Whether a source supplies another batch. Only loops expect that there is none."""
        self.fed = number
        if self.phase != 1 or number not in self.feeding:
            return True
        frame = caller()
        result: bool = frame.f_code.co_code[frame.f_lasti] != opcode.opmap["FOR_ITER"]
        return result

    def read(self, data: Any) -> None:
        """The program reads a batch."""
        if not self.phase:
            self.batches.append(batch_of(data))

    # Steps

    def made(self, optimizer: Any) -> Optimizer:
        """The program makes an optimizer, or has made it."""
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = Optimizer(optimizer, self.program.site())
        return self.optimizers[id(optimizer)]

    def trains(self, one: Optimizer, tensors: List[Any], names: List[str], **facts: Any) -> None:
        """Report an optimizer before its first step.

        All ranks know it by the same number, also if some of them have made others before.
        """
        kind = type(one.optimizer).__name__
        made = "{} {}".format(kind, one.site)
        numbers = (zlib.crc32("{} {}".format(made, at).encode()) for at in itertools.count(1))
        known = {each.number for each in self.optimizers.values()}
        one.tensors, one.number = tensors, next(each for each in numbers if each not in known)
        facts.update(names=names[:MOST_NAMES], lost=one.lost)
        self.emit(events.Optimizer(one.number, kind, one.site, **facts))

    def shows_gradients(self) -> bool:
        """Whether the next step is reported with what became of its gradients."""
        step = self.most_steps + 1
        return step <= 3 or step % 5 == 0

    def stepped(self, one: Optimizer, count: int = 1) -> None:
        """Report the end of a step, or of several at once; after enough, end the program."""
        self.clock += 1
        self.feeding.add(self.fed)
        observed = one.steps < self.wanted
        one.steps += count
        if observed:
            # At once may be more than are observed: its end is the last of these.
            one.steps = min(one.steps, self.wanted)
            self._report_step(one)
        self.batches, one.facts = [], {}
        self._end_after_enough(one.steps)

    def _report_step(self, one: Optimizer) -> None:
        facts, sums = one.facts, checksums(one.tensors)
        read = [each for whole, _ in self.batches for each in whole]
        if one.steps in (1, 2, self.wanted):
            facts["tensors"] = ["{:08x}".format(each) for each in sums[:MOST_NAMES]]
        facts["samples"] = sorted(each for _, samples in self.batches for each in samples)
        facts.update(batch=digest(read), after=digest(sums), source=self.fed)
        self.emit(events.Stage("training", "step {}".format(one.steps)))
        self.emit(events.TrainingStep(one.number, one.steps, **facts))

    def _end_after_enough(self, step: int) -> None:
        self.left -= self.phase == 2
        if not self.left or (step >= self.wanted and self.short):
            self.end("enough")
        elif step >= self.wanted and not self.phase:
            self.phase = 1
            # On a busy host, a rank is not ended before it has called what others wait in.
            seconds = max(TAIL_SECONDS, time.monotonic() - self.began)
            timer = threading.Timer(seconds, self.end, ("enough",))
            timer.daemon = True
            timer.start()

    def end(self, reason: str, error: str = "") -> None:
        """Report the end; after enough steps, end the process."""
        with self.lock:
            if not self.watches:
                return
            self.emit(
                events.ProgramEnd(
                    steps=[each.steps for each in self.optimizers.values() if each.number],
                    reason=reason,
                    error=error,
                    device=self.device,
                    initialised=self.initialised,
                    other_groups=self.other_groups,
                    unobserved=self.unobserved,
                )
            )
            self.over = True
            if reason == "enough":
                self._leave()

    def _leave(self) -> None:
        self.emit(events.Stage("shutdown"))
        # Ranks that are at the same step leave together, which launchers expect.
        leaving = threading.Thread(target=self.leave, daemon=True)
        leaving.start()
        leaving.join(LEAVING_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # TensorFlow removes the modules that it has written into TMPDIR as it exits.
        for name, module in list(sys.modules.items()):
            if name.startswith("__autograph_generated_file"):
                with contextlib.suppress(OSError):
                    os.remove(module.__file__ or "")
        os._exit(0)


recorder = Recorder()

# A pattern for modules, the name of a function in these, and what is called instead of it.
HOOKS: List[Tuple[str, str, Function]] = []


def hook(owner: Any, name: str, function: Function) -> None:
    """Call a function of ours instead of one of a module, or of ``A|B.name``: of its classes A and B.

    It gets the original before its arguments. An empty name stands for the module itself.
    """
    if not name:
        function(owner)
    owners, names = [owner], name.split(".")
    for kinds in names[:-1]:
        owners = [getattr(each, kind, None) for each in owners for kind in kinds.split("|")]
    for each in owners:
        _replace(each, names[-1], function)


def _replace(owner: Any, name: str, function: Function) -> None:
    """The replacement looks like the original to inspect, and TensorFlow does not rewrite it."""
    original = getattr(owner, name, None)
    hooks = getattr(original, "_hvdenv", ())
    if owner is None or original is None or function in hooks:  # missing, or of a base class
        return

    @functools.wraps(original)
    def replacement(*words: Any, **named: Any) -> Any:
        return function(original, *words, **named)

    replacement._hvdenv = (*hooks, function)  # type: ignore[attr-defined]
    replacement.autograph_info__ = {}  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


def around(module: str, *names: str) -> Callable[[Function], Function]:
    """A function of ours is called instead of others, with the original before its arguments."""

    def add(function: Function) -> Function:
        HOOKS.extend((module, name, function) for name in names)
        return function

    return add


def on(module: str, *names: str) -> Callable[[Function], Function]:
    """A function of ours is called before others, with their arguments.

    One that yields goes on after them, with their result, or ends at its yield if they raise.
    """

    def add(function: Function) -> Function:
        @around(module, *names)
        def call(original: Function, *words: Any, **named: Any) -> Any:
            # Nothing is asked of the program's own objects: they may answer anything.
            recorder.of_some = any(
                type(each).__name__ == "ProcessSet" and each.process_set_id
                for each in (*words, *named.values())
            )
            ours = recorder.guarded(lambda: function(*words, **named))
            if not inspect.isgenerator(ours):
                return original(*words, **named)
            recorder.guarded(next, ours, None)
            try:
                result = original(*words, **named)
                recorder.guarded(_goes_on, ours, result)
            finally:
                recorder.guarded(ours.close)
            return result

        return function

    return add


def _goes_on(ours: Any, result: Any) -> None:
    with contextlib.suppress(StopIteration):
        ours.send(result)


def within_horovod() -> bool:
    """Whether a function of Horovod that sends several tensors is under way."""
    return any(each.f_code.co_filename.endswith(_SENDERS) for each in stack())


def collectives(module: str, *names: str) -> None:
    """Report calls of functions of Horovod that wait for all ranks."""
    for name in names:
        operation = name.rpartition(".")[2].strip("_")
        on(module, name)(functools.partial(_calls, operation))


def _calls(operation: str, first: Any = None, *rest: Any, **named: Any) -> None:
    if operation in _OF_TENSORS and isinstance(first, (dict, list)) and not first:
        return  # a model of Keras has no variables before it is built
    if operation == "broadcast_object" and not any(isinstance(each, str) for each in rest):
        # Without a name, Horovod calls it by the type, so ranks with other types wait.
        kind = "" if named.get("name") else type(named.get("obj", first)).__name__
        operation = "broadcast_object of {}".format(kind) if kind else operation
    recorder.called(operation)


def savers(module: str, *names: str, write: bool = True, place: int = 1) -> None:
    """Report the files of functions that save or load models, which they get as this argument."""

    @on(module, *names)
    def call(*words: Any, **named: Any) -> None:
        given = [*words[place : place + 1], *(named.get(each) for each in _PATH_NAMES)]
        recorder.file(next(each for each in (*given, "") if each is not None), write, saver=True)


def holds_a_model(path: str) -> bool:
    """Whether a file is a checkpoint, by its name."""
    name = os.path.basename(path)
    return "checkpoint" in name.lower() or bool(_CHECKPOINT.search(name[-40:]))


def on_gpu(index: int) -> str:
    """A GPU of this process as all processes of the host would call it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[index] if index < len(visible) and visible[index] else str(index)


def digest(numbers: List[int]) -> str:
    """One digest of many numbers; empty without any."""
    text = ",".join(map(str, numbers))
    return "{:08x}".format(zlib.crc32(text.encode("ascii")) & 0xFFFFFFFF) if numbers else ""


def arrays(data: Any) -> Iterator[Any]:
    """The tensors in lists and dictionaries that Python can read now, as arrays of numpy."""
    if isinstance(data, (list, tuple)):
        for each in data:
            yield from arrays(each)
    elif hasattr(data, "items"):
        yield from arrays([each for _, each in sorted(data.items())])
    else:
        if hasattr(data, "detach"):  # of PyTorch
            data = data.detach()
            data = (data.coalesce().values() if data.is_sparse else data).cpu()
            if str(data.dtype) == "torch.bfloat16":  # which numpy does not have
                data = data.contiguous().view(sys.modules["torch"].int16)
        found = data.numpy() if hasattr(data, "numpy") else data
        if getattr(getattr(found, "dtype", None), "kind", "O") not in "OSU":
            yield found


def batch_of(data: Any) -> Batch:
    """The checksums of a batch.

    Ranks can compare the least ones of samples, whatever batches these are in.
    """
    found = list(arrays(data))
    tables = [each for each in found if each.ndim > 1]
    rows = zip(*(each for each in tables if len(each) == len(tables[0])))
    samples = sorted({zlib.crc32(b"".join(row.tobytes() for row in sample)) for sample in rows})
    return [_checksum(each) for each in found], samples[:MOST_SAMPLES]


def checksums(data: Any) -> List[int]:
    """Numbers that differ if tensors in lists and dictionaries do."""
    return [_checksum(each) for each in arrays(data)]


def _checksum(array: Any) -> int:
    """Of all bytes of an array, or of a sample, and a sum of all bits."""
    numpy = importlib.import_module("numpy")  # which the frameworks require
    flat = numpy.ascontiguousarray(array).reshape(-1)
    if flat.nbytes <= WHOLE_BYTES:
        return zlib.crc32(flat.tobytes()) & 0xFFFFFFFF
    words = flat.view("u{}".format(min(flat.itemsize, 4)))
    sample = zlib.crc32(words[:: len(words) // 1024 or 1].tobytes())
    return (int(words.sum(dtype="u8")) * 31 + sample) & 0xFFFFFFFF
