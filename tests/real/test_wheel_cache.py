"""Wheels that users share: real users, real permissions, real signatures."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdenv.errors import RecipeError, StepError
from hvdenv.model.cluster import Wheels
from hvdenv.places import Places
from hvdenv.runner import Runner
from hvdenv.wheels import wheelcache
from hvdenv.wheels.cache_entry import Cache, key
from hvdenv.wheels.wheelcache import copy, describe, names, own, sign, store, take
from tests.real.conftest import Cli
from tests.support.needs import need
from tests.waiting import wait_until
from tests.wheels import NAME, wheel_in

INPUTS: dict[str, Any] = {"source": "abc"}
# Nobody's: users need no name to own files. The last one is of another group.
ANN, BOB, EVE = 61001, 61002, 61003
GROUP, OTHERS = 61000, 61009


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everyone can get at."""
    folder = Path(tempfile.mkdtemp(prefix="hvdenv-test-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def wheel(place: Path) -> Path:
    path = wheel_in(place, os.urandom(200_000))
    path.chmod(0o644)
    return path


def start_as(user: int, work: Callable[[], str], umask: int = 0o077) -> tuple[int, int]:
    """Have another user do something in a process of its own: its id, and where it says what came of it."""
    need("root")
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        said = "it did not end"
        try:
            os.setgroups([])
            os.setgid(OTHERS if user == EVE else GROUP)
            os.setuid(user)
            os.umask(umask)
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    return process, reading


def end_of(process: int, reading: int) -> str:
    with open(reading, encoding="utf-8") as stream:
        said = stream.read()
    os.waitpid(process, 0)
    return said


def as_user(user: int, work: Callable[[], str], umask: int = 0o077) -> str:
    return end_of(*start_as(user, work, umask))


def group_cache(place: Path, mode: int = 0o2750) -> Path:
    """What an administrator makes for ann to publish to and for her group to read."""
    folder = place / "wheels"
    folder.mkdir()
    os.chown(folder, ANN, GROUP)
    folder.chmod(mode)
    return folder


def shared(folder: Path, **values: Any) -> Cache:
    (cache,) = wheelcache.shared(Wheels(read=(str(folder),), **values), {})
    return cache


def publishing(cache: Cache, wheel: Path, inputs: dict[str, Any] = INPUTS) -> Callable[[], str]:
    def work() -> str:
        store(cache, inputs, wheel, Runner())
        return "stored"

    return work


def taking(cache: Cache, wheel: Path) -> Callable[[], str]:
    """What a user gets; `the wheel` if it is the right one, with a file of their own."""

    def work() -> str:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / NAME
            taken = take([cache], INPUTS, target, Runner())
            if taken.entry is None:
                return "; ".join(taken.notes) or "nothing"
            status = target.stat()
            assert (status.st_uid, status.st_nlink) == (os.geteuid(), 1)
            return "the wheel" if target.read_bytes() == wheel.read_bytes() else "another"

    return work


def test_one_publishes_and_the_group_reads(place: Path, wheel: Path) -> None:
    folder = group_cache(place)
    trusting = shared(folder, trust=(str(ANN),))
    assert as_user(BOB, taking(trusting, wheel)) == "nothing"
    assert as_user(BOB, publishing(trusting, wheel)).startswith("StepError")
    assert as_user(ANN, publishing(trusting, wheel)) == "stored"
    for path in folder.rglob("*"):
        assert path.stat().st_gid == GROUP
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IRWXO)
    assert as_user(BOB, taking(trusting, wheel)) == "the wheel"
    assert as_user(BOB, taking(shared(folder), wheel)) == (
        f"cached wheel not used: {folder} belongs to user {ANN}"
    )
    assert as_user(EVE, taking(trusting, wheel)) == (
        f"cached wheel not used: {folder} cannot be read: Permission denied"
    )
    assert as_user(BOB, publishing(trusting, wheel)) == "stored"  # by ann, already


def test_an_entry_of_somebody_else_is_not_used(place: Path, wheel: Path) -> None:
    """Whoever gets a folder into the cache by another way is still not trusted."""
    folder = group_cache(place)
    trusting = shared(folder, trust=(str(ANN),))
    as_user(ANN, publishing(trusting, wheel))
    entry = trusting.entry(key(INPUTS))
    for path, owner in ((entry, EVE), (entry / NAME, EVE), (entry / "entry.json", EVE)):
        os.chown(path, owner, -1)
        said = as_user(BOB, taking(trusting, wheel))
        assert said == f"cached wheel not used: {path} belongs to user {EVE}"
        os.chown(path, ANN, -1)
    assert as_user(BOB, taking(trusting, wheel)) == "the wheel"


def test_many_at_once(place: Path, wheel: Path) -> None:
    """Readers never see half an entry, and of several publishers one stays."""
    folder = group_cache(place)
    trusting = shared(folder, trust=(str(ANN),))

    def reading() -> str:
        deadline, said = time.monotonic() + 120, "nothing"
        while said == "nothing" and time.monotonic() < deadline:
            said = taking(trusting, wheel)()
        return said

    users = [start_as(BOB, reading) for _ in range(3)]
    users += [start_as(ANN, publishing(trusting, wheel)) for _ in range(4)]
    assert [end_of(*user) for user in users] == ["the wheel"] * 3 + ["stored"] * 4
    assert names(trusting) == [key(INPUTS)]
    assert not list(folder.rglob(".*"))


def test_publishers_that_are_killed(place: Path, wheel: Path) -> None:
    folder = group_cache(place)
    trusting = shared(folder, trust=(str(ANN),))
    large = place / "horovod-0-large.whl"
    with large.open("wb") as stream:
        stream.truncate(1000 << 20)
    large.chmod(0o644)
    process, reading = start_as(ANN, publishing(trusting, large))
    wait_until(lambda: any(path.stat().st_size for path in folder.glob(".*/*.whl")), 60)
    os.kill(process, signal.SIGKILL)
    end_of(process, reading)
    (left,) = folder.glob(".*")
    assert as_user(BOB, taking(trusting, wheel)) == "nothing"
    assert as_user(ANN, publishing(trusting, wheel)) == "stored"
    assert as_user(BOB, taking(trusting, wheel)) == "the wheel"
    assert as_user(ANN, lambda: str(wheelcache.sweep(trusting))) == "0"
    os.utime(left, (0, 0))
    assert as_user(ANN, lambda: str(wheelcache.sweep(trusting))) == "1"
    assert not left.exists()


@pytest.mark.needs("root", "mounts")
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_full_file_system(place: Path, wheel: Path, is_shared: bool) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(place)], check=True)
    try:
        (place / "cache" / "wheels").mkdir(parents=True)
        cache = shared(place / "cache/wheels") if is_shared else own(Places(place))
        source = Path(tempfile.gettempdir()) / f"{os.getpid()}.whl"
        source.write_bytes(bytes(200_000))
        with pytest.raises(StepError, match="No space left"):
            store(cache, INPUTS, source, Runner())
        assert list(cache.folder.rglob("*.json")) == list(cache.folder.glob(".*")) == []
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(StepError, match="Read-only file system"):
            store(cache, INPUTS, source, Runner())
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        source.unlink()


