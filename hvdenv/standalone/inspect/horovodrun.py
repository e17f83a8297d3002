"""Run horovodrun as if it had found that Gloo was built.

usage: python -s horovodrun.py HOROVODRUN ARGUMENT...

To find out, horovodrun imports TensorFlow in a forked process. `horovodrun --check-build` has
answered the same question, and ranks report it, too. The program runs HOROVODRUN as it is if that
is no script of this Python. Runs on Python 3.6 and newer.
"""

import importlib
import os
import runpy
import sys

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check_build import is_own_script


def main(program: str, *arguments: str) -> None:
    if not is_own_script(program):
        os.execv(program, [program, *arguments])
    sys.path[0] = os.path.dirname(program)
    util = importlib.import_module("horovod.common.util")
    util.gloo_built = lambda verbose=False: True  # type: ignore[attr-defined]
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
