"""Run ``horovodrun --check-build`` with each framework imported once.

usage: python -s check_build.py HOROVODRUN FRAMEWORK...

For each row of its table, Horovod forks a process that imports a framework: TensorFlow six times.
Processes that are forked from this one find the imported modules. The program runs HOROVODRUN as
it is if that is no script of this Python, or if a framework starts threads when it is imported:
locks that a thread holds stay locked in a forked process. Runs on Python 3.6 and newer.
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


def import_extensions(frameworks: List[str]) -> None:
    """Import Horovod's modules; those that fail are left to Horovod, which reports them."""
    gc.disable()
    for framework in frameworks:
        with contextlib.suppress(Exception):
            importlib.import_module("horovod." + framework)
    getattr(gc, "freeze", int)()  # of Python 3.7; forked processes would each look through it all
    gc.enable()


def main(program: str, *frameworks: str) -> None:
    program = shutil.which(program) or program
    safe = getattr(sys.flags, "safe_path", False)  # PYTHONSAFEPATH leaves out this directory
    sys.path[: not safe] = [os.path.dirname(program)]
    if is_own_script(program):
        import_extensions(list(frameworks))
        if len(os.listdir("/proc/self/task")) == 1:
            sys.argv = [program, "--check-build"]
            runpy.run_path(program, run_name="__main__")
            return
    os.execv(program, [program, "--check-build"])


if __name__ == "__main__":
    main(*sys.argv[1:])
