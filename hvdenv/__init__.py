"""Horovod environments on clusters that build the first time and can be proven to work."""

from pathlib import Path

__version__ = "0.1.0"

PACKAGE = Path(__file__).parent
# Programs that run elsewhere: in environments, on hosts, as ranks. Nothing imports them.
PROBES = PACKAGE / "probes"
