"""Failures of real builds that are provoked, named, and gone once the remedy is carried out.

A build of the recipe `local` meets one trouble after another in what lies around it: the shell,
indexes, files, limits. Each time what hvdenv's own diagnosis names first is the right one, what its
remedy says is done, and the build goes further, until the environment is there.
tests/real/test_remedied.py has what a wrong recipe leads to, in small programs.

Not part of `make test`, since it compiles Horovod: `python -m pytest -s tests/optin/test_remedies.py`
prints how long each took. It needs Python 3.11, which the frameworks have packages for, an index over
https, `unshare` and `openssl`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest

from tests.real.conftest import home
from tests.support.index import package, served

__all__ = ["home"]

# pip with nothing but its default index.
PLAIN = {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": ""}
NOBODY = "http://127.0.0.1:9"
LOGIN = b"<!DOCTYPE html>\n<title>Log in first</title><a href=/help>help</a>"
USED = """\
import torch, horovod.torch as hvd
hvd.init()
assert hvd.allreduce(torch.ones(3)).tolist() == [1.0] * 3
print("used")
"""

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="packages are for Python 3.11"
)


class Build:
    """A build that is tried until it passes."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home, self.prefix = home, folder / "env"
        self.words = ("build", "local", "--variant", "torch", "--prefix", str(self.prefix))
        self.began = time.monotonic()

    def call(
        self, *words: str, variables: Mapping[str, str] = {}, inside: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """hvdenv itself, started by the program `inside`, with variables besides the shell's."""
        return subprocess.run(
            [*inside, sys.executable, "-m", "hvdenv", *words],
            env={**os.environ, "HVDENV_HOME": str(self.home), **variables},
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )

    def fails(
        self, cause: str, step: str, remedy: str, inside: Sequence[str] = (), **variables: str
    ) -> None:
        """It stops at a step, and says why and what to do, as doctor does afterwards."""
        done = self.call(*self.words, variables=variables, inside=inside)
        assert done.returncode == 5, done.stderr
        root = self.doctor()
        assert root["id"] == cause, f"{root}\n{done.stderr}"
        assert f"step {step} failed" in done.stderr, done.stderr
        assert root["cause"] in done.stderr and root["remedy"] in done.stderr
        assert remedy in root["remedy"], root["remedy"]
        self.note(f"{step}: {cause}")

    def doctor(self) -> dict[str, str]:
        """The first cause that doctor names of the last failure."""
        done = self.call("doctor", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        root: dict[str, str] = json.loads(done.stdout)["causes"][0]
        return root

    def passes(self, inside: Sequence[str]) -> None:
        """It comes to its end, and Horovod works in its environment."""
        done = self.call(*self.words, inside=inside)
        assert done.returncode == 0, done.stderr
        self.note("passes")
        used = subprocess.run(
            ["sh", "-ec", f". {self.prefix}/activate.sh; exec python -c '{USED}'"],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert used.stdout == "used\n", used.stderr

    def note(self, text: str) -> None:
        now = time.monotonic()
        print(f"{now - self.began:5.0f} s  {text}", flush=True)
        self.began = now


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For an environment and what is around it; gone afterwards, for it takes gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def other_certificates(folder: Path) -> Path:
    """Certificates by which nothing is trusted."""
    path = folder / "other.pem"
    words = (
        "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=other -keyout key.pem -out other.pem"
    )
    subprocess.run(words.split(), cwd=folder, check=True, capture_output=True)
    return path


def old_libstdcxx(folder: Path) -> Path:
    """A directory with a libstdc++ that ends at GLIBCXX_3.4.18, as that of gcc 4.8 does."""
    names = ["GLIBCXX_3.4", *(f"GLIBCXX_3.4.{number}" for number in range(1, 19))]
    nodes = [f"{name} {{}} {before};" for before, name in zip(["", *names], names, strict=False)]
    (folder / "versions").write_text("\n".join([*nodes, "CXXABI_1.3 {};"]))
    (folder / "empty.c").write_text("int nothing;\n")
    (folder / "old").mkdir()
    linker = "-Wl,-soname,libstdc++.so.6 -Wl,--version-script=versions"
    words = f"gcc -shared -fPIC empty.c {linker} -o old/libstdc++.so.6"
    subprocess.run(words.split(), cwd=folder, check=True)
    return folder / "old"


def cut_off(wheel: Path) -> Path:
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    return wheel


def small(temporary: Path) -> list[str]:
    """What starts a program that sees this directory with room for 4 MB."""
    temporary.mkdir()
    script = 'mount -t tmpfs -o size=4m none "$1"; shift; exec "$@"'
    return ["unshare", "--map-root-user", "--mount", "sh", "-ec", script, "sh", str(temporary)]


def limited(kilobytes: int) -> list[str]:
    return ["sh", "-c", f'ulimit -v {kilobytes}; exec "$@"', "sh"]


@contextmanager
def memory_full(below: Path) -> Iterator[None]:
    """Kill the first compiler of a build, as the kernel does where memory is full."""
    over = Event()

    def kill() -> None:
        while not over.wait(0.05):
            for each in psutil.process_iter(["name", "cmdline"]):
                words = each.info["cmdline"] or ()
                # Not what CMake tries the compiler out with.
                if each.info["name"] == "cc1plus" and any(
                    re.search(rf"^{below}.*/source/.*\.cc$", word) for word in words
                ):
                    each.kill()
                    return

    thread = Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_what_lies_around_a_build(home: Path, folder: Path) -> None:
    build = Build(home, folder)
    # What is compiled here would not fail if it were in the cache.
    shutil.rmtree(home / "cache" / "wheels", ignore_errors=True)
    (folder / "empty").mkdir()
    with served(folder / "empty") as site:
        site.everywhere = LOGIN
        login = {**PLAIN, "PIP_INDEX_URL": f"{site.url}/simple"}
        build.fails("index-proxy", "resolution", "PIP_INDEX_URL", **login)
    proxy = {**PLAIN, "https_proxy": NOBODY, "HTTPS_PROXY": NOBODY, "no_proxy": "", "NO_PROXY": ""}
    build.fails("index-proxy", "resolution", "unset", **proxy)
    for path, cause in (
        (other_certificates(folder), "tls-failed"),
        (folder / "nowhere.pem", "certificates-not-there"),
    ):
        bundle = {**PLAIN, "REQUESTS_CA_BUNDLE": str(path)}
        build.fails(cause, "resolution", "REQUESTS_CA_BUNDLE", **bundle)
    gone = {**PLAIN, "PIP_INDEX_URL": f"{NOBODY}/simple"}
    build.fails("connect-failed", "resolution", "https_proxy", **gone)
    build.fails("nothing-on-the-index", "resolution", "PIP_NO_INDEX", PIP_NO_INDEX="1")
    damaged = cut_off(package(folder / "wheels", "packaging", "999.0"))
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {damaged.parent}"
    build.fails("damaged-file", "resolution", "remove", PIP_FIND_LINKS=links)
    damaged.unlink()
    temporary = folder / "tmp"
    full = {**PLAIN, "PIP_FIND_LINKS": links, "TMPDIR": str(temporary)}
    build.fails("disk-full", "resolution", "TMPDIR", inside=small(temporary), **full)
    old = str(old_libstdcxx(folder))
    build.fails("libstdcxx-too-old", "wheel", "LD_LIBRARY_PATH", LD_LIBRARY_PATH=old)
    build.fails("out-of-memory", "wheel", "ulimit", inside=limited(400_000))
    with memory_full(folder):
        build.fails("out-of-memory-in-compiler", "wheel", "taskset")
    core = min(os.sched_getaffinity(0))
    build.passes(inside=("taskset", "-c", str(core)))
