"""What the options of programs mean, and what the variables that a page sets mean, in a recipe."""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.masking import holds_secret
from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import decode, parse_toml
from hvdenv.drafting.values import WITHOUT, Fact, Value, Weight, at, leave
from hvdenv.knowledge.flags import KEYS, PARTS

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


def split(
    words: Sequence[str],
    table: Mapping[str, Option],
    *,
    program: bool = False,
    guess: bool = False,
) -> Options:
    """Read the arguments of a program.

    Args:
        program: stop at the first word that is no option.
        guess: an unknown option may be followed by its value.
    """
    given, rest, left = list[tuple[str, str, str]](), list[str](), deque(words)
    while left and not (program and rest):
        word = left.popleft()
        name, equals, value = word.partition("=")
        short = table.get(word[:2], Option())
        pair = guess and word not in table and bool(left) and not left[0].startswith("-")
        known = table.get(word, Option(values=int(pair)))
        joined = short.values and word[1:2] != "-" and (word[2:3].isdigit() or not pair)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            rest.append(word)
        elif equals and word.startswith("--"):
            given.append((name, table.get(name, Option()).meaning, value))
        elif len(word) > 2 and word not in table and joined:
            given.append((word[:2], short.meaning, word[2:].removeprefix("=")))
        else:
            following = [left.popleft() for _ in range(min(known.values, len(left)))]
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
# Others, with the reason to leave them out. Those of a page itself need no key.
_SET_BY_OTHERS = "the page, the batch system or hvdenv sets it"
_CACHE = "hvdenv has a cache of its own"
_OTHERS = {
    "recipes do not set search paths: modules and hvdenv do": re.compile(
        r"^(?:(?:LD_LIBRARY_|LIBRARY_|PYTHON|C_INCLUDE_|CPLUS_INCLUDE_|C)?PATH|LD_PRELOAD|INCLUDE"
        r"|PYTHONUSERBASE)$"
    ),
    _SET_BY_OTHERS: re.compile(
        r"^(?:(?:SLURM|PBS|LSB|COBALT)_\w+|MASTER_(?:ADDR|PORT)|WORLD_SIZE|N?RANKS?|LOCAL_RANK|NNODES"
        r"|CUDA_VISIBLE_DEVICES|\w+_(?:VERSION|VER\d?|LABEL|NAME|WHEEL|URL|TAG))$"
    ),
    _CACHE: re.compile(r"^(?:CONDA_PKGS_DIRS|(?:PIP|UV)_CACHE_DIR)$"),
    "a directory that the page uses": re.compile(
        r"^(?!CMAKE_)\w+_(?:HOME|ROOT|DIRS?|PATH|INCLUDE|LIB|LIBRARY|INSTALL_PATH)$"
    ),
    "recipes name no proxies: set it in your shell": re.compile(r"(?i)^\w+_proxy$"),
}
_OF_THE_PAGE = leave("a variable that the page uses", understood=True)


def variable(name: str, value: str, *, exported: bool) -> Iterator[Fact]:
    if holds_secret(name, value):
        yield leave(f"recipes contain no secrets: export {name} in your shell")
    elif name in _INTERFACES:
        key = at("network", "avoid" if value.startswith("^") else "use")
        yield from (Value(key, each, item=True) for each in value.lstrip("^=").split(","))
    elif name.startswith("HOROVOD_") and not _OF_RUNS.fullmatch(name):
        yield from _build_variable(name, value, exported=exported)
    elif reasons := [told for told, pattern in _OTHERS.items() if pattern.search(name)]:
        needless = not exported or reasons[0] in (_SET_BY_OTHERS, _CACHE)
        yield leave(reasons[0], understood=needless)
    elif not exported and not name.startswith("HOROVOD_"):
        yield _OF_THE_PAGE
    elif of_builds := _OF_BUILDS.fullmatch(name) or _OF_RUNS.fullmatch(name):
        table = "build" if of_builds.re is _OF_BUILDS else "run"
        yield Value(at("environment", table, name), value)
    else:
        yield leave(f"hvdenv does not know what {name} is for")


def _build_variable(name: str, value: str, *, exported: bool) -> Iterator[Fact]:
    """A variable of Horovod's build."""
    part = re.fullmatch(r"HOROVOD_WITH(OUT)?_(\w+)", name)
    folder = re.fullmatch(r"HOROVOD_(CUDA|NCCL|ROCM)_(?:INCLUDE|LIB)", name)
    if (part or name in _SWITCHES) and value != "1":
        yield leave(f"it has no effect: Horovod compares {name} with 1")
    elif part:
        yield _part(part[2], wanted=not part[1])
    elif name in _BY_VARIABLE:
        stated = value if name.endswith("_HOME") else value.lower()
        yield Value(at(_BY_VARIABLE[name]), name in _SWITCHES or stated)
    elif folder:
        key = f"horovod.gpu.{folder[1].lower()}_home"
        above, _, last = value.rstrip("/").rpartition("/")
        told = leave(f"recipes state the directory above include and lib: {key}")
        below = above and last in ("include", "lib", "lib64")
        yield Value(at(key), above, weight=Weight.INFERRED) if below else told
    elif name == "HOROVOD_BUILD_CUDA_CC_LIST":
        for capability in value.split(","):
            yield Value(at("horovod.gpu.capabilities"), capability.replace(".", ""), item=True)
    elif not exported or _OTHERS[_SET_BY_OTHERS].search(name):
        yield _OF_THE_PAGE
    else:
        yield leave(f"recipes have no key for {name}")


def _part(name: str, *, wanted: bool) -> Fact:
    if name in ("MXNET", "NVTX"):
        told = "does not build Horovod for" if wanted else "always builds without"
        return leave(f"hvdenv {told} {name}", understood=not wanted)
    if name not in PARTS:
        known = ", ".join(sorted(PARTS.keys() - {"MXNET"}))
        return leave(f"Horovod has no part {name}: its parts are {known}")
    key, value = PARTS[name]
    # Merged with the items of the list, and removed from it.
    return Value(at(key), value if wanted else f"{WITHOUT}{value}", item=True)
