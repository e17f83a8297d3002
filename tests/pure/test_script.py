from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdenv.base.command import Command
from hvdenv.base.places import find_places
from hvdenv.base.runner import ALWAYS_SET, CLEANED_PATTERN, clean, cleaned_names
from hvdenv.model.facts import Facts
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import Plan, make_plan, render_bash, steps_of
from hvdenv.plans.step import Step, TextFile
from tests.support.commands import Hvdenv

# Legal in a file's name, and in none of the places that a prefix may lie.
HOSTILE = """/tmp/a b"c'd$(touch pwned)`touch pwned`\\;touch pwned&}{*?#\N{SNOWMAN}"""


def bash(script: str, *words: str, **env: str) -> tuple[int, str]:
    found = subprocess.run(
        ["bash", "-s", "--", *words],
        input=script,
        env={"PATH": os.environ["PATH"], **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return found.returncode, found.stdout


def accepted(script: str) -> bool:
    return subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.fixture
def plan(recipe: Recipe, facts: Facts, tmp_path: Path) -> Plan:
    return make_plan(steps_of(recipe, facts, facts.interpreters[0])).at(tmp_path / "generation")


@pytest.mark.parametrize("words", [(), ("--variant", "openmpi5"), ("--locked",)])
def test_bash_accepts_the_script(words: tuple[str, ...], cases: Path, hvdenv: Hvdenv) -> None:
    command = ("plan", "local", *words, "--facts", str(cases / "facts.json"))
    script, shared = hvdenv(*command, "--format", "bash").out, str(find_places().cache)
    assert accepted(script)
    if "--locked" in words:  # needs neither uv nor caches
        said = hvdenv(*command).out
        assert "uv_pip.py" in said and f"UV_CACHE_DIR={shared}" in said
        assert "uv_pip" not in script and shared not in script
        assert "--require-hashes" in script


def test_the_script_goes_by_its_own_folder_and_ends_with_the_check_of_the_documents(
    plan: Plan,
) -> None:
    script = render_bash(plan, Path("/envs/local"))
    assert str(plan.generation) not in script
    assert "/envs/local" in script
    lines = script.rstrip().splitlines()
    check = lines.index("""bash -c '. "$0/activate.sh" && horovodrun --check-build' "$folder\"""")
    assert not [line for line in lines[check + 1 : -1] if line and not line.startswith("#")]


def test_a_folder_that_is_refused_and_nothing_is_run(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = render_bash(plan, Path(HOSTILE))
    assert accepted(script)
    for words in ((), (HOSTILE,), ("rel a b",), ("$(touch pwned)",)):
        code, said = bash(script, *words)
        assert code == 2, said
        assert "name a directory without spaces and special characters" in said
    assert bash(script, str(tmp_path)) == (2, f"{tmp_path} exists already\n")
    assert list(tmp_path.iterdir()) == []


# Neither is in any recipe: the pattern of each value refuses them. The script quotes all the same.
WORDS = ["a b", "$(touch pwned)", "`touch pwned`", "'", '"', "\\", "", "*", "~", "x;y", "#", "-n", "!",
         "$HOME", "{a,b}"]  # fmt: skip


def harmless(plan: Plan, *steps: Step) -> Plan:
    """A plan whose steps install nothing."""
    return plan._replace(steps=steps)


def test_words_variables_and_texts_arrive_as_they_are(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside = plan.generation / "build"
    text = "".join(f"{word}\n" for word in WORDS)
    steps = (
        Step("words", "first\nline; touch pwned", (Command(("printf", "%s\n", *WORDS)),)),
        Step("variable", "", (Command(("printenv", "HOSTILE"), (("HOSTILE", "".join(WORDS)),)),)),
        Step("plain", "", files=(TextFile(inside / "plain.txt", text),)),
        Step("named", "", files=(TextFile(inside / "named.txt", f"{text}{inside}/x $folder\n"),)),
        Step("folder", "", (Command(("printf", "%s\n", f"a:{inside}:{inside}/x y")),)),
    )
    folder = tmp_path / "made"
    code, said = bash(render_bash(harmless(plan, *steps), folder))
    assert code == 0, said
    assert said == (
        f"== words\n{text}== variable\n{''.join(WORDS)}\n== plain\n== named\n"
        f"== folder\na:{folder}/build:{folder}/build/x y\ndone: . {folder}/activate.sh\n"
    )
    assert (folder / "build/plain.txt").read_text() == text
    assert (folder / "build/named.txt").read_text() == f"{text}{folder}/build/x $folder\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


def test_the_script_imports_nothing_from_the_current_folder(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pathlib.py").write_text("print('of the directory')")
    monkeypatch.chdir(tmp_path)
    steps = (Step("python", "", (Command((sys.executable, "-c", "import pathlib")),)),)
    code, said = bash(render_bash(harmless(plan, *steps), Path("/envs/local")), "made")
    assert (code, said) == (0, f"== python\ndone: . {tmp_path}/made/activate.sh\n")


def test_a_step_that_fails_ends_the_script(plan: Plan, tmp_path: Path) -> None:
    steps = (Step("one", "", (Command(("false",)),)), Step("two", "", (Command(("echo", "on")),)))
    code, said = bash(render_bash(harmless(plan, *steps), tmp_path / "made"))
    assert (code, said) == (1, "== one\n")


def test_the_activation_of_the_script_is_that_of_hvdenv(plan: Plan, tmp_path: Path) -> None:
    (activation,) = (step for step in plan.steps if step.name == "activation")
    folder = tmp_path / "made"
    assert bash(render_bash(harmless(plan, activation), folder))[0] == 0
    expected = activation.files[0].text.replace(str(plan.generation), str(folder))
    assert (folder / "activate.sh").read_text() == expected


CLEANED = """
    CPATH PYTHONPATH PYTHONHOME PYTHONUSERBASE HOROVOD_WITH_MPI HOROVOD_CUDA_HOME HVDENV_TOKEN CC CXX
    CFLAGS CPPFLAGS CXXFLAGS CUDAFLAGS LDFLAGS CCL_ROOT CONDA_PREFIX CONDA_DEFAULT_ENV LD_PRELOAD
    LIBRARY_PATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CUDA_HOME CUDA_PATH NCCL_HOME CUDNN_PATH
    CMAKE_PREFIX_PATH CMAKE_GENERATOR MAKEFLAGS DESTDIR OMPI_MCA_btl PMIX_RANK PRTE_ALLOW_RUN_AS_ROOT
    I_MPI_ROOT MPI_HOME MPICH_CC OPAL_PREFIX VIRTUAL_ENV PIP_USER PIP_TARGET PIP_NO_BUILD_ISOLATION
    TF_CPP_MIN_LOG_LEVEL TORCH_CUDA_ARCH_LIST SETUPTOOLS_USE_DISTUTILS
""".split()
KEPT = """
    PATH HOME USER LD_LIBRARY_PATH PIP_CONSTRAINT PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CONFIG_FILE
    PIP_CACHE_DIR PIP_PROXY PIP_CERT https_proxy HTTPS_PROXY no_proxy SSL_CERT_FILE TMPDIR LANG
    SLURM_JOB_ID MODULEPATH LOADEDMODULES HVDENV_HOME MY_CC CCX XDG_CACHE_HOME TERM
""".split()


def test_what_is_taken_away_and_what_stays() -> None:
    seen = dict.fromkeys([*CLEANED, *KEPT], "x")
    assert clean(seen) == {**dict.fromkeys(KEPT, "x"), **dict(ALWAYS_SET)}
    assert cleaned_names(seen) == sorted(CLEANED)


def test_the_script_takes_away_the_same(plan: Plan, tmp_path: Path) -> None:
    """Bash reads the pattern its own way: it is asked, and nothing is in it that it cannot read."""
    assert not any(each in CLEANED_PATTERN for each in ("\\", "(?", "{", "^", "$", " "))
    step = Step("see", "", (Command(("env",)),))
    variables = dict.fromkeys({*CLEANED, *KEPT} - {"PATH", "TMPDIR"}, "x")
    code, said = bash(render_bash(harmless(plan, step), tmp_path / "made"), **variables)
    assert code == 0, said
    seen = dict(line.split("=", 1) for line in said.splitlines() if "=" in line and line[0] != "=")
    assert {name for name in CLEANED if seen.get(name) == "x"} == set()
    assert {name for name in KEPT if name not in seen} - {"TMPDIR"} == set()
    assert {name: seen[name] for name, _ in ALWAYS_SET} == dict(ALWAYS_SET)
