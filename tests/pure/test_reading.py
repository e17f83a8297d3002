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

from hvdenv.reading import MIB, RECIPE, SYSTEM, Kind, open_file, read_file, read_text
from tests.files import write

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
    read = read_file(file, RECIPE)
    assert (read.path, read.text) == (file, "ä = 1\r\n")
    assert read.status.st_ino == file.stat().st_ino
    assert read.status.st_mode & 0o777 == 0o640


def test_links_are_followed_and_the_status_is_the_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    (tmp_path / "link").symlink_to("file")
    read = read_file(tmp_path / "link", RECIPE)
    assert read.status.st_ino == (tmp_path / "file").stat().st_ino
    assert read.path == tmp_path / "link"


def test_the_status_is_of_what_was_read_although_the_path_changed(tmp_path: Path) -> None:
    file = write(tmp_path / "file", "one")
    inode = file.stat().st_ino
    with open_file(file, RECIPE) as stream:
        (tmp_path / "other").write_text("two")
        os.replace(tmp_path / "other", file)
        assert (stream.read(), os.fstat(stream.fileno()).st_ino) == (b"one", inode)


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_pipe_does_not_hang(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    reader = threading.Thread(target=lambda: refusal(tmp_path / name), daemon=True)
    reader.start()
    reader.join(5)
    assert not reader.is_alive()
    assert refusal(tmp_path / name).strerror == "it is a pipe, not a regular file"


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/urandom"])
def test_devices_are_refused(device: str) -> None:
    assert refusal(device).strerror == "it is a device, not a regular file"


def test_folders_and_sockets_are_refused(tmp_path: Path) -> None:
    assert isinstance(refusal(tmp_path), IsADirectoryError)
    assert refusal(tmp_path).strerror == "it is a directory, not a regular file"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        assert refusal(tmp_path / "s").strerror == "it is a socket, not a regular file"


def test_what_is_missing_or_forbidden_stays_what_it_is(tmp_path: Path) -> None:
    assert isinstance(refusal(tmp_path / "none"), FileNotFoundError)
    assert isinstance(refusal(tmp_path / "none/x"), FileNotFoundError)
    (tmp_path / "loop").symlink_to("loop")
    assert refusal(tmp_path / "loop").errno == errno.ELOOP


def test_a_file_of_the_limit_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"x" * SMALL.limit)
    assert len(read_file(file, SMALL).data) == SMALL.limit
    file.write_bytes(b"x" * (SMALL.limit + 1))
    said = refusal(file, SMALL)
    assert said.errno == errno.EFBIG
    assert said.strerror == "its size is 101 bytes, and the limit for a test is 100 bytes"


def test_a_huge_sparse_file_costs_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as stream:
        stream.truncate(5 << 40)
    assert "its size is 5,497,558,138,880 bytes" in str(refusal(tmp_path / "x"))
    with (
        pytest.raises(OSError, match="the limit for a recipe is 1,048,576 bytes"),
        open_file(tmp_path / "x", RECIPE),
    ):
        pass


def test_the_limit_holds_where_the_size_says_nothing() -> None:
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
    ["show", "{}.toml"],
    ["show", "local", "--site", "{}"],
    ["plan", "local", "--facts", "{}"],
    ["check", "{}.toml"],
    ["verify", "--report", "{}"],
    ["doctor", "{}"],
    ["doctor", "--recipe", "{}.toml", "README.md"],
    ["plan", "local", "--locked", "--lock", "{folder}", "--facts", "{facts}"],
]


# One process for all commands, since the start of each takes longer than what it does.
ALL_COMMANDS = """
import contextlib, io, json, sys
from hvdenv.cli.main import main
from tests.files import write
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    print(json.dumps([code, said.getvalue()]), flush=True)
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [("pipe", "it is a pipe"), ("device", "it is a device"), ("large", "and the limit for a")],
)
def test_no_command_waits_for_a_pipe_or_reads_a_device(
    what: str, said: str, tmp_path: Path, cases: Path
) -> None:
    for name in ("x", "x.toml", "hvdenv-lock.toml"):
        if what == "pipe":
            os.mkfifo(tmp_path / name)
        elif what == "device":
            (tmp_path / name).symlink_to("/dev/zero")
        else:
            with open(tmp_path / name, "wb") as stream:
                stream.truncate(5 << 40)
    files = {"folder": tmp_path, "facts": cases / "facts.json"}
    commands = [[word.format(tmp_path / "x", **files) for word in words] for words in COMMANDS]
    shown = subprocess.run(
        [sys.executable, "-c", ALL_COMMANDS, json.dumps(commands)],
        text=True,
        stdout=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    answers = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(answers) == len(commands)
    for words, (code, text) in zip(COMMANDS, answers, strict=True):
        assert code in (2, 5), (words, text)
        assert said in text, words
        assert str(tmp_path) in text, words
