"""Packages that are added to an environment, and the errors when versions would change."""

from __future__ import annotations

import re

import pytest

from hvdenv.base.errors import IncompatibleError, LockError, UsageError
from hvdenv.cli.install import added_to, parse
from hvdenv.cli.main import make_parser
from hvdenv.cli.options import read_request
from hvdenv.locks import lockfile
from hvdenv.locks.packages import Package
from hvdenv.locks.record import Additions, GenerationRecord, LockUse
from hvdenv.session.lock import add_recorded_lock, make_resolution, recipe_locks
from hvdenv.session.prepare import Prepared, prepare
from hvdenv.session.request import Request
from tests.support.commands import Hvdenv

OWN = {"numpy": "1.26.4", "torch": "2.13.0+cpu", "horovod": "0.28.1"}
CONDA = Package("conda", "python", "3.11.7", "h955ad1f_0")


def chosen(*words: str) -> Additions:
    """What is to be added where OWN is there. tests/real/test_install.py adds more, and later."""
    return added_to(Additions(), parse(words), OWN, (CONDA,))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["./a.whl"], "'./a.whl' .*Expected"),
        (["-r"], "'-r' .*Expected"),
        ([""], "'' .*Expected"),
        (["tqdm @ https://example.org/tqdm.whl"], "'tqdm @ https://example.org/tqdm.whl'.*a URL"),
        (["tqdm; python_version > '3'"], "tqdm; python_version > '3'.*a condition"),
        (["a.b>1", "A_b<3"], "A_b is named twice"),
    ],
)
def test_what_is_no_package(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert re.search(reason, caught.value.message)
    assert "\n" not in caught.value.message


def test_the_first_addition_keeps_all_that_is_there() -> None:
    found = chosen("tqdm>=4", "SciPy[x]<2")
    assert found == Additions(("SciPy[x]<2", "tqdm>=4"), OWN, {}, ("python=3.11.7=h955ad1f_0",))
    odd = Additions(("tqdm",), {"numpy": "1.26.4", "site": "2021-site"}, {})
    assert odd.kept == {"numpy": "1.26.4"}  # pip does not know the other version


def test_what_is_there_is_not_added_unless_an_extra_may_bring_something() -> None:
    assert chosen("NumPy>=1.20", "torch==2.13.0", "horovod").requirements == ()
    assert chosen("torch[optree]").requirements == ("torch[optree]",)
    for word in ("torch==2.9", "numpy[x]>=2"):
        with pytest.raises(
            IncompatibleError, match=r"the environment has (torch 2\.13\.0|numpy 1\.26\.4)"
        ):
            chosen(word)


def prepared_for(*words: str) -> tuple[Request, Prepared]:
    words = ("install", "local", "--python", "3.11", *words)
    request = read_request(make_parser("install").parse_args(words))
    return request, prepare(request, thorough=False)


def test_a_generation_of_a_lock_gets_that_lock_again() -> None:
    request, prepared = prepared_for("tqdm")
    assert add_recorded_lock(request, prepared, GenerationRecord()) == prepared
    inputs = make_resolution(prepared).inputs(())
    folder = lockfile.lock_folder(recipe_locks(request, prepared).root, inputs)
    record = GenerationRecord(lock=LockUse(lockfile.read_lock(folder).digest))
    found = add_recorded_lock(request, prepared, record)
    assert found.locked and found.locked.folder == folder
    with pytest.raises(LockError, match="is not here, or was rewritten"):
        add_recorded_lock(request, prepared, GenerationRecord(lock=LockUse("0" * 64)))
    request, other = prepared_for("--set", "packages.tqdm=>=4", "a")
    with pytest.raises(LockError, match="not what the recipe asks for now"):
        add_recorded_lock(request, other, record)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("local", "tqdm"), 2, "with the same options: hvdenv build local\n"),
        (("thetagpu", "tqdm"), 3, "no Python environment of its own"),
        (("local", "tqdm", "-r"), 2, ""),
    ],
)
def test_where_nothing_can_be_added(
    words: tuple[str, ...], code: int, said: str, hvdenv: Hvdenv
) -> None:
    assert said in hvdenv("install", *words, code=code).err
