"""inspect_wheel.py, pip_install.py and stack.py, run as a build runs them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hvdenv.plan import PROBES

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
EXTENSIONS = {
    "torch": f"horovod/torch/mpi_lib_v2{SUFFIX}",
    "tensorflow": f"horovod/tensorflow/mpi_lib{SUFFIX}",
}
# Some program stands for an extension: it is linked against libraries, too.
LIBRARY = Path("/bin/true").read_bytes()


def probe(name: str, *words: str, path: Path | None = None) -> tuple[int, str]:
    """Run a probe in an environment that has nothing but what is given."""
    env = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "PYTHONNOUSERSITE": "1"}
    if path:
        env["PYTHONPATH"] = str(path)
    found = subprocess.run(
        [sys.executable, str(PROBES / name), *words], env=env, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return found.returncode, found.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Distributions as pip leaves them: what is known of their version, and nothing else."""
    site = tmp_path / "site"
    for name, version in (("torch", "2.13.0+cpu"), ("tensorflow_cpu", "2.15.1")):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (folder / "RECORD").write_text(f"{name}/__init__.py,,\n")
    return site


def wheel(
    folder: Path, metadata: dict[str, str], *frameworks: str, library: bytes = LIBRARY
) -> Path:
    path = folder / "horovod-0.28.1-x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("horovod/metadata.json", json.dumps({"dummy": "none", **metadata}))
        for framework in frameworks:
            archive.writestr(EXTENSIONS[framework], library)
    return path


def inspect(path: Path, site: Path, *frameworks: str) -> tuple[int, Any]:
    code, output = probe("inspect_wheel.py", str(path), *frameworks, path=site)
    return code, json.loads(output.splitlines()[-1])


GOOD = {"pytorch": "2.13.0+cpu", "tensorflow": "2.15.1"}


def test_a_good_wheel(tmp_path: Path, installed: Path) -> None:
    path = wheel(tmp_path, GOOD, "torch", "tensorflow")
    code, found = inspect(path, installed, "torch", "tensorflow")
    assert (code, found["problems"]) == (0, [])
    assert found["bytes"] == path.stat().st_size
    assert found["frameworks"]["torch"] == {
        "built_with": "2.13.0+cpu", "bytes": len(LIBRARY), "extension": EXTENSIONS["torch"]
    }  # fmt: skip


def test_a_wheel_without_extensions(tmp_path: Path, installed: Path) -> None:
    code, found = inspect(wheel(tmp_path, {}), installed, "torch", "tensorflow")
    assert code == 1
    assert found["problems"] == [
        f"{name}: the wheel has no {EXTENSIONS[name]}: no extension was compiled"
        for name in ("torch", "tensorflow")
    ]


def test_a_wheel_with_one_extension_of_two(tmp_path: Path, installed: Path) -> None:
    code, found = inspect(wheel(tmp_path, GOOD, "torch"), installed, "torch", "tensorflow")
    assert code == 1
    assert [problem.split(":")[0] for problem in found["problems"]] == ["tensorflow"]


def test_a_wheel_compiled_with_another_version(tmp_path: Path, installed: Path) -> None:
    code, found = inspect(wheel(tmp_path, {"pytorch": "2.12.0"}, "torch"), installed, "torch")
    assert code == 1
    assert found["problems"] == ["torch: compiled with 2.12.0, installed is 2.13.0+cpu"]


