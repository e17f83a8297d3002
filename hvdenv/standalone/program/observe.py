"""Runs a training program as a rank, unchanged, and reports what it does.

usage: python observe.py FRAMEWORK CONTROLLER DEVICE REPORT_FD DUMP_SECONDS program=SPEC

SPEC is base64 of a JSON object: `argv` (SCRIPT ARGS... or -m MODULE ARGS...), `directory`, and
`steps`; with `short`, the program is ended right after these. Nothing here
changes a number: the program's tensors are read and hashed between its own operations.
observe_torch.py, observe_tensorflow.py and observe_keras.py know the frameworks. They are called
as soon as the program imports one; it imports what it always imports.

After `steps` training steps, the loaders that supplied them end their pass, so that the program
goes on to its end of an epoch. Two steps later, or after TAIL_SECONDS, it is ended, and so are the
programs of the other ranks. Runs on Python 3.6 and newer.
"""

import base64
import builtins
import contextlib
import faulthandler
import importlib
import importlib.util
import json
import opcode
import os
import re
import runpy
import sys
import threading
import time
import traceback
import types
import zlib
from typing import Any, Callable, Dict, List, NoReturn, Optional, Set, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "ranks")]
import events  # noqa: E402
from source import Source  # noqa: E402

# After the steps that were asked for: how long the program may go on, and how many steps.
TAIL_SECONDS, TAIL_STEPS = 20.0, 2
LEAVING_SECONDS = 3.0
# Files that hold models, by their names. Archives and locks of downloads are none.
_CHECKPOINT = re.compile(
    r"(?i)\.(?:pth?|ckpt|h5|hdf5|keras|npz?|pkl|pickle|safetensors|tar|index|onnx|pb"
    r"|data-\d{1,5}-of-\d{1,5})(?:\.(?:tar|tmp|part))?\Z"
)
# Files of no interest: locks, Python's own, and programs that libraries generate.
_NO_DATA = re.compile(r"\.lock$|\.pyc|\.py$|^/(?:proc|dev|sys)/|/__pycache__/")
_METRIC = re.compile(r"(?i)(?:loss|acc(?:uracy)?|error|mse|auc|f1|score)\w{0,12}\W{1,4}\d{0,6}\.\d")
_LIBRARIES = os.path.dirname(os.__file__)
MOST_EVENTS = 200
# Below these, all bytes of a tensor are hashed; above, a sample and a sum of all bits.
WHOLE_BYTES = 1 << 18


