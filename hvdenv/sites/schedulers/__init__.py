"""The schedulers that hvdenv supports. To add one, write a file like slurm.py and enter it here."""

from __future__ import annotations

from collections.abc import Mapping

from hvdenv.model.cluster import Scheduler
from hvdenv.sites.schedulers import cobalt, lsf, pbs, slurm
from hvdenv.sites.schedulers.dialect import Dialect

DIALECTS: Mapping[Scheduler, Dialect] = {
    "slurm": slurm.DIALECT,
    # Cobalt sets variables of PBS as well.
    "cobalt": cobalt.DIALECT,
    "pbs": pbs.DIALECT,
    "lsf": lsf.DIALECT,
}
