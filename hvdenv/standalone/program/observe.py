"""Runs a training program as a rank, unchanged, and reports what it does.

usage: python observe.py FRAMEWORK CONTROLLER DEVICE REPORT_FD DUMP_SECONDS program=SPEC

SPEC is base64 of a JSON object: `argv` (SCRIPT ARGS... or -m MODULE ARGS...), `directory`, and
`steps`; with `short`, the program is ended right after these. Nothing here
changes a number: the program's tensors are read and hashed between its own operations.
observe_torch.py and observe_tensorflow.py know the frameworks, and observer.py what they share.
They are called as soon as the program imports a framework; it imports what it always imports.

After `steps` training steps, the loaders that supplied them end their pass, so that the program
goes on to its end of an epoch. Two steps later, or after TAIL_SECONDS, it is ended, and so are the
programs of the other ranks. Runs on Python 3.6 and newer.
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
import types
from typing import Any, Callable, Dict, List, NoReturn, Set, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "ranks")]
import events  # noqa: E402
import observe_keras  # noqa: E402
import observe_tensorflow  # noqa: E402
import observe_torch  # noqa: E402
from observer import observer, replaces, watch  # noqa: E402
from source import Program  # noqa: E402

OWN_MODULES = (
    "events",
    "source",
    "observer",
    "observe_torch",
    "observe_tensorflow",
    "observe_keras",
)


class Importer:
    """Calls a function after a module was imported, by a pattern for the module's name."""

    def __init__(self, actions: Dict[str, Callable[[Any], None]]) -> None:
        self.actions = {re.compile(pattern): action for pattern, action in actions.items()}
        self.seen: Set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Part of the protocol of importlib. Libraries also call it to see what is installed."""
        found = [action for pattern, action in self.actions.items() if pattern.fullmatch(name)]
        if not found or name in self.seen:
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
                for action in found:
                    observer.guarded(action, module)

            loader.exec_module = exec_module
        return spec


def watch_horovod(module: Any) -> None:
    """Watch init() and shutdown() of horovod.common.basics, which all frameworks share."""
    basics = module.HorovodBasics
    shut_down = basics.shutdown

    def joined(self: Any) -> None:
        names = "rank", "size", "local_rank", "local_size"
        observer.emit(events.Joined(*(int(getattr(self, each)()) for each in names)))

    @replaces(basics, "init")
    def init(original: Any, self: Any, *words: Any, **named: Any) -> Any:
        result = original(self, *words, **named)
        if not observer.initialised:
            observer.initialised = True
            observer.leave = lambda: shut_down(self)
            observer.guarded(observer.called, "init")
            observer.guarded(joined, self)
        return result

    watch(basics, "shutdown", lambda *_: observer.called("shutdown"))


def watch_files() -> None:
    """Report files that Python opens for writing, and metrics that the program prints."""

    def opened(event: str, words: Tuple[Any, ...]) -> None:
        if event == "open" and isinstance(words[0], (str, bytes)):
            flags = words[2] if isinstance(words[2], int) else 0
            observer.guarded(observer.file, words[0], bool(flags & (os.O_WRONLY | os.O_RDWR)))
        elif event == "os.rename":
            observer.guarded(observer.renamed, words[0], words[1])

    if hasattr(sys, "addaudithook"):  # of Python 3.8
        sys.addaudithook(opened)
    watch(builtins, "print", lambda *words, **_: observer.shown(" ".join(map(str, words))))


def run(argv: List[str]) -> None:
    """Run the program as Python would."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        path = os.path.abspath(argv[0])  # programs change their directory
        observer.program = Program(path, os.path.dirname(path))
        sys.path.insert(0, observer.program.home)
        main_module = types.ModuleType("__main__")
        main_module.__file__ = path
        sys.modules["__main__"] = main_module
        with open(path, "rb") as stream:
            code = compile(stream.read(), path, "exec")
        exec(code, main_module.__dict__)


def describe(error: BaseException) -> str:
    """An exception of the program, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [each for each in frames if observer.program.has(each.filename)]
    where = "{}:{}".format(os.path.basename(mine[-1].filename), mine[-1].lineno) if mine else ""
    early = ", after verify ended a pass over the data early" if observer.phase else ""
    return "{} ({})".format("{}: {}".format(type(error).__name__, error)[:400] + early, where)


def main(
    framework: str, controller: str, device: str, report_fd: str, dump_seconds: str, word: str
) -> NoReturn:
    spec = json.loads(base64.b64decode(word.partition("=")[2]).decode("utf-8"))
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(dump_seconds))
    del sys.path[:3]  # this directory twice, and that of the events
    for name in OWN_MODULES:  # the program may have modules of these names
        del sys.modules[name]
    os.chdir(spec["directory"])
    observer.descriptor, observer.wanted = int(report_fd), spec["steps"]
    observer.short = bool(spec["short"])
    observer.program = Program("", os.getcwd())
    actions = {r"horovod\.common\.basics": watch_horovod}
    for framework_module in (observe_torch, observe_tensorflow, observe_keras):
        actions.update(framework_module.ACTIONS)
    sys.meta_path.insert(0, Importer(actions))  # type: ignore[arg-type]
    watch_files()
    observer.emit(events.Stage("program"))
    code = 0
    try:
        run(spec["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code != code and code:  # as Python does with a message
            print(end.code, file=sys.stderr)
        observer.end("exception" if code else "end", "SystemExit: {}".format(end.code))
    except BaseException as error:
        observer.end("exception", describe(error))
        raise
    observer.end("end")
    observer.emit(events.Stage("shutdown"))
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
