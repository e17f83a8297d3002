"""Horovod environments on clusters that build the first time and can be proven to work."""

import os
import sys

# `python -m hvdenv` has put the current folder first on the search path, where anybody may have
# left a pathlib.py. What was imported before this line, Python has chosen by itself.
if sys.argv[:1] == ["-m"] and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from pathlib import Path

__version__ = "0.1.0"

PACKAGE = Path(__file__).parent
# Programs that run elsewhere: in environments, on hosts, as ranks. Nothing imports them.
PROBES = PACKAGE / "probes"
