"""Run horovodrun without its repeated imports of frameworks.

usage: python -s horovodrun.py check HOROVODRUN FRAMEWORK...
       python -s horovodrun.py start HOROVODRUN ARGUMENT...

`check` runs ``horovodrun --check-build`` with each framework imported once. For each row of its
table, Horovod forks a process that imports a framework: TensorFlow six times. Processes that are
forked from this one find the imported modules. If a framework starts threads when it is imported,
the program runs HOROVODRUN as it is: locks that a thread holds stay locked in a forked process.

`start` runs horovodrun as if it had found that Gloo was built. To find out, horovodrun imports
TensorFlow in a forked process. `horovodrun --check-build` has answered the same question, and
ranks report it, too.

Both run HOROVODRUN as it is if that is no script of this Python. Runs on Python 3.6 and newer.
"""

import contextlib
import gc
import importlib
import os
import runpy
import shutil
import sys
from typing import List


def is_own_script(path: str) -> bool:
    """Whether the interpreter of a script is in the same directory as this one."""
    with open(path, "rb") as stream:
        words = os.fsdecode(stream.readline(4096)).split()
    interpreter = words[0][2:] if words and words[0].startswith("#!") else ""
    folders = {os.path.realpath(os.path.dirname(each)) for each in (interpreter, sys.executable)}
    return "python" in os.path.basename(interpreter) and len(folders) == 1


def can_fork(frameworks: List[str]) -> bool:
    """Import Horovod's modules; those that fail are left to Horovod, which reports them."""
    gc.disable()
    for framework in frameworks:
        with contextlib.suppress(Exception):
            importlib.import_module("horovod." + framework)
    getattr(gc, "freeze", int)()  # of Python 3.7; forked processes would each look through it all
    gc.enable()
    return len(os.listdir("/proc/self/task")) == 1


def knows_gloo() -> bool:
    util = importlib.import_module("horovod.common.util")
    util.gloo_built = lambda verbose=False: True  # type: ignore[attr-defined]
    return True


def main(what: str, program: str, *words: str) -> None:
    program = shutil.which(program) or program
    arguments = ["--check-build"] if what == "check" else list(words)
    safe = getattr(sys.flags, "safe_path", False)  # PYTHONSAFEPATH leaves out this directory
    sys.path[: not safe] = [os.path.dirname(program)]
    if is_own_script(program) and (can_fork(list(words)) if what == "check" else knows_gloo()):
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")
    else:
        os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
