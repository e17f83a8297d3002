"""What `check` makes of the answers of uv, pip and conda; these were recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hvdenv import STEP_PROGRAMS
from hvdenv.building import lookup
from hvdenv.building.availability import Availability
from hvdenv.building.lookup import Questions, look_up
from hvdenv.building.resolver import platform
from hvdenv.cli.main import main
from hvdenv.command import Command, Outcome
from hvdenv.masking import mask
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.layers import load_recipe
from hvdenv.plans.plan import steps_of
from hvdenv.plans.resolution import Resolution
from hvdenv.runner import Runner
from hvdenv.session.progress import Silent
from tests.standalone import load

FAILED = "error: No solution found when resolving dependencies\n  cause: "
CONCLUDED = "we can conclude that your requirements are unsatisfiable."
NO_TORCH = f"{FAILED}Because there is no version of torch==2.99.0 and you require torch==2.99.0, {CONCLUDED}"
OLD_PYTHON = (
    f"{FAILED}Because all of:\n{'  numpy>=1.23.0,<=1.23.4' * 30}\n"
    f"have no wheels with a matching Python implementation tag and you require numpy>=1.23, {CONCLUDED}\n\n"
    "hint: Wheels are required for `numpy` because building from source is disabled for all packages"
)
ARCHIVE = (
    f"{FAILED}Because wheel==0.40 has no usable wheels and you require wheel==0.40, {CONCLUDED}\n\n"
    "hint: Wheels are required for `wheel` because building from source is disabled for all packages"
)
NO_NETWORK = (
    "error: Failed to fetch: `https://pypi.org/simple/torch/`\n"
    "  cause: error sending request for url (https://pypi.org/simple/torch/)\n"
    "  cause: dns error"
)
SILENT = "https://download.pytorch.org/whl/cpu\n"
GOOD = "numpy==2.2.6\ntorch==2.13.0+cpu\n"


class Recorded(Runner):
    """Answers of uv one after the other, and one of ``pip index versions``."""

    def __init__(self, answers: list[tuple[int, str]], versions: str, silent: str) -> None:
        super().__init__()
        self.answers, self.versions, self.asked = answers, versions, list[Command]()
        self.silent = silent

    def run(self, command: Command, **_: Any) -> Outcome:
        self.asked.append(command)
        code, output = 0, ""
        if "uv" in command.argv:
            code, output = self.answers.pop(0)
        elif "pip_sources.py" in command.argv[1]:
            output = self.silent
        elif "versions" in command.argv:
            output = f"x (1)\nAvailable versions: {self.versions}\n"
        return Outcome(command, code, output, 0.0, timed_out=code == -9)


Ask = Callable[..., tuple[Availability, Recorded]]


@pytest.fixture
def ask(facts: Facts, tmp_path: Path) -> Ask:
    def answered(
        *answers: tuple[int, str], versions: str = "", silent: str = ""
    ) -> tuple[Availability, Recorded]:
        resolved = load_recipe("local")
        steps = steps_of(resolved.recipe, facts, Interpreter("python3", "3.11.7"), tmp_path)
        runner = Recorded([*answers], versions, silent)
        questions = Questions(
            maker=Resolution(*steps),
            work=tmp_path,
            cache=tmp_path,
            runner=runner,
            progress=Silent(),
            end=time.monotonic() + 60,
            where=resolved.where,
        )
        return look_up(questions), runner

    return answered


@pytest.mark.parametrize(
    ("answers", "versions", "wrong", "told"),
    [
        ([(0, GOOD)], "", "", "Python packages: 2 agree for Python 3.11.7 on x86_64"),
        ([(1, NO_TORCH)], "", "local.toml:13: frameworks.torch.version: Because there is no", ""),
        ([(1, OLD_PYTHON)], "1.21.6, 1.21.5", "packages.numpy: no file for Python 3.11.7 on", ""),
        ([(1, ARCHIVE), (0, GOOD)], "0.40, 0.39", "", "wheel: only its source archive fits"),
        ([(2, NO_NETWORK)], "", "", "Python packages: Failed to fetch: `https://pypi.org"),
        ([(-9, "")], "", "", "Python packages: no answer in time"),
    ],
)  # fmt: skip
def test_answers_of_indexes(
    ask: Ask,
    answers: list[tuple[int, str]],
    versions: str,
    wrong: str,
    told: str,
) -> None:
    found, _ = ask(*answers, versions=versions)
    (said,) = found.wrong.get("packages_refused", {""})
    assert (wrong in said) == bool(wrong or not said), said
    assert told in "\n".join((*found.looked_up, *found.not_looked_up))
    # Neither an answer that is missing, nor one that is bad, is the other.
    assert bool(said) == bool(wrong)


def test_builds_do_without_an_index_of_cpu_builds_that_does_not_answer(
    ask: Ask, tmp_path: Path
) -> None:
    found, _ = ask((0, GOOD), silent=SILENT)
    assert found.not_looked_up == ("download.pytorch.org: no answer",)
    assert SILENT.strip() not in (tmp_path / "uv.toml").read_text()
    assert ask((1, NO_TORCH), silent=SILENT)[0].wrong


@pytest.mark.parametrize(
    ("machine", "glibc", "tag"),
    [
        ("x86_64", "2.17", "x86_64-manylinux_2_17"), ("aarch64", "2.30", "aarch64-manylinux_2_28"),
        ("x86_64", "2.41", "x86_64-manylinux_2_40"), ("x86_64", "2.12", ""), ("ppc64le", "2.28", ""),
    ],
)  # fmt: skip
def test_platforms(machine: str, glibc: str, tag: str) -> None:
    assert platform(machine, glibc) == tag


def test_where_pip_is_configured_to_look() -> None:
    listed = (
        "global.index-url='https://a:b@mirror/simple'\nglobal.find-links='/w'\n"
        ":env:.find-links='/x /y'\ninstall.no-index='true'\nglobal.os=3\n"
    )
    assert load("pip_sources").parse(listed) == {
        "index-url": "https://a:b@mirror/simple", "find-links": "/x /y", "no-index": "true",
    }  # fmt: skip


def test_credentials_of_pip_reach_uv_in_a_file_only(ask: Ask, tmp_path: Path) -> None:
    secret = "https://me:geheim-1@mirror/simple"
    (tmp_path / "pip.json").write_text(json.dumps({"index-url": secret, "cert": "/ca.pem"}))
    _, runner = ask((0, GOOD))
    assert not any("geheim" in word for each in runner.asked for word in each.argv)
    assert secret in (tmp_path / "uv.toml").read_text()
    assert (tmp_path / "uv.toml").stat().st_mode & 0o077 == 0
    assert ("SSL_CERT_FILE", "/ca.pem") in runner.asked[-1].env
    assert mask("401 for geheim-1") == "401 for ***"


def test_uv_goes_where_pip_would(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, gone = tmp_path / "there", tmp_path / "gone"
    there.mkdir()
    links = f"{there} {gone} https://x.org/links.html"
    pip = {"find-links": links, "proxy": "http://proxy:3128"}
    (tmp_path / "pip.json").write_text(json.dumps(pip))
    _, runner = ask((0, GOOD))
    assert {("HTTPS_PROXY", "http://proxy:3128"), ("UV_SYSTEM_CERTS", "1")} <= {
        *runner.asked[-1].env
    }
    configuration = (tmp_path / "uv.toml").read_text()
    assert str(there) in configuration and "links.html" in configuration
    assert str(gone) not in configuration  # pip passes over it, and uv would stop


def pip_options(python: Path, file: Path, **variables: str) -> dict[str, str]:
    """What pip_sources.py finds with these variables."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    command = [python, STEP_PROGRAMS / "pip_sources.py", file]
    subprocess.run(command, env={**environ, **variables}, check=True)
    found: dict[str, str] = json.loads(file.read_text())
    return found