def keygen(path: Path, *options: str) -> str:
    """A new key pair; its public key."""
    words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "x", "-f", str(path), *options)
    subprocess.run(words, check=True)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


@pytest.fixture
def signers(place: Path) -> Path:
    """The keys that the site allows: one that is good and one that has expired."""
    need("openssh-client")
    path = place / "signers"
    path.write_text(
        f'ann@site namespaces="hvdenv-wheel" {keygen(place / "ann")}\n'
        f'old@site valid-before="20200101" {keygen(place / "old")}\n'
        f'git@site namespaces="git" {keygen(place / "git")}\n'
    )
    keygen(place / "eve")
    return path


def test_a_site_that_requires_signatures(
    place: Path, wheel: Path, signers: Path, runner: Runner
) -> None:
    """Then it does not matter who owns and writes the folder."""
    folder = group_cache(place, 0o2770)
    cache = shared(folder, signers=str(signers))
    with pytest.raises(StepError, match="no key to sign with"):
        store(cache, INPUTS, wheel, runner)
    store(cache, INPUTS, wheel, runner, str(place / "ann"))
    entry = cache.entry(key(INPUTS))
    if os.geteuid() == 0:
        for path in (entry, *entry.iterdir()):
            os.chown(path, EVE, GROUP)
            path.chmod(0o777)
    assert taking(cache, wheel)() == "the wheel"
    assert describe(cache, entry.name, runner, thorough=True).problem == ""

    # A wheel that was changed, and a record that was changed with it.
    (entry / NAME).write_bytes(b"evil")
    assert "is damaged: its hash is" in taking(cache, wheel)()
    record = (entry / "entry.json").read_text()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    evil = record.replace(digest, hashlib.sha256(b"evil").hexdigest())
    assert evil != record
    (entry / "entry.json").write_text(evil)
    assert "its signature is invalid: " in taking(cache, wheel)()


