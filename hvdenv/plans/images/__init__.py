"""Images of an environment. To add a format, write a file like apptainer.py and enter it here."""

from __future__ import annotations

from collections.abc import Mapping

from hvdenv.plans.images import apptainer, docker
from hvdenv.plans.images.formats import Format, FormatName

FORMATS: Mapping[FormatName, Format] = {
    "singularity": apptainer.FORMAT,
    "docker": docker.FORMAT,
}
