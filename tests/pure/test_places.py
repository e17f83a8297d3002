from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.base.errors import StepError, UsageError
from hvdenv.base.places import (
    environment_name,
    find_places,
    make_folder,
    named_file,
    named_folder,
    write_json,
    write_text,
)
from hvdenv.base.reading import MIB, RECIPE, SYSTEM, Kind, open_file, read_file, read_text
from tests.support.commands import ended
from tests.support.files import write
from tests.support.wheels import umask

VARIANTS = st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True), max_size=5)
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")


@pytest.mark.parametrize(
    ("home", "data", "expected"),
    [
        ("/x/../home", "/data", "/home"),
        ("~/h", "/data", "~/h"),
        ("", "/data", "/data/hvdenv"),
        (None, "/data", "/data/hvdenv"),
        (None, "", "~/.local/share/hvdenv"),
        (None, "data", "~/.local/share/hvdenv"),
    ],
)
def test_home_by_the_environment(
    home: str | None, data: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", data)
    monkeypatch.delenv("HVDENV_HOME")
    if home is not None:
        monkeypatch.setenv("HVDENV_HOME", home)
    places = find_places()
    assert places.home == Path(os.path.expanduser(expected))
    assert places.wheels == places.home / "cache/wheels"
    assert places.reports.parent == places.registry.parent == places.home


@given(VARIANTS, VARIANTS, st.randoms(use_true_random=False))
def test_names_are_those_of_sets_of_variants(
    one: list[str], other: list[str], random: Random
) -> None:
    shuffled = one + one[:1]
    random.shuffle(shuffled)
    for variants in (shuffled, other):
        same = environment_name("local", one) == environment_name("local", variants)
        assert same == (set(one) == set(variants))


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a+b", "a b", "a\n", "-x", "$(id)", "é", "x" * 65]
)
def test_names_that_are_no_folder_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name") as caught:
        environment_name("local", [name])
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError):
        environment_name(name, [])


def test_json_is_replaced_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    write_json(path, {"name": "\udcff\n"})
    with pytest.raises(ValueError, match="float"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_bytes()) == {"name": "\udcff\n"}
    assert os.listdir(tmp_path) == ["record.json"]


def test_umask_is_honoured(tmp_path: Path) -> None:
    def modes(*names: str) -> list[int]:
        return [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names]

    with umask(0o027):
        write_json(tmp_path / "one", {})
        write_json(tmp_path / "two", {}, mode=0o604)
        make_folder(tmp_path / "folder")
    assert modes("one", "two", "folder") == [0o640, 0o600, 0o750]
    with umask(0o000):  # and makes nothing that everybody can write
        write_text(make_folder(tmp_path / "a" / "b") / "c", "text")
    assert not any(mode & 0o002 for mode in modes("a", "a/b", "a/b/c"))


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "file", "") / "folder"
    with pytest.raises(StepError, match="HVDENV_HOME, --prefix") as caught:
        make_folder(path)
    assert str(path) in str(caught.value)
    with pytest.raises(StepError, match="No such file"):
        write_json(tmp_path / "no/record.json", {})


@pytest.fixture
def sticky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that everybody can write, and whose files belong to somebody else: see foreign()."""
    folder = Path(tempfile.mkdtemp(prefix="hvdenv-sticky-"))
    folder.chmod(0o1777)
    if os.geteuid():
        # This user's files are the other one's then, and the directory is nobody's.
        real = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    yield folder
    shutil.rmtree(folder)


def foreign(path: Path) -> Path:
    """Make it belong to another user than this process and the directory's owner."""
    if os.getuid() == 0:
        os.lchown(path, 4242, 4242)
    return path


def test_nothing_is_written_through_a_link_of_another_user(sticky: Path, tmp_path: Path) -> None:
    target = write(tmp_path / "secret", "root's", 0o600)
    link = sticky / "report.html"
    link.symlink_to(target)
    with pytest.raises(StepError, match="this link belongs to another user") as caught:
        named_file(foreign(link))
    assert caught.value.where == str(link)
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("root's", 0o600)


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_nor_through_a_link_on_the_way(sticky: Path, tmp_path: Path, mode: int) -> None:
    sticky.chmod(mode)
    (tmp_path / "folder").mkdir()
    (sticky / "link").symlink_to(tmp_path / "folder")
    foreign(sticky / "link")
    for asked in (named_file, named_folder):
        with pytest.raises(StepError, match="this link belongs to another user"):
            asked(sticky / "link" / "x")
    # Nor by a link of one's own that leads there.
    (tmp_path / "own").symlink_to(sticky / "link")
    with pytest.raises(StepError, match="this link belongs to another user"):
        named_folder(tmp_path / "own" / "x")


@needs_root
def test_a_file_of_another_user_in_a_sticky_folder_is_not_replaced(sticky: Path) -> None:
    foreign_file = foreign(Path(shutil.copy("/dev/null", sticky / "x")))
    with pytest.raises(StepError, match="this file belongs to another user"):
        named_file(foreign_file)


def test_links_of_ones_own_and_of_folders_nobody_else_writes_are_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    (tmp_path / "a").symlink_to("data")
    (tmp_path / "data" / "report").symlink_to("../b/../data/real")
    (tmp_path / "b").symlink_to(tmp_path / "data")
    assert named_file(tmp_path / "a" / "report") == (tmp_path / "a" / "report").resolve()
    assert named_folder(tmp_path / "a" / "new" / ".." / "x") == tmp_path / "data" / "x"
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(StepError, match="symbolic links"):
        named_file(tmp_path / "circle")


NAMES = st.sampled_from(["a", "b", "c", "..", ".", ""])
ROOTS = st.sampled_from(["", "/"])
LINKS = st.lists(st.tuples(NAMES, ROOTS, st.lists(NAMES, max_size=3)), max_size=5)


