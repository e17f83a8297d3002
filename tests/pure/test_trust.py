"""Nothing that another user can change is executed without --trust, by any command."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from hvdenv.base import trust
from hvdenv.base.command import Command
from hvdenv.base.runner import Runner, drop_relative_folders
from hvdenv.base.schema import decode, encode
from hvdenv.cli.main import COMMANDS, main, make_parser
from hvdenv.environments import generations
from hvdenv.model.cluster import Modules
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Conda, FrameworkPackage, Source, executed_paths
from hvdenv.session import build as session_build
from hvdenv.session import job
from tests.support.commands import Hvdenv, ended
from tests.support.environments import ONE, build, build_active
from tests.support.files import EXECUTABLE, write

EVE, GROUP = 12345, 12346
OF_EVE = f"belongs to uid {EVE}"
# What `job` says of `local` after all files were judged: it goes on, and fails.
RAN = "this recipe has no scheduler"
OWN = trust.trusted_owners()

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only the superuser can give a file to another user"
)


def mine(folder: Path, *lines: str) -> Path:
    """A recipe over `local`."""
    text = "\n".join(('format = 1\nname = "mine"\nextends = "local"', *lines))
    return write(folder / "mine.toml", text)


def of_eve(path: Path) -> Path:
    os.chown(path, EVE, GROUP, follow_symlinks=False)
    return path


def faults(prefix: Path, *, whole: bool) -> str:
    return " ".join(map(str, trust.judge_environment(str(prefix), OWN, whole=whole)))


# What executes nothing of a recipe, a site file or an environment. `envs` and `plan` start the
# workspace tools, `init` those of this machine, from PATH.
SHOWN = {
    "completion": ("bash",),
    "container": ("singularity",),
    "diff": ("PREFIX", "PREFIX"),
    "doctor": ("RECIPE",),
    "envs": (),
    "examples": (),
    "export": ("--prefix", "PREFIX"),
    "init": ("x", "--from", "RECIPE", "-o", "-"),
    "plan": ("RECIPE", "--facts", "FACTS"),
    "recipes": (),
    "show": ("RECIPE",),
    "wheels": ("list",),
}
# What executes something of them; with --trust also that of other users.
EXECUTING = {
    "build": (),
    "check": (),
    "fetch": ("--to", "there"),
    "install": ("tqdm",),
    "job": ("--", "true"),
    "lock": (),
    "module": (),
    "pack": (),
    "run": ("--", "true"),
    "shell": (),
    "verify": (),
}


def test_every_command_that_executes_anything_can_be_told_to_trust() -> None:
    words = {**SHOWN, **{command: ("r", *more) for command, more in EXECUTING.items()}}
    words |= dict.fromkeys(("job", "run", "shell"), ("r",))  # main() splits at --
    parser = make_parser()
    parsed = {each: parser.parse_args([each, *words[each]]) for each in COMMANDS}
    with_trust = {command for command, arguments in parsed.items() if hasattr(arguments, "trust")}
    assert with_trust == set(EXECUTING) == set(COMMANDS) - set(SHOWN)


@needs_root
@pytest.mark.parametrize("command", EXECUTING)
@pytest.mark.parametrize("whose", ["recipe", "parent", "site", "init", "folder"])
def test_nothing_of_another_user_is_executed(
    command: str, whose: str, tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as it was attacked: a script that a recipe or site file names left a mark."""
    monkeypatch.chdir(tmp_path)
    mark, folder = tmp_path / "mark", tmp_path / "folder"
    init = write(tmp_path / "init.sh", f"touch {mark}\n")
    named = f'modules = {{ init = "{init}", load = ["x"] }}'
    recipe = mine(folder, named)
    foreign = {"init": init, "folder": folder}.get(whose, recipe)
    if whose == "parent":
        foreign = recipe.rename(folder / "base.toml")
        text = 'format = 1\nname = "child"\nextends = "./base.toml"\n'
        recipe = write(folder / "child.toml", text)
    elif whose == "site":
        foreign = write(folder / "site.toml", named)
        monkeypatch.setenv("HVDENV_SITE", str(foreign))
        recipe = mine(tmp_path)
    of_eve(foreign)
    words = [command, str(recipe), *EXECUTING[command]]
    said = hvdenv(*words, code=(125 if command in ("run", "shell") else 2)).err
    assert OF_EVE in said
    assert "--trust" in said
    assert str(foreign) in said
    assert not mark.exists()


@needs_root
def test_with_trust_it_is_executed(tmp_path: Path, hvdenv: Hvdenv) -> None:
    """So the mark above means something."""
    mark = tmp_path / "mark"
    init = of_eve(write(tmp_path / "init.sh", f"touch {mark}\n"))
    recipe = of_eve(mine(tmp_path, f'modules = {{ init = "{init}", load = ["x"] }}'))
    hvdenv("check", str(recipe), code=2)
    assert not mark.exists()
    main(["check", "--trust", str(recipe)])
    assert mark.exists()


