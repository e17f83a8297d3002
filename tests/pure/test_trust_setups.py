"""Ordinary set-ups of clusters work, and attacks are refused: with real owners, modes and users.

Files belong to users and groups without names, as root can make them; hvdenv judges them in a
process of one of these users.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvdenv.base import trust
from hvdenv.base.places import find_places
from hvdenv.base.reading import RECIPE, read_file
from hvdenv.cli.main import make_parser
from hvdenv.cli.options import read_request
from hvdenv.session.recipe import open_recipe
from hvdenv.session.request import Request
from tests.support.files import write

ROOT, ANN, BOB, SERVICE, NOBODY = 0, 61001, 61002, 61003, 65534
PROJECT, USERS, OTHERS = 61010, 61011, 61012
RECIPE_TEXT = 'format = 1\nname = "mine"\nextends = "local"\n'
UNCLEAR = "ownership cannot be judged here"
NEW_USERS, NEW_MOUNTS, BIND = 0x10000000, 0x20000, 4096

# Other users call hvdenv.
pytestmark = pytest.mark.needs("root", "a checkout that others can read")


@pytest.fixture(autouse=True, scope="module")
def _everything_is_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By root: others may not be able to read this Python."""
    judged(recipe(tmp_path_factory.mktemp("warm"), ROOT))


