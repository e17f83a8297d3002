"""Images for real: a Debian root file system from debootstrap, built by buildah.

The root file system is kept in the directory that HVDENV_TEST_HOME names. What is built in an
image has to find packages as this machine does, so pip's configuration goes with it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.plans.images import define, image_facts, image_plan
from hvdenv.plans.plan import Plan, candidates
from tests.support.needs import need
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

    def build(self, definition: Path, image: str, binds: tuple[str, ...]) -> None:
        """Build an image that sees files of this machine, HOST:IMAGE."""
        words = [word for bind in binds for word in ("--volume", f"{bind}:ro")]
        file = ("--file", str(definition), str(definition.parent))
        self.buildah("bud", "--tag", image, *words, *file, timeout=3000)

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
    """What pip of this machine goes by, as HOST:IMAGE."""
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
            binds.append(f"{top}:{top}")
    lines = [f"{key} = {value}" for key, value in options.items()]
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    return (f"{folder}/pip.conf:/etc/pip.conf", *dict.fromkeys(binds))


def recipe_and_plan() -> tuple[Recipe, Plan]:
    recipe = load_recipe("local", variants=["torch"], overrides=[f"container.base={BASE}"]).recipe
    assert recipe.container
    facts = image_facts(recipe.container, "x86_64", len(os.sched_getaffinity(0)))
    return recipe, image_plan(recipe, ("torch",), facts, candidates(recipe, facts)[0])


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
    store.build(definition, "localhost/small:1", pip_binds)

    found = json.loads(store.buildah("inspect", "--type", "image", "localhost/small:1"))
    labels = found["OCIv1"]["config"]["Labels"]
    assert (labels["hvdenv.recipe"], labels["hvdenv.variants"]) == ("local", "torch")
    assert labels["hvdenv.plan"] == plan.digest
    with store.container("localhost/small:1") as inside:
        assert inside("printenv", "ODD", "OPAL_PREFIX") == f"{ODD}\n/opt/horovod/venv\n"
        assert inside("which", "python", "mpirun").split() == [
            "/opt/horovod/venv/bin/python",
            "/opt/horovod/venv/bin/mpirun",
        ]
        ranks = inside(*ROOT, "mpirun", "--oversubscribe", "-n", "2", "echo", "rank")
        assert ranks.split() == ["rank", "rank"]

    definition.write_text(f"FROM localhost/small:1\n{run_test}{test}", encoding="utf-8")
    with pytest.raises(AssertionError, match="horovodrun: not found"):
        store.build(definition, "localhost/tested:1", pip_binds)
