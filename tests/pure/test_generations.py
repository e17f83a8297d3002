from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.errors import BusyError, HvdenvError, StepError, UsageError
from hvdenv.base.places import write_json
from hvdenv.base.schema import encode
from hvdenv.environments import generations, image, prune
from hvdenv.environments.generations import UNFIT_IN_BASH, UNFIT_IN_PREFIX, Environment, at
from hvdenv.environments.image import ImageManifest, Packed
from tests.support.commands import ended
from tests.support.environments import ONE, THREE, TWO, build, build_active
from tests.support.files import write
from tests.support.standalone import load


def test_the_store_lies_beside_the_prefix(tmp_path: Path) -> None:
    assert at(tmp_path / "x/../env/").prefix == tmp_path / "env"
    assert at(tmp_path / "env").store == tmp_path / ".env.hvdenv"
    with pytest.raises(UsageError, match="cannot be a prefix"):
        at(Path("/"))


def test_the_prefix_points_to_what_was_switched_to(
    environment: Environment, tmp_path: Path
) -> None:
    build(environment, ONE)
    build(environment, TWO)
    for identity in (ONE, TWO):
        generations.switch(environment, identity)
        assert environment.active() == identity
        assert (environment.prefix / "bin/python").exists()
    assert os.readlink(environment.prefix) == f".env.hvdenv/{TWO}"
    assert list(environment.records()) == [TWO, ONE]
    assert set(os.listdir(environment.store)) == {ONE, TWO}
    generations.create(environment, THREE)
    assert environment.begun(THREE) and not environment.begun(ONE)
    with pytest.raises(StepError, match="never finished"):
        generations.switch(environment, THREE)
    assert environment.active() == TWO
    # By an absolute link through another path, and moved as a whole.
    (tmp_path / "alias").symlink_to(tmp_path)
    environment.prefix.unlink()
    environment.prefix.symlink_to(tmp_path / "alias/.env.hvdenv" / ONE)
    assert environment.active() == at(tmp_path / "alias/env").active() == ONE
    generations.switch(environment, TWO)
    (tmp_path / "new").mkdir()
    environment.prefix.rename(tmp_path / "new/env")
    environment.store.rename(tmp_path / "new/.env.hvdenv")
    assert at(tmp_path / "new/env").active() == TWO


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the record is damaged"),
        (b'{"format": 1, "created": "20', "the record is damaged"),
        (b"\xff\xff", "the record is damaged"),
        (b"[" * 100_000, "the record is damaged"),
        (b"[1]", "has format None"),
        (b"{}", "has format None"),
        (b'{"format": 2}', "has format 2; this hvdenv knows format 1"),
        (b'{"format": "1"}', "has format '1'"),
        (b'{"format": 1, "created": 5}', "created: expected a string, found 5"),
        (b'{"format": 1, "variants": "x"}', "variants: expected a list, found 'x'"),
    ],
)
def test_a_damaged_record_is_no_complete_generation(
    environment: Environment, content: bytes, message: str
) -> None:
    build_active(environment, ONE, recipe="local")
    path = environment.record(ONE)
    document = json.loads(path.read_text())
    assert document["format"] == 1
    path.write_text(json.dumps({**document, "future": {"x": [1]}}))
    assert generations.read_record(path).recipe == "local"  # unknown keys are ignored
    path.write_bytes(content)
    assert environment.active() == ""
    assert environment.pointed() == ONE
    assert environment.records() == {}
    with pytest.raises(StepError, match=message) as caught:
        generations.read_record(path)
    assert caught.value.where == str(path)
    assert caught.value.remedy


