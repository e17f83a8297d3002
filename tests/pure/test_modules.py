from __future__ import annotations

import subprocess
import tempfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdenv.base.schema import Problem, decode
from hvdenv.model.cluster import Modules
from hvdenv.sites.module_shell import LoadResult, judge
from hvdenv.sites.modules import (
    Loaded,
    compare,
    offers,
    parse_available,
    shell_lines,
    split_loaded,
)

# A `module` that writes down its arguments and believes everything.
RECORDING = """\
module() {
    printf '%s\\0' "$#" "$@" >> "$RECORD"
    case $1 in
    load) LOADEDMODULES="${LOADEDMODULES-}:$2" ;;
    esac
}
"""
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


def recorded(shell: str, modules: Modules) -> tuple[int, str, list[list[str]]]:
    """The status of the lines in a shell, what it said, and what `module` was called with."""
    with tempfile.NamedTemporaryFile() as record:
        done = subprocess.run(
            [shell, "-c", RECORDING + "\n".join(shell_lines(modules, "build"))],
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "RECORD": record.name},
            capture_output=True,
        )
        words = record.read().decode().split("\0")
    calls = []
    while len(words) > 1:
        count = int(words[0])
        calls.append(words[1 : count + 1])
        words = words[count + 1 :]
    return done.returncode, done.stderr.decode("utf-8", "replace"), calls


@pytest.mark.parametrize("shell", ["dash", "bash"])
@settings(max_examples=40)
@given(words=st.lists(WORDS, min_size=1, max_size=4))
@example(words=["$(touch /tmp/evil)", "a'b", 'a"b', "a\nb; exit 0", "`id`", "\\", "*", "-"])
@example(words=["#", "!x", "~", "{a,b}", "é", ")", "esac", "a b", "%s", "|| exit"])
def test_no_name_is_more_than_a_word_to_the_shell(shell: str, words: list[str]) -> None:
    modules = Modules(purge="no", unload=tuple(words), load=tuple(words), build=tuple(words))
    status, said, calls = recorded(shell, modules)
    assert (status, said) == (0, "")
    assert calls == [
        *(["unload", word] for word in words),
        *(["load", word] for word in words * 2),
    ]


@pytest.mark.parametrize("shell", ["dash", "bash"])
@settings(max_examples=25)
@given(word=WORDS)
@example(word="a'; touch /tmp/evil; '")
def test_a_failure_says_the_hostile_name_and_does_nothing_else(shell: str, word: str) -> None:
    for fields, what in (
        ({"use": (f"/nowhere/{word}",)}, "there is no directory of modules /nowhere/"),
        ({"source": (f"/nowhere/{word}",)}, "cannot read the script /nowhere/"),
    ):
        status, said, calls = recorded(shell, Modules(load=("gcc",), **fields))  # type: ignore[arg-type]
        assert status == 1
        assert f"{what}{word}\n" in said
        assert calls == [["purge"]]


