"""The programs of pages, and what reads their commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, get_args

from hvdenv.drafting import jobs, launching, modulelines, packages
from hvdenv.drafting.jobs import Field
from hvdenv.drafting.page import Page
from hvdenv.drafting.shell import Statement
from hvdenv.drafting.values import Read, leave
from hvdenv.model.cluster import LauncherName

Reader = Callable[[Statement, Page], Iterator[Read | Field]]


class Program(NamedTuple):
    """A program of pages.

    Attributes:
        table: of the recipe that it is about.
        read: what a command of it means.
    """

    table: str
    read: Reader


def _export(statement: Statement, _: Page) -> Iterator[Read]:
    if not statement.variables:
        yield leave("the page sets its value elsewhere", understood=True)


def _means(told: str) -> Reader:
    return lambda _, __: iter([leave(told, understood=True)])


EXPORTS = ("export", "declare", "local", "typeset")
_LAUNCHERS = (
    *(each for each in get_args(LauncherName) if not each.startswith("horovodrun-")),
    *["mpiexec.hydra", "orterun", "horovodrun", "ibrun", "prun", "lrun", "mpirun_rsh", "torchrun"],
)
_INTERACTIVE = "idev qrsh qlogin srun_gpu interact sdev si"
_NO_EFFECT = (
    "cd mkdir ls ll cp mv rm cat echo vi vim nano emacs less more tail head chmod pwd which whereis wget"
    " curl tar unzip ssh scp rsync squeue scancel sinfo scontrol sacct qstat qdel bjobs watch nvidia-smi"
    " rocm-smi date hostname printenv sleep wait touch deactivate exit clear htop top grep sed awk find"
    " tree tee sort uniq wc cut xargs df du quota id groups whoami uname lscpu nproc jupyter tensorboard"
    " pytest test true printf set shopt ulimit umask unset showq sacctmgr bpeek bkill clush tmux screen"
    " python3-config kill let return break continue trap : ldconfig ln locale-gen"
)
_SYSTEM_PACKAGES = "apt-get apt yum dnf microdnf zypper apk"
_PROGRAMS: dict[str, Program] = {
    **dict.fromkeys(
        _NO_EFFECT.split(), Program("", _means("it changes nothing that a recipe describes"))
    ),
    **dict.fromkeys(
        _INTERACTIVE.split(), Program("", _means("for an interactive job: hvdenv shell"))
    ),
    **dict.fromkeys(_LAUNCHERS, Program("launch", launching.launch)),
    "srun": Program("launch", launching.srun),
    **dict.fromkeys(jobs.REQUESTS, Program("job", launching.request)),
    **dict.fromkeys(("module", "ml"), Program("modules", modulelines.module)),
    **dict.fromkeys(("source", "."), Program("modules", modulelines.source)),
    **dict.fromkeys(("conda", "mamba", "micromamba"), Program("conda", packages.conda)),
    **dict.fromkeys(("pip", "uv"), Program("packages", packages.pip)),
    **dict.fromkeys(("python", "virtualenv"), Program("packages", packages.python)),
    "FROM": Program("container", launching.base_image),
    **dict.fromkeys(_SYSTEM_PACKAGES.split(), Program("container", launching.system_packages)),
    "git": Program("", packages.git),
    **dict.fromkeys(("singularity", "apptainer"), Program("container", launching.container)),
    **dict.fromkeys(EXPORTS, Program("environment.run", _export)),
}
_VERSIONED = re.compile(r"(?:.*/)?(python|pip)[\d.]*")


def find_program(name: str) -> Program | None:
    found = _VERSIONED.fullmatch(name)
    return _PROGRAMS.get(found[1] if found else name)


def is_known(name: str) -> bool:
    return name != "." and find_program(name) is not None


def recipe_table(statement: Statement) -> str:
    """The table of the recipe that a command is about."""
    if statement.directive:
        return "job"
    program = find_program(statement.program)
    return program.table if program else "" if statement.words else "environment.run"
