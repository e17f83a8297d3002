"""Horovod environments for HPC clusters: reproducible builds, proven to work."""

import os
import sys

# `python -m hvdenv` has put the current directory first on the search path, where anybody may have
# left a pathlib.py. What was imported before this line, Python has chosen by itself.
_FIRST = sys.path[0] or "."
_IS_ADDED = sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False)
if _IS_ADDED and os.path.isdir(_FIRST) and os.path.samefile(_FIRST, "."):
    del sys.path[0]

from pathlib import Path  # noqa: E402

__version__ = "0.1.0"

PACKAGE = Path(__file__).parent
# Stand-alone programs: run in environments, on hosts and as ranks. hvdenv imports none.
STANDALONE = PACKAGE / "standalone"
STEP_PROGRAMS = STANDALONE / "steps"
INSPECT_PROGRAMS = STANDALONE / "inspect"
RANK_PROGRAMS = STANDALONE / "ranks"
IMAGE_PROGRAMS = STANDALONE / "image"
WHEEL_PROGRAMS = STANDALONE / "wheel"