@needs_root
@pytest.mark.parametrize("command", SHOWN)
def test_what_executes_nothing_uses_foreign_files(
    command: str, tmp_path: Path, cases: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = tmp_path / "folder", tmp_path / "mark"
    prefix = environment(folder)
    for name in ("bin/python", "bin/pip", "activate.sh", "lib/python3.11/site-packages/a.pth"):
        (prefix / name).unlink()
        write(prefix / name, f"#!/bin/sh\ntouch {mark}\n", EXECUTABLE)
    built = generations.at(folder / "built")
    generations.claim(built)
    build_active(built, ONE, environment=str(prefix))
    init = write(folder / "init.sh", f"touch {mark}\n")
    named = f'modules = {{ init = "{init}", load = ["x"] }}'
    recipe = mine(folder, named)
    monkeypatch.setenv("HVDENV_SITE", str(write(folder / "site.toml", named)))
    monkeypatch.setenv("HVDENV_HOME", str(tmp_path / "home"))
    for path in (folder, *folder.rglob("*")):
        of_eve(path)
    names = {"PREFIX": built.prefix, "RECIPE": recipe, "FACTS": cases / "facts.json"}
    words = [str(names.get(each, each)) for each in SHOWN[command]]
    # `doctor` finds no cause in a recipe.
    said = hvdenv(command, *words, code=int(command == "doctor"))
    assert OF_EVE not in said.err
    assert not mark.exists()


@needs_root
def test_a_store_that_appears_before_a_build_makes_it_is_judged(
    tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    def race(*_: object, **__: object) -> tuple[tuple[()], None]:
        (tmp_path / ".env.hvdenv").mkdir()
        of_eve(tmp_path / ".env.hvdenv")
        return (), None

    monkeypatch.setattr(session_build, "_refuse", race)
    assert OF_EVE in hvdenv("build", "local", "--prefix", str(tmp_path / "env"), code=2).err


def test_what_a_site_file_must_not_say(tmp_path: Path, hvdenv: Hvdenv) -> None:
    site = write(tmp_path / "site.toml", '[trust]\nowner = ["ann"]\n')
    assert "trust.owner" in hvdenv("check", "local", "--site", str(site), code=2).err
    recipe = mine(tmp_path, '[trust]\nowners = ["ann"]')
    assert "trust" in hvdenv("show", str(recipe), code=2).err


def environment(folder: Path) -> Path:
    """Something like a virtual environment."""
    prefix, packages = folder / "env", "lib/python3.11/site-packages"
    for name in ("activate.sh", "bin/pip", f"{packages}/horovod/common/basics.py"):
        write(prefix / name, "")
    (prefix / "bin" / "python").symlink_to(write(folder / "python3.11", ""))
    (folder / "src").mkdir()
    (folder / "base").mkdir()
    write(prefix / "pyvenv.cfg", f"home = {folder / 'base'}\n")  # if python is a copy
    write(prefix / packages / "a.pth", f"import site\n{folder / 'src'}\n")
    return prefix


@needs_root
@pytest.mark.parametrize(
    "part",
    [
        *("", "activate.sh", "bin", "bin/python", "bin/pip", "pyvenv.cfg", "lib", "lib/python3.11"),
        "lib/python3.11/site-packages",
        "lib/python3.11/site-packages/a.pth",
        "lib/python3.11/site-packages/horovod",
        *("..", "../python3.11", "../src", "../base"),
    ],
)
def test_what_an_environment_executes_is_judged(part: str, tmp_path: Path) -> None:
    prefix = environment(tmp_path)
    path = prefix / part
    for whole in (False, True):
        assert faults(prefix, whole=whole) == ""
        of_eve(path)
        assert OF_EVE in faults(prefix, whole=whole)
        os.chown(path, 0, 0, follow_symlinks=False)
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | stat.S_IWOTH)
            assert "can be written by everybody" in faults(prefix, whole=whole)
            path.chmod(mode)
    of_eve(prefix / "lib/python3.11/site-packages/horovod/common/basics.py")
    assert faults(prefix, whole=False) == ""  # only verify looks so deep
    assert "basics.py" in faults(prefix, whole=True)


@needs_root
@pytest.mark.parametrize("command", ["verify", "run", "shell", "job"])
def test_a_prefix_of_another_user_is_not_run(command: str, tmp_path: Path, hvdenv: Hvdenv) -> None:
    prefix = tmp_path / "env"
    environment_ = generations.at(prefix)
    generations.claim(environment_)
    record = {"recipe": "local", "variants": [], "resolved": encode(load_recipe("local").recipe)}
    build(environment_, ONE, **record, environment=".")
    generations.switch(environment_, ONE)
    mark = tmp_path / "mark"
    (prefix / "activate.sh").write_text(f"touch {mark}\n")
    of_eve(prefix / "activate.sh")
    more = {"run": ("--", "true"), "job": ("--", "true")}.get(command, ())
    words = [command, *(("neuron",) if command == "job" else ()), "--prefix", str(prefix), *more]
    said = hvdenv(*words, code=(125 if command in ("run", "shell") else 2)).err
    assert OF_EVE in said
    assert f"hvdenv {command} " in said and " --trust" in said
    assert not mark.exists()


def test_nobody_is_told_to_change_a_device(hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDENV_HOME", "/dev/null")
    said = hvdenv("job", "local", "--", "true", code=2).err
    assert "neither a file nor a directory" in said and "chmod" not in said


def test_all_that_a_recipe_names_is_judged() -> None:
    """A key that takes a directory, a file or a URL is among these, or not executed from."""
    recipe = load_recipe("local").recipe
    modules = decode(
        Modules, {"init": "/a/init", "use": ["/a/use"], "source": ["/a/source"], "load": ["x"]}
    )
    conda = decode(Conda, {"channels": ["file:///a/chan%20nel", "conda-forge"]})
    torch = FrameworkPackage(
        "1",
        wheelhouse="/a/wheels",
        cpu_index="file://localhost/a/index",
        extra_index="file:///a/more%23x#fragment",
        find_links=("/a/links", "file:///a/page", "https://x/page"),
        source=Source("file:///a/git", "v1"),
    )
    python = recipe.python._replace(prefix="/a/prefix")
    named = executed_paths(
        recipe._replace(modules=modules, conda=conda, frameworks={"torch": torch}, python=python)
    )
    expected = "init use source prefix wheels index git more#x links page".split()
    assert {path for _, path in named} == {f"/a/{each}" for each in (*expected, "chan nel")}


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        (".:/usr/bin::bin:/bin:", "/usr/bin:/bin"),
        (".", os.defpath),
        ("/usr/bin", "/usr/bin"),
    ],
)
def test_programs_of_the_current_folder_are_not_found(
    path: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "quota", "#!/bin/sh\ntouch mark\n", EXECUTABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path)
    drop_relative_folders()
    assert os.environ["PATH"] == kept
    assert shutil.which("quota") in (None, "/usr/bin/quota")
    assert Runner().run(Command(("sh", "-c", "echo $PATH"))).output == kept


