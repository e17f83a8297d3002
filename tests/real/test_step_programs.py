"""Stand-alone programs of steps, run as a build runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from hvdenv import STEP_PROGRAMS
from hvdenv.base.command import OWN_PYTHON, Command
from hvdenv.base.errors import StepError
from hvdenv.base.runner import Runner, clean
from hvdenv.building.run_step import perform
from hvdenv.knowledge.diagnosis import explain
from hvdenv.plans.step import Progress, Step, TextFile
from tests.support.files import programs, write
from tests.support.index import Site, package, served
from tests.support.standalone import load

pip_sources = load("pip_sources")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
EXTENSIONS = {
    "torch": f"horovod/torch/mpi_lib_v2{SUFFIX}",
    "tensorflow": f"horovod/tensorflow/mpi_lib{SUFFIX}",
}
# Some program stands for an extension: it is linked against libraries, too.
LIBRARY = Path("/bin/true").read_bytes()


def run_step(name: str, *words: str, path: Path | None = None, **given: str) -> tuple[int, str]:
    """Run a program with only the given variables."""
    env = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "PYTHONNOUSERSITE": "1"}
    env |= given
    if path:
        env["PYTHONPATH"] = str(path)
    found = subprocess.run(
        [sys.executable, str(STEP_PROGRAMS / name), *words],
        env=env,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return found.returncode, found.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Distributions as pip leaves them: what is known of their version, and nothing else."""
    site = tmp_path / "site"
    for name, version in (("torch", "2.13.0+cpu"), ("tensorflow_cpu", "2.15.1")):
        folder = site / f"{name}-{version}.dist-info"
        write(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        write(folder / "RECORD", f"{name}/__init__.py,,\n")
    return site


GOOD = {"pytorch": "2.13.0+cpu", "tensorflow": "2.15.1"}
BOTH = ("torch", "tensorflow")
NOT_COMPILED = {
    name: f"{name}: the wheel has no {EXTENSIONS[name]}: no extension was compiled" for name in BOTH
}


def inspect(
    folder: Path,
    site: Path,
    metadata: dict[str, str],
    compiled: tuple[str, ...],
    requested: tuple[str, ...],
    library: bytes = LIBRARY,
) -> Any:
    """What is found in a wheel of Horovod with these extensions."""
    path = folder / "horovod-0.28.1-x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("horovod/metadata.json", json.dumps({"dummy": "none", **metadata}))
        for framework in compiled:
            archive.writestr(EXTENSIONS[framework], library)
    code, output = run_step("inspect_wheel.py", str(path), *requested, path=site)
    found = json.loads(output.splitlines()[-1])
    assert (code, found["bytes"]) == (1 if found["problems"] else 0, path.stat().st_size)
    return found


@pytest.mark.parametrize(
    ("metadata", "compiled", "requested", "problems"),
    [
        (GOOD, BOTH, BOTH, []),
        ({}, (), BOTH, [*NOT_COMPILED.values()]),
        (GOOD, ("torch",), BOTH, [NOT_COMPILED["tensorflow"]]),
        (
            {"pytorch": "2.12.0"},
            BOTH,
            ("torch",),
            ["torch: compiled with 2.12.0, installed is 2.13.0+cpu"],
        ),
        ({}, BOTH, ("torch",), ["torch: compiled with None, installed is 2.13.0+cpu"]),
    ],
)
def test_the_inspection_of_a_wheel(
    tmp_path: Path,
    installed: Path,
    metadata: dict[str, str],
    compiled: tuple[str, ...],
    requested: tuple[str, ...],
    problems: list[str],
) -> None:
    found = inspect(tmp_path, installed, metadata, compiled, requested)
    assert found["problems"] == problems
    assert problems or found["frameworks"]["torch"] == {
        "built_with": "2.13.0+cpu",
        "bytes": len(LIBRARY),
        "extension": EXTENSIONS["torch"],
    }


def test_what_a_wheel_was_compiled_with_and_needs(tmp_path: Path, installed: Path) -> None:
    """The index's torch for CUDA: distribution 2.13.0, torch.__version__ 2.13.0+cu130."""
    assert b"libc.so.6\0" in LIBRARY
    broken = LIBRARY.replace(b"libc.so.6\0", b"libq.so.6\0")
    found = inspect(tmp_path, installed, GOOD, ("torch",), ("torch",), broken)
    assert found["problems"] == ["torch: libraries not found: libq.so.6"]
    write(installed / "torch/__init__.py", "")
    write(installed / "torch/version.py", "__version__ = '2.13.0+cu130'\ncuda = 0\n")
    cuda = {"pytorch": "2.13.0+cu130"}
    assert inspect(tmp_path, installed, cuda, ("torch",), ("torch",))["problems"] == []


def test_the_stack_that_horovod_is_compiled_against(installed: Path) -> None:
    def stack(compiler: str) -> Any:
        return json.loads(run_step("stack.py", compiler, path=installed)[1])

    found = stack("/none/g++")
    assert (found["soabi"], found["compiler"]) == (SUFFIX, "")
    torch = found["frameworks"]["torch"]
    assert (torch["package"], torch["version"]) == ("torch", "2.13.0+cpu")
    assert found["frameworks"]["tensorflow"]["package"] == "tensorflow-cpu"
    before = stack(sys.executable)
    assert before["compiler"].startswith("Python 3")
    # What differs from one environment to the next is not of the stack; another build is.
    record = installed / "torch-2.13.0+cpu.dist-info/RECORD"
    record.write_text(
        record.read_text() + "../../../bin/torchrun,sha256=x,1\ntorch/__init__.cpython-311.pyc,,\n"
    )
    assert stack(sys.executable) == before
    record.write_text("torch/cuda.so,,\n")
    assert stack(sys.executable) != before


@contextmanager
def silent_port() -> Iterator[str]:
    """Something that takes connections and says nothing, as behind some firewalls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def answering(content: bytes) -> Iterator[str]:
    """A server that says this once, whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(content)

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_cpu_index_that_does_not_answer_costs_seconds_and_another_is_used(tmp_path: Path) -> None:
    package(tmp_path / "good/tiny", "tiny")
    for program in ("pip_install.py", "uv_pip.py"):
        command = ["install"] if program == "uv_pip.py" else []
        with silent_port() as silent, served(tmp_path / "good") as good:
            words = [
                word for url in (silent, closed_port(), good.url) for word in ("--cpu-index", url)
            ]
            words += ["--", *command, "tiny"]
            started = time.monotonic()
            target = ("--target", str(tmp_path / program))
            code, printed = run_step(program, *words, *target, PIP_INDEX_URL=f"file://{tmp_path}")
        assert code == 0, printed
        assert f"hvdenv: no answer from {silent} (timed out); continuing without it" in printed
        assert printed.count("hvdenv: no answer from ") == 2
        assert (tmp_path / program / "tiny.py").exists()
        assert time.monotonic() - started < 60  # pip itself would wait for minutes


def test_a_silent_index_stops_uv_unless_hashes_decide_and_the_files_are_here(
    tmp_path: Path,
) -> None:
    wheel = package(tmp_path / "good/tiny", "tiny")
    digest = sha256(wheel.read_bytes()).hexdigest()
    (listed := tmp_path / "wheels.txt").write_text(f"tiny===1.0 --hash=sha256:{digest}\n")
    hashed, target = ("--require-hashes", "--requirement", str(listed)), tmp_path / "to"

    def install(index: str, *words: str, **given: str) -> bool:
        install = ("--", "install", "--reinstall", "--target", str(target), *words)
        given |= {"PIP_INDEX_URL": index, "UV_HTTP_RETRIES": "0"}
        given.setdefault("UV_CACHE_DIR", str(tmp_path / "cache"))
        code, printed = run_step("uv_pip.py", *install, path=None, **given)
        assert (code == 0) == (target / "tiny.py").exists(), printed
        assert code == 0 or "Failed to fetch" in printed
        shutil.rmtree(target, ignore_errors=True)
        return code == 0

    with served(tmp_path / "good") as good:
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            assert not install(good.url, *hashed, **{name: closed_port()})
        assert install(good.url, *hashed)
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            assert install(good.url, *hashed, **{name: closed_port()})
            assert not install(good.url, "tiny", **{name: closed_port()})
    assert install(good.url, *hashed)
    assert not install(good.url, "tiny")
    empty = {"UV_CACHE_DIR": str(tmp_path / "empty")}
    assert not install(good.url, *hashed, **empty)
    assert install(good.url, *hashed, **empty, PIP_FIND_LINKS=str(wheel.parent))


def test_a_cpu_index_is_asked_with_the_proxy_of_pip() -> None:
    with served(Path("/none")) as proxy:
        proxy.everywhere = b"<a>"
        words = ("pip_install.py", "--cpu-index", "http://no-such-host/cpu", "--", "--help")
        code, printed = run_step(*words, PIP_PROXY=proxy.url)
    assert code == 0 and "no answer from" not in printed
    assert proxy.asked == ["http://no-such-host/cpu/"]


@pytest.mark.parametrize("words", [("pip_install.py", "--"), ("uv_pip.py", "--", "install")])
def test_the_exit_code_is_that_of_the_installer(tmp_path: Path, words: tuple[str, ...]) -> None:
    program, *more = words
    source = ["--no-index", "--find-links", str(tmp_path)]
    code, printed = run_step(program, *source, *more, "--target", str(tmp_path), "no-such-package")
    assert code == 1
    assert "no-such-package" in printed
    assert "hvdenv:" not in printed


# Of pip: a pip.conf of the user, and variables.
CONFIGURED = {
    "an empty variable": ("[global]\nindex-url = file:///a\n", {"PIP_INDEX_URL": ""}),
    "an empty option": ("[global]\nindex-url = file:///a\n[install]\nindex-url =\n", {}),
    "other names": ("[global]\n--pypi_url = file:///a\n", {"PIP_INDEX_URL": ""}),
    "links": ("[install]\nfind-links = {0} /gone file://{0}\nno-index = y\n", {"PIP_NO_INDEX": ""}),
    "relative links": ("", {"PIP_FIND_LINKS": "wheels", "PIP_NO_INDEX": "T"}),
    "one slash": ("[global]\nindex-url = file:{0}\nextra-index-url = {0}\n", {}),
    "another file": ("[global]\nindex-url = file:///a\n", {"PIP_CONFIG_FILE": "{0}/other"}),
    "a file that is not there": ("[global]\nindex-url = file:///a\n", {"PIP_CONFIG_FILE": "gone"}),
    "no file": (
        "[global]\nno-index = 1\n",
        {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "{0}"},
    ),
    "no XDG": ("[global]\nindex-url = file:///b\n", {"XDG_CONFIG_HOME": "", "XDG_CONFIG_DIRS": ""}),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_places_are_those_of_pip(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    for folder in ("tiny", "pip"):
        (wheels / folder).mkdir(parents=True)
    package(wheels, "tiny")
    package(wheels / "tiny", "tiny")
    (wheels / "other").write_text("[global]\nindex-url = file:///b\n")
    text, variables = CONFIGURED[name]
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text(text.format(wheels))
    # Not a file of pip.
    (wheels / "pip/pip.conf").write_text("[global]\nindex-url = file:///c\n")
    monkeypatch.chdir(wheels if name == "no XDG" else tmp_path)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_RETRIES": "0"}
    environ |= {key: value.format(wheels) for key, value in variables.items()}
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--target", "t", "tiny"]
    found = subprocess.run(install, env=environ, capture_output=True, text=True, check=False)
    printed = re.findall(r"^Looking in (indexes|links): (.*)$", found.stdout, re.MULTILINE)
    pip = {
        kind: [os.path.abspath(pip_sources.local(each)) for each in places.split(", ")]
        for kind, places in printed
    }
    with mock.patch.dict(os.environ, clean(environ), clear=True):
        monkeypatch.chdir("/")  # as steps
        ours = pip_sources.Sources(pip_sources.parser_of_sources().parse_args([]))
    assert [*map(pip_sources.local, ours.indexes)] == pip.get("indexes", [])
    assert ours.links == [each for each in pip.get("links", []) if Path(each).exists()]


def test_constraints_of_pip_hold_for_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.0", "2.0"):
        package(tmp_path / "wheels", "tiny", version)
    (tmp_path / "c.txt").write_text("tiny<2\n")
    monkeypatch.chdir(tmp_path)
    environ = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull}
    environ |= {"PIP_CONSTRAINT": "c.txt", "PIP_FIND_LINKS": "wheels", "PIP_NO_INDEX": "1"}
    words = ("--", "install", "tiny", "--target", str(tmp_path / "t"))
    found = Runner(environ).run(Command((OWN_PYTHON, str(STEP_PROGRAMS / "uv_pip.py"), *words)))
    assert found, found.output
    assert (tmp_path / "t/tiny-1.0.dist-info").exists()


def test_uv_starts_a_python_that_needs_the_libraries_of_modules(tmp_path: Path) -> None:
    package(tmp_path / "wheels", "tiny")
    python = f'[ "$LD_LIBRARY_PATH" = /needed ] && exec {sys.executable} "$@"'
    programs(tmp_path, python=python)
    words = ("--no-index", "--find-links", str(tmp_path / "wheels"), "--", "install", "tiny")
    code, printed = run_step(
        "uv_pip.py",
        *words,
        "--python",
        str(tmp_path / "python"),
        "--target",
        str(tmp_path / "t"),
        HVDENV_STEP_LIBRARY_PATH="/needed",
        UV_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert code == 0, printed


def test_the_nccl_of_torch_can_be_linked(tmp_path: Path) -> None:
    package, folder = tmp_path / "site/nvidia/nccl", tmp_path / "nccl"
    status, printed = run_step("nccl_of_torch.py", str(folder), path=tmp_path / "site")
    assert status == 1
    assert "this torch is for CPUs" in printed
    assert not folder.exists()
    for path in (package / "lib/libnccl.so.2", package / "include/nccl.h"):
        path.parent.mkdir(parents=True)
        path.write_text(path.name)
    assert run_step("nccl_of_torch.py", str(folder), path=tmp_path / "site") == (0, f"{package}\n")
    assert (folder / "lib/libnccl.so").read_text() == "libnccl.so.2"
    assert (folder / "include/nccl.h").read_text() == "nccl.h"


def test_files_are_recognised_by_their_hash(tmp_path: Path) -> None:
    wheels = [package(tmp_path / "site/simple" / name, name) for name in ("tiny", "other")]
    folder, listed = tmp_path / "files", tmp_path / "files.json"
    entries = [
        {
            "name": name,
            "file": each.name,
            "url": "",
            "sha256": sha256(each.read_bytes()).hexdigest(),
        }
        for name, each in zip(("tiny", "other"), wheels, strict=True)
    ]
    listed.write_text(json.dumps(entries))

    def get(index: str = "") -> tuple[int, str]:
        words = ("get_files.py", str(listed), str(folder))
        if index:
            return run_step(*words, PIP_INDEX_URL=index)
        # Without any index, nothing can be downloaded.
        return run_step(*words, PIP_NO_INDEX="1")

    with served(tmp_path / "site") as site:
        index = f"{site.url}/simple"
        page = '<a href="{0}" data-yanked="bad">{0}</a>'
        (tmp_path / "site/simple/tiny/index.html").write_text(page.format(wheels[0].name))
        code, printed = get(index.replace("://", "://me:geheim@"))
        assert code == 0 and printed.startswith("0 of 2 files are there\n"), printed
        assert get() == (0, "2 of 2 files are there\n")
        (folder / wheels[0].name).write_bytes(b"damaged")
        code, printed = get()
        assert code == 1 and f"no index has exactly {wheels[0].name}" in printed
        assert get(index)[0] == 0
        assert get() == (0, "2 of 2 files are there\n")
        (folder / wheels[0].name).unlink()
        wheels[0].write_bytes(b"replaced")
        code, printed = get(index.replace("://", "://me:geheim@"))
        assert code == 1 and f"{wheels[0].name} has sha256 " in printed
        assert "geheim" not in printed
        assert [each.name for each in folder.iterdir()] == [wheels[1].name]


@pytest.mark.parametrize("program", ["get_files.py", "uv_pip.py"])
def test_an_index_may_move_on_a_host_that_wants_a_password(program: str, tmp_path: Path) -> None:
    """Its pages name their files relative to where they are now, or to what they say."""
    wheel = package(tmp_path / "site/files", "tiny")
    (tmp_path / "site/new/tiny").mkdir(parents=True)
    listed, folder = tmp_path / "files.json", tmp_path / "files"
    entry = {"name": "tiny", "file": wheel.name, "url": ""}
    listed.write_text(json.dumps([{**entry, "sha256": sha256(wheel.read_bytes()).hexdigest()}]))
    words = {
        "get_files.py": [str(listed), str(folder)],
        "uv_pip.py": ["--", "install", "--target", str(folder), "tiny"],
    }
    with served(tmp_path / "site") as site:
        page = f'<base href="{site.url}/files/"><a href="{wheel.name}">{wheel.name}</a>'
        (tmp_path / "site/new/tiny/index.html").write_text(page)
        site.moved, site.secret = {"/old/simple": "/new"}, "bWU6Z2VoZWlt"
        index = site.url.replace("://", "://me:geheim@") + "/old/simple"
        # uv accepts no fraction of a second.
        code, printed = run_step(
            program, *words[program], PIP_INDEX_URL=index, PIP_TIMEOUT="9.5", UV_NO_CACHE="1"
        )
    assert code == 0, printed
    assert "geheim" not in printed and [*folder.glob("tiny*")]


UNUSABLE = "pip's configuration cannot be used: "


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "index-url = https://me:geheim@x\n",
            UNUSABLE + "{}:1: neither [SECTION] nor NAME = VALUE",
        ),
        ("[global]\ngeheim\n", UNUSABLE + "{}:2: neither [SECTION] nor NAME = VALUE"),
        (
            "[global]\nextra-index-url = https://me:geheim@[x/simple\n",
            UNUSABLE + "extra-index-url = [x/simple in {}: not a URL",
        ),
        ("[global]\ntimeout = soon\n", UNUSABLE + "timeout = soon in {}: not a number of seconds"),
        (
            "[global]\nindex-url = me:geheim@x/simple\n",
            UNUSABLE + "index-url = x/simple in {}: neither a URL nor a directory",
        ),
        ("[global]\ntimeout = inf\n", UNUSABLE + "timeout = inf in {}: not a number of seconds"),
        (
            "[global]\nno-index = perhaps\n",
            UNUSABLE + "no-index = perhaps in {}: neither yes nor no",
        ),
        ("[global]\ncert = /gone.pem\n", "no certificates at /gone.pem (cert in {})"),
        ("", "no certificates at /gone (cert in REQUESTS_CA_BUNDLE)"),
    ],
)
def test_a_configuration_of_pip_that_cannot_be_used_is_named(
    text: str, problem: str, tmp_path: Path
) -> None:
    check_configuration("uv_pip.py", text, problem, tmp_path)