@given(LINKS, st.lists(NAMES))
def test_links_lead_where_the_system_says(
    links: list[tuple[str, str, list[str]]], parts: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        (folder / "d" / "a").mkdir(parents=True)
        for name, root, target in links:
            with suppress(OSError):
                (folder / "d" / name).symlink_to(root + "/".join(target))
        path = folder / "d" / "/".join(parts)
        try:
            expected = os.path.realpath(path, strict=True)
        except OSError:
            return
        assert str(named_folder(path)) == expected


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o664, 0o755])
def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "report", "old", mode)
    with umask(0o000):
        write_text(path, "new", 0o777)
    assert (path.read_text(), path.stat().st_mode & 0o7777) == ("new", mode)


@needs_root
def test_a_file_that_is_there_keeps_its_owner(tmp_path: Path) -> None:
    path = foreign(write(tmp_path / "report", "old", 0o640))
    write_text(path, "new")
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (4242, 4242, 0o640)


def test_everything_that_a_command_makes_has_a_safe_umask(tmp_path: Path) -> None:
    """Also what its children make; programs of `run` have the user's own umask."""
    program = (
        "import os, sys; os.umask(0)\n"
        "from hvdenv.cli.main import main; from hvdenv.base.command import Command\n"
        "from hvdenv.base.runner import Runner, replace_process\n"
        "main(['recipes']); show = ('sh', '-c', 'umask')\n"
        "print(Runner().run(Command(show)).output)\n"
        "sys.stdout.flush(); replace_process(Command(show), os.environ)"
    )
    shown = ended(sys.executable, "-c", program, check=True).stdout.split()
    assert shown[-2:] == ["0002", "0000"]


# ---------------------------------------------------------------- reading

SMALL = Kind("a test", 100)


def refusal(path: Path | str, kind: Kind = RECIPE) -> OSError:
    with pytest.raises(OSError, match=".") as caught:
        read_file(path, kind)
    assert caught.value.filename == str(path)
    return caught.value


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/dev/zero", "it is a device, not a regular file"),
        ("/dev/null", "it is a device, not a regular file"),
        ("/", "it is a directory, not a regular file"),
        ("pipe", "it is a pipe, not a regular file"),
        ("link", "it is a pipe, not a regular file"),
        ("socket", "it is a socket, not a regular file"),
        ("none", os.strerror(errno.ENOENT)),
        ("none/x", os.strerror(errno.ENOENT)),
        ("loop", os.strerror(errno.ELOOP)),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(path: str, said: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        found: list[OSError] = []
        reader = threading.Thread(target=lambda: found.append(refusal(tmp_path / path)))
        reader.daemon = True
        reader.start()
        reader.join(5)
    assert [each.strerror for each in found] == [said]
    assert isinstance(found[0], IsADirectoryError) == (path == "/")


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "x", "x" * SMALL.limit)
    assert len(read_file(file, SMALL).data) == SMALL.limit
    file.write_bytes(b"x" * (SMALL.limit + 1))
    said = refusal(file, SMALL)
    assert said.errno == errno.EFBIG
    assert said.strerror == "its size is 101 bytes, and the limit for a test is 100 bytes"
    os.truncate(file, 5 << 40)  # it is sparse
    assert "its size is 5,497,558,138,880 bytes" in str(refusal(file))
    with (
        pytest.raises(OSError, match="the limit for a recipe is 1,048,576 bytes"),
        open_file(file, RECIPE),
    ):
        pass
    # Where the size says nothing.
    assert os.stat("/proc/self/maps").st_size == 0
    assert read_text("/proc/self/maps", SYSTEM)
    assert refusal("/proc/self/maps", SMALL).strerror == (
        "its size is over 100 bytes, and the limit for a test is 100 bytes"
    )


def test_no_descriptor_is_left_open_and_none_is_inherited(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * MIB)
    before = len(os.listdir("/proc/self/fd"))
    read_file(tmp_path / "x", RECIPE)
    refusal(tmp_path / "x", SMALL)
    refusal(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    with open_file(tmp_path / "x", RECIPE) as stream:
        assert not os.get_inheritable(stream.fileno())


COMMANDS = [
    "show {}.toml",
    "show local --site {}",
    "plan local --facts {}",
    "check {}.toml",
    "verify --report {}",
    "doctor {}",
    "plan local --locked --lock {folder} --facts {facts}",
]


# One process for all commands, since the start of each takes longer than what it does.
ALL_COMMANDS = """
import contextlib, io, json, sys
from hvdenv.cli.main import main
for line in sys.argv[1:]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(line.split())
    print(json.dumps([code, said.getvalue()]), flush=True)
"""


def test_no_command_waits_for_a_pipe_or_reads_a_device(tmp_path: Path, cases: Path) -> None:
    kinds = {"pipe": "it is a pipe", "device": "it is a device", "large": "and the limit for a"}
    calls = {}
    for kind, said in kinds.items():
        (folder := tmp_path / kind).mkdir()
        for path in (folder / "x", folder / "x.toml", folder / "hvdenv-lock.toml"):
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "device":
                path.symlink_to("/dev/zero")
            else:
                os.truncate(write(path, ""), 5 << 40)
        for command in COMMANDS:
            words = command.format(folder / "x", folder=folder, facts=cases / "facts.json")
            calls[words] = (said, str(folder))
    shown = ended(sys.executable, "-c", ALL_COMMANDS, *calls)
    answers = [json.loads(line) for line in shown.stdout.splitlines()]
    for (words, texts), (code, said) in zip(calls.items(), answers, strict=True):
        assert code in (2, 5), (words, said)
        assert all(text in said for text in texts), (words, said)