def test_all_of_a_group_publish_with_signatures(place: Path, wheel: Path, signers: Path) -> None:
    """None can remove what another stored."""
    # ssh-keygen works only for users that have a name.
    one, other = (pwd.getpwnam(name).pw_uid for name in ("daemon", "bin"))
    cache = shared(group_cache(place, 0o3770), signers=str(signers))
    number = next(n for n in range(10_000) if key({"n": n})[:2] == key({"n": -1})[:2])
    entries = {-1: one, -2: other, number: other}  # the last in a folder that the first one made
    for user in (one, other):
        shutil.copy(place / "ann", place / str(user))
        if os.geteuid() == 0:
            os.chown(place / str(user), user, GROUP)

    def storing(number: int, user: int) -> Callable[[], str]:
        def work() -> str:
            store(cache, {"n": number}, wheel, Runner(), str(place / str(user)))
            return "stored"

        return work

    def found() -> str:
        return str(
            {describe(cache, each, Runner(), thorough=True).problem for each in names(cache)}
        )

    for number, user in entries.items():
        assert as_user(user, storing(number, user)) == "stored"
    assert names(cache) == sorted(key({"n": number}) for number in entries)
    assert as_user(one, found) == as_user(other, found) == "{''}"
    name = key({"n": -1})
    assert as_user(other, lambda: str(wheelcache.remove(cache, name))) == "False"
    assert as_user(one, lambda: str(wheelcache.remove(cache, name))) == "True"


@pytest.mark.parametrize(
    ("signer", "reason"),
    [
        ("eve", "it is not signed by a key that is valid in"),
        ("old", "it is not signed by a key that is valid in"),
        ("git", "its signature is invalid: "),
        ("", "it is not signed, and the site requires it"),
    ],
)
def test_signatures_that_are_not_good(
    place: Path, wheel: Path, signers: Path, runner: Runner, signer: str, reason: str
) -> None:
    folder = group_cache(place)
    unsigned = shared(folder, trust=(str(ANN),))
    cache = unsigned._replace(signers=signers)
    store(unsigned, INPUTS, wheel, runner, str(place / signer) if signer else "")
    assert reason in taking(cache, wheel)()
    # The others are not asked for a signature, and may have one.
    assert taking(unsigned, wheel)() == "the wheel"
    # Who signs vouches for the entry: not for that of a user who is not trusted.
    if os.geteuid() == 0:
        with pytest.raises(StepError, match=f"not signed: .* belongs to user {ANN}"):
            sign(shared(folder, signers=str(signers)), key(INPUTS), str(place / "ann"), runner)
    sign(cache, key(INPUTS), str(place / "ann"), runner)
    assert taking(cache, wheel)() == "the wheel"
    assert not list(folder.rglob(".*"))