@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize(
    ("module", "tried"),
    [
        ('echo "$@"; test "$2" != two', ["purge", "load one", "load two"]),
        # Environment Modules 3 ends with status 0 when there is no such module.
        ('echo "$@"; LOADEDMODULES=one', ["purge", "load one", "load two", "load three"]),
    ],
)
def test_a_failure_is_noticed(shell: str, module: str, tried: list[str]) -> None:
    lines = "\n".join(shell_lines(Modules(load=("one", "two", "three")), "run"))
    words = [shell, "-c", f"module() {{ {module}; }}\n{lines}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.splitlines() == tried
    assert done.stderr.endswith("cannot load the module two\n")


def test_names_of_modules() -> None:
    hostile = ["gcc;id", "gcc 10", "$(id)", "a\nb", "-x", "`id`", "a'b", "gcc/10|sh", ""]
    for name in (*hostile, "Horovod-0.28.1.eb"):
        for fields in ({"load": [name]}, {"unload": [name]}):
            with pytest.raises(Problem):
                decode(Modules, fields)
    of_sites = ["evp-patch", "GCCcore/.11.2.0", "cudampi/openmpi-4.1.1", "craype-accel-amd-gfx90a"]
    of_sites += ["Horovod/0.28.1-foss-2022a-CUDA-11.7.0", "compilers/gcc/10.2", "libstdc++/12"]
    assert decode(Modules, {"load": of_sites}).load == tuple(of_sites)


def test_what_the_shell_does_is_no_difference() -> None:
    before = {"PATH": "/bin", "SHLVL": "1", "PWD": "/", "BASH_ENV": "/x", "GONE": "1"}
    loaded = {
        "LOADEDMODULES": "gcc/10.2.0:evp-patch",
        "PATH": "/opt/bin:/bin",
        "_ModuleTable001_": "X01v",
        "__LMOD_REF_COUNT_PATH": "/opt/bin:1",
    }
    own = {"SHLVL": "2", "_": "/usr/bin/env", "OLDPWD": "/", "BASH_FUNC_module%%": "() { :; }"}
    found = compare(before, {**loaded, **own})
    assert found == Loaded(loaded, ("GONE",), ("gcc/10.2.0", "evp-patch"))
    assert split_loaded("") == ()


def test_names_in_the_lists_of_each_system() -> None:
    lmod = (
        "compiler(@gcc/10.2.0)\n/apps/Core:\nGCC/\nGCC/10.2.0\nGCCcore/.11.2.0\n"
        "gcc/old(@gcc/9.1.0)\nLmod Warning: the cache is old\nGCC/10.2.0\n"
    )
    assert parse_available(lmod) == ("compiler", "GCC/10.2.0", "GCCcore/.11.2.0", "gcc/old")
    tcl = (
        "/apps/modulefiles:\ncompiler(@)\ngcc/9.1.0(old)\ngcc/10.2.0(default) <L>\n"
        "GCCcore/.11.2.0 <H>\n\nERROR: no such directory\nevp-patch\n"
    )
    found = "compiler gcc/9.1.0 gcc/10.2.0 GCCcore/.11.2.0 evp-patch"
    assert parse_available(tcl) == tuple(found.split())


def test_what_modules_offer() -> None:
    horovod, ce = "Horovod/0.28.1-foss-2022a-CUDA-11.7.0-PyTorch-1.13.1", "open-ce/1.10.0-py39-ibm"
    there = "cudampi/openmpi-4.1.1 tensorflow/2.9.0 nccl/2.15.5-ofi aws-ofi-nccl/1.4 OpenMPI/4.0.5"
    there += " cray-mpich/8.1 torch/2.1 Bison/3 mpi4py/3.1 HDF5/1.10-gompi"
    assert offers((horovod, ce, *there.split())) == {
        "Horovod": (horovod, ce),
        "PyTorch": (horovod, ce, "torch/2.1"),
        "TensorFlow": (ce, "tensorflow/2.9.0"),
        "MPI": ("cray-mpich/8.1", "cudampi/openmpi-4.1.1", "OpenMPI/4.0.5"),
        "NCCL": ("nccl/2.15.5-ofi",),
    }


def test_how_modules_stand() -> None:
    python = "Python/3.6.6-fosscuda-2018b"
    missing, gcc = "ERROR: Unable to locate a modulefile for", ("gcc/10.2.0",)
    trials = (
        LoadResult("gcc", 0, "", before=(), after=gcc),
        LoadResult("compiler", 0, "", before=gcc, after=gcc),
        LoadResult("mpi/2", 1, f"{missing} 'mpi/2'", before=gcc, after=gcc),
        LoadResult("nvhpc/1", 1, "a conflict\n", before=gcc, after=gcc),
        LoadResult("Pyhton", 1, f"{missing} 'Pyhton'", before=gcc, after=gcc),
        # Environment Modules 3 ends with status 0.
        LoadResult("silent/1", 0, f"{missing} 'silent/1'", before=gcc, after=gcc),
        LoadResult("tf/2", 1, "", before=gcc, after=gcc, prerequisites=("GCC/10", "GCC/11")),
        LoadResult("gcc/12", 0, "", before=gcc, after=("gcc/12",)),
    )
    examined = judge(trials, ("gcc/10.2.0", "gcc/12", "nvhpc/1", "mpi/4", "tf/2", python))
    assert [f"{each.state}: {each}" for each in examined] == [
        "loads: gcc: available",
        "loads: compiler: available",
        "missing: mpi/2: not available; similar modules: mpi/4",
        "fails: nvhpc/1: available, but cannot be loaded",
        f"missing: Pyhton: not available; similar modules: {python}",
        "missing: silent/1: not available",
        "hidden: tf/2: first load GCC/10, or GCC/11",
        "loads: gcc/12: available",
    ]
    assert examined[3].output == "a conflict"
