"""What one user has built is used by others of the same group: real users, real permissions."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hvdenv import __version__
from tests.support.modulesystems import KINDS, Kind, install
from tests.support.needs import need

ROOT = Path(__file__).parents[2]
# Debian's own: other users can get at it.
PYTHON = "/usr/bin/python3"

# Stands for `hvdenv build`: everything but the frameworks and the compile of Horovod.
BUILD = """
import subprocess, sys
from pathlib import Path
from hvdenv.locks.record import GenerationRecord
from hvdenv.environments import generations, manifest
from hvdenv.environments.activation import activate_script
from hvdenv.model.layers import load_recipe
from hvdenv.base.schema import encode

prefix, bundle = map(Path, sys.argv[1:])
environment = generations.at(prefix)
generations.claim(environment)
folder = generations.create(environment, "0" * 12)
venv = folder / "venv"
subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "--quiet"]
subprocess.run([*pip, "--no-index", "--find-links", str(bundle), "psutil"], check=True)
(site_packages,) = venv.glob("lib/python3*/site-packages")
(site_packages / "horovod").mkdir()
(site_packages / "horovod" / "__init__.py").write_text("")
script = activate_script(venv, kind="venv", variables={})
(folder / "activate.sh").write_text(script)
listed = manifest.write(folder, (generations.RECORD, generations.MARKER))
path = environment.record(folder.name)
generations.write_record(path, GenerationRecord(
    recipe="local", prefix=str(prefix), generation=folder.name,
    created=generations.timestamp(), plan_digest="00", manifest_digest=listed.digest,
    files=len(listed.entries), variables={}, environment="venv",
    resolved=encode(load_recipe("local").recipe),
))
generations.switch(environment, folder.name)
"""


class User(NamedTuple):
    """A user of this machine, and the directory in which hvdenv lies for all."""

    name: str
    group: str
    place: Path

    @property
    def home(self) -> Path:
        return self.place / self.name

    def __call__(
        self, *words: str, umask: int = 0o022, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as this user."""
        return subprocess.run(
            words,
            user=self.name,
            group=self.group,
            extra_groups=[],
            umask=umask,
            cwd=cwd or self.home,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.home), "LC_ALL": "C.UTF-8"},
        )

    def hvdenv(self, *words: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
        return self(str(self.place / "hvdenv" / "bin" / "hvdenv"), *words, umask=umask)


class People(NamedTuple):
    """Two of one group, and one of another."""

    builder: User
    colleague: User
    stranger: User


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that everyone can get at, with hvdenv in it."""
    need("root")
    folder = Path(tempfile.mkdtemp(prefix="hvdenv-test-"))
    folder.chmod(0o755)
    try:
        wheels = ["-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder / "bundle"), str(ROOT)]
        subprocess.run([sys.executable, *wheels], check=True, timeout=600)
        (folder / "bundle").chmod(0o755)
        subprocess.run([PYTHON, "-m", "venv", str(folder / "hvdenv")], check=True)
        install = ["-m", "pip", "install", "--quiet", "--no-index", "hvdenv"]
        # Nor from where pip is configured to look.
        only = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"}
        subprocess.run(
            [folder / "hvdenv/bin/python", *install, "--find-links", folder / "bundle"],
            check=True,
            timeout=600,
            env=only,
        )
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def people(place: Path) -> Iterator[People]:
    names = [f"hvd{os.getpid()}{letter}" for letter in "abc"]
    groups = [f"hvd{os.getpid()}g", f"hvd{os.getpid()}h"]
    try:
        for group in groups:
            subprocess.run(["groupadd", group], check=True)
        for name, group in zip(names, (groups[0], groups[0], groups[1]), strict=True):
            home = place / name
            subprocess.run(["useradd", "-M", "-N", "-g", group, "-d", str(home), name], check=True)
            home.mkdir()
            os.chown(home, pwd.getpwnam(name).pw_uid, grp.getgrnam(group).gr_gid)
        yield People(*map(User, names, (groups[0], groups[0], groups[1]), (place,) * 3))
    finally:
        for name in names:
            subprocess.run(["userdel", name], check=False)
        for group in groups:
            subprocess.run(["groupdel", group], check=False)


def test_the_bundle_is_all_that_is_needed(people: People) -> None:
    """hvdenv gets onto a machine that has no package index."""
    hvdenv = people.stranger.hvdenv
    assert hvdenv("--version").stdout == f"hvdenv {__version__}\n"
    assert "\nlocal " in f"\n{hvdenv('recipes').stdout}"
    assert "horovod.version" in hvdenv("show", "local").stdout
    examples = people.stranger("ls", hvdenv("examples").stdout.strip()).stdout
    assert "pytorch_mnist.py" in examples.split()


def shared_folder(people: People, name: str) -> Path:
    """A project's directory: of the group, which new files and directories in it get too."""
    folder = people.builder.place / name
    folder.mkdir()
    shutil.chown(folder, people.builder.name, people.builder.group)
    folder.chmod(0o2750)
    return folder


def build(people: People, folder: Path, umask: int) -> Path:
    """An environment of the builder's."""
    place, prefix = people.builder.place, folder / "horovod"
    python = str(place / "hvdenv" / "bin" / "python")
    done = people.builder(python, "-c", BUILD, str(prefix), str(place / "bundle"), umask=umask)
    assert done.returncode == 0, done.stderr
    return prefix


@pytest.fixture(scope="module")
def prefix(people: People) -> Path:
    return build(people, shared_folder(people, "project"), 0o027)


def tree(folder: Path) -> dict[Path, os.stat_result]:
    return {path: path.lstat() for path in (folder, *folder.rglob("*"))}


def test_umask_and_group_are_honoured(people: People, prefix: Path) -> None:
    group = grp.getgrnam(people.builder.group).gr_gid
    owner = pwd.getpwnam(people.builder.name).pw_uid
    found = tree(prefix.parent)
    assert len(found) > 50
    for path, status in found.items():
        assert (status.st_uid, status.st_gid) == (owner, group), path
        if not stat.S_ISLNK(status.st_mode):
            mode = stat.filemode(status.st_mode)
            # venv and pip give some files bits of their own: the directories keep others out.
            ours = path.is_dir() or path.parent.name == "0" * 12
            assert not status.st_mode & (0o027 if ours else 0o022), (path, mode)
            readable = 0o050 if path.is_dir() else 0o040
            assert status.st_mode & readable == readable, (path, mode)


def test_a_colleague_uses_it_and_changes_nothing(people: People, prefix: Path) -> None:
    before = tree(prefix.parent)
    code = "import sys, psutil, horovod; print(sys.prefix, horovod.__file__)"
    used = people.colleague("sh", "-c", f'set -eu; . {prefix}/activate.sh; python -c "{code}"')
    venv = prefix.resolve() / "venv"
    assert used.stdout.split()[0] == str(venv), used.stderr
    assert used.stdout.split()[1].startswith(str(venv))
    verify = ("verify", "--quick", "--prefix", str(prefix))
    refused = people.colleague.hvdenv(*verify)
    assert refused.returncode == 2
    assert f"belongs to {people.builder.name}" in refused.stderr
    assert "hvdenv verify " in refused.stderr and " --trust" in refused.stderr
    site = people.colleague.home / "site.toml"
    site.write_text(f'trust.owners = ["{people.builder.name}"]\n')
    verified = people.colleague.hvdenv(*verify, "--site", str(site))
    assert "--trust" not in verified.stderr
    assert verified.returncode == 1, "there is no Horovod to speak of in it"
    assert "Traceback" not in verified.stderr
    removed = people.colleague.hvdenv("envs", "remove", str(prefix))
    assert removed.returncode == 5, removed.stderr
    assert "Traceback" not in removed.stderr
    after = tree(prefix.parent)
    assert {path: status.st_mtime_ns for path, status in after.items()} == {
        path: status.st_mtime_ns for path, status in before.items()
    }


def test_who_is_not_of_the_group_is_kept_out(people: People, prefix: Path) -> None:
    used = people.stranger("sh", "-c", f". {prefix}/activate.sh")
    assert used.returncode != 0
    verified = people.stranger.hvdenv("verify", "--quick", "--prefix", str(prefix))
    assert verified.returncode in (2, 5), verified.stderr
    assert "Traceback" not in verified.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_colleague_loads_its_module(people: People, prefix: Path, kind: Kind) -> None:
    system = install(kind, people.builder.place / "system")
    folder = prefix.parent.parent / f"modulefiles-{kind}"
    folder.mkdir()
    shutil.chown(folder, people.builder.name, people.builder.group)
    folder.chmod(0o2750)
    form = "lua" if kind == "lmod" else "tcl"
    words = ("module", "--prefix", str(prefix), "--format", form, "--to", str(folder))
    written = people.builder.hvdenv(*words, umask=0o027)
    assert (written.returncode, written.stderr) == (0, "")
    use = written.stdout.splitlines()[1].removeprefix("use it with: ")
    script = f". {system.init}; {use}; command -v python; module help horovod 2>&1"
    loaded = people.colleague("bash", "-c", script)
    assert loaded.stdout.startswith(f"{prefix.resolve()}/venv/bin/python\n"), loaded.stderr
    assert f"by {people.builder.name}" in loaded.stdout


def test_a_private_umask_keeps_it_private_and_module_says_so(people: People) -> None:
    folder = shared_folder(people, "private")
    prefix = build(people, folder, 0o077)
    assert people.colleague("sh", "-c", f". {prefix}/activate.sh").returncode != 0
    verified = people.colleague.hvdenv("verify", "--quick", "--prefix", str(prefix))
    assert verified.returncode in (2, 5), verified.stderr
    assert "Traceback" not in verified.stderr
    words = ("module", "--prefix", str(prefix), "--to", str(folder / "modulefiles"))
    written = people.builder.hvdenv(*words)
    assert written.returncode == 0
    store = prefix.with_name(".horovod.hvdenv")
    assert f"note: other users cannot use it: the mode of {store} is drwx--S---\n" in written.stderr


def test_read_only(people: People) -> None:
    folder = shared_folder(people, "read-only")
    prefix = build(people, folder, 0o027)
    generation = prefix.resolve()
    assert people.builder("chmod", "-R", "a-w", str(generation)).returncode == 0
    used = people.colleague("sh", "-c", f". {prefix}/activate.sh; python -c 'import psutil'")
    assert used.returncode == 0, used.stderr
    kept = people.builder.hvdenv("envs", "remove", str(prefix))
    assert "could not be deleted completely" in kept.stderr + kept.stdout
    assert (
        people.builder("chmod", "-R", "u+w", str(prefix.with_name(".horovod.hvdenv"))).returncode
        == 0
    )
    gone = people.builder.hvdenv("envs", "remove", str(prefix))
    assert gone.returncode == 0, gone.stderr
    assert os.listdir(folder) == []
