"""A secret of the user's shell, wherever a command could print or store it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.places import find_places
from hvdenv.base.schema import encode
from hvdenv.building.effects import _recorded
from hvdenv.cli.main import COMMANDS, main
from hvdenv.sites.modules import Loaded
from tests.support.commands import Hvdenv
from tests.support.files import write

CANARY = "c4n4ry-of-ann's"
PASSWORD = "p4ssw0rd-of-ann"


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", CANARY)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"https://ann:{PASSWORD}@index.example/simple")


@pytest.fixture
def unseen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Runs a command; returns what it printed, in which and in whose files there is no secret."""

    def run(*words: str) -> str:
        main(words)
        said = capsys.readouterr()
        kept = [path for path in find_places().home.rglob("*") if path.is_file()]
        texts = [said.out, said.err, *(path.read_text(errors="replace") for path in kept)]
        for text in texts:
            assert not any(each in text for each in ("c4n4ry", "p4ssw0rd")), text
        return said.out + said.err

    return run


# Arguments before and after one that the command cannot use; by default there are none.
ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "container": (("write",), ()),
    "diff": ((), ("local",)),
    "envs": (("rollback",), ()),
    "export": ((), ()),
    "fetch": (("--to", "/nowhere"), ()),
    "init": (("x", "--from"), ()),
    "install": ((), ("x",)),
    "job": ((), ("--", "true")),
    "recipes": (("--site",), ()),
    "run": ((), ("--", "true")),
    "wheels": (("list", "--site"), ()),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_a_secret_that_is_an_argument(
    command: str, unseen: Callable[..., str]
) -> None:
    """Errors repeat arguments, in which shells have expanded variables."""
    before, after = ARGUMENTS.get(command, ((), ()))
    assert "***" in unseen(command, *before, f"./no-{CANARY}-{PASSWORD}.toml", *after)


def test_doctor_shows_lines_without_secrets(tmp_path: Path, unseen: Callable[..., str]) -> None:
    line = f"{'x' * 150} {CANARY}: error: No space left on device {PASSWORD}"
    log = write(tmp_path / "log", f"{line}\nfatal: {CANARY} was refused\n")
    for option in ((), ("--json",)):
        assert "***" in unseen("doctor", str(log), *option)


def test_reports_are_shown_and_written_without_secrets(
    cases: Path, tmp_path: Path, unseen: Callable[..., str]
) -> None:
    report: dict[str, Any] = json.loads((cases / "reports" / "everything.json").read_text())
    for finding in report["findings"]:
        finding["evidence"] += f"\n{CANARY} {PASSWORD}"
    kept = write(tmp_path / "report.json", json.dumps(report))
    assert "***" in unseen("verify", "--report", str(kept))
    assert "***" in unseen("verify", "--report", str(kept), "--json")
    for option in ("--html", "--junit", "--metrics"):
        file = tmp_path / f"of{option}"
        unseen("verify", "--report", str(kept), option, str(file))
        text = file.read_text() if file.exists() else ""
        assert not any(each in text for each in ("c4n4ry", "p4ssw0rd"))
        assert option == "--metrics" or "***" in text


def test_a_draft_contains_no_secret(tmp_path: Path, unseen: Callable[..., str]) -> None:
    page = write(
        tmp_path / "page", f'```\nmodule load gcc/1\ncurl -u ann:{PASSWORD} "{CANARY}"\n```\n'
    )
    assert "***" in unseen("init", "x", "--from", str(page), "-o", "-")


def test_a_job_script_with_a_secret_is_the_users_alone(
    tmp_path: Path, unseen: Callable[..., str], hvdenv: Hvdenv
) -> None:
    words = ("job", "neuron", "--", "python", "train.py", f"--token={CANARY}")
    assert "shown as ***; --to writes it whole" in unseen(*words)
    for secret, mode in ((CANARY, 0o700), ("none", 0o755)):
        file = tmp_path / f"{mode}.sh"
        before = os.umask(0o022)
        hvdenv("job", "neuron", "--to", str(file), "--", "python", f"--token={secret}")
        os.umask(before)
        assert stat.S_IMODE(file.stat().st_mode) == mode
        assert "***" not in file.read_text()


TABLES = ("environment.run", "environment.build")
SOURCE = '{git = "https://h/x", tag = "v1", build = {MY_TOKEN = "q1-w2-e3"}}'


@pytest.mark.parametrize(
    ("key", "line", "harmless"),
    [
        *(
            (f"{table}.MY_TOKEN", f'{table}.MY_TOKEN = "q1-w2-e3"', ("q1-w2-e3", "true"))
            for table in TABLES
        ),
        (
            "frameworks.torch.source.build.MY_TOKEN",
            f"frameworks.torch.source = {SOURCE}",
            (', build = {MY_TOKEN = "q1-w2-e3"}', ""),
        ),
        *(
            (f"{table}.https_proxy", f'{table}.https_proxy = "http://q1:w2@proxy"', ("q1:w2@", ""))
            for table in TABLES
        ),
    ],
)
def test_a_recipe_with_a_secret_is_refused(
    key: str,
    line: str,
    harmless: tuple[str, str],
    tmp_path: Path,
    unseen: Callable[..., str],
    hvdenv: Hvdenv,
) -> None:
    head = 'format = 1\nname = "mine"\nextends = "local"\nsummary = "x"\nstatus = "tested"\n'
    recipe = write(tmp_path / "mine.toml", f"{head}{line}\n")
    for command in ("show", "plan", "check", "build"):
        said = unseen(command, str(recipe))
        assert f"{recipe}:6: {key}: other users read recipes" in said, said
        assert f"remove {key.rpartition('.')[2]} here, and export it in your shell" in said
        assert "q1" not in said
    assert "q1" not in unseen("show", "local", "--set", line)
    write(recipe, f"{head}{line}\n".replace(*harmless))
    hvdenv("show", str(recipe))


def test_what_modules_set_is_recorded_without_secrets() -> None:
    loaded = Loaded({"A_LICENSE_KEY": "q1-w2-e3", "CC": "gcc", "B_KEY": "1"}, (), ("x/1",))
    assert _recorded(loaded) == encode(loaded._replace(set={"CC": "gcc", "B_KEY": "1"}))


def test_a_plan_digest_does_not_depend_on_secrets_of_the_shell(
    cases: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("plan", "local", "--facts", str(cases / "facts.json"), "--json")
    one = json.loads(hvdenv(*words).out)["digest"]
    monkeypatch.setenv("MY_API_TOKEN", "prepare_source")  # a word of the plan
    assert json.loads(hvdenv(*words).out)["digest"] == one
