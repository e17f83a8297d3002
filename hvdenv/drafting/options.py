"""What the options of programs mean, and what the variables that a page sets mean, in a recipe."""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, get_args

from hvdenv.base.masking import holds_secret
from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import decode, parse_toml
from hvdenv.drafting.values import WITHOUT, Fact, Left, Value, at, leave
from hvdenv.knowledge.flags import KEYS, PARTS
from hvdenv.model.cluster import LauncherName

# How many words follow an option.
_VALUES = {"flags": 0, "options": 1, "pairs": 2, "reasons": 0}


class Option(NamedTuple):
    """What an option means.

    Attributes:
        meaning: for a reader, or the reason to leave it out (several words).
        values: how many words follow it.
    """

    meaning: str = ""
    values: int = 0


class Options(NamedTuple):
    """The arguments of a program.

    Attributes:
        given: options, what they mean, and their values, which may be empty.
    """

    given: tuple[tuple[str, str, str], ...]
    rest: tuple[str, ...]

    def all(self, meaning: str) -> list[str]:
        return [value for _, known, value in self.given if known == meaning]

    @property
    def reasons(self) -> list[Left]:
        return [leave(meaning) for _, meaning, _ in self.given if " " in meaning]

    def last(self, meaning: str) -> str:
        return (self.all(meaning) or [""])[-1]


@lru_cache(maxsize=1)
def tables() -> dict[str, dict[str, Option]]:
    """The options of programs, by program or kind of program."""
    document = parse_toml(read_text(Path(__file__).with_suffix(".toml"), OWN))
    listed = decode(dict[str, dict[str, dict[str, str]]], document)
    return {
        name: {
            option: Option(meaning, _VALUES[part])
            for part, meanings in parts.items()
            for meaning, options in meanings.items()
            for option in options.split()
        }
        for name, parts in listed.items()
    }


def meaning_of(word: str, table: str) -> str:
    """What a word means; empty if the table does not have it."""
    return tables()[table].get(word, Option()).meaning


_VERSIONED = re.compile(r"(?:.*/)?(python|pip)[\d.]*")
# Not that of a page's own programs, such as ./test.
_DIRECTORY = re.compile(r"\A[/$~].*/")


def program_kind(name: str) -> str:
    """The kind of a program, or the reason why recipes have no key for it; empty if it is not known."""
    found = _VERSIONED.fullmatch(name)
    name = _DIRECTORY.sub("", name)
    launcher = "launch" if name in get_args(LauncherName) else ""
    return meaning_of(found[1] if found else name, "programs") or launcher


def reason(option: str, meaning: str) -> Left:
    """Why an option is left out. A reason that asks is not understood."""
    return leave(f"{option}: {meaning}", understood=not meaning.endswith("?"))


def split(
    words: Sequence[str],
    table: Mapping[str, Option],
    *,
    program: bool = False,
    guess: bool = False,
    long: bool = False,
) -> Options:
    """Read the arguments of a program.

    Args:
        program: stop at the first word that is no option.
        guess: an unknown option may be followed by its value.
        long: options with one dash may be words, such as -nolocal, which is no -n.
    """
    given, rest, left = list[tuple[str, str, str]](), list[str](), deque(words)
    while left and not (program and rest):
        word = left.popleft()
        name, equals, value = word.partition("=")
        short = table.get(word[:2], Option())
        pair = guess and word not in table and bool(left) and not left[0].startswith("-")
        known = table.get(word, Option(values=int(pair)))
        joined = short.values and word[1:2] != "-" and (word[2:3].isdigit() or not (pair or long))
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            rest.append(word)
        elif equals and word.startswith("--"):
            given.append((name, table.get(name, Option()).meaning, value))
        elif len(word) > 2 and word not in table and joined:
            given.append((word[:2], short.meaning, word[2:].removeprefix("=")))
        else:
            joint = known.values == 2 and "=" in "".join([*left][:1])  # -env A=1 for -env A 1
            following = [left.popleft() for _ in range(min(known.values - joint, len(left)))]
            given.append((word, known.meaning, "=".join(following)))
    return Options(tuple(given), (*rest, *left))