@pytest.mark.parametrize("kind", ["damaged", "active without a record", "no marker", "a link"])
def test_what_may_be_in_use_or_is_not_ours_is_left_alone(
    environment: Environment, kind: str
) -> None:
    if kind == "damaged":
        build(environment, ONE)
        environment.record(ONE).write_text("{")
    elif kind == "active without a record":
        build_active(environment, ONE)
        environment.record(ONE).unlink()
    elif kind == "no marker":
        write(environment.generation(ONE) / "data", "")
    else:
        environment.generation(ONE).symlink_to(generations.create(environment, TWO))
    environment.generation(f"{ONE}-2").mkdir()  # without a marker: not hvdenv's
    assert not environment.begun(ONE)
    generations.delete_unfinished(environment)
    assert os.path.lexists(environment.generation(ONE))
    assert environment.generation(f"{ONE}-2").exists()
    assert generations.new_identity(environment, "1" * 64) == f"{ONE}-3"


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ("env/x", "inside another environment"),
        (f".env.hvdenv/{ONE}/bin/x", "inside another environment"),
        (".env.hvdenv/x", "inside another environment"),
        ("no/env", "directory for the prefix does not exist"),
        ("file/env", "directory for the prefix does not exist"),
        ("/proc/env", "cannot write"),
    ],
)
def test_places_for_no_environment(environment: Environment, inside: str, said: str) -> None:
    build_active(environment, ONE)
    (environment.prefix.parent / "file").touch()
    with pytest.raises((UsageError, StepError), match=said) as caught:
        generations.claim(at(environment.prefix.parent / inside))
    assert caught.value.exit_code == (5 if said == "cannot write" else 2)
    assert said != "cannot write" or "--prefix" in caught.value.remedy


