"""How long one rank takes from its start to the end of ``hvd.init()``, and for what.

usage: python startup.py FRAMEWORK CONTROLLER DEVICE REPORT_FD DUMP_SECONDS WORD STARTED

The arguments are those of rank_work.py, and STARTED: the time by this host's clock at which
rank.py started this process. It reports an events.Startup, and the rank's numbers. Until Horovod
is initialised, it imports nothing else that has to be read from a file.

Files are counted in the interpreter: opens and listings by its audit events (Python 3.8), other
look-ups by wrappers around os.stat() and its like. What the dynamic loader and C code open
themselves is not counted, nor what the interpreter reads before this program. Runs on Python 3.6
and newer.
"""

import time

BEGAN = time.time()

import faulthandler  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Tuple

SLOWEST = 10
LOOKUPS = ("stat", "lstat", "readlink")
LISTINGS = ("os.listdir", "os.scandir")


class Files:
    """Counts what the interpreter looks for; the numbers are those of events.Startup."""

    def __init__(self) -> None:
        self.opens = self.lookups = self.failed = self.inside = 0
        self.folders = tuple({sys.prefix, os.path.realpath(sys.prefix)})

    def watch(self) -> bool:
        """Count from now on; returns whether opens are counted."""
        for name in LOOKUPS:
            counted = self._counted(getattr(os, name))
            # importlib uses the module below os.
            for module in (os, sys.modules[os.name]):
                setattr(module, name, counted)
        if hasattr(sys, "addaudithook"):
            sys.addaudithook(self._heard)
        return hasattr(sys, "addaudithook")

    def _counted(self, call: "Callable[..., Any]") -> "Callable[..., Any]":
        def look(path: "Any", *args: "Any", **words: "Any") -> "Any":
            if not isinstance(path, int):  # an open file
                self.lookups += 1
                self._place(path)
            try:
                return call(path, *args, **words)
            except OSError:
                self.failed += 1
                raise

        return look

    def _heard(self, event: str, args: "Tuple[Any, ...]") -> None:
        if event == "open" and not isinstance(args[0], int):
            self.opens += 1
            self._place(args[0])
        elif event in LISTINGS:
            self.lookups += 1
            self._place(args[0])

    def _place(self, path: "Any") -> None:
        self.inside += isinstance(path, str) and path.startswith(self.folders)


class Imports:
    """Measures each import of the main thread, as ``python -X importtime`` does.

    `own` is the seconds by module, without those of modules that it imports.
    """

    def __init__(self) -> None:
        self.own = {}  # type: Dict[str, float]
        self._inner = []  # type: List[float]

    def watch(self) -> None:
        bootstrap = sys.modules["_frozen_importlib"]  # type: Any
        load = bootstrap._find_and_load
        thread = sys.modules["_thread"].get_ident
        main = thread()

        def timed(name: str, call: "Any") -> "Any":
            if thread() != main:
                return load(name, call)
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return load(name, call)
            finally:
                seconds = time.perf_counter() - began
                self.own[name] = self.own.get(name, 0.0) + seconds - self._inner.pop()
                if self._inner:
                    self._inner[-1] += seconds

        bootstrap._find_and_load = timed

    def slowest(self) -> "List[str]":
        return sorted(self.own, key=self.own.__getitem__, reverse=True)[:SLOWEST]


def main(
    framework: str, controller: str, device: str, report_fd: str, dump: str, _: str, started: str
) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(dump))
    own_folder = sys.path.pop(0)
    files, imports, before = Files(), Imports(), len(sys.modules)
    opens_count = files.watch()
    imports.watch()
    times = [time.time()]
    for name in (framework, "horovod." + framework):
        __import__(name)
        times.append(time.time())
    hvd = sys.modules["horovod." + framework]
    if not getattr(hvd, controller.lower() + "_built", lambda: True)():
        sys.exit("this Horovod was built without " + controller)
    hvd.init()
    times.append(time.time())
    found: "Dict[str, Any]" = {
        "started": float(started),
        "interpreter": round(max(BEGAN - float(started), 0.0), 4),
        "modules": len(sys.modules) - before,
        "opens": files.opens if opens_count else None,
        "lookups": files.lookups,
        "failed": files.failed,
        "inside": files.inside,
    }
    for at, name in enumerate(("framework", "horovod", "init")):
        found[name] = round(times[at + 1] - times[at], 4)
    slowest = imports.slowest()
    sys.path.insert(0, own_folder)
    import events
    from context import Context

    context = Context(framework, controller, int(report_fd))
    context.report(context.numbers())
    modules = [events.Imported(name, round(imports.own[name], 4)) for name in slowest]
    context.report(events.Startup(slowest=modules, **found))
    context.stage("shutdown")
    context.hvd.shutdown()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