class Importer:
    """Calls a function after a module was imported, by a pattern for the module's name."""

    def __init__(self, actions: Dict[str, Callable[[Any], None]]) -> None:
        self.actions = {re.compile(pattern): action for pattern, action in actions.items()}
        self.searching: Set[str] = set()
        self.done: Set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Part of the protocol of importlib. Libraries also call it to see what is installed."""
        found = [action for pattern, action in self.actions.items() if pattern.fullmatch(name)]
        if not found or name in self.searching | self.done:
            return None
        self.searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching.discard(name)
        loader = getattr(spec, "loader", None)
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                self.done.add(name)
                execute(module)
                for action in found:
                    observer.guarded(action, module)

            loader.exec_module = exec_module
        return spec


class Observer:
    """What was seen so far, and the way to report it.

    Attributes:
        clock: how many operations of all ranks have ended.
        phase: 0 while steps are observed; then 1 until the pass over the data has ended, and 2 in
            the next pass.
        sources_read: files of the program.
        fed: number of the data source that supplied the last batch.
        batch: checksums of what a loader has supplied for this step.
        batches: of what models have read since the last step, where no loader is known.
        of_some: a function of Horovod is called for a process set.
        by_local_rank: a callback saves that was made where the local rank is compared.
        communicates: libraries besides Horovod by which ranks have met.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.script = self.home = ""
        self.wanted, self.short = 20, False
        self.clock = self.sent = self.fed = 0
        self.steps: Dict[int, int] = {}
        self.optimizers: List[str] = []
        self.phase, self.left = 0, TAIL_STEPS
        self.initialised = self.over = self.by_local_rank = self.of_some = False
        self.sources_read: Dict[str, Source] = {}
        self.calls: Set[Tuple[str, str, bool]] = set()
        self.files: Set[Tuple[str, bool]] = set()
        self.device = self.unobserved = ""
        self.batches: List[int] = []
        self.batch: List[int] = []
        self.feeding: Set[int] = set()
        self.sources: Dict[int, int] = {}
        self.first = self.last = self.spent = self.spent_then = 0.0
        self.leave: Callable[[], Any] = lambda: None
        self.communicates: Set[str] = set()

    @property
    def most_steps(self) -> int:
        """The steps of the optimizer that has taken most."""
        return max(self.steps.values(), default=0)

    # Reporting

    def emit(self, event: Any) -> None:
        """Report an event, unless this is a process that the program has forked."""
        if os.getpid() == self.pid and self.descriptor >= 0:
            line = (json.dumps(events.to_table(event)) + "\n").encode("ascii")
            with self.lock:
                while line:
                    line = line[os.write(self.descriptor, line) :]

    def guarded(self, function: Callable[..., Any], *words: Any, **named: Any) -> Any:
        """Call a function of ours; an error of ours must not reach the program."""
        if self.over or os.getpid() != self.pid:
            return None
        began = time.monotonic()
        try:
            return function(*words, **named)
        except Exception:
            if not self.unobserved:
                self.unobserved = traceback.format_exc(limit=-3)[-600:]
        finally:
            self.spent += time.monotonic() - began
        return None

    # Places in the program

    def place(self, frame: Any) -> Tuple[str, int]:
        """The file and line of the innermost frame of the program; empty if there is none."""
        while frame:
            name = frame.f_code.co_filename
            if self.is_of_program(name):
                return name, frame.f_lineno
            frame = frame.f_back
        return "", 0

    def is_of_program(self, name: str) -> bool:
        """Whether a file belongs to the program rather than to an installed package."""
        # TensorFlow rewrites functions into files of this name.
        if name.startswith((HERE + os.sep, "<")) or "__autograph_generated_file" in name:
            return False
        if name == self.script or (self.home and os.path.dirname(name) == self.home):
            return True
        parts = "/site-packages/", "/dist-packages/", "/horovod/"
        return not (name.startswith(_LIBRARIES) or any(part in name for part in parts))

    def site(self, frame: Any = None) -> str:
        """Where the program is: ``train.py:12``."""
        name, line = self.place(frame or sys._getframe(1))
        if not name:
            return ""
        base = self.home or os.getcwd()
        short = os.path.relpath(name, base)
        return "{}:{}".format(name if short.startswith("..") else short, line)

    def decided_by_local_rank(self, frame: Any) -> bool:
        """Whether the local rank decides that the program gets to where it is."""
        while frame:
            name = frame.f_code.co_filename
            if self.is_of_program(name) and self.source(name).decides(frame.f_lineno):
                return True
            frame = frame.f_back
        return False

    def source(self, name: str) -> Source:
        """The source of a file of the program."""
        if name not in self.sources_read:
            with open(name, "rb") as stream:
                self.sources_read[name] = Source(stream.read())
        return self.sources_read[name]

    def gives_local_rank(self, frame: Any, function: str, place: int, keyword: str) -> bool:
        """Whether the program calls a function with the local rank as this argument."""
        name, line = self.place(frame)
        return bool(name) and self.source(name).gives(line, function, place, keyword)

    # What all frameworks have

    def called(self, operation: str, elements: int = 0, gradient: bool = False) -> None:
        """Report a call of Horovod, once for each place."""
        if gradient and (operation, "", True) in self.calls:
            return
        site = "" if gradient or self.of_some else self.site(sys._getframe(1))
        key = operation, site, gradient
        if key not in self.calls and len(self.calls) < MOST_EVENTS:
            self.calls.add(key)
            self.emit(events.Call(operation, site, self.most_steps, elements, gradient))

    def file(self, path: Any, write: bool, saver: bool = False) -> None:
        """Report a file that the program opens."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            path = getattr(path, "name", None)
            if not isinstance(path, str):
                return
        name = os.path.abspath(os.fsdecode(os.fspath(path)))
        # Before training, files with such names are data that are downloaded.
        checkpoint = saver or (self.most_steps > 0 and holds_a_model(name))
        key = name, write
        if key in self.files or len(self.files) > MOST_EVENTS or not (write or checkpoint):
            return
        frame = sys._getframe(1)
        site = self.site(frame)
        if not site or _NO_DATA.search(name) or (os.path.isdir(name) and not saver):
            return
        self.files.add(key)
        decided = self.by_local_rank or self.decided_by_local_rank(frame)
        local = decided and self.most_steps > 0
        self.emit(events.FileUse(name, write, checkpoint, local, site, self.clock))

    def shown(self, text: str) -> None:
        """Report a line with a metric, the first one of each place."""
        if self.most_steps and _METRIC.search(text):
            site = self.site(sys._getframe(1))
            if site and ("shown", site, False) not in self.calls:
                self.calls.add(("shown", site, False))
                self.emit(events.Shown('prints "{}"'.format(text.strip()[:120]), site))

    def passes(self, key: int, loader: Any, **facts: Any) -> int:
        """Report that a pass over data begins; returns the number of its source."""
        number = self.sources.setdefault(key, len(self.sources) + 1)
        if self.phase == 1 and number in self.feeding:
            self.phase = 2
        kind, looped = facts.pop("kind", type(loader).__name__), facts.pop("looped", True)
        site = self.site(sys._getframe(1))
        if site and looped:
            name, line = self.place(sys._getframe(1))
            facts["whole"] = self.source(name).reads_all(line)
        if site and self.sent < MOST_EVENTS:
            self.sent += 1
            self.emit(events.DataSource(number, site, kind, **facts))
        return number

    def next_batch(self, number: int) -> bool:
        """Whether a source supplies another batch. Only loops expect that there is none."""
        self.fed = number
        self.batch = []
        if self.phase != 1 or number not in self.feeding:
            return True
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename.startswith(HERE + os.sep):
            frame = frame.f_back
        result: bool = frame.f_code.co_code[frame.f_lasti] != opcode.opmap["FOR_ITER"]
        return result

    def optimizer(self, **facts: Any) -> int:
        """Report an optimizer; returns its number.

        All ranks know one by the same number, also if some of them have made others before.
        """
        made = "{kind} {site}".format(**facts)
        self.optimizers.append(made)
        number = zlib.crc32("{} {}".format(made, self.optimizers.count(made)).encode())
        self.steps[number] = 0
        self.emit(events.Optimizer(number=number, **facts))
        return number

    def stepped(self, number: int, count: int = 1, **facts: Any) -> None:
        """Report a step of an optimizer, and end the program after enough of them."""
        now = time.monotonic()
        self.clock += 1
        self.feeding.add(self.fed)
        if not self.first:
            self.first, self.spent = now, 0.0
        self.steps[number] += count
        step = self.steps[number]
        if step <= self.wanted:
            self.last, self.spent_then = now, self.spent
            read = self.batch or self.batches
            batch = digest(read) if read else ""
            self.emit(events.Stage("training", "step {}".format(step)))
            self.emit(
                events.TrainingStep(
                    optimizer=number, step=step, batch=batch, source=self.fed, **facts
                )
            )
        self.batches = []
        if self.phase == 2:
            self.left -= 1
            if not self.left:
                self.end("enough")
        elif step >= self.wanted and self.short:
            self.end("enough")
        elif step >= self.wanted and not self.phase:
            self.phase = 1
            timer = threading.Timer(TAIL_SECONDS, self.end, ("enough",))
            timer.daemon = True
            timer.start()

    def observes(self, number: int) -> bool:
        """Whether the next step of an optimizer is reported."""
        return not self.over and os.getpid() == self.pid and self.steps[number] < self.wanted

    def shows_tensors(self, number: int) -> bool:
        """Whether the next step is reported with the digest of each tensor."""
        return self.steps[number] + 1 in (1, 2, self.wanted)

    def shows_gradients(self) -> bool:
        """Whether the next step is reported with what became of its gradients."""
        step = self.most_steps + 1
        return step <= 3 or step % 5 == 0

    def end(self, reason: str, error: str = "") -> None:
        """Report the end; after enough steps, end the process."""
        with self.lock:
            if self.over or os.getpid() != self.pid:
                return
            self.emit(
                events.ProgramEnd(
                    steps=list(self.steps.values()),
                    reason=reason,
                    error=error,
                    device=self.device,
                    libraries=sorted(set(sys.modules) & _KNOWN | self.communicates),
                    initialised=self.initialised,
                    unobserved=self.unobserved,
                    seconds=[round(self.last - self.first, 3), round(self.spent_then, 3)],
                )
            )
            self.over = True
            if reason == "enough":
                self.emit(events.Stage("shutdown"))
                # Ranks that are at the same step leave together, which launchers expect.
                leaving = threading.Thread(target=self.leave, daemon=True)
                leaving.start()
                leaving.join(LEAVING_SECONDS)
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                remove_generated_files()
                os._exit(0)


_KNOWN = {"torch", "tensorflow", "keras", "horovod", "lightning", "pytorch_lightning", "deepspeed"}
_FRAMEWORKS = ("observe_torch", "observe_tensorflow", "observe_keras")
_OWN_MODULES = ("events", "source", "observe", *_FRAMEWORKS)
observer = Observer()


def holds_a_model(path: str) -> bool:
    """Whether a file is a checkpoint, by its name."""
    name = os.path.basename(path)
    return "checkpoint" in name.lower() or bool(_CHECKPOINT.search(name[-40:]))


def physical_gpu(index: int) -> str:
    """A GPU of this process as all processes of the host would call it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[index] if index < len(visible) and visible[index] else str(index)