def test_what_else_keeps_a_signature_from_counting(
    place: Path, wheel: Path, signers: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = shared(group_cache(place), signers=str(signers), trust=(str(ANN),))
    store(cache, INPUTS, wheel, runner, str(place / "ann"))
    entry = cache.entry(key(INPUTS))
    signature = (entry / "entry.json.sig").read_bytes()
    for wrong in (b"", b"text", signature[:100], b"\0" * 70_000):
        (entry / "entry.json.sig").write_bytes(wrong)
        assert taking(cache, wheel)().startswith("cached wheel not used")
    # That of another entry.
    store(cache, {"other": 1}, wheel, runner, str(place / "ann"))
    shutil.copy(cache.entry(key({"other": 1})) / "entry.json.sig", entry)
    assert "its signature is invalid" in taking(cache, wheel)()
    (entry / "entry.json.sig").write_bytes(signature)
    assert taking(cache, wheel)() == "the wheel"
    signers.chmod(0o666)
    assert f"{signers} can be written by others" in taking(cache, wheel)()
    signers.chmod(0o644)
    signers.rename(place / "elsewhere")
    assert "cannot be read" in taking(cache, wheel)()
    (place / "elsewhere").rename(signers)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "/none")
        assert "cannot start ssh-keygen" in taking(cache, wheel)()
    with pytest.raises(StepError, match="does not sign with this key"):
        sign(cache, key(INPUTS), str(place / "none"), runner)


def test_a_key_that_only_an_agent_has(
    place: Path, wheel: Path, signers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True)
    variables = dict(
        word.split("=") for word in started.stdout.replace("\n", "").split(";") if "=" in word
    )
    try:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        subprocess.run(["ssh-add", "-q", str(place / "ann")], check=True)
        (place / "ann").unlink()
        cache = shared(group_cache(place), signers=str(signers))
        store(cache, INPUTS, wheel, Runner(), str(place / "ann.pub"))
        assert taking(cache, wheel)() == "the wheel"
    finally:
        os.kill(int(variables["SSH_AGENT_PID"]), signal.SIGTERM)


def test_copies_into_a_cache_that_requires_signatures(
    place: Path, wheel: Path, signers: Path, runner: Runner
) -> None:
    private = own(Places(place / "home"))
    cache = shared(group_cache(place), signers=str(signers))
    store(private, INPUTS, wheel, runner)
    with pytest.raises(RecipeError, match="it is not signed"):
        copy({key(INPUTS): private}, cache, runner)
    assert list(cache.folder.iterdir()) == []
    sign(private, key(INPUTS), str(place / "ann"), runner)
    copy({key(INPUTS): private}, cache, runner)
    assert taking(cache, wheel)() == "the wheel"


def test_the_command_line(place: Path, wheel: Path, signers: Path) -> None:
    """As a site has it: a site file, a shared folder, signatures."""
    folder, site = group_cache(place), place / "site.toml"
    if os.geteuid() == 0:
        os.chown(folder, 0, GROUP)
    site.write_text(
        f'places.wheels.publish = "{folder}"\nplaces.wheels.signers = "{signers}"\n'
        f'places.wheels.key = "{place / "ann"}"\n'
    )
    cli = Cli(place / "home", {"HVDENV_SITE": str(site)})
    assert "no wheels yet" in cli("cache", "list").stdout
    store(own(Places(place / "home")), INPUTS, wheel, Runner())
    result = cli("cache", "copy", "--to", str(folder), code=2)
    assert "it is not signed" in result.stderr
    cli("cache", "sign", "--cache", str(place / "home/cache/wheels"))
    cli("cache", "copy", "--to", str(folder), key(INPUTS)[:5])
    listed = cli("cache", "verify", "--json").json
    assert [(each["shared"], each["signed"], each["problem"]) for each in listed] == [
        (False, True, ""),
        (True, True, ""),
    ]
    assert {each["horovod"] for each in listed} == {"0.28.1"}
    (shared(folder).entry(key(INPUTS)) / NAME).write_bytes(b"")
    said = cli("cache", "verify", code=1).stdout
    assert "good" in said
    assert "not used: " in said
    assert "is damaged" in said
    assert "removed" in cli("cache", "prune", "--damaged", "--cache", str(folder)).stdout
    assert [each["shared"] for each in cli("cache", "list", "--json").json] == [False]
    assert "removed" in cli("cache", "prune", "--max-size", "1KB").stdout
    assert cli("cache", "list", "--json").json == []
    (empty := place / "empty.toml").touch()
    assert "--key" in cli("cache", "sign", "--site", str(empty), code=2).stderr
