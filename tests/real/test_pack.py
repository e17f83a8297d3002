"""Images of environments: made by mksquashfs, mounted by squashfuse in namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdenv.base.command import Command, Outcome
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.environments import generations, image, manifest, prune
from hvdenv.environments.generations import Environment
from hvdenv.environments.image import Packed
from hvdenv.environments.installation import inspect_prefix
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.layers import load_recipe
from tests.real.conftest import Cli
from tests.real.doctored import make_copy
from tests.standin import Cluster
from tests.support.files import EXECUTABLE, programs, write
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("squashfs-tools", "squashfuse", "/dev/fuse", "user namespaces")

ONE = "1" * 12
# An ordinary user. On some machines only root may open /dev/fuse, which on clusters is for all.
NOBODY = 65534
USER = (
    "setpriv",
    f"--reuid={NOBODY}",
    f"--regid={NOBODY}",
    "--clear-groups",
    "--",
)
WITH_FUSE = (
    "unshare",
    "-m",
    "sh",
    "-c",
    "mount -t tmpfs none /mnt && mknod /mnt/fuse c 10 229 && chmod 666 /mnt/fuse"
    ' && mount --bind /mnt/fuse /dev/fuse && exec "$@"',
    "sh",
)
WHERE = "cat {0}/venv/file; grep -c hvdenv: /proc/self/mountinfo; readlink /proc/self/ns/mnt"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can read, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="hvdenv-pack-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def environment(place: Path) -> Environment:
    return small_environment(place)


def small_environment(place: Path) -> Environment:
    """A small environment, with an interpreter that is not the system's."""
    base = place / "base"
    python = f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n'
    for name, text in {"bin/python3.99": python, "lib/python3.99/os.py": "packed\n"}.items():
        write(base / name, text, EXECUTABLE)
    environment = generations.at(place / "env")
    environment.store.mkdir()
    generation = generations.create(environment, ONE)
    (generation / "venv/bin").mkdir(parents=True)
    (generation / "venv/file").write_text("packed\n")
    (generation / "venv/bin/python").symlink_to(base / "bin/python3.99")
    (generation / "activate.sh").write_text("export WHO=environment\n")
    generations.write_record(
        environment.record(ONE),
        GenerationRecord(
            recipe="local", generation=ONE, files=3, resolved=encode(load_recipe("local").recipe)
        ),
    )
    generations.switch(environment, ONE)
    return environment


@pytest.fixture
def user(place: Path) -> Cli:
    return Cli(place / "hvdenv")


def pack(user: Cli, environment: Environment, *words: str) -> Packed:
    user("pack", "local", "--prefix", str(environment.prefix), *words)
    return image.default(environment, ONE)


@pytest.fixture
def packed(environment: Environment) -> Packed:
    """The image; afterwards the environment itself has other files."""
    packed = image.default(environment, ONE)
    image.make(environment, record_of(environment), packed.image, Runner())
    (environment.generation(ONE) / "venv/file").write_text("not packed\n")
    return packed


def record_of(environment: Environment) -> GenerationRecord:
    return generations.read_record(environment.record(ONE))


def entered(packed: Packed, environment: Environment, *argv: str, job: str = "a") -> list[str]:
    return [*image.before(packed, packed.manifest(), environment, job), *argv]


def run(argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, **options)


