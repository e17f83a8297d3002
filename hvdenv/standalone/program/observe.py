"""Runs a training program as a rank, unchanged, and reports what it does.

usage: python observe.py FRAMEWORK CONTROLLER DEVICE REPORT_FD DUMP_SECONDS program=SPEC

SPEC is base64 of a JSON object: `argv` (SCRIPT ARGS... or -m MODULE ARGS...), `directory`, and
`steps`; with `short`, the program is ended right after these. Nothing here
changes a number: the program's tensors are read and hashed between its own operations.
in_torch.py and in_tensorflow.py know the frameworks; their hooks are put into modules as soon as
the program imports these. It imports what it always imports.

After `steps` training steps, the loaders that supplied them end their pass, so that the program
goes on to its end of an epoch. Two steps later, or after TAIL_SECONDS or as long again as it has
taken so far, it is ended, and so are the programs of the other ranks. Runs on Python 3.6 and newer.
"""

import base64
import builtins
import faulthandler
import importlib.util
import json
import os
import re
import runpy
import sys
import traceback
from typing import Any, Iterator, List, NoReturn, Set, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "ranks")]
import events  # noqa: E402
import in_tensorflow  # noqa: E402
import in_torch  # noqa: E402
from recorder import HOOKS, Function, collectives, hook, on, recorder  # noqa: E402
from source import Program  # noqa: E402

# The program may have modules of these names.
OWN_MODULES = "events", "source", "recorder", in_torch.__name__, in_tensorflow.__name__


class Importer:
    """Puts hooks into modules after they were imported."""

    def __init__(self) -> None:
        self.seen: Set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Part of the protocol of importlib. Libraries also call it to see what is installed."""
        hooks = [rest for pattern, *rest in HOOKS if re.fullmatch(pattern, name)]
        if not hooks or name in self.seen:
            return None
        self.seen.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.seen.discard(name)
        loader = getattr(spec, "loader", None)
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                self.seen.add(name)
                execute(module)
                for function, ours in hooks:
                    recorder.guarded(hook, module, function, ours)

            loader.exec_module = exec_module
        return spec


@on(r"horovod\.common\.basics", "HorovodBasics.init")
def initialises(basics: Any, *_: Any, **__: Any) -> Iterator[None]:
    """The rank gets to know its place among all."""
    yield
    if not recorder.initialised:
        recorder.initialised = True
        recorder.leave = basics.shutdown
        recorder.called("init")
        names = "rank", "size", "local_rank", "local_size"
        recorder.emit(events.Joined(*(int(getattr(basics, each)()) for each in names)))


collectives(r"horovod\.common\.basics", "HorovodBasics.shutdown")


def opened(event: str, words: Tuple[Any, ...]) -> None:
    """Python opens a file."""
    if event == "open" and isinstance(words[0], (str, bytes)):
        flags = words[2] if isinstance(words[2], int) else 0
        recorder.guarded(recorder.file, words[0], bool(flags & (os.O_WRONLY | os.O_RDWR)))


def prints(original: Function, *words: Any, **named: Any) -> None:
    """Called instead of print(): the text may be a metric."""
    recorder.guarded(lambda: recorder.printed(" ".join(map(str, words))))
    original(*words, **named)


def exits(original: Function, status: int) -> None:
    """Called instead of os._exit(), after which nothing more is seen."""
    text = "os._exit({}) ({})"
    reason = "exception" if status else "end"
    recorder.guarded(lambda: recorder.end(reason, text.format(status, recorder.program.site())))
    original(status)


def run(argv: List[str]) -> None:
    """Run the program as Python would."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        path = os.path.abspath(argv[0])  # programs change their directory
        recorder.program = Program(path, os.path.dirname(path))
        sys.path.insert(0, recorder.program.home)
        runpy.run_path(path, run_name="__main__")


def describe(error: BaseException) -> str:
    """An exception of the program, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [each for each in frames if recorder.program.has(each.filename)]
    where = "{}:{}".format(os.path.basename(mine[-1].filename), mine[-1].lineno) if mine else ""
    ended = recorder.phase and any(recorder.feeding)
    early = ", after verify ended a pass over the data early" if ended else ""
    # Errors of TensorFlow have a traceback before their cause.
    lines = [each for each in str(error).splitlines() if not each.startswith('  File "')]
    text = "{}: {}".format(type(error).__name__, "\n".join(filter(None, lines)))
    return "{} ({})".format(text[:400] + early, where)


def main(
    framework: str, controller: str, device: str, report_fd: str, dump_seconds: str, word: str
) -> NoReturn:
    spec = json.loads(base64.b64decode(word.partition("=")[2]).decode("utf-8"))
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(dump_seconds))
    del sys.path[:3]  # this directory twice, and that of the events
    for name in OWN_MODULES:
        del sys.modules[name]
    os.chdir(spec["directory"])
    recorder.descriptor, recorder.wanted = int(report_fd), spec["steps"]
    recorder.short = bool(spec["short"])
    recorder.program = Program("", os.getcwd())
    sys.meta_path.insert(0, Importer())
    hook(builtins, "print", prints)
    hook(os, "_exit", exits)
    if hasattr(sys, "addaudithook"):  # of Python 3.8
        sys.addaudithook(opened)
    recorder.emit(events.Stage("program"))
    code = 0
    try:
        run(spec["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code != code and code:  # as Python does with a message
            print(end.code, file=sys.stderr)
        recorder.end("exception" if code else "end", "SystemExit: {}".format(end.code))
    except BaseException as error:
        recorder.end("exception", describe(error))
        raise
    recorder.end("end")
    recorder.emit(events.Stage("shutdown"))
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
