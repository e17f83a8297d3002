"""Compiled wheels of Horovod as far as a cache cares what they are, and the umask they get."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hvdenv.building.wheelcache import Cache, key, store
from hvdenv.knowledge.patches import applicable
from hvdenv.plans.step import digest

NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


def wheel_in(folder: Path, content: bytes = b"wheel" * 1000) -> Path:
    """A file that goes for a wheel."""
    path = folder / NAME
    path.write_bytes(content)
    return path


def store_for(wheels: Path, inputs: dict[str, Any], prefix: Path, *, without: str = "") -> None:
    """Let a build take the wheel of another environment, whose compile takes minutes.

    Args:
        wheels: the cache of both.
        inputs: of the plan of the build.
        prefix: of the other environment.
        without: a framework that the build does not have.
    """
    cache, stack = Cache(wheels), json.loads((prefix / "hvdenv.json").read_text())["stack"]
    (wheel,) = cache.entry(key(stack)).glob("*.whl")
    frameworks = {k: v for k, v in stack["stack"]["frameworks"].items() if k != without}
    with TemporaryDirectory() as folder:
        smaller = Path(folder) / wheel.name
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w") as new:
            for name in old.namelist():
                if not re.search(rf"horovod/{without}/.*\.so$", name):
                    listed = re.sub(
                        rf"(?m)^horovod/{without}/\S*\.so,.*\n".encode(), b"", old.read(name)
                    )
                    new.writestr(old.getinfo(name), listed if "RECORD" in name else old.read(name))
        stack = {**stack["stack"], "frameworks": frameworks}
        store(cache, {**inputs, "stack": stack}, smaller)


@contextmanager
def umask(value: int) -> Iterator[None]:
    """What is written within is written under this umask."""
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


# An extension as far as publishing looks into it: what it links and the symbols that it uses.
EXTENSION = b"\0libmpi.so.40\0libtorch.so\0_ZNSt7__cxx11\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.3.4\0"
TORCH_INPUTS: dict[str, Any] = {
    "source": "0" * 64,
    "patches": {
        each.name: digest(each.edit)
        for each in applicable({"horovod": "0.28.1", "torch": "2.13.0"})
    },
    "variables": {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HVDENV_INSTALL_RPATH": "$ORIGIN/../../../..",
    },
    "stack": {
        "compiler": "g++ 12.2.0",
        "frameworks": {"torch": {"package": "torch", "version": "2.13.0+cpu", "files": "0"}},
        "glibc": "2.36",
        "machine": "x86_64",
        "mpi": "mpirun (Open MPI) 4.1.8 Report bugs to",
        "nccl": [],
        "programs": {},
        "soabi": sysconfig.get_config_var("EXT_SUFFIX"),
    },
}


def compiled_wheel(folder: Path, extension: bytes = EXTENSION) -> Path:
    """A wheel for torch 2.13.0 and this Python, whose extension nobody can load."""
    about, suffix = "horovod-0.28.1.dist-info", TORCH_INPUTS["stack"]["soabi"]
    tag = "cp{}{}".format(*sys.version_info)
    files = {
        "horovod/__init__.py": b"__version__ = '0.28.1'\n",
        "horovod/metadata.json": b'{"pytorch": "2.13.0+cpu"}',
        "horovod/torch/__init__.py": b'"""Doc."""\nfrom __future__ import annotations\nimport os\n',
        f"horovod/torch/mpi_lib_v2{suffix}": extension,
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n"
        b"Requires-Python: >=3.6\nRequires-Dist: cloudpickle\n\nVersion: of the text\n",
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-linux_x86_64\n".encode(),
        f"{about}/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"horovod-0.28.1-{tag}-{tag}-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path