@pytest.mark.parametrize("program", ["get_files.py", "pip_install.py"])
def test_all_programs_read_it(program: str, tmp_path: Path) -> None:
    problem = "no certificates at /gone (cert in REQUESTS_CA_BUNDLE)"
    check_configuration(program, "", problem, tmp_path)


def check_configuration(program: str, text: str, problem: str, tmp_path: Path) -> None:
    (conf := tmp_path / "pip.conf").write_text(text)
    (listed := tmp_path / "files.json").write_text('[{"file": "tiny"}]')
    words = {"get_files.py": [str(listed), str(tmp_path / "files")], "uv_pip.py": ["--", "install"]}
    code, printed = run_step(
        program,
        *words.get(program, ["--"]),
        PIP_CONFIG_FILE=str(conf) if text else os.devnull,
        REQUESTS_CA_BUNDLE="/gone",
    )
    assert code == 1
    told = f"hvdenv: {problem.format(conf)}\n"
    assert printed.replace("0 of 1 files are there\n", "") == told
    found = explain(printed)
    expected = "pip-configuration" if UNUSABLE in printed else "certificates-not-there"
    assert found and found.id == expected and (str(conf) if text else "CA_BUNDLE") in found.cause


def test_an_answer_that_is_no_http_is_a_line_and_leaves_no_file(tmp_path: Path) -> None:
    """An answer that ends before its time, and an address with a port that is none."""
    listed, folder = tmp_path / "files.json", tmp_path / "files"
    cut = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"
    with answering(cut) as url:
        entry = {"name": "tiny", "file": "tiny.whl", "sha256": "0" * 64, "url": f"{url}/tiny.whl"}
        listed.write_text(json.dumps([entry]))
        code, printed = run_step(
            "get_files.py", str(listed), str(folder), PIP_INDEX_URL="http://me:geheim@host:port/"
        )
    assert code == 1 and "IncompleteRead" in printed, printed
    assert "geheim" not in printed and "Traceback" not in printed
    assert not [*folder.iterdir()]


