"""The installed program `hvdenv`: which Python it starts, and what can disturb it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from hvdenv import STANDALONE
from hvdenv.base.runner import ENDING
from hvdenv.cli.main import COMMANDS, PASS_CODES_ON, main
from tests.support.files import write

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("hvdenv")
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
FULL = Path("/dev/full")


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **options.pop("env", {})}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        list(map(str, words)), env=variables, text=True, check=False, timeout=60, **options
    )


def test_nothing_of_the_users_python_reaches_hvdenv(tmp_path: Path) -> None:
    """Modules of sites put directories of an older Python on PYTHONPATH, with its enum.py."""
    for name in sys.stdlib_module_names:
        write(tmp_path / f"{name}.py", f"raise SystemExit('{name} of the user')")
    done = run(PROGRAM, "recipes", env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nlocal " in done.stdout
    shadowed = run(sys.executable, "-m", "hvdenv", env={"PYTHONPATH": str(tmp_path)})
    assert "of the user" in shadowed.stderr  # as it was
    # All variables that this Python obeys.
    library = Path(os.__file__).parent
    text = run(sys.executable, "-h", "--help-env").stdout + (library / "site.py").read_text()
    names = {"PYTHONHOME", "PYTHONPATH", *re.findall(r"\bPYTHON[A-Z_]+\b", text)}
    assert {"PYTHONUSERBASE", "PYTHONWARNINGS"} <= names
    done = run(PROGRAM, "--version", env=dict.fromkeys(names, "/nowhere"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a virtual environment with hvdenv, whose path has a space."""
    folder = tmp_path_factory.mktemp("of a user") / "venv"
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
    put(folder)
    return folder / "bin"


def put(prefix: Path) -> None:
    """Install hvdenv into a prefix, as an editable one."""
    packages = prefix / "lib" / PYTHON / "site-packages"
    (packages / "hvdenv-0.1.0.dist-info").mkdir(parents=True)
    own = [each for each in sys.path if each.endswith("site-packages")]
    write(packages / "hvdenv.pth", "\n".join(map(str, (ROOT, *own))))
    (prefix / "bin").mkdir(exist_ok=True)
    shutil.copy(ROOT / "bin/hvdenv", prefix / "bin/hvdenv")


def test_the_python_beside_it_is_used(installed: Path, tmp_path: Path) -> None:
    assert PROGRAM.read_bytes() == (ROOT / "bin/hvdenv").read_bytes()
    (tmp_path / "one").symlink_to(installed / "hvdenv")
    (tmp_path / "hvdenv").symlink_to("one")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for program, variables in (
        (installed / "hvdenv", {}),
        (tmp_path / "one", {}),
        ("hvdenv", path),
    ):
        done = run(program, "--version", env=variables)
        assert (done.returncode, done.stderr) == (0, ""), program
        assert done.stdout.startswith("hvdenv ")
    done = run("./hvdenv", "show", "no such  recipe", cwd=installed)
    assert done.returncode == 2
    assert "no such  recipe" in done.stderr


def test_an_installation_for_the_user_finds_its_python(tmp_path: Path) -> None:
    put(tmp_path / ".local")
    program = tmp_path / ".local/bin/hvdenv"
    write(tmp_path / ".local/bin/python3", "#!/bin/sh\nexit 9\n", 0o755)  # that of another program
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / PYTHON).symlink_to(sys.executable)
    done = run(program, "recipes", env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / ".local/lib" / PYTHON).rename(tmp_path / ".local/lib/python3.1")
    done = run(program, "recipes")
    assert done.returncode == 127
    assert done.stderr.startswith(f"error: {program}: the Python that hvdenv was installed for")


NO_SPACE = "error: standard output: cannot write the output: No space left on device\nwhat to do: "


@pytest.mark.parametrize(
    "words",
    [("recipes",), ("--version",), ("--help",), *((name, "--help") for name in COMMANDS)],
    ids=" ".join,
)
def test_a_full_disk_is_named_for_every_output(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with FULL.open("w") as full, redirect_stdout(full):
        assert main(words) == (125 if words[0] in PASS_CODES_ON else 5)
    assert capsys.readouterr().err.startswith(NO_SPACE)


def test_the_exit_code_does_not_depend_on_where_messages_go() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with FULL.open("w") as full:
        for words in (("show", "nonsense"), ("recipes", "--nonsense"), ("nonsense",)):
            assert run(PROGRAM, *words, stderr=full).returncode == 2
        assert run(PROGRAM, "nonsense", stderr=writing).returncode == 2
        assert run(PROGRAM, "recipes", stdout=full, stderr=full).returncode == 5
    os.close(writing)
    for closed in (">&-", "2>&-", "<&-", ">&- 2>&-"):
        assert run("sh", "-c", f"exec {PROGRAM} show nonsense {closed}").returncode == 2


@pytest.mark.parametrize("number", ENDING, ids=lambda each: each.name)
def test_an_interrupt_at_any_moment_is_one_line(number: signal.Signals, cases: Path) -> None:
    words = [str(PROGRAM), "plan", "local", "--facts", str(cases / "facts.json")]
    began = time.monotonic()
    assert run(*words).returncode == 0
    whole = time.monotonic() - began
    # Each signal at moments of its own: the shell, Python's own start, then the command.
    first = ENDING.index(number) / len(ENDING)
    starting = [0.012 * (first + each) for each in range(4)]
    for wait in (*starting, *(0.01 + whole * (first + part) / 2 for part in range(2))):
        with subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            time.sleep(wait)
            process.send_signal(number)
            _, said = process.communicate()
        assert process.returncode in (130, 0, -number)  # the latter: the shell script itself
        assert "Traceback" not in said
        assert said.startswith("error: interrupted") == (process.returncode == 130)


@pytest.mark.parametrize(
    "program",
    [
        path
        for path in sorted(STANDALONE.rglob("*.py"))
        if "__main__" in path.read_text(encoding="utf-8")
        # rank.py starts the other programs of its directory, without the variable.
        and (path.parent.name != "ranks" or path.name == "rank.py")
    ],
    ids=lambda path: path.name,
)
def test_programs_find_their_siblings_without_their_folder(program: Path) -> None:
    """PYTHONSAFEPATH leaves it out. Modules of hvdenv's directories must not stay on the path."""
    variables = {"PYTHONSAFEPATH": "1", "PATH": "/usr/bin:/bin"}
    words = (sys.executable, "-s", program, "--help")
    safe = run(*words, env=variables, stdin=subprocess.DEVNULL, cwd="/")
    missing = re.findall(r"No module named '(\w+)'", safe.stderr)
    siblings = {path.stem for path in program.parent.glob("*.py")}
    assert not siblings & {*missing}
