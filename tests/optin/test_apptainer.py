"""A definition built and run by a real Apptainer, as a user who is not root.

Not part of `make test`: Debian has Apptainer in sid only, so this makes a root file system
of sid (a minute or two) and works in it. As root on a Debian machine with debootstrap and
buildah: `python -m pytest tests/optin/test_apptainer.py`. Nothing is left behind but the
root file systems in the directory that HVDENV_TEST_HOME names, if it does.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdenv.model.cluster import Container
from hvdenv.plans.images import define
from hvdenv.sites.container import inside
from tests.real.conftest import home
from tests.real.test_container import (
    BASE,
    Store,
    limited,
    pip_binds,
    recipe_and_plan,
    rootfs,
    run,
    store,
)
from tests.support.needs import need

__all__ = ["home", "pip_binds", "rootfs", "store"]

# A root file system becomes the root of a mount namespace; Apptainer refuses a chroot.
ENTER = """\
mount --bind "$1" "$1" && cd "$1" && mkdir -p old
mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev
echo "127.0.0.1 localhost $(hostname)" > etc/hosts
mount -t tmpfs none run && cp /etc/resolv.conf run/ && ln -sf /run/resolv.conf etc/resolv.conf
for bind in $3; do
    mkdir -p "$(dirname ".${bind#*:}")"
    if [ -d "${bind%%:*}" ]; then mkdir -p ".${bind#*:}"; else touch ".${bind#*:}"; fi
    mount --bind "${bind%%:*}" ".${bind#*:}"
done
pivot_root . old && umount -l /old
exec su user -c "cd && $2"
"""


@pytest.fixture(scope="module")
def sid(home: Path) -> Iterator[Path]:
    """A Debian sid with Apptainer and a user who may be root in an image."""
    need("root", "mounts", "debootstrap")
    folder = home / "rootfs" / "sid"
    if not (folder / "home/user").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run(
            "debootstrap",
            "--variant=minbase",
            "--include=apptainer,ca-certificates,fakeroot,uidmap",
            "sid",
            str(folder),
            "http://deb.debian.org/debian",
        )
        run("chroot", str(folder), "useradd", "--create-home", "--shell", "/bin/sh", "user")
    yield folder
    for name in ("base.tar", "h.def", "h.sif"):
        (folder / "home/user" / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "home/user/.apptainer", ignore_errors=True)


def in_sid(sid: Path, command: str, binds: tuple[str, ...] = (), timeout: float = 1800) -> str:
    """What a command of the user prints in sid; Apptainer's own notes go to standard error."""
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child",
         "sh", "-euc", ENTER, "sh", str(sid), command, " ".join(binds)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
        preexec_fn=limited, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_a_definition_becomes_an_image_that_runs(
    sid: Path, store: Store, pip_binds: tuple[str, ...]
) -> None:
    """All of it but the frameworks and Horovod, whose compile the layer `real` has."""
    recipe, plan = recipe_and_plan()
    steps = tuple(s for s in plan.steps if s.name in ("environment", "activation"))
    odd = "a $HOME `id` {{ x }}"
    activation = next(step for step in steps if step.name == "activation")
    script = activation.files[0].text + "ODD='" + odd + "'\nexport ODD\n"
    changed = activation._replace(files=(activation.files[0]._replace(text=script),))
    steps = tuple(changed if step is activation else step for step in steps)
    text = define(recipe, plan._replace(steps=steps), "singularity")
    head, test, _ = text.rpartition("\n%test")
    assert test
    user = sid / "home/user"
    store.buildah("push", BASE, f"docker-archive:{user}/base.tar")
    text = head.replace(
        f"BootStrap: docker\nFrom: {BASE}", "BootStrap: docker-archive\nFrom: base.tar"
    )
    there = tuple(bind.rpartition(":")[2] for bind in pip_binds)
    text += "\n%test\n    test $VIRTUAL_ENV = /opt/horovod/venv && mpirun --version\n"
    # Apptainer binds only to what exists in the image.
    text += '\n%setup\n    cd "$APPTAINER_ROOTFS"\n'
    for path in there:
        text += f"    mkdir -p .{Path(path).parent}; [ -d {path} ] && mkdir -p .{path} || touch .{path}\n"
    (user / "h.def").write_text(text, encoding="utf-8")
    binds = [word for path in there for word in ("--bind", path)]
    build = shlex.join(["apptainer", "build", "--fakeroot", *binds, "h.sif", "h.def"])
    assert "mpirun (Open MPI) 4.1.8" in in_sid(sid, build, pip_binds)

    words = " ".join(inside(Container(runtime="apptainer", image="h.sif"), "/"))
    program = "'echo $ODD; which python mpirun; echo ${PYTHONPATH:-none} ${OPAL_PREFIX}'"
    leaking = "PYTHONPATH=/host OPAL_PREFIX=/host ODD=host"
    assert in_sid(sid, f"{leaking} {words} sh -c {program}").splitlines() == [
        odd,
        "/opt/horovod/venv/bin/python",
        "/opt/horovod/venv/bin/mpirun",
        "none /opt/horovod/venv",
    ]
    assert in_sid(sid, "apptainer run h.sif python -c 'print(6 * 7)'").strip() == "42"
    labels = in_sid(sid, "apptainer inspect --labels h.sif")
    assert f"hvdenv.plan: {plan.digest}" in labels
    ranks = in_sid(sid, "apptainer exec h.sif mpirun --oversubscribe -n 2 sh -c 'echo rank'")
    assert ranks.split() == ["rank", "rank"]
