"""A lock that was made on one distribution builds on another: Debian 13, with GCC 14.

The root file system comes from Debian's archive (a minute or two); the interpreter, hvdenv and
pip's directories of packages are bound into it. As root, with debootstrap: `python -m pytest
tests/optin/test_other_distribution.py`. It compiles Horovod there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdenv.locks import lockfile
from hvdenv.locks.lockfile import MAIN
from tests.real.conftest import home

__all__ = ["home"]

ROOT = Path(__file__).parents[2]
LOCKED = ROOT / "lockfiles" / "local" / "py3.11-linux-x86_64"
PACKAGES = "gcc,g++,libc6-dev,ca-certificates,procps,openssh-client"
# What an interpreter of another machine links.
LIBRARIES = "libbz2-1.0,libffi8,liblzma5,libsqlite3-0"

pytestmark = [
    pytest.mark.needs("root", "mounts", "debootstrap"),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock is for Python 3.11"),
]

# In namespaces of its own: what is bound is gone with it.
ENTER = """\
root=$1; shift; binds=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount --rbind /sys "$root/sys"
for bind in $binds; do mkdir -p "$root$bind"; mount --rbind "$bind" "$root$bind"; done
# How this network is reached, and the certificates that it needs.
for file in /etc/hosts /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt; do cp "$file" "$root$file"; done
exec chroot "$root" "$@"
"""


@pytest.fixture(scope="module")
def trixie(home: Path) -> Path:
    folder = home / "rootfs" / "trixie"
    if not (folder / "usr/bin/g++").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(
            [
                "debootstrap",
                "--variant=minbase",
                f"--include={PACKAGES},{LIBRARIES}",
                "trixie",
                folder,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return folder


def there(trixie: Path, home: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line in that root file system."""
    own = home / "trixie"
    own.mkdir(exist_ok=True)
    named = [Path(each) for each in os.environ.get("PIP_FIND_LINKS", "").split() if each]
    binds = [Path(sys.base_prefix), Path(sys.prefix), ROOT, own, *filter(Path.is_dir, named)]
    inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", ENTER, "sh"]
    return subprocess.run(
        [*inside, trixie, " ".join(map(str, binds)), sys.executable, "-m", "hvdenv", *words],
        env={**os.environ, "HVDENV_HOME": str(own), "HOME": "/root", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )


def test_a_lock_of_another_distribution_builds_and_works(trixie: Path, home: Path) -> None:
    made = lockfile.read_lock(LOCKED).lock.built
    assert made, f"{LOCKED / MAIN} was not filled in by a build"
    built = there(trixie, home, "build", "local", "--locked")
    assert built.returncode == 0, built.stderr
    judged = there(trixie, home, "verify", "local", "--quick", "--json")
    assert json.loads(judged.stdout)["verdict"] == "pass", judged.stdout