def test_modules_of_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pathlib", "argparse", "tomli", "pwd", "signal", "packaging", "pip", "horovod"):
        write(tmp_path / f"{name}.py", f"print('{name} of the directory')\n")
    program = write(
        tmp_path / "there" / "program.py",
        "import subprocess, sys; subprocess.check_call([sys.executable, *sys.argv[1:]])",
    )
    by_another = (str(program), "-m", "pip", "--version")  # as hvdenv's programs for steps do
    monkeypatch.chdir(tmp_path)
    assert outcome_of("-m", "hvdenv", "show", "local") == (0, "")
    # Nor by the Pythons that hvdenv starts.
    for words in (("-m", "pip", "--version"), ("-c", "import pathlib"), by_another):
        outcome = Runner().run(Command((sys.executable, *words)))
        assert outcome
        assert "of the directory" not in outcome.output
    # Nor in jobs, where the directory is also on PYTHONPATH.
    for name in ("hvdenv/__init__", "runpy"):
        write(tmp_path / f"{name}.py", f"print('{name} of the directory')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert outcome_of(*job.AS_MODULE, "hvdenv", "show", "local") == (0, "")


def outcome_of(*words: str) -> tuple[int, str]:
    """The exit code and the errors of a Python that shows a recipe in the current directory."""
    done = ended(sys.executable, *words)
    assert "of the directory" not in done.stdout
    assert 'name = "local"' in done.stdout
    return done.returncode, done.stderr


def test_what_everybody_can_create_is_not_used(tmp_path: Path, hvdenv: Hvdenv) -> None:
    """A sticky directory protects what is in it, but not names that are still free."""
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    absent = public / "absent/init.sh"
    recipe = mine(tmp_path, "[modules]", f'init = "{absent}"', 'load = ["x/1"]')
    refused = hvdenv("check", str(recipe), "--offline", code=2)
    assert f"{public} can be written by everybody" in refused.err
    (found,) = trust.judge_way(absent, OWN, used=True)
    assert (found.path, found.problem) == (str(public), "can be written by everybody")
    assert not list(trust.judge_way(absent, OWN))  # such as a prefix, which a build creates
    (public / "absent").mkdir(mode=0o755)
    assert not list(trust.judge_way(absent, OWN, used=True))
