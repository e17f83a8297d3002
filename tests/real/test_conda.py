"""conda environments from a local channel: real packages, solved, installed and copied."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hvdenv import STEP_PROGRAMS
from tests.channel import PLACEHOLDER, Channel, File, find_interpreter, python_channel
from tests.real.conftest import hear_interrupts

CONDA_ENV = STEP_PROGRAMS / "conda_env.py"
PROGRAM = (
    f'#include <stdio.h>\nstatic volatile const char *prefix = "{PLACEHOLDER}/share";\n'
    'int main(void) { printf("%s\\n", (const char *)prefix); return 0; }\n'
)


@pytest.fixture(scope="session")
def channel(home: Path) -> Channel:
    """With CPython and pip."""
    return python_channel(home)


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Channel:
    """With a compiled program, packages for GPUs, and one that would run a script."""
    folder = tmp_path_factory.mktemp("tools")
    compiled = folder / "greeter"
    subprocess.run(
        ["gcc", "-x", "c", "-", "-o", str(compiled)], input=PROGRAM, text=True, check=True
    )
    channel = Channel(folder / "channel")
    channel.add(
        "greeter", "1.0",
        {
            "bin/greeter": File(compiled.read_bytes(), executable=True, prefix=PLACEHOLDER),
            "bin/greet": File(
                f"#!/bin/sh\nexec {PLACEHOLDER}/bin/greeter\n".encode(), True, PLACEHOLDER
            ),
            "bin/hello": File(link="greet"),
        },
        depends=["__glibc >=2.17,<3"], packed=".tar.bz2",
    )  # fmt: skip
    for version, needs in (("1.0", ()), ("2.0", ("__cuda >=11.8",))):
        channel.add("gpulib", version, {"share/gpulib": File(version.encode())}, depends=needs)
    script = File(b"#!/bin/sh\ntouch $PREFIX/ran\n", executable=True)
    channel.add("scripted", "1.0", {"bin/.scripted-post-link.sh": script}, noarch="generic")
    return channel.index()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def variables(cache: Path | None) -> dict[str, str]:
    kept = {"RATTLER_CACHE_DIR": str(cache)} if cache else {}
    return {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), **kept}


def start(*words: str | Path, cache: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CONDA_ENV), *map(str, words)],
        env=variables(cache), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        preexec_fn=hear_interrupts,
    )  # fmt: skip


def run(*words: str | Path, cache: Path | None = None) -> tuple[int, str]:
    with start(*words, cache=cache) as process:
        printed, _ = process.communicate(timeout=300)
    return process.returncode, printed


def document(folder: Path, channels: list[str], specs: list[str], **changed: Any) -> Path:
    path = folder / "conda.json"
    virtual = {"__cuda": "11.4", "__glibc": "2.17"}
    spec = {"channels": channels, "specs": specs, "platform": "linux-64", "virtual": virtual}
    path.write_text(json.dumps({**spec, **changed}))
    return path


def refused(folder: Path, cache: Path, *document_words: Any, **changed: Any) -> str:
    """What is printed when it fails; then nothing is left of it."""
    target = folder / "env"
    status, printed = run(document(folder, *document_words, **changed), target, cache=cache)
    assert status == 1, printed
    assert "Traceback" not in printed
    assert not target.exists()
    return printed


# On a busy machine a program may get to its end before its test gets to end it.
TRIES = 10


def wait_for(path: Path) -> None:
    """Until it is there, and not a moment longer."""
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come to be"


def output(*words: str | Path) -> str:
    """Of a program of an environment, without anything of the tests' own environment."""
    return subprocess.run(
        [str(word) for word in words], env={"PATH": "/usr/bin:/bin"}, text=True, check=True,
        stdout=subprocess.PIPE, timeout=120,
    ).stdout.strip()  # fmt: skip