def remove_generated_files() -> None:
    """Remove the modules that TensorFlow has written into TMPDIR, as it does itself on exit."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            with contextlib.suppress(OSError):
                os.remove(module.__file__ or "")


def digest(numbers: List[int]) -> str:
    """One digest of many."""
    text = ",".join(map(str, numbers))
    return "{:08x}".format(zlib.crc32(text.encode("ascii")) & 0xFFFFFFFF)


def checksum(array: Any) -> int:
    """A number that differs if an array of numpy does: of all its bytes, or a sample and a sum."""
    numpy = importlib.import_module("numpy")  # which the frameworks require
    if array.nbytes <= WHOLE_BYTES:
        return zlib.crc32(numpy.ascontiguousarray(array).tobytes()) & 0xFFFFFFFF
    flat = numpy.ascontiguousarray(array).reshape(-1)
    words = flat.view("u{}".format(min(flat.itemsize, 4)))
    sample = zlib.crc32(words[:: len(words) // 1024 or 1].tobytes())
    return (int(words.sum(dtype="u8")) * 31 + sample) & 0xFFFFFFFF


def watch_horovod(module: Any) -> None:
    """Wrap init() and shutdown() of horovod.common.basics, which all frameworks share."""
    basics = module.HorovodBasics
    initialise, shut_down = basics.init, basics.shutdown

    def init(self: Any, *words: Any, **named: Any) -> Any:
        result = initialise(self, *words, **named)
        if not observer.initialised:
            observer.initialised = True
            observer.leave = lambda: shut_down(self)
            observer.guarded(observer.called, "init")
            observer.guarded(_report_numbers, self)
        return result

    def shutdown(self: Any) -> Any:
        observer.guarded(observer.called, "shutdown")
        return shut_down(self)

    basics.init, basics.shutdown = init, shutdown


def _report_numbers(basics: Any) -> None:
    names = "rank", "size", "local_rank", "local_size"
    observer.emit(events.Joined(*(int(getattr(basics, name)()) for name in names)))


def watch(module: Any, name: str, before: Callable[..., None]) -> None:
    """Call a function of ours before one of the program's, with its arguments."""
    original = getattr(module, name, None)
    if original is None:
        return

    def wrapper(*words: Any, **named: Any) -> Any:
        # Nothing is asked of the program's own objects: they may answer anything.
        observer.of_some = any(
            type(each).__name__ == "ProcessSet" and each.process_set_id
            for each in (*words, *named.values())
        )
        observer.guarded(before, *words, **named)
        return original(*words, **named)

    wrapper.__name__, wrapper.__doc__ = name, getattr(original, "__doc__", None)
    wrapper.__wrapped__ = original  # type: ignore[attr-defined]
    wrapper.autograph_info__ = {}  # type: ignore[attr-defined] # TensorFlow must not rewrite it
    setattr(module, name, wrapper)