def output(argv: Sequence[str]) -> str:
    done = run(argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def users(packed: Packed) -> dict[int, str]:
    """Command lines of processes that mount an image, or run from it."""
    names = (str(packed.image), packed.manifest().mounts[0])
    found = {}
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if any(name in words for name in names):
            found[process.pid] = words
    return found


def servers(packed: Packed) -> list[int]:
    return [pid for pid, words in users(packed).items() if "squashfuse" in words.split()[0]]


def mounts(packed: Packed) -> int:
    """In how many processes of this machine the image is mounted."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            count += packed.manifest().sha256 in path.read_text()
        except OSError:
            continue
    return count


def nothing_is_left(packed: Packed) -> bool:
    return not users(packed) and not mounts(packed)


def python_by(folder: Path, program: str) -> str:
    """A Python that another program starts."""
    started = programs(folder, python=f'exec {program} {sys.executable} "$@"')
    return str(started / "python")


def test_an_image_is_the_same_when_it_is_made_again(
    user: Cli, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pack(user, environment)
    data = first.image.read_bytes()
    other = Cli(user.home, {"SOURCE_DATE_EPOCH": "1000000000", "TZ": "Asia/Seoul"})
    again = user.home.parent / "again.sqsh"
    monkeypatch.setattr("tests.real.conftest.sys.executable", python_by(user.home, "taskset -c 0"))
    other("pack", "local", "--prefix", str(environment.prefix), "--to", str(again))
    assert again.read_bytes() == data
    told = first.manifest()
    assert Packed(again).manifest() == told
    base = environment.prefix.parent / "base"
    assert list(told.mounts) == [
        str(environment.generation(ONE)),
        str(base / "lib/python3.99"),
    ]


def test_an_image_survives_a_prune_while_it_is_made(environment: Environment) -> None:
    class Pruned(Runner):
        def run(self, command: Command, **options: Any) -> Outcome:
            outcome = super().run(command, **options)
            prune.prune(environment, keep=0)
            return outcome

    to = image.default(environment, ONE).image
    killed = to.with_name(f".{to.name}.{'0' * 32}")
    killed.touch()
    os.utime(killed, (0, 0))
    image.make(environment, record_of(environment), to, Pruned())
    assert to.exists()
    assert not killed.exists()


@pytest.mark.needs("root")
def test_a_file_that_cannot_be_read_is_not_packed_as_an_empty_one(
    user: Cli, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For root without the capabilities that let it read all files."""
    (environment.generation(ONE) / "venv/file").chmod(0)
    limits = "setpriv --bounding-set=-dac_override,-dac_read_search"
    monkeypatch.setattr("tests.real.conftest.sys.executable", python_by(user.home, limits))
    done = user("pack", "local", "--prefix", str(environment.prefix), code=5)
    assert "mksquashfs failed" in done.stderr
    assert "Failed to read file" in done.stderr
    assert list(environment.store.glob("*.sqsh*")) == []


def test_the_image_goes_with_its_generation(environment: Environment, packed: Packed) -> None:
    generations.delete(environment, ONE)
    assert os.listdir(environment.store) == []


def test_programs_see_the_image_and_others_do_not(environment: Environment, packed: Packed) -> None:
    here, base = environment.generation(ONE), environment.prefix.parent / "base"
    (base / "lib/python3.99/os.py").write_text("not packed\n")
    script = f"cat {here}/venv/file {base}/lib/python3.99/os.py; touch {here}/new; pwd; exit 3"
    argv = entered(packed, environment, "sh", "-c", script)
    done = run(argv, cwd=environment.prefix.parent)
    assert done.stdout.splitlines() == ["packed", "packed", str(environment.prefix.parent)]
    assert (done.returncode, "Read-only file system" in done.stderr) == (3, True)
    assert (here / "venv/file").read_text() == "not packed\n"
    wait_until(lambda: nothing_is_left(packed), 10)


@pytest.mark.needs("root", "mounts")
def test_an_ordinary_user_mounts_it_and_gains_nothing(
    environment: Environment, packed: Packed
) -> None:
    script = f"{WHERE.format(environment.generation(ONE))}; id -u; grep CapEff /proc/self/status"
    argv = [*WITH_FUSE, *USER, *entered(packed, environment, "sh", "-c", script)]
    content, count, _, user, capabilities = output(argv).splitlines()
    assert (content, user, capabilities) == ("packed", str(NOBODY), f"CapEff:\t{0:016x}")
    assert int(count) > 0
    wait_until(lambda: nothing_is_left(packed), 10)


@pytest.mark.needs("root")
def test_a_host_without_namespaces_says_so_and_runs_without(
    environment: Environment, packed: Packed, place: Path
) -> None:
    folder = programs(place / "bin", unshare="echo not permitted\nexit 1")
    argv = entered(packed, environment, "cat", f"{environment.prefix}/venv/file")
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = run([*USER, *argv], env=environ)
    assert (done.returncode, done.stdout) == (0, "not packed\n")
    assert "users may not make namespaces here (not permitted)" in done.stderr
    wait_until(lambda: nothing_is_left(packed), 10)


@pytest.mark.needs("root", "mounts")
def test_a_host_that_cannot_mount_says_so_and_runs_without(
    environment: Environment, packed: Packed
) -> None:
    """As a user who may not open /dev/fuse, on this machine or one made like it."""
    closed = [*WITH_FUSE, "sh", "-c", 'chmod 600 /dev/fuse; exec "$@"', "sh", *USER]
    argv = entered(packed, environment, "cat", f"{environment.prefix}/venv/file")
    done = run([*closed, *argv])
    assert (done.returncode, done.stdout) == (0, "not packed\n")
    assert "/dev/fuse: Permission denied" in done.stderr
    assert "the program runs without the image" in done.stderr


@pytest.mark.needs("root", "mounts")
def test_a_host_without_the_systems_python_uses_that_of_the_environment(
    environment: Environment, packed: Packed
) -> None:
    without = ("unshare", "-m", "sh", "-c", 'mount --bind /dev/null /usr/bin/python3; exec "$@"')
    file = f"{environment.prefix}/venv/file"
    assert output([*without, "sh", *entered(packed, environment, "cat", file)]) == "packed\n"


def test_a_flipped_byte_is_refused(environment: Environment, packed: Packed) -> None:
    data = bytearray(packed.image.read_bytes())
    data[len(data) // 2] ^= 1
    packed.image.write_bytes(data)
    done = run(entered(packed, environment, "echo", "it ran"))
    assert (done.returncode, done.stdout) == (125, "")
    assert "differs from its manifest" in done.stderr
    assert "hvdenv pack RECIPE" in done.stderr
    wait_until(lambda: nothing_is_left(packed), 10)


def started(
    packed: Packed, environment: Environment, job: str, step: str = "0"
) -> subprocess.Popen[str]:
    """A rank that waits, after it has printed its namespace."""
    script = f"{WHERE.format(environment.generation(ONE))}; exec sleep 600"
    argv = entered(packed, environment, "sh", "-c", script, job=job)
    environ = {**os.environ, "SLURM_STEP_ID": step}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ)


def end(rank: subprocess.Popen[str]) -> None:
    rank.kill()
    rank.communicate()


def namespace(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout
    content, _, found = (rank.stdout.readline().strip() for _ in range(3))
    assert content == "packed"
    return found


def test_ranks_of_a_step_share_a_mount_and_two_jobs_or_steps_do_not(
    environment: Environment, packed: Packed
) -> None:
    """Slurm ends all processes that a job step has started, also those that another step uses."""
    steps = (("a", "0"), ("a", "0"), ("a", "1"), ("b", "1"))
    ranks = [started(packed, environment, job, step) for job, step in steps]
    first, second, *others = map(namespace, ranks)
    assert first == second
    assert len({first, *others}) == 3
    for rank in ranks[:3]:
        end(rank)
    wait_until(lambda: len(servers(packed)) == 1, 10)
    late = started(packed, environment, *steps[-1])
    assert namespace(late) == others[-1]
    for rank in (late, ranks[-1]):
        end(rank)
    wait_until(lambda: nothing_is_left(packed), 10)


def test_nothing_is_left_of_what_is_killed(environment: Environment, packed: Packed) -> None:
    """Of ranks and of the keeper alike."""
    rank = started(packed, environment, "a")
    namespace(rank)
    end(rank)
    wait_until(lambda: nothing_is_left(packed), 10)
    rank = started(packed, environment, "a")
    namespace(rank)
    (keeper,) = (pid for pid, words in users(packed).items() if " --keep " in words)
    # Nobody would read what squashfuse prints, which must not stop or end it.
    (status,) = [Path(f"/proc/{each}/status").read_text() for each in servers(packed)]
    assert int(status.partition("SigIgn:")[2].split()[0], 16) & 1 << (signal.SIGPIPE - 1)
    os.kill(keeper, signal.SIGKILL)
    assert output(["cat", f"/proc/{rank.pid}/root{environment.prefix}/venv/file"]) == "packed\n"
    end(rank)
    wait_until(lambda: nothing_is_left(packed), 10)


def test_a_rank_that_closes_all_descriptors_keeps_its_image(
    environment: Environment, packed: Packed
) -> None:
    file = environment.generation(ONE) / "venv/file"
    script = f'for n in 3 4 5 6 7 8 9; do eval "exec $n>&-"; done; sleep 1; cat {file}'
    assert output(entered(packed, environment, "sh", "-c", script)) == "packed\n"
    wait_until(lambda: nothing_is_left(packed), 10)


def test_an_image_of_another_generation_is_not_used(
    user: Cli, environment: Environment, packed: Packed
) -> None:
    record = GenerationRecord(recipe="local", generation=ONE, created="later")
    generations.write_record(environment.record(ONE), record)
    words = ("run", "local", "--prefix", str(environment.prefix), "--dry-run")
    done = user(*words, "--", "true")
    assert ".enter.py" not in done.stdout
    assert "the time of the build of this image is " in done.stderr
    named = user(*words, "--image", str(packed.image), "--", "true", code=125)
    assert "the time of the build of this image is " in named.stderr


SITE = """
[job]
nodes = 2
time = "00:10:00"

[launch]
launcher = "srun"
"""


def test_a_job_of_slurm_runs_from_the_image(cluster: Cluster, tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes/local.toml"
    text = recipe.read_text().replace("format = 1\n", 'format = 1\nscheduler = "slurm"\n', 1)
    (tmp_path / "site.toml").write_text(text + SITE)
    environment = small_environment(tmp_path)
    hvdenv = Cli(tmp_path / "home", cluster.environ)
    words = (str(tmp_path / "site.toml"), "--prefix", str(environment.prefix))
    hvdenv("pack", *words)
    (environment.generation(ONE) / "venv/file").write_text("not packed\n")
    script = f"echo $WHO on $(hostname) $(cat {environment.prefix}/venv/file)"
    job = ("job", *words, "--output", str(tmp_path / "out"), "--submit")
    shown = hvdenv(*job, "--", "sh", "-c", script).stdout
    for host in cluster.hosts:
        assert f"environment on {host} packed\n" in shown


def thin_environment(local: Path, place: Path) -> Path:
    """`local` with nothing of its own but Horovod for PyTorch: the rest would take long to pack."""
    original, environment = generations.at(local), generations.at(place / "env")
    environment.store.mkdir()
    generation = generations.create(environment, ONE)
    make_copy(inspect_prefix(str(local)), generation / "venv")
    for program in (local / "venv/bin").resolve().iterdir():
        if not os.path.lexists(generation / "venv/bin" / program.name):
            (generation / "venv/bin" / program.name).symlink_to(program)
    known = original.generation(original.active())
    text = (known / "activate.sh").read_text()
    (generation / "activate.sh").write_text(text.replace(str(known), str(generation)))
    written = manifest.write(generation, (generations.RECORD, generations.MARKER))
    record = generations.read_record(original.record(original.active()))
    # What it uses lies elsewhere than at the time of the build.
    changed = record._replace(generation=ONE, manifest_digest=written.digest, observed=None)
    generations.write_record(environment.record(ONE), changed)
    generations.switch(environment, ONE)
    return environment.prefix


def test_verify_proves_that_all_ranks_ran_from_the_image(
    cluster: Cluster, local_prefix: Path, tmp_path: Path
) -> None:
    """Over MPI and Gloo on two hosts."""
    hvdenv = Cli(tmp_path / "home", cluster.environ)
    prefix, file = str(thin_environment(local_prefix, tmp_path)), str(tmp_path / "local.sqsh")
    hvdenv("pack", "local", "--prefix", prefix, "--to", file)
    words = ("local", "--prefix", prefix, "--image", file, "--framework", "torch")
    done = hvdenv("verify", *words, "--quick", "--hosts", "gpu32:1,gpu33:1", "--json")
    found = [each for each in done.json["findings"] if each["check"] == "data-path"]
    assert [each["subject"] for each in found] == ["torch over MPI", "torch over Gloo"]
    for each in found:
        assert "all ranks ran from the image" in each["message"]
    assert done.json["verdict"] == "pass"