def test_a_torch_that_says_more_than_its_distribution(tmp_path: Path, installed: Path) -> None:
    """The index's torch for CUDA: distribution 2.13.0, torch.__version__ 2.13.0+cu130."""
    (installed / "torch").mkdir()
    (installed / "torch" / "__init__.py").touch()
    (installed / "torch" / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda = 0\n")
    code, found = inspect(wheel(tmp_path, {"pytorch": "2.13.0+cu130"}, "torch"), installed, "torch")
    assert (code, found["problems"]) == (0, [])


def test_a_wheel_that_does_not_say_what_it_was_compiled_with(
    tmp_path: Path, installed: Path
) -> None:
    code, found = inspect(wheel(tmp_path, {}, "torch"), installed, "torch")
    assert code == 1
    assert found["problems"] == ["torch: compiled with None, installed is 2.13.0+cpu"]


def test_a_wheel_whose_libraries_are_not_there(tmp_path: Path, installed: Path) -> None:
    assert b"libc.so.6\0" in LIBRARY
    broken = LIBRARY.replace(b"libc.so.6\0", b"libq.so.6\0")
    code, found = inspect(wheel(tmp_path, GOOD, "torch", library=broken), installed, "torch")
    assert code == 1
    assert found["problems"] == ["torch: libraries not found: libq.so.6"]


def test_the_stack_that_horovod_is_compiled_against(installed: Path) -> None:
    code, output = probe("stack.py", "/none/g++", path=installed)
    found = json.loads(output)
    assert code == 0
    assert found["soabi"] == SUFFIX
    assert found["compiler"] == ""
    torch = found["frameworks"]["torch"]
    assert (torch["package"], torch["version"]) == ("torch", "2.13.0+cpu")
    assert found["frameworks"]["tensorflow"]["package"] == "tensorflow-cpu"


def test_two_builds_of_one_version_are_two_stacks(installed: Path) -> None:
    record = installed / "torch-2.13.0+cpu.dist-info/RECORD"

    def stack() -> Any:
        return json.loads(probe("stack.py", sys.executable, path=installed)[1])

    before = stack()
    assert before["compiler"].startswith("Python 3")
    # What differs from one environment to the next is not of the stack.
    record.write_text(
        record.read_text() + "../../../bin/torchrun,sha256=x,1\ntorch/__init__.cpython-311.pyc,,\n"
    )
    assert stack() == before
    record.write_text("torch/cuda.so,,\n")
    assert stack() != before


def package(folder: Path, name: str) -> None:
    """A package with nothing in it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{about}/RECORD",
            f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n",
        )


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextmanager
def index(folder: Path) -> Iterator[str]:
    """A package index: a folder over HTTP."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def silent_port() -> Iterator[str]:
    """Something that takes connections and says nothing, as behind some firewalls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_cpu_index_that_does_not_answer_costs_seconds_and_pip_goes_on(tmp_path: Path) -> None:
    package(tmp_path / "wheels", "tiny")
    with silent_port() as silent:
        arguments = [
            "--no-index",
            "--find-links",
            str(tmp_path / "wheels"),
            "--target",
            str(tmp_path / "t"),
            "tiny",
        ]
        started = time.monotonic()
        without, _ = probe(
            "pip_install.py", "--", *arguments[:-3], "--target", str(tmp_path / "u"), "tiny"
        )
        plain = time.monotonic() - started
        code, said = probe(
            "pip_install.py", "--cpu-index", silent, "--cpu-index", closed_port(), "--", *arguments
        )
        both = time.monotonic() - started - plain
    assert (code, without) == (0, 0)
    assert f"hvdenv: no answer from {silent} (timed out); pip goes by its own configuration" in said
    assert said.count("hvdenv: no answer from ") == 2
    assert (tmp_path / "t/tiny.py").exists()
    assert both - plain < 5


def test_a_cpu_index_that_answers_is_used_and_gpu_packages_are_announced(tmp_path: Path) -> None:
    package(tmp_path / "cpu/nvidia-tiny-cu12", "nvidia_tiny_cu12")
    package(tmp_path / "cpu/tiny", "tiny")
    with index(tmp_path / "cpu") as url:
        code, said = probe(
            "pip_install.py", "--cpu-index", url, "--", "--index-url", closed_port(), "--retries", "0",
            "--no-cache-dir", "--target", str(tmp_path / "t"), "tiny", "nvidia-tiny-cu12",
        )  # fmt: skip
    assert code == 0, said
    lines = said.splitlines()
    (notice,) = (
        n for n, line in enumerate(lines) if line.startswith("hvdenv: pip found no CPU build")
    )
    assert lines[notice + 1].startswith("Collecting nvidia-tiny-cu12")
    assert "no answer from" not in said


def test_the_exit_code_is_that_of_pip(tmp_path: Path) -> None:
    code, said = probe(
        "pip_install.py", "--", "--no-index", "--target", str(tmp_path), "no-such-package"
    )
    assert code == 1
    assert "No matching distribution found" in said
    assert "hvdenv:" not in said


def test_pip_install_says_how_it_is_used() -> None:
    code, said = probe("pip_install.py", "--index", "x", "--", "y")
    assert code == 1
    assert said.startswith("usage: pip_install.py")
