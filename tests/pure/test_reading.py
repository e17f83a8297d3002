from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvdenv.base.reading import MIB, RECIPE, SYSTEM, Kind, open_file, read_file, read_text
from tests.support.files import write

SMALL = Kind("a test", 100)


def refusal(path: Path | str, kind: Kind = RECIPE) -> OSError:
    with pytest.raises(OSError, match=".") as caught:
        read_file(path, kind)
    assert caught.value.filename == str(path)
    return caught.value


def test_a_file_is_read_with_the_status_of_its_descriptor(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes("ä = 1\r\n".encode())
    file.chmod(0o640)
    (tmp_path / "link").symlink_to("x.toml")
    for path in (file, tmp_path / "link"):
        read = read_file(path, RECIPE)
        assert (read.path, read.text) == (path, "ä = 1\r\n")
        assert read.status.st_ino == file.stat().st_ino
        assert read.status.st_mode & 0o777 == 0o640


def test_the_status_is_of_what_was_read_although_the_path_changed(tmp_path: Path) -> None:
    file = write(tmp_path / "file", "one")
    inode = file.stat().st_ino
    with open_file(file, RECIPE) as stream:
        (tmp_path / "other").write_text("two")
        os.replace(tmp_path / "other", file)
        assert (stream.read(), os.fstat(stream.fileno()).st_ino) == (b"one", inode)


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


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "x", RECIPE)
    assert read_text(tmp_path / "x", RECIPE, errors="replace") == "a\N{REPLACEMENT CHARACTER}"


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
    shown = subprocess.run(
        [sys.executable, "-c", ALL_COMMANDS, *calls],
        text=True,
        stdout=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    answers = [json.loads(line) for line in shown.stdout.splitlines()]
    for (words, texts), (code, said) in zip(calls.items(), answers, strict=True):
        assert code in (2, 5), (words, said)
        assert all(text in said for text in texts), (words, said)
