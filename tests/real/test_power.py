"""Power cuts: what survives, what is taken for whole, and that the next build gets it right.

An ext4 file system in a file is shut down by its own ioctl, which drops all that is not on the
disk yet, as a power cut does. That takes root and a loop device.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from hvdenv.base import places
from hvdenv.base.errors import HvdenvError, StepError
from hvdenv.environments import generations, manifest, prefix_lock
from hvdenv.environments.generations import Environment
from hvdenv.model.observe import declared
from hvdenv.plans.step import Step
from tests.pure.test_build_anew import STEPS, Recorder, Site
from tests.support.needs import need
from tests.support.waiting import wait_until

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
WITHOUT_FLUSH = 2


class Disk:
    """A small ext4 file system."""

    def __init__(self, folder: Path) -> None:
        self.image, self.root = folder / "disk.img", folder / "disk"
        self.root.mkdir()
        with self.image.open("wb") as stream:
            stream.truncate(64 << 20)
        _call("mkfs.ext4", "-q", str(self.image))
        # One device throughout: two on one file do not see what the other has not written yet.
        self.device = _call("losetup", "--find", "--show", str(self.image))
        self.mount()

    def mount(self) -> None:
        _call("mount", self.device, str(self.root))

    def unmount(self) -> None:
        _call("umount", str(self.root))

    def remove(self) -> None:
        self.unmount()
        _call("losetup", "--detach", self.device)

    def cut(self) -> None:
        """Lose all that is not on the disk; from now on nothing can be read or written."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", WITHOUT_FLUSH))
        finally:
            os.close(descriptor)

    def restore(self) -> None:
        """What the disk has after the machine has started again.

        The file system stays shut down as long as the mount namespace of another test has it, too.
        """
        wait_until(self._is_mounted_anew)

    def _is_mounted_anew(self) -> bool:
        self.unmount()
        self.mount()
        try:
            TemporaryFile(dir=self.root).close()
        except OSError:
            return False
        return True


def _call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    need("root", "mounts", "loop devices", "e2fsprogs")
    disk = Disk(tmp_path)
    try:
        yield disk
    finally:
        disk.remove()


@pytest.fixture
def site(disk: Disk, tmp_path: Path) -> Site:
    (tmp_path / "switches").mkdir()
    facts = declared(Path(__file__).parents[1] / "cases" / "facts.json")
    return Site(generations.at(disk.root / "env"), tmp_path / "switches", facts)


class Cut(Recorder):
    """Cuts the power when a step is done."""

    def __init__(self, disk: Disk, step: str) -> None:
        super().__init__()
        self.disk, self.step = disk, step

    def step_done(self, number: int, step: Step, note: str, seconds: float) -> None:
        super().step_done(number, step, note, seconds)
        if step.name == self.step:
            self.disk.cut()


def in_a_process(disk: Disk, run: Callable[[], object]) -> int:
    """What a process ends with that cuts the power; its disk is there again afterwards."""

    def end() -> None:
        try:
            run()
        except HvdenvError as error:
            sys.exit(error.exit_code)

    process = multiprocessing.get_context("fork").Process(target=end)
    process.start()
    process.join()
    disk.restore()
    assert process.exitcode is not None
    return process.exitcode


def build_until(site: Site, disk: Disk, step: str) -> int:
    """Build, and cut the power when a step is done. Returns the exit code."""
    cut = Cut(disk, step)
    return in_a_process(disk, lambda: site.build(recorder=cut))


def differences(environment: Environment) -> list[manifest.ChangedFile]:
    """Where the active generation is not what its manifest says, by the hashes of all files."""
    identity = environment.active()
    record = generations.read_record(environment.record(identity))
    root = environment.generation(identity)
    listed = manifest.read(root / manifest.NAME, record.manifest_digest)
    return manifest.compare(root, listed, closely=lambda path: True)


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_called_complete_is_on_the_disk(
    site: Site, disk: Disk, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:  # as on file systems that ignore syncfs()
        monkeypatch.setattr(places, "_sync_file_system", lambda path: None)
    assert build_until(site, disk, "record") == 0
    assert site.environment.active()
    assert differences(site.environment) == []
    assert not site.build()[0].changed


@pytest.mark.parametrize("step", STEPS[:-1])
def test_a_build_that_is_cut_off_is_removed_by_the_next(site: Site, disk: Disk, step: str) -> None:
    assert build_until(site, disk, step) == 5
    assert not site.environment.active()
    built, recorder = site.build()
    assert built.changed
    assert recorder.done == STEPS
    assert site.environment.identities() == [built.generation.name]
    assert differences(site.environment) == []


def test_a_file_system_that_may_only_be_read_is_named(site: Site, disk: Disk) -> None:
    site.build()
    _call("mount", "-o", "remount,ro", disk.device, str(disk.root))
    assert not site.build()[0].changed
    with pytest.raises(StepError, match="cannot write: Read-only file system"):
        site.build(rebuild=True)


def test_a_lock_survives_its_holder(disk: Disk) -> None:
    def cut() -> None:
        with prefix_lock.hold(disk.root, wait=0):
            disk.cut()

    assert in_a_process(disk, cut) == 0
    with prefix_lock.hold(disk.root, wait=0) as held:
        held.check()