_BY_VARIABLE = {
    **{variable: key for key, variable in KEYS.items()},
    "HOROVOD_MPI_THREADS_DISABLE": "launch.mpi_threads_disable",
}
_SWITCHES = ("HOROVOD_ALLOW_MIXED_GPU_IMPL", "HOROVOD_MPI_THREADS_DISABLE")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
_OF_RUNS = re.compile(
    r"HOROVOD_(?:FUSION_THRESHOLD|CYCLE_TIME|TIMELINE\w*|LOG_\w+|AUTOTUNE\w*|CACHE_CAPACITY|STALL_\w+"
    r"|HIERARCHICAL_\w+|NUM_NCCL_STREAMS|NUM_FINALIZER_THREADS|GLOO_TIMEOUT\w*|THREAD_AFFINITY"
    r"|BATCH_D2D_MEMCOPIES|DISABLE_GROUP_FUSION|ENABLE_ASYNC_COMPLETION|ELASTIC_\w+|ADASUM_\w+)"
    r"|(?:NCCL|UCX|UCC|OMPI|PMI|FI|MPICH|PSM[23]|TF|XLA|OMP|KMP|MKL|I_MPI|MV2|CUDNN|PYTORCH|HDF5|MIOPEN"
    r"|HSA|RCCL|PAMI|GLOO|MPIR|CCL|ITEX|ZE|TORCH_NCCL|PYTHON(?:UNBUFFERED|FAULTHANDLER))\w*"
)
_OF_BUILDS = re.compile(r"CC|CXX|FC|CUDAHOSTCXX|MAKEFLAGS|CMAKE_\w+|[CL]?(?:XX|D)?FLAGS")
_SET_BY_OTHERS = re.compile(
    r"(?:SLURM|PBS|LSB|COBALT)_\w+|MASTER_(?:ADDR|PORT)|WORLD_SIZE|N?RANKS?|LOCAL_RANK|NNODES"
    r"|CUDA_VISIBLE_DEVICES|DEBIAN_FRONTEND|(?:CONDA_PKGS|(?:PIP|UV)_CACHE)_DIRS?"
    r"|\w+_(?:VERSION|VER\d?|LABEL|NAME|WHEEL|URL|TAG)"
)
_FOLDERS = re.compile(
    r"(?:\w+_)?(?:PATH|HOME|ROOT|DIRS?|INCLUDE|LIB|LIBRARY|PRELOAD|PYTHONPATH|CPATH|USERBASE)"
)
_OF_THE_PAGE = leave("a variable that the page, the batch system or hvdenv sets", understood=True)


def variable(name: str, value: str, *, exported: bool) -> Iterator[Fact]:
    """What a variable means that a page sets; those of a page itself need no key."""
    if holds_secret(name, value):
        yield leave(f"recipes contain no secrets: export {name} in your shell")
    elif name in _INTERFACES:
        key = at("network", "avoid" if value.startswith("^") else "use")
        yield from (Value(key, each, item=True) for each in value.lstrip("^=").split(","))
    elif name == "MODULEPATH":
        paths = (each for each in value.split(":") if each not in ("", "$MODULEPATH"))
        yield from (Value(at("modules.use"), each, item=True) for each in paths)
    elif name.startswith("HOROVOD_") and not _OF_RUNS.fullmatch(name):
        yield _build_variable(name, value, exported=exported)
    elif _SET_BY_OTHERS.fullmatch(name) or not (exported or name.startswith("HOROVOD_")):
        yield _OF_THE_PAGE
    elif _FOLDERS.fullmatch(name) and not name.startswith("CMAKE_"):
        yield leave("recipes set no search paths and directories: modules and hvdenv do")
    elif of_builds := _OF_BUILDS.fullmatch(name) or _OF_RUNS.fullmatch(name):
        table = "build" if of_builds.re is _OF_BUILDS else "run"
        yield Value(at("environment", table, name), value)
    else:
        yield leave(f"do ranks need {name}? environment.run sets it")


def _build_variable(name: str, value: str, *, exported: bool) -> Fact:
    """A variable of Horovod's build."""
    part = re.fullmatch(r"HOROVOD_WITH(OUT)?_(\w+)", name)
    if (part or name in _SWITCHES) and value != "1":
        return leave(f"it has no effect: Horovod compares {name} with 1")
    if part and part[2] in ("MXNET", "NVTX"):
        return leave(f"hvdenv always builds without {part[2]}", understood=bool(part[1]))
    if part and part[2] in PARTS:
        key, item = PARTS[part[2]]
        # Merged with the items of the list, and removed from it.
        return Value(at(key), f"{WITHOUT}{item}" if part[1] else item, item=True)
    if name in _BY_VARIABLE:
        stated = value if name.endswith("_HOME") else value.lower()
        return Value(at(_BY_VARIABLE[name]), name in _SWITCHES or stated)
    if not part and (not exported or _SET_BY_OTHERS.fullmatch(name)):
        return _OF_THE_PAGE
    known = ", ".join(sorted(PARTS.keys() - {"MXNET"}))
    return leave(f"recipes have no key for {name}: Horovod has the parts {known}")