def test_a_marker_is_there_from_the_first_moment(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Stands for a kill -9."""

    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(generations, "write_json", killed)
    with pytest.raises(Killed):
        generations.create(environment, ONE)
    monkeypatch.undo()
    assert environment.identities() == []
    assert generations.new_identity(environment, "1" * 64) == ONE
    prune.prune(environment, keep=0)
    assert os.listdir(environment.store) == []


UNFIT = " \t\n\r\v\f\x01\x1b\x7f'\"`$\\;&|<>(){}[]*?!#%:,"


def elsewhere(prefix: Path) -> None:
    prefix.symlink_to("/usr")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.mkdir, "is a directory"),
        (lambda prefix: (prefix / "pyvenv.cfg").mkdir(parents=True), "is a Python environment"),
        (lambda prefix: (prefix / "conda-meta").mkdir(parents=True), "is a conda prefix"),
        (Path.touch, "is a file"),
        (lambda prefix: prefix.symlink_to("nowhere"), "is a symbolic link to nowhere"),
        (elsewhere, "is a symbolic link to /usr"),
    ],
)
def test_what_is_not_ours_is_refused_and_left(
    tmp_path: Path, make: Callable[[Path], None], what: str
) -> None:
    environment = at(tmp_path / "env")
    make(environment.prefix)
    with pytest.raises(UsageError, match=f"{what}.* that hvdenv did not make") as caught:
        generations.claim(environment)
    assert "--prefix" in caught.value.remedy
    assert not environment.store.exists()

    environment.store.mkdir()
    build(environment, ONE)
    with pytest.raises(UsageError, match=what):
        generations.switch(environment, ONE)
    cleared = prune.remove(environment)
    assert cleared.removed == (ONE,)
    assert [path for path, _ in cleared.kept] == [str(environment.prefix)]
    assert os.path.lexists(environment.prefix)


@pytest.mark.parametrize("make", [Path.touch, elsewhere])
def test_a_store_that_is_not_ours_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    environment = at(tmp_path / "env")
    make(environment.store)
    with pytest.raises(UsageError, match="that hvdenv did not make"):
        generations.claim(environment)
    with pytest.raises(UsageError, match="no environment"):
        prune.remove(environment)


def test_a_path_that_tools_stumble_over_is_refused(tmp_path: Path) -> None:
    for character in (*UNFIT, "\x85", "\u2003", "\udcff"):
        for prefix in (tmp_path / f"a{character}b", tmp_path / f"a{character}b" / "env"):
            with pytest.raises(UsageError, match="in its path would break") as caught:
                generations.claim(at(prefix))
            assert repr(character) in caught.value.message
    assert os.listdir(tmp_path) == []
    for name in ("local+torch", "A_b-1.0", "u@site", "run=1~2^3", "jürgen", "山田"):
        (tmp_path / name).mkdir()
        environment = at(tmp_path / name / name)
        generations.claim(environment)
        build_active(environment, ONE)
        assert environment.active() == ONE


ASK = """
for text in "${@:2}"; do
    if [[ $text =~ $1 ]]; then echo unfit; else echo fit; fi
done
"""


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bash_and_python_agree_on_such_paths(locale: str) -> None:
    texts = [f"a{chr(code)}b" for code in range(1, 128)] + ["jürgen", "à", "山田"]
    said = ended(
        "bash", "-c", ASK, "bash", UNFIT_IN_BASH, *texts, check=True, env={"LC_ALL": locale}
    ).stdout.split()
    unfit = [text for text, word in zip(texts, said, strict=True) if word == "unfit"]
    assert unfit == [text for text in texts if re.search(UNFIT_IN_PREFIX, text)]
    assert "".join(sorted(text[1] for text in unfit)) == "".join(
        sorted({*UNFIT, *map(chr, range(1, 33))})
    )


# Older generations


def test_rollback_goes_to_the_one_before(environment: Environment) -> None:
    for identity in (TWO, ONE, THREE):
        build(environment, identity)
    generations.create(environment, "4" * 12)
    generations.switch(environment, THREE)
    assert prune.rollback(environment) == ONE
    assert prune.rollback(environment) == TWO
    with pytest.raises(UsageError, match="no earlier generation") as caught:
        prune.rollback(environment)
    assert f"complete are: {THREE}, {ONE}, {TWO}" in caught.value.remedy
    assert prune.rollback(environment, THREE[:4]) == THREE
    assert environment.active() == THREE
    for other in ("4" * 12, "5" * 12, "../x"):
        with pytest.raises(UsageError, match="no complete generation"):
            prune.rollback(environment, other)
    assert environment.active() == THREE


def test_prune_keeps_the_active_one_and_as_many_as_asked(environment: Environment) -> None:
    for number in range(1, 6):
        build(environment, str(number) * 12)
    generations.switch(environment, TWO)
    generations.create(environment, "6" * 12)
    (environment.store / ".removed-x").mkdir()
    (environment.store / ".new-x").mkdir()
    (environment.store / ".link-x").symlink_to("/usr")
    (environment.store / "mine").mkdir()
    cleared = prune.prune(environment, keep=1)
    assert set(cleared.removed) == {ONE, THREE, "4" * 12, "6" * 12}
    assert cleared.kept == ()
    assert set(os.listdir(environment.store)) == {TWO, "5" * 12, "mine"}
    assert environment.active() == TWO
    prune.prune(environment, keep=0)
    assert environment.identities() == [TWO]


def test_a_generation_that_lost_files_is_not_the_one_to_go_back_to(
    environment: Environment,
) -> None:
    build(environment, ONE)
    build(environment, TWO, manifest_digest="0" * 64)
    build_active(environment, THREE)
    assert prune.prune(environment, keep=1, dry_run=True).removed == (TWO,)
    assert prune.rollback(environment) == ONE
    # What the prefix points to is kept, even damaged; then the newest is the one to go back to.
    generations.switch(environment, THREE)
    environment.record(THREE).write_text("{")
    prune.prune(environment, keep=1)
    assert environment.identities() == [ONE, THREE]
    assert prune.rollback(environment) == ONE


def test_removing_never_follows_links_out(environment: Environment, tmp_path: Path) -> None:
    precious = write(tmp_path / "precious" / "data", "")
    write(precious.with_name(generations.MARKER), "")
    build(environment, ONE)
    (environment.generation(ONE) / "out").symlink_to(precious.parent)
    environment.generation(TWO).symlink_to(precious.parent)
    other = write(environment.generation(THREE) / "data", "")
    generations.switch(environment, ONE)

    cleared = prune.remove(environment)

    assert cleared.removed == (ONE,)
    assert {Path(path).name for path, _ in cleared.kept} == {TWO, THREE}
    assert precious.exists() and other.exists()
    assert not os.path.lexists(environment.prefix)


def test_remove_leaves_nothing(environment: Environment, tmp_path: Path) -> None:
    build_active(environment, ONE)
    old, new = (environment.store / f".{ONE}.sqsh.{each * 32}" for each in "ab")
    for path in (old, new):  # of processes that pack the environment, or were killed
        path.touch()
    os.utime(old, (0, 0))
    prune.prune(environment, keep=1)
    assert (old.exists(), new.exists()) == (False, True)
    generations.create(environment, TWO)
    cleared = prune.remove(environment)
    assert (cleared.removed, cleared.kept) == ((ONE, TWO), ())
    assert os.listdir(tmp_path) == []
    for change in changes(environment):
        with pytest.raises(UsageError, match="no environment that hvdenv built"):
            change()
    assert os.listdir(tmp_path) == []


def changes(environment: Environment) -> tuple[Callable[[], object], ...]:
    return (
        lambda: prune.remove(environment, force=True),
        lambda: prune.prune(environment, keep=0),
        lambda: prune.rollback(environment),
    )


def test_nothing_is_changed_while_a_build_on_another_machine_runs(environment: Environment) -> None:
    build(environment, ONE)
    build_active(environment, TWO)
    fields = ("boot", "namespace", "started", "job", "user", "since", "token")
    holder = dict.fromkeys(fields, "x") | {"host": f"not-{socket.gethostname()}", "pid": 1}
    (environment.store / "lock-1").write_text(json.dumps(holder))
    for change in changes(environment):
        with pytest.raises(BusyError):
            change()
    assert environment.active() == TWO
    assert environment.identities() == [ONE, TWO]


# ---------------------------------------------------------------- images of generations

enter = load("enter")


@pytest.fixture
def packed(environment: Environment) -> Packed:
    build_active(environment, ONE, environment="")
    packed = image.default(environment, ONE)
    packed.image.write_bytes(b"image")
    packed.program.write_text("")
    write_manifest(packed, environment)
    return packed


def write_manifest(packed: Packed, environment: Environment, **changes: Any) -> None:
    record = generations.read_record(environment.record(ONE))
    manifest = ImageManifest(
        generation=ONE,
        built=record.created,
        mounts=image.contents(environment, record),
        sha256="0" * 64,
        bytes=5,
    )
    write_json(packed.path, encode(manifest._replace(**changes)))


@pytest.mark.parametrize("name", ["image", "program"])
def test_which_image_fits(environment: Environment, packed: Packed, name: str) -> None:
    assert image.fitting(packed, environment, ONE).generation == ONE
    build_active(environment, TWO, environment="")
    with pytest.raises(UsageError, match=f"generation of this image is {ONE}, expected {TWO}"):
        image.fitting(packed, environment, TWO)
    # pack was killed, or only two of the files were copied.
    getattr(packed, name).unlink()
    with pytest.raises(UsageError, match="is 0, expected 5"):
        image.fitting(packed, environment, ONE)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "[" * 100_000])
def test_a_malformed_manifest(environment: Environment, packed: Packed, text: str) -> None:
    packed.path.write_text(text)
    with pytest.raises(HvdenvError, match="manifest of an image is malformed"):
        image.fitting(packed, environment, ONE)
    packed.path.unlink()
    with pytest.raises(HvdenvError, match=r"cannot be read: No such(?s:.*)hvdenv pack"):
        image.fitting(packed, environment, ONE)


@pytest.mark.parametrize("also", ["/usr", "/root"])
def test_a_manifest_that_covers_other_folders_is_not_used(
    environment: Environment, packed: Packed, also: str
) -> None:
    own = str(environment.generation(ONE).resolve())
    for mounts in ((own, also), ()):
        write_manifest(packed, environment, mounts=mounts)
        with pytest.raises(UsageError, match="mount points"):
            image.fitting(packed, environment, ONE)


def test_a_name_that_another_user_holds_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other user never answers."""
    name, user = f"\0hvdenv-test-{os.getpid()}", os.geteuid()
    monkeypatch.setattr(enter, "READ_SECONDS", 0.5)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        monkeypatch.setattr(enter.os, "geteuid", lambda: user + 1)
        with pytest.raises(enter.CannotMount, match="another user"):
            enter.ask_keeper(name, [])