@pytest.fixture(scope="session")
def environment(
    channel: Channel, tools: Channel, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Python, pip and a compiled program; beside it the report and what was printed."""
    folder = tmp_path_factory.mktemp("made")
    minor = find_interpreter().minor
    spec = document(folder, [tools.url, channel.url], [f"python {minor}.*", "pip", "greeter 1.0"])
    umask = os.umask(0o022)
    status, printed = run(
        spec, folder / "env", "--report", folder / "report.json", cache=cache
    )  # fmt: skip
    os.umask(umask)
    (folder / "printed").write_text(printed)
    assert status == 0, printed
    return folder / "env"


def test_python_and_pip_run(environment: Path) -> None:
    python = find_interpreter()
    assert output(environment / "bin/python", "-V") == f"Python {python.version}"
    ask = (
        "import sys, ssl, ctypes, sysconfig; print(sys.prefix, sysconfig.get_config_var('prefix'))"
    )
    assert output(environment / "bin/python", "-c", ask) == f"{environment} {environment}"
    assert f"from {environment}/lib" in output(environment / "bin/pip", "--version")
    assert output(environment / "bin/hello") == f"{environment}/share"


def test_what_is_reported_and_said(environment: Path, channel: Channel, tools: Channel) -> None:
    folder = environment.parent
    printed = (folder / "printed").read_text()
    assert "for: linux-64 with __cuda 11.4, __glibc 2.17" in printed
    assert "installing 3 packages" in printed
    packages = {each["name"]: each for each in json.loads((folder / "report.json").read_text())}
    assert set(packages) == {"python", "pip", "greeter"}
    assert packages["python"]["version"] == find_interpreter().version
    assert packages["pip"]["url"].startswith(f"{channel.url}/noarch/pip-")
    greeter = packages["greeter"]
    assert greeter["url"] == f"{tools.url}/linux-64/greeter-1.0-0.tar.bz2"
    index = json.loads((tools.folder / "linux-64/repodata.json").read_text())
    assert greeter["sha256"] == index["packages"]["greeter-1.0-0.tar.bz2"]["sha256"]


def test_it_is_an_environment_to_conda_and_to_a_group(environment: Path) -> None:
    """conda activates what has conda-meta, and takes it for its own with a history there."""
    assert (environment / "conda-meta/history").is_file()
    for path in (environment / "conda-meta").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644, path


def test_nothing_is_shared_with_the_cache(environment: Path) -> None:
    files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 500
    assert {path.stat().st_nlink for path in files} == {1}


@pytest.mark.parametrize(("cuda", "version"), [("11.4", "1.0"), ("12.4", "2.0"), (None, "1.0")])
def test_the_target_decides(
    tools: Channel, cache: Path, tmp_path: Path, cuda: str | None, version: str
) -> None:
    virtual = {"__cuda": cuda} if cuda else {}
    spec = document(tmp_path, [tools.url], ["gpulib"], virtual=virtual)
    status, printed = run(spec, tmp_path / "env", cache=cache)
    assert status == 0, printed
    assert (tmp_path / "env/share/gpulib").read_text() == version


def test_more_than_the_target_has(tools: Channel, cache: Path, tmp_path: Path) -> None:
    printed = refused(tmp_path, cache, [tools.url], ["gpulib 2.0"])
    assert "gpulib ==2.0 cannot be installed" in printed
    assert "__cuda >=11.8" in printed
    assert "with __cuda 11.4" in printed
    assert "asks more of the machine" in printed
    printed = refused(tmp_path, cache, [tools.url], ["greeter"], virtual={"__glibc": "2.12"})
    assert "__glibc >=2.17" in printed


def test_what_cannot_be_had(tools: Channel, cache: Path, tmp_path: Path) -> None:
    printed = refused(tmp_path, cache, [tools.url], ["greeter", "gpulib 3.*"])
    assert "No candidates were found for gpulib 3.*" in printed
    assert "packages: greeter, gpulib 3.*" in printed
    assert tools.url in printed
    assert "asks more of the machine" not in printed
    printed = refused(tmp_path, cache, [tools.url], ["gpulib >=2", "gpulib <2"])
    assert "gpulib" in printed


@pytest.mark.parametrize("spec", ["", "greeter ===", "gr\u00fcss $(id)"])
def test_what_is_no_package(tools: Channel, cache: Path, tmp_path: Path, spec: str) -> None:
    assert f"conda_env: {spec}: " in refused(tmp_path, cache, [tools.url], [spec])


def test_a_channel_that_is_not_there(cache: Path, tmp_path: Path) -> None:
    gone = tmp_path.as_uri() + "/gone"
    printed = refused(tmp_path, cache, [gone], ["python"])
    assert "a channel cannot be read" in printed
    assert gone in printed
    printed = refused(tmp_path, cache, ["http://127.0.0.1:9/site"], ["python"])
    assert "a channel cannot be read" in printed
    assert "http://127.0.0.1:9/site" in printed


def test_scripts_of_packages_are_not_run(tools: Channel, cache: Path, tmp_path: Path) -> None:
    spec = document(tmp_path, [tools.url], ["scripted"])
    status, printed = run(spec, tmp_path / "env", cache=cache)
    assert status == 0, printed
    assert "bin/.scripted-post-link.sh" in printed
    assert not (tmp_path / "env/ran").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_ended_in_the_middle_and_run_again(
    channel: Channel, tmp_path: Path, number: signal.Signals
) -> None:
    minor = find_interpreter().minor
    target, report = tmp_path / "env", tmp_path / "report.json"
    words = (
        document(tmp_path, [channel.url], [f"python {minor}.*", "pip"]),
        target, "--report", report,
    )  # fmt: skip
    for _ in range(TRIES):
        with start(*words, cache=tmp_path / "cache") as process:
            wait_for(target / f"lib/python{minor}")
            process.send_signal(number)
            printed, _ = process.communicate(timeout=300)
        if process.returncode:
            break
        shutil.rmtree(target)
        report.unlink()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[number], printed
    assert not report.exists()
    assert "exists already" in run(*words, cache=tmp_path / "cache")[1]
    shutil.rmtree(target)
    status, printed = run(*words, cache=tmp_path / "cache")
    assert status == 0, printed
    assert output(target / "bin/pip", "--version").startswith("pip ")
    assert len(json.loads(report.read_text())) == 2
    assert not Path(f"{target}.unfinished").exists()


def wheel(folder: Path) -> Path:
    """A wheel with a console script."""
    path = folder / "printed-1.0-py3-none-any.whl"
    files = {
        "printed.py": "import sys\ndef main():\n    print('printed by', sys.prefix)\n",
        "printed-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: printed\nVersion: 1.0\n",
        "printed-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "printed-1.0.dist-info/entry_points.txt": "[console_scripts]\nprinted = printed:main\n",
    }
    files["printed-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_copy_of_a_site_environment(environment: Path, tmp_path: Path) -> None:
    site, copy = tmp_path / "site", tmp_path / "home/of/a/user/and/a-path/that-is/longer/conda"
    assert run("--clone", environment, site)[0] == 0
    output(site / "bin/python", "-m", "pip", "install", "--no-index", wheel(tmp_path))
    assert output(site / "bin/printed") == f"printed by {site}"

    status, printed = run("--clone", site, copy, "--report", tmp_path / "report.json")
    assert status == 0, printed
    assert "still name" not in printed
    shutil.rmtree(site)
    ask = "import sys, ssl, sysconfig; print(sys.prefix, sysconfig.get_config_var('prefix'))"
    assert output(copy / "bin/python", "-c", ask) == f"{copy} {copy}"
    assert output(copy / "bin/printed") == f"printed by {copy}"
    assert f"from {copy}/lib" in output(copy / "bin/pip", "--version")
    assert output(copy / "bin/hello") == f"{copy}/share"
    names = [each["name"] for each in json.loads((tmp_path / "report.json").read_text())]
    assert names == ["greeter", "pip", "python"]


def test_the_interpreter_is_not_let_to_its_end(tools: Channel, cache: Path, tmp_path: Path) -> None:
    """It dies there in one of four runs that installed something."""
    (tmp_path / "sitecustomize.py").write_text("import atexit; atexit.register(print, 'the end')")
    words = (document(tmp_path, [tools.url], ["greeter"]), tmp_path / "env")
    for program, reaches_it in ((["-c", ""], True), ([str(CONDA_ENV), *map(str, words)], False)):
        printed = subprocess.run(
            [sys.executable, *program], env={**variables(cache), "PYTHONPATH": str(tmp_path)}, text=True, check=True,
            stdout=subprocess.PIPE, timeout=300,
        ).stdout  # fmt: skip
        assert ("the end" in printed) is reaches_it