# ---------------------------------------------------------------- indexes that have changed, or are none

LOGIN = b"<!DOCTYPE html>\n<title>Log in\n first</title><a href=/help>help</a>"


class Index(NamedTuple):
    """An index with one package in two versions."""

    folder: Path
    wheel: Path
    site: Site

    def page(self, *entries: str) -> None:
        text = "".join(f"<a {each}</a>" for each in entries)
        (self.folder / "simple/tiny/index.html").write_text(f"<!DOCTYPE html>{text}")

    def locked(self, mark: str = "") -> str:
        return f'href="{self.wheel.name}"{mark}>{self.wheel.name}'


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    wheel = package(tmp_path / "simple/tiny", "tiny")
    package(tmp_path / "simple/tiny", "tiny", "2.0")
    with served(tmp_path) as site:
        found = Index(tmp_path, wheel, site)
        found.page(found.locked(), 'href="tiny-2.0-py3-none-any.whl">tiny-2.0-py3-none-any.whl')
        yield found


def get(index: Index) -> None:
    """Get the files of the lock as a build does."""
    digest = sha256(index.wheel.read_bytes()).hexdigest() if index.wheel.exists() else "0" * 64
    listed = TextFile(index.folder / "wheels.txt", f"tiny===1.0 --hash=sha256:{digest}\n")
    install = (
        sys.executable,
        str(STEP_PROGRAMS / "uv_pip.py"),
        "--",
        "install",
        "--no-deps",
        "--require-hashes",
        "--no-cache",
        "--reinstall",
        "--target",
        str(index.folder / "to"),
        "--requirement",
        str(listed.path),
    )
    environ = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{index.site.url}/simple"}
    environ |= {"UV_HTTP_RETRIES": "0", "PIP_FIND_LINKS": ""}
    command = Command(install, tuple(environ.items()))
    perform([Step("files", "", (command,), (listed,))], Runner(), Progress())
    assert (index.folder / "to" / "tiny.py").exists()