def watch_files() -> None:
    """Report files that Python opens for writing, and metrics that the program prints."""

    def opened(event: str, words: Tuple[Any, ...]) -> None:
        if event == "open" and isinstance(words[0], (str, bytes)):
            flags = words[2] if isinstance(words[2], int) else 0
            observer.guarded(observer.file, words[0], bool(flags & (os.O_WRONLY | os.O_RDWR)))
        elif (
            event == "os.rename"
            and (os.path.abspath(os.fsdecode(words[0])), True) in observer.files
        ):
            observer.guarded(observer.file, words[1], True)

    if hasattr(sys, "addaudithook"):  # of Python 3.8
        sys.addaudithook(opened)
    watch(builtins, "print", lambda *words, **_: observer.shown(" ".join(map(str, words))))


def run(argv: List[str]) -> None:
    """Run the program as Python would."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        observer.home = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    observer.script, sys.argv = argv[0], argv
    observer.home = os.path.dirname(os.path.abspath(argv[0]))
    sys.path.insert(0, observer.home)
    with open(argv[0], "rb") as stream:
        code = compile(stream.read(), argv[0], "exec")
    main = types.ModuleType("__main__")
    main.__file__ = argv[0]
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def main(
    framework: str, controller: str, device: str, report_fd: str, dump_seconds: str, word: str
) -> NoReturn:
    actions = {r"horovod\.common\.basics": watch_horovod}
    for name in _FRAMEWORKS:  # which import this module
        actions.update(importlib.import_module(name).ACTIONS)
    spec = json.loads(base64.b64decode(word.partition("=")[2]).decode("utf-8"))
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(dump_seconds))
    del sys.path[:3]  # this folder twice, and that of the events
    observer.descriptor, observer.wanted = int(report_fd), spec["steps"]
    observer.short = bool(spec["short"])
    os.chdir(spec["directory"])
    for name in _OWN_MODULES:  # the program may have modules of these names
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Importer(actions))  # type: ignore[arg-type]
    watch_files()
    observer.emit(events.Stage("program"))
    code: Optional[int] = 0
    try:
        run(spec["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) or end.code is None else 1
        if code is not end.code:  # as Python does with a message
            print(end.code, file=sys.stderr)
        observer.end("exception" if code else "end", "SystemExit: {}".format(end.code))
    except BaseException as error:
        where = observer.site(error.__traceback__.tb_frame) if error.__traceback__ else ""
        frames = traceback.extract_tb(error.__traceback__)
        mine = [each for each in frames if observer.is_of_program(each.filename)]
        if mine:
            where = "{}:{}".format(os.path.basename(mine[-1].filename), mine[-1].lineno)
        text = "{}: {}".format(type(error).__name__, error)[:400]
        if observer.phase:
            text += ", after verify ended a pass over the data early"
        observer.end("exception", "{} ({})".format(text, where))
        raise
    observer.end("end")
    observer.emit(events.Stage("shutdown"))
    sys.exit(code or 0)


if __name__ == "__main__":
    # The modules for the frameworks import this one by its name.
    sys.modules["observe"] = sys.modules["__main__"]
    main(*sys.argv[1:])
