"""Variables of the user's shell: which of them reach ranks, and on which command lines they may be."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

from hvdenv.errors import UsageError
from hvdenv.launch.launchers import LAUNCHERS
from hvdenv.launch.placement import Requested
from hvdenv.masking import is_secret
from hvdenv.model.dialect import shipped

# Variables that users set for ranks.
FOR_RANKS = re.compile(
    r"(HOROVOD|NCCL|RCCL|GLOO|CCL|UCX|FI|PSM2?|OMP|KMP|GOMP|MKL|OPENBLAS|TF|XLA|TORCH|PYTORCH"
    r"|MIOPEN|ROCR|HSA|MPICH|MV2|I_MPI)_\w+"
)
# Other variables that may be on command lines that other users can read.
_FOR_LAUNCHERS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|PWD|TMPDIR|TZ|LANG|LC_\w+|LD_LIBRARY_PATH|HOSTNAME"
    r"|SSH_AUTH_SOCK|KRB5CCNAME|XDG_RUNTIME_DIR|PYTHONNOUSERSITE|PYTHONUNBUFFERED|SHLVL|OLDPWD|_"
    r"|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
    r"|CUDA_VISIBLE_DEVICES"
    r"|(OMPI|PRTE|PMIX)_(MCA_\w+|ALLOW_RUN_AS_ROOT(_CONFIRM)?)"
)
# Other variables that change the results or the data path of ranks, or by which Python, the
# dynamic loader, MPI and libraries load other code.
_FOR_PROGRAMS = re.compile(
    r"LD_\w+|GLIBC_TUNABLES|GCONV_PATH|LOCPATH|MALLOC_\w+|OPAL_\w+|(PMIX|PRTE)_(INSTALL_)?PREFIX"
    r"|(OMPI|PRTE|PMIX)_MCA_\w+|(CUDA|CUBLAS|CUDNN)_(?!VISIBLE_DEVICES)\w+|NVIDIA_\w+|KERAS_\w+"
    r"|FLEXIBLAS\w*|OCL_\w+|TRITON_\w+|EBPYTHONPREFIXES|COVERAGE_PROCESS_START"
    r"|_?PYTHON(?!NOUSERSITE|UNBUFFERED|DONTWRITEBYTECODE|IOENCODING|UTF8|FAULTHANDLER)\w+"
)
# Variables of module systems themselves.
_OF_MODULES = re.compile(r"_.*|LMOD_\w+|MODULE\w+|LOADEDMODULES\w*|BASH_ENV")


def influences(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables except PATH that change the results or the data path of ranks."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if FOR_RANKS.fullmatch(name) or _FOR_PROGRAMS.fullmatch(name)
    }


def shell_variables(
    environ: Mapping[str, str], *, clean: bool = False, kept: Collection[str] = ()
) -> dict[str, str]:
    """The variables of the user's shell that run, shell and the ranks of verify start with."""
    dropped = {*influences(environ)} - {*kept} if clean else set()
    return {name: value for name, value in environ.items() if name not in dropped}


def hidden(
    launcher: str, names: Iterable[str], activated: Collection[str], *, patched: bool
) -> tuple[str, ...]:
    """Variables to remove, since the launcher would expose them on command lines.

    Args:
        activated: names of variables that the environment sets.
        patched: whether Horovod has the patch that keeps them off command lines.
    """
    if patched or launcher not in LAUNCHERS or not LAUNCHERS[launcher].exposes:
        return ()
    return tuple(name for name in names if name not in activated and not may_be_seen(name))


def refuse_exposed(launcher: str, requested: Requested, *, patched: bool, words: str) -> None:
    """Check that a launcher does not show a requested variable to other users; see hidden().

    Args:
        words: what names the recipe on a command line.

    Raises:
        UsageError: it does.
    """
    names = (*requested.exports, *(name for name, _ in requested.variables))
    for name in hidden(launcher, names, (), patched=patched):
        raise UsageError(
            f"horovodrun of this Horovod would show the value of {name} to every user of the hosts,"
            " on command lines",
            where=f"-x {name}",
            remedy=f"build Horovod with hvdenv's patches (hvdenv build {words} --rebuild), or use"
            " --launcher mpirun",
        )


def exported(
    site: Sequence[str],
    activated: Collection[str],
    environ: Mapping[str, str],
    requested: Requested,
) -> tuple[str, ...]:
    """Names of the variables that ranks on other hosts get from this process.

    If a recipe has no exports, programs must not get the variables of this host.

    Args:
        site: the recipe's names (launch.exports).
        activated: names that activate.sh sets.
    """
    known = {*activated, *environ}
    activated = sorted(name for name in activated if not _OF_MODULES.fullmatch(name))
    own = [name for name in environ if FOR_RANKS.fullmatch(name)]
    given = {name for name, _ in requested.variables}
    names = [*site, *(activated if site else ()), *sorted(own), *requested.exports]
    return tuple(n for n in dict.fromkeys(names) if n in known and n not in given)


@cache
def _of_schedulers() -> tuple[str, ...]:
    """How variables of schedulers begin."""
    return tuple(prefix for each in shipped().values() for prefix in each.variables)


def may_be_seen(name: str) -> bool:
    """Whether a variable may be on command lines on other hosts."""
    listed = FOR_RANKS.fullmatch(name) or _FOR_LAUNCHERS.fullmatch(name)
    return bool(listed or name.startswith(_of_schedulers())) and not is_secret(name)