def test_what_was_withdrawn_is_taken(index: Index) -> None:
    index.page(index.locked(' data-yanked="it eats files"'))
    get(index)


def test_what_is_not_there_any_more(index: Index) -> None:
    index.page('href="tiny-2.0-py3-none-any.whl">tiny-2.0-py3-none-any.whl')
    with pytest.raises(StepError, match="does not have, or no longer has, exactly tiny==1.0") as a:
        get(index)
    assert a.value.exit_code == 5
    assert "hvdenv lock RECIPE --update" in a.value.remedy
    index.page(index.locked())
    index.wheel.unlink()
    with pytest.raises(StepError, match="the server does not have what is asked for"):
        get(index)


def test_a_login_page_in_the_place_of_an_index(index: Index, tmp_path: Path) -> None:
    index.site.everywhere = LOGIN
    said = "a package index answers with a page that is not a package index"
    with pytest.raises(StepError, match=said) as caught:
        get(index)
    assert caught.value.exit_code == 5
    # An index without the package is no such thing, and a network that is not there neither.
    said = "does not have, or no longer has, exactly tiny==1.0"
    index.site.everywhere = b"<!DOCTYPE html><title>Links for tiny</title>"
    with pytest.raises(StepError, match=said):
        get(index)
    index.site.everywhere = b""
    with pytest.raises(StepError, match="no index that was asked has any tiny"):
        get(index)
