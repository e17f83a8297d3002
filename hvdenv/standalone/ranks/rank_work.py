"""The work of a rank: one process of Horovod, supervised by rank.py.

usage: python rank_work.py FRAMEWORK CONTROLLER DEVICE REPORT_FD DUMP_SECONDS [EXERCISE...]

Events (events.py) are lines of JSON to REPORT_FD: ExtensionFacts about this rank's Horovod;
Joined, the rank's numbers; Stage, what comes next; Result and DataPath of the allreduces; and
those of the exercises.
DEVICE is gpu if ranks may use NCCL, and host if they must not. If CONTROLLER was not built in,
the rank ends after ExtensionFacts. An EXERCISE is NAME or NAME=OPTION, for the function
run(context, option) of NAME.py, before which before_init(context, option) is called if it has
one. The allreduces of allreduce.py come first. After DUMP_SECONDS the stacks of all threads go to
standard error. Runs on Python 3.6 and newer.
"""

import faulthandler
import gc
import importlib
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(1, os.path.join(os.path.dirname(HERE), "inspect"))
import allreduce  # noqa: E402
import datapath  # noqa: E402
import events  # noqa: E402
import extension  # noqa: E402
import gpus  # noqa: E402
from context import Context  # noqa: E402


def keep() -> None:
    """Let the garbage collector pass over all objects that exist now: what imports made stays."""
    getattr(gc, "freeze", int)()  # of Python 3.7


def main(
    framework: str, controller: str, device: str, report_fd: str, dump_seconds: str, *words: str
) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(dump_seconds))
    exercises = [word.partition("=") for word in words]
    modules = {name: importlib.import_module(name) for name, _, _ in exercises}
    del sys.path[:2]  # hvdenv's directories: their files must not shadow modules
    gc.disable()  # it takes a fifth of the time of imports, which leave next to no garbage
    context = Context(framework, controller, int(report_fd))
    gc.enable()
    keep()
    facts = events.ExtensionFacts(**extension.files(framework), **extension.imported(framework))
    context.report(facts)
    if facts.built.get(controller) == 0:
        return
    for name, _, option in exercises:
        getattr(modules[name], "before_init", lambda *_: None)(context, option)
    context.hvd.init()
    context.report(context.numbers())
    context.stage("allreduce")
    gpu = gpus.take(context, facts.built, device)
    allreduce.run(context)
    datapath.run(context, gpu)
    for name, _, option in exercises:
        context.stage(name)
        modules[name].run(context, option)
    context.stage("shutdown")
    context.hvd.shutdown()
    faulthandler.cancel_dump_traceback_later()
    keep()  # or the interpreter would look through it all as it ends


if __name__ == "__main__":
    main(*sys.argv[1:])