def test_pips_configuration_is_read_without_a_pip(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    (tmp_path / "env" / "pip.conf").write_text("[global]\nindex-url = https://mirror/simple\n")
    found = pip_options(tmp_path / "env" / "bin" / "python", tmp_path / "pip.json")
    assert found["index-url"] == "https://mirror/simple"


def test_certificates_of_requests_are_those_of_pip(tmp_path: Path) -> None:
    (bundle := tmp_path / "ca.pem").write_text("")
    variables = {"PIP_CONFIG_FILE": os.devnull, "REQUESTS_CA_BUNDLE": str(bundle)}
    options = partial(pip_options, Path(sys.executable), tmp_path / "pip.json", **variables)
    assert options()["cert"] == str(bundle)
    assert options(PIP_CERT="/other.pem")["cert"] == "/other.pem"


def test_offline(capsys: pytest.CaptureFixture[str], cases: Path) -> None:
    assert main(["check", "local", "--offline", "--facts", str(cases / "facts.json")]) == 0
    said = capsys.readouterr().out
    assert "not looked up: packages: --offline" in said
    assert "no known problem" not in said
    assert main(["check", "local", "--timeout", "0"]) == 2


def test_a_chain_of_causes_is_its_request_and_the_first_cause() -> None:
    chain = "no channel\nCaused by: request for (https://x/y)\nCaused by: client error\nCaused by: no such name\nhint"
    assert lookup._first_cause(chain) == "no channel\nrequest for (https://x/y): no such name\nhint"
    assert lookup._first_cause("one\nCaused by: two") == "one\nCaused by: two"


def test_a_proxy_that_does_not_answer_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [each for each in os.environ if each.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    assert lookup._proxies() == Availability()
    monkeypatch.setenv("HTTPS_PROXY", "http://ann:secret@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "localhost")
    (dead,) = lookup._proxies().wrong["proxies_dead"]
    assert dead.startswith("HTTPS_PROXY (127.0.0.1: ") and "secret" not in dead