@pytest.fixture
def at() -> Iterator[Path]:
    """A directory that everyone can get at."""
    folder = Path(tempfile.mkdtemp(prefix="hvdenv-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def owned(path: Path, owner: int, group: int, mode: int) -> Path:
    os.chown(path, owner, group, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(mode)
    return path


def folder(path: Path, owner: int = ROOT, group: int = ROOT, mode: int = 0o755) -> Path:
    path.mkdir()
    return owned(path, owner, group, mode)


def recipe(
    where: Path, owner: int = ANN, group: int = ANN, mode: int = 0o644, text: str = ""
) -> Path:
    return owned(write(where / "mine.toml", RECIPE_TEXT + text), owner, group, mode)


def link(path: Path, target: Path | str, owner: int = ANN) -> Path:
    path.symlink_to(target)
    return owned(path, owner, owner, 0)


def environment(where: Path, owner: int = ANN, group: int = ANN, mode: int = 0o755) -> Path:
    """Something like a virtual environment."""
    prefix = where / "env"
    (prefix / "lib/python3.11/site-packages").mkdir(parents=True)
    for name in ("activate.sh", "bin/python", "lib/python3.11/site-packages/a.pth", "pyvenv.cfg"):
        write(prefix / name, "")
    for path in (prefix, *prefix.rglob("*")):
        owned(path, owner, group, mode)
    return prefix


def listed(path: Path, user: int) -> Path:
    """Let a user write by an access control list."""
    rights = [(1, 7, -1), (2, 7, user), (4, 5, -1), (0x10, 7, -1), (0x20, 5, -1)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in rights)
    try:
        os.setxattr(path, "system.posix_acl_access", value)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    return path


def command(*words: str) -> Request:
    return read_request(make_parser(words[0]).parse_args(words))


def judged(path: Path, *options: str) -> None:
    """Judge a recipe, or an environment, as commands do before they execute anything."""
    request = command("job", *options, str(path))
    if path.name.endswith(".toml"):
        open_recipe(request)
    else:
        request.gate.refuse_prefix(path)


def home(path: Path) -> None:
    os.environ["HVDENV_HOME"] = str(path)
    command("job", "local").gate.refuse_home()


def namespace(inside: int) -> None:
    """Enter a user namespace in which this user has a name, and nobody else."""
    user, group = os.geteuid(), os.getegid()
    ctypes.CDLL(None).prctl(4, 1)  # dumpable: otherwise /proc/self belongs to root
    assert ctypes.CDLL(None).unshare(NEW_USERS) == 0, "no user namespaces here"
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{inside} {group} 1")


def used_by(
    user: int, work: Callable[[], object], group: int | None = None, before: object = None
) -> str:
    """What hvdenv says when a user calls it: empty, notes, or the refusal.

    Args:
        group: the user's primary group; the user is in PROJECT as well.
        before: what the process of the user does first.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        said = ""
        try:
            sys.stdout = sys.stderr = os.fdopen(writing, "w")
            os.setgroups([PROJECT] if user else [])
            os.setgid(user if group is None else group)
            os.setuid(user)
            if callable(before):
                before()
            work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            print(said, end="", file=sys.stderr, flush=True)
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as stream:
        text = stream.read()
    os.waitpid(process, 0)
    return text


def space(at: Path, mode: int = 0o2770, owner: int = ROOT, group: int = PROJECT) -> Path:
    return folder(at / "project", owner, group, mode)


def ann(at: Path, group: int = ANN, mode: int = 0o755) -> Path:
    return folder(at / "ann", ANN, group, mode)


# Each returns what ann uses. What hvdenv says of it: nothing, a note, or one sentence, after which
# --trust helps.
NOTE = "can be written by the group "
ORDINARY: dict[str, tuple[Callable[[Path], Path], str]] = {
    "project space": (lambda at: recipe(space(at, 0o770)), NOTE),
    "project space with setgid": (lambda at: recipe(space(at), ANN, PROJECT, 0o664), NOTE),
    "own directory in project space": (lambda at: recipe(ann(space(at), PROJECT)), ""),
    "prefix in project space": (lambda at: environment(space(at), ANN, PROJECT, 0o2775), NOTE),
    "project space by a list": (lambda at: recipe(listed(space(at), BOB)), "note: "),
    "squashed NFS": (lambda at: recipe(at, NOBODY, NOBODY), UNCLEAR),
    "shared group, umask 002": (
        lambda at: recipe(ann(at, USERS, 0o775), ANN, USERS, 0o664),
        NOTE,
    ),
    "recipes of support": (lambda at: recipe(folder(at / "shared", SERVICE), SERVICE), "owners = "),
    "home below a service account": (lambda at: recipe(ann(folder(at / "home", SERVICE))), ""),
    "link that leads round": (
        lambda at: (
            folder(at / "a")
            and link(at / "l", "a/../ann/./")
            and recipe(ann(at))
            and at / "l/mine.toml"
        ),
        "",
    ),
    "own directory in a sticky scratch": (
        lambda at: recipe(ann(folder(at / "scratch", mode=0o1777))),
        "",
    ),
    "linked home": (
        lambda at: (
            link(at / "home", recipe(ann(folder(at / "export", SERVICE))).parent, ROOT)
            / "mine.toml"
        ),
        "",
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary(name: str, at: Path) -> None:
    make, expected = ORDINARY[name]
    path = make(at)
    said = used_by(ANN, lambda: judged(path), USERS)
    assert said.count("\n") <= 2  # a note, or what is wrong and what to do
    assert said == "" if not expected else expected in said
    assert used_by(ANN, lambda: judged(path, "--trust"), USERS) == ""
    if expected in ("", NOTE, "note: "):
        assert "Error" not in said
        assert "Error" not in used_by(ANN, lambda: home(path.parent), USERS)


def test_root_in_a_container_with_the_checkout_of_another_user(at: Path) -> None:
    path = recipe(folder(at / "checkout", ANN))
    said = used_by(ROOT, lambda: judged(path))
    assert f"{path}: this belongs to uid {ANN}, and hvdenv would run what it names" in said
    assert f"`hvdenv job {path} --trust`" in said


def test_a_site_file_names_users_to_trust(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe(folder(at / "shared", SERVICE), SERVICE)
    site = write(at / "site.toml", f'trust.owners = ["nobody-of-this-name", "{SERVICE}"]\n')
    monkeypatch.setenv("HVDENV_SITE", str(site))
    assert used_by(ANN, lambda: judged(path)) == ""
    owned(site, ANN, ANN, 0o644)
    assert used_by(ANN, lambda: judged(path)) == ""
    owned(site, SERVICE, SERVICE, 0o644)
    assert f"{site}: this belongs to uid {SERVICE}" in used_by(ANN, lambda: judged(path))


def test_without_an_entry_in_passwd_or_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "USER", "LOGNAME", "HVDENV_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    request = command("show", "local", "--set", "places.environments=/scratch/{user}")
    said = used_by(ANN, lambda: print(find_places().home, open_recipe(request).recipe.places))
    assert f"/scratch/{ANN}" in said and said.startswith("/.local/share/hvdenv ")


@pytest.mark.needs("user namespaces")
def test_own_files_in_a_user_namespace(at: Path) -> None:
    """As in a container of an ordinary user: root's files there belong to nobody."""
    path = recipe(ann(at))
    for inside in (ANN, ROOT):
        for work in (lambda: judged(path), lambda: home(path.parent)):
            assert used_by(ANN, work, before=lambda n=inside: namespace(n)) == ""


def of_bob(at: Path, mode: int = 0o755) -> Path:
    return folder(at / "bob", BOB, BOB, mode)


def hard_link(where: Path) -> Path:
    os.link(recipe(ann(where.parent)), where / "mine.toml")
    return where / "mine.toml"


def in_an_environment(at: Path) -> Path:
    """A library beside the home of pyvenv.cfg is bob's."""
    folder(at / "lib")
    folder(at / "lib/python3.11", BOB)
    prefix = environment(ann(at))
    owned(write(prefix / "pyvenv.cfg", f"Home={at}/bin\n"), ANN, ANN, 0o644)
    return prefix


ATTACKS: dict[str, Callable[[Path], Path]] = {
    "recipe of another user": lambda at: recipe(ann(at), BOB),
    "directory of another user": lambda at: recipe(of_bob(at)),
    "everybody can write it": lambda at: recipe(ann(at), mode=0o666),
    "everybody can exchange the directory": lambda at: recipe(ann(folder(at / "open", mode=0o777))),
    "link of another user in a sticky directory": lambda at: link(
        folder(at / "tmp", mode=0o1777) / "l.toml", recipe(ann(at)), BOB
    ),
    "sticky directory of another user": lambda at: recipe(of_bob(at, 0o1777)),
    "own directory in a sticky directory of another user": lambda at: recipe(
        ann(of_bob(at, 0o1777))
    ),
    "prefix that is a sticky directory": lambda at: folder(at / "tmp", mode=0o1777),
    "hard link in a sticky directory": lambda at: hard_link(folder(at / "tmp", mode=0o1777)),
    "directory of another user before ..": lambda at: (
        recipe(ann(at)) and folder(of_bob(at) / "x", ANN) / "../../ann/mine.toml"
    ),
    "open directory behind ..": lambda at: (
        folder(folder(at / "tmp", mode=0o777) / "x")
        and recipe(at / "tmp")
        and at / "tmp/x/../mine.toml"
    ),
    "link to . in an open directory": lambda at: (
        recipe(folder(at / "tmp", mode=0o777)) and link(at / "here", "tmp/.") / "mine.toml"
    ),
    "link to .. of another user": lambda at: (
        link(at / "up", of_bob(at) / "..") and recipe(at) and at / "up/mine.toml"
    ),
    "list on a recipe": lambda at: listed(recipe(ann(at)), BOB),
    "list on a directory": lambda at: recipe(listed(ann(at), BOB)),
    "project space of another user": lambda at: recipe(space(at, owner=BOB)),
    "project space of others": lambda at: recipe(space(at, 0o2775, group=OTHERS)),
    "setgid gave it to others": lambda at: recipe(ann(at), ANN, OTHERS, 0o664),
    "prefix link in project space": lambda at: link(space(at) / "env", environment(ann(at)), BOB),
    "library beside the home of pyvenv.cfg": in_an_environment,
    "launcher that a recipe names": lambda at: recipe(
        ann(at),
        text=f'[launch.launchers.x]\ncommand = "{of_bob(at)}/mpirun -n {{ranks}} {{program}}"\n',
    ),
    "library that a recipe preloads": lambda at: recipe(
        ann(at), text=f'environment.run.LD_PRELOAD = "{of_bob(at)}/x.so"\n'
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name: str, at: Path) -> None:
    path = ATTACKS[name](at)
    said = used_by(ANN, lambda: judged(path))
    assert said.startswith("UntrustedError: ")
    assert "hvdenv job " in said and " --trust" in said
    assert used_by(ANN, lambda: judged(path, "--trust")) == ""


@pytest.mark.needs("user namespaces")
@pytest.mark.parametrize("inside", [ANN, ROOT, None])
def test_a_user_namespace_hides_whose_it_is(inside: int | None, at: Path) -> None:
    def enter() -> None:
        if inside is not None:
            namespace(inside)
        else:
            ctypes.CDLL(None).unshare(NEW_USERS)

    path = recipe(of_bob(at), BOB)
    said = used_by(ANN, lambda: judged(path), before=enter)
    assert f"{UNCLEAR}, because this user namespace does not show all users" in said
    # Nor are other groups, which all have one number there, groups of ann's.
    shared = recipe(ann(at), ANN, OTHERS, 0o664)
    said = used_by(ANN, lambda: judged(shared), before=enter)
    assert inside is None or "can be written by the group" in said


def test_a_mount_over_own_files(at: Path) -> None:
    path, foreign = recipe(ann(at)), recipe(of_bob(at), BOB)

    def mount() -> None:
        libc = ctypes.CDLL(None)
        libc.unshare(NEW_MOUNTS)
        libc.mount(b"none", b"/", None, 0x44000, None)  # private: what follows is seen here only
        assert libc.mount(bytes(foreign), bytes(path), None, BIND, None) == 0, "cannot mount"
        os.setuid(ANN)

    said = used_by(ROOT, lambda: judged(path), before=mount)
    if "cannot mount" in said:
        pytest.skip("mounting is not allowed here")
    assert f"this belongs to uid {BOB}" in said


@pytest.mark.parametrize("inside", ["", "envs", "cache", "cache/uv", "jobs"])
def test_a_home_that_others_write(inside: str, at: Path) -> None:
    path = folder(at / "home", ANN)
    for each in ("envs", "cache", "cache/uv", "jobs"):
        folder(path / each, ANN)
    assert used_by(ANN, lambda: home(path)) == ""
    owned(path / inside, BOB, BOB, 0o755)
    assert "export HVDENV_HOME=..." in used_by(ANN, lambda: home(path))


def test_bytes_that_are_used_are_those_that_were_judged(at: Path) -> None:
    """A link is exchanged all the time while the recipe is read and judged."""
    good, link_ = write(at / "good.toml", "good"), at / "link.toml"
    bad = owned(write(at / "bad.toml", "bad"), BOB, BOB, 0o644)
    link_.symlink_to(good)
    done = threading.Event()

    def exchange() -> None:
        while not done.is_set():
            for target in (bad, good):
                (at / "next").symlink_to(target)
                (at / "next").rename(link_)

    accepted, refused, owners = set(), 0, trust.trusted_owners()
    with ThreadPoolExecutor() as pool:
        pool.submit(exchange)
        try:
            for _ in range(1000):
                content = read_file(link_, RECIPE)
                if next(trust.judge_content(content, owners), None):
                    refused += 1
                else:
                    accepted.add(content.data)
        finally:
            done.set()
    assert refused
    assert accepted == {b"good"}


def test_files_of_a_private_group(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As useradd makes one for each user: nobody else is in it."""
    path = recipe(folder(at / "ann", ANN, ANN, 0o775), ANN, ANN, 0o664)
    monkeypatch.setattr(trust, "user_name", {ANN: "ann", ROOT: "root"}.get)
    monkeypatch.setattr(trust, "_members", lambda group: {"ann"})
    assert used_by(ANN, lambda: judged(path)) == ""
    monkeypatch.setattr(trust, "_members", lambda group: {"ann", "bob"})
    assert used_by(ANN, lambda: judged(path)).count("note: ") == 1
