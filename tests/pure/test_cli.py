"""The command line: help, mistakes, exit codes; where the ranks of verify go."""

from __future__ import annotations

import argparse
import ast
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdenv import __version__, cli
from hvdenv.base.errors import HvdenvError
from hvdenv.cli import verify
from hvdenv.cli.main import COMMANDS, GROUPS, main, make_parser
from hvdenv.cli.options import command_line
from hvdenv.environments.installation import Expectation
from hvdenv.model.layers import load_recipe
from hvdenv.verification.verify import usual_ranks
from tests.support.commands import Hvdenv

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(command: str, hvdenv: Hvdenv) -> None:
    said = hvdenv(command, "--help")
    assert "examples:" in said.out
    assert f"hvdenv {command}" in said.out
    assert said.err == ""


def test_help(hvdenv: Hvdenv) -> None:
    said = hvdenv("--help").out
    assert all(f"\n  {command:12}{summary}\n" in said for command, summary in COMMANDS.items())
    assert re.findall(r"^(\w+):$", said, re.MULTILINE) == [*GROUPS, "options", "examples"]
    assert "exit codes:" in said
    assert hvdenv("--version").out == f"hvdenv {__version__}\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("biuld local", 2, 'error: there is no command "biuld"; did you mean "build"?'),
        ("show", 2, "error: show needs a recipe"),
        ("show lokal", 2, 'did you mean "local"'),
        ("show local+torch", 2, 'did you mean "local --variant torch"'),
        ("show ./none.toml", 2, "error: none.toml: cannot read this file: No such file"),
        ("show local --variant conda", 2, 'has no variant "conda"'),
        ("show local --variant torch --variant tensorflow", 2, "both set horovod.frameworks"),
        ("show local --set x", 2, "write KEY=VALUE"),
        ("show local --site none.toml", 2, "none.toml: cannot read this file"),
        ("plan local --facts /none.json", 2, "/none.json: cannot read this file"),
        ("verify --report none.json", 2, "--report none.json: cannot read it"),
        ("verify none -n 0", 2, "-n: 0 ranks"),
        ("plan local --python 2.7", 3, "--python requests 2.7"),
        ("plan local --prefix /", 2, "cannot be a prefix"),
        ("plan local --format bash --json", 2, "--json and --format bash exclude each other"),
        ("job neuron --image /x.sqsh -- true", 2, "build it: hvdenv build neuron"),
        ("envs rollback none", 2, "no environments are named none"),
        ("envs prune --keep 0", 2, "--keep must be 1 or more"),
        (f"job neuron --to {__file__}/x -- true", 5, "check this path: a part of it is missing"),
        (
            "lock local --check --variant torch --python 3.12 --platform linux-ppc64le",
            4,
            "`hvdenv lock local --variant torch --python 3.12 --platform linux-ppc64le`",
        ),
        (
            "run neuron --set places.environments=/none -- true",
            125,
            "hvdenv build neuron --set places.environments=/none",
        ),
    ],
)
def test_mistakes_of_users_are_said_on_standard_error(
    words: str,
    code: int,
    said: str,
    hvdenv: Hvdenv,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = hvdenv(*words.split(), code=code)
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert "what to do: " in shown.err or "did you mean" in shown.err


@pytest.mark.parametrize(
    ("words", "error", "remedy"),
    [
        ("--verison", '--verison; did you mean "--version"?', "--help"),
        ("-- show", "invalid choice: '--'", "--help"),
        ("verify local --quik", '--quik; did you mean "--quick"?', "verify --help"),
        ("module local --output x", "unrecognized arguments: --output x\n", "module --help"),
        ("show local --horovod=9", "unrecognized arguments: --horovod=9", "show --help"),
        ("show local --variant", "--variant: expected one argument", "show --help"),
        ("build local --quiet --verbose", "not allowed with argument -q", "build --help"),
        ("job local python x", "python x; write -- before the command", "job --help"),
        ("wheels export", "invalid choice: 'export' (choose from", "wheels --help"),
        ("wheels publish", "arguments are required: DIR\n", "wheels publish --help"),
        ("plan local --python /bin/x", "'/bin/x' is not a version such as 3.11", "plan --help"),
    ],
)
def test_malformed_usage_is_one_message_with_a_remedy(
    words: str, error: str, remedy: str, hvdenv: Hvdenv
) -> None:
    said = hvdenv(*words.split(), code=2)
    first, second = said.err.splitlines(keepends=True)
    assert first.startswith("error: ")
    assert error in first
    assert second.startswith("what to do: ")
    assert f"hvdenv {remedy}" in second
    assert said.out == ""


def test_every_error_of_a_command_says_what_to_do() -> None:
    kinds = {each.__name__ for each in HvdenvError.__subclasses__()}
    without = [
        f"{path.name}:{node.lineno}"
        for path in Path(cli.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and node.args
        and getattr(node.func, "id", "") in kinds
        and not any(each.arg == "remedy" for each in node.keywords)
    ]
    assert without == []


WORDS = st.sampled_from(
    ["recipes", "show", "plan", "check", "envs", "completion", "local", "--json", "--variant", "torch",
     "--set", "mpi.version=5", "--python", "3.11", "--prefix", "p q", "--", "-h", "--format", "bash",
     "--site", "/", "./x.toml", "prune", "rollback", "remove", "--keep", "-1", "", "=", "--facts", "/dev/null"]
)  # fmt: skip


@given(words=st.lists(WORDS | st.text(max_size=5), max_size=6))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_words_show_a_bug(words: list[str], capsys: Captured) -> None:
    """`verify` and `build` are left out: they would do what they are told."""
    if {"verify", "build"} & {*words}:
        return
    code = main(words)
    said = capsys.readouterr()
    assert code in (0, 2, 3, 5), (words, said.err)
    assert "Traceback" not in said.err


def with_command(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """A command that does what a test needs, in the place of `recipes`."""
    module = ModuleType("hvdenv.cli.recipes")
    vars(module).update(EXAMPLES="examples:", configure=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def fail(error: BaseException) -> Any:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


def test_a_bug_gives_70_and_a_text_to_paste_and_an_interruption_130(
    monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    with_command(monkeypatch, fail(ValueError("https://u:secret@host")))
    said = hvdenv("recipes", code=70)
    assert said.out == ""
    assert said.err.startswith(f"this is a bug in hvdenv {__version__} (Python 3.")
    assert "Traceback (most recent call last)" in said.err
    assert "ValueError: https://***@host" in said.err
    with_command(monkeypatch, fail(KeyboardInterrupt()))
    assert "interrupted" in hvdenv("recipes", code=130).err


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOSPC, errno.EROFS])
def test_what_a_file_system_refuses_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv, number: int
) -> None:
    with_command(monkeypatch, fail(OSError(number, os.strerror(number), "/data/x")))
    said = hvdenv("recipes", code=5).err
    assert f"/data/x: cannot read or write: {os.strerror(number)}" in said
    assert "bug" not in said


@pytest.mark.parametrize("words", ["recipes", "show local", "plan local", "check local", "envs"])
def test_json_is_all_that_is_on_standard_output(words: str, cases: Path, hvdenv: Hvdenv) -> None:
    facts = ("--facts", str(cases / "facts.json")) if words.startswith(("plan", "check")) else ()
    said = hvdenv(*words.split(), *facts, "--json")
    assert json.loads(said.out) is not None
    assert said.err == ""


def module(*words: str, **options: Any) -> subprocess.Popen[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, "-m", "hvdenv", *words], **options)


def test_a_reader_that_goes_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = module("show", "local", stdout=writing)
    os.close(writing)
    _, said = process.communicate()
    assert (process.returncode, said) == (141, "")


def test_what_the_terminal_has_no_characters_for(cases: Path) -> None:
    facts = str(cases / "facts.json")
    prefix = os.fsdecode(b"/tmp/\xc3\xbc\xff")
    words = ("plan", "local", "--facts", facts, "--prefix", prefix)
    process = module(*words, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "\n/tmp/\\xfc\\udcff -> /tmp/" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("", 2, "hvdenv build local "),
        ("wheels list", 0, "no wheels yet"),
        ("envs", 0, "no environments yet; build one with `hvdenv build local`"),
        ("completion", 0, "hvdenv completion bash > "),
    ],
)
def test_a_command_alone_lists(words: str, code: int, said: str, hvdenv: Hvdenv) -> None:
    printed = hvdenv(*words.split(), code=code)
    assert said in printed.out
    assert "error" not in printed.err


# ---------------------------------------------------------------- options of verify


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 3), (1, 3), (2, 2), (8, 3)])
def test_enough_ranks_for_process_sets(gpus: int, ranks: int) -> None:
    """Two share no proper subset; more than there are GPUs would take NCCL its proof."""
    assert usual_ranks(gpus) == ranks


def test_allreduces_alone_take_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of an allocation."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(verify, "gpus", lambda: ())
    parser, recipe = argparse.ArgumentParser(), load_recipe("local").recipe
    verify.configure(parser)
    for words, ranks in (((), 3), (("--quick",), 2), (("--quick", "-n", "5"), 5)):
        launch, _ = verify._launched(parser.parse_args(words), recipe, Expectation())
        assert (launch.ranks, launch.hosts) == (ranks, ())


def test_the_command_without_variables_of_the_shell() -> None:
    arguments = make_parser("verify").parse_args(["verify", "--prefix", "/my env", "-n", "2"])
    words = ("verify", "--prefix=/my env", "--ranks=2", "--clean")
    assert command_line(arguments, clean=True) == words
