"""What `check` makes of the answers of uv, pip and conda; these were recorded."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import HTTPError

import pytest

from hvdenv.base.command import Command, Outcome
from hvdenv.base.masking import forgotten, mask
from hvdenv.base.runner import Runner
from hvdenv.building import lookup
from hvdenv.building.lookup import Questions, look_up
from hvdenv.environments import prefix_lock
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.layers import load_recipe
from hvdenv.plans.plan import steps_of
from hvdenv.plans.resolution import Availability, Resolution
from hvdenv.session.progress import Silent
from tests.support.commands import Hvdenv
from tests.support.files import write
from tests.support.standalone import load

pip_sources, uv_pip = map(load, ("pip_sources", "uv_pip"))

FAILED = "error: No solution found when resolving dependencies\n  cause: "
CONCLUDED = "we can conclude that your requirements are unsatisfiable."
NO_TORCH = f"{FAILED}Because there is no version of torch==2.99.0 and you require torch==2.99.0, {CONCLUDED}"
NO_BUILD = (
    "hint: Wheels are required for `{}` because building from source is disabled for all packages"
)
LONG = (
    f"{FAILED}Because all of:\n{'  numpy>=1.23.0,<=1.23.4' * 30}\n"
    f"have no wheels with a matching Python implementation tag and you require numpy>=1.23, {CONCLUDED}"
)
ARCHIVE = (
    f"{FAILED}Because wheel==0.40 has no usable wheels and you require wheel==0.40, {CONCLUDED}\n\n"
    + NO_BUILD.format("wheel")
)
NO_NETWORK = (
    "error: Failed to fetch: `https://pypi.org/simple/torch/`\n"
    "  cause: error sending request for url (https://pypi.org/simple/torch/)\n"
    "  cause: dns error"
)
NO_INDEX = "hvdenv: pip is configured to use no index and no directory of packages\n"
SILENT = "hvdenv: no answer from https://cpu.org (timed out); continuing without it\n"
GOOD = "numpy==2.2.6\ntorch==2.13.0+cpu\n"


class Recorded(Runner):
    """Answers of uv one after the other."""

    def __init__(self, answers: tuple[tuple[int, str], ...], silent: str) -> None:
        super().__init__()
        self.answers, self.silent = [*answers], silent

    def run(self, command: Command, **_: Any) -> Outcome:
        code, output = 0, ""
        if "/uv_pip.py" in command.argv[1]:
            code, output = self.answers.pop(0)
            output = self.silent + output
        return Outcome(command, code, output, 0.0, timed_out=code == -9)


Ask = Callable[..., Availability]


@pytest.fixture
def ask(facts: Facts, tmp_path: Path) -> Ask:
    def answered(*answers: tuple[int, str], silent: str = "") -> Availability:
        resolved = load_recipe("local")
        steps = steps_of(resolved.recipe, facts, Interpreter("python3", "3.11.7"), tmp_path)
        questions = Questions(
            maker=Resolution(*steps),
            work=tmp_path,
            cache=tmp_path,
            runner=Recorded(answers, silent),
            progress=Silent(),
            end=time.monotonic() + 60,
            where=resolved.where,
        )
        return look_up(questions)

    return answered


@pytest.mark.parametrize(
    ("answers", "wrong", "told"),
    [
        ([(0, GOOD)], "", "Python packages: 2 agree for Python 3.11.7 on x86_64"),
        ([(1, NO_TORCH)], "local.toml:13: frameworks.torch.version: Because there is no", ""),
        ([(1, LONG)], "packages.numpy: no file for Python 3.11.7 on", ""),
        ([(1, ARCHIVE), (0, GOOD)], "", "wheel: no wheel fits"),
        ([(1, NO_INDEX)], "", "Python packages: pip is configured to use no index"),
        ([(2, NO_NETWORK)], "", "Python packages: Failed to fetch: `https://pypi.org"),
        ([(-9, "")], "", "Python packages: no answer in time"),
    ],
)
def test_answers_of_indexes(
    ask: Ask, answers: list[tuple[int, str]], wrong: str, told: str
) -> None:
    """Neither an answer that is missing, nor one that is bad, is the other."""
    found = ask(*answers)
    (said,) = found.wrong.get("packages_refused", {""})
    assert wrong in said and bool(said) == bool(wrong), said
    assert told in "\n".join((*found.looked_up, *found.not_looked_up))


def test_builds_do_without_an_index_of_cpu_builds_that_does_not_answer(ask: Ask) -> None:
    found = ask((0, GOOD), silent=SILENT)
    assert found.not_looked_up == (SILENT.strip().removeprefix("hvdenv: "),)
    assert ask((1, NO_TORCH), silent=SILENT).wrong
    (told,) = ask((2, f"warning: none\n{NO_NETWORK}"), silent=SILENT).not_looked_up
    assert told.startswith("Python packages: Failed to fetch: `https://pypi.org")


Sources = Callable[..., Any]


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """What pip_sources.py finds with some variables and, once a call wrote it, a pip.conf of the user."""
    environ = {
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_CONFIG_DIRS": str(tmp_path / "none"),
        "HOME": "/none",
    }

    def found(*words: str, conf: str | None = None, **variables: str) -> Any:
        if conf is not None:
            write(tmp_path / "pip/pip.conf", conf)
        elif not (tmp_path / "pip").exists():
            variables["PIP_CONFIG_FILE"] = os.devnull  # not that of this machine
        with mock.patch.dict(os.environ, {**environ, **variables}, clear=True):
            return pip_sources.Sources(pip_sources.parser_of_sources().parse_args([*words]))

    return found


def variables_of(found: Any) -> dict[str, str]:
    """What uv gets to hear."""
    with mock.patch.dict(os.environ, {}, clear=True):
        variables: dict[str, str] = uv_pip.variables(found)
    return variables


def test_a_netrc_need_not_be_the_private_one_at_home(tmp_path: Path, sources: Sources) -> None:
    for name, user in (("named", "al"), (".netrc", "bo")):
        write(tmp_path / name, f"machine mirror login {user} password hunter2\n", 0o644)
    for variables, sent in (
        ({"NETRC": f"{tmp_path}/named"}, "YWw6aHVudGVyMg=="),
        ({"HOME": str(tmp_path)}, "Ym86aHVudGVyMg=="),
    ):
        found = sources(**variables)
        with mock.patch.dict(os.environ, variables):
            request = found.request_of("https://mirror/x")
        assert request.unredirected_hdrs["Authorization"] == f"Basic {sent}"
        # Where a redirect may lead.
        assert not found.request_of("http://mirror/x").unredirected_hdrs


def test_an_index_that_shows_no_list_of_packages_answers(sources: Sources) -> None:
    for code, used in ((403, ["http://cpu"]), (503, [])):
        answer = HTTPError("", code, "", Message(), None)
        with mock.patch.object(pip_sources.Sources, "open", side_effect=answer) as opened:
            assert sources("--cpu-index", "http://cpu").cpu_indexes == used
        assert [call.args[0] for call in opened.mock_calls] == ["http://cpu/"]


def test_each_server_is_verified_as_it_is_configured(tmp_path: Path, sources: Sources) -> None:
    """A redirect of a trusted host does not make the other server trusted."""
    found = sources(PIP_INDEX_URL="https://me:geheim@mirror/simple", PIP_TRUSTED_HOST="old:81")
    modes = [found.context_of(url).verify_mode for url in ("https://old:81/", "https://me:x@m/")]
    assert modes == [ssl.CERT_NONE, ssl.CERT_REQUIRED]
    # Certificates matter for https only.
    plain = sources(PIP_INDEX_URL="http://mirror/simple", REQUESTS_CA_BUNDLE="/gone.pem")
    assert plain.pip["cert"] == "/gone.pem"
    # pip's own setting comes first.
    bundle, other = (str(write(tmp_path / name, "")) for name in ("ca.pem", "other.pem"))
    assert sources(REQUESTS_CA_BUNDLE=bundle).pip["cert"] == bundle
    assert sources(REQUESTS_CA_BUNDLE=bundle, PIP_CERT=other).pip["cert"] == other


def test_uv_goes_where_pip_would(tmp_path: Path, sources: Sources) -> None:
    conf = (
        "[global]\nindex-url = https://me:geheim-1@mirror/simple\nproxy = http://proxy:3128\n"
        f"trusted-host =\n  mirror\n  other:81\ncert = ~/ca.pem\nclient-cert = {tmp_path}/me.pem\n"
        "constraint = /c.txt\ntimeout = 6.5\n"
    )
    for name in ("ca.pem", "me.pem"):
        (tmp_path / name).touch()
    found = sources(HOME=str(tmp_path), conf=conf)
    assert variables_of(found) == {
        "UV_NO_CONFIG": "1",
        "UV_SYSTEM_CERTS": "1",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_NO_WRAP": "1",
        "UV_DEFAULT_INDEX": "https://me:geheim-1@mirror/simple",
        "UV_INDEX": "",
        "UV_FIND_LINKS": "",
        "UV_INSECURE_HOST": "mirror other:81",
        "UV_HTTP_TIMEOUT": "7",
        "SSL_CERT_FILE": f"{tmp_path}/ca.pem",
        "SSL_CLIENT_CERT": f"{tmp_path}/me.pem",
        "HTTP_PROXY": "http://proxy:3128",
        "HTTPS_PROXY": "http://proxy:3128",
    }
    # Nothing that other users can list has a password.
    assert uv_pip.options(found, ["compile"]) == ["--constraint", "/c.txt"]
    assert uv_pip.options(found, ["install", "--require-hashes"]) == []
    none = sources(PIP_NO_INDEX="1", HOME=str(tmp_path))
    assert uv_pip.options(none, ["compile"])[0] == "--no-index"
    # The main index comes first, and those of a recipe last.
    several = {"PIP_INDEX_URL": "https://main", "PIP_EXTRA_INDEX_URL": "https://a https://b"}
    found = sources("--extra-index-url", "https://recipe", **several, conf="")
    assert variables_of(found)["UV_INDEX"] == "https://main https://a https://b"
    assert variables_of(found)["UV_DEFAULT_INDEX"] == "https://recipe"
    assert sources().indexes == ["https://pypi.org/simple"]


def test_the_password_of_an_index_is_sent_but_not_part_of_the_address(
    capsys: pytest.CaptureFixture[str], sources: Sources
) -> None:
    url = "http://alice:hunter%232@127.0.0.1:9/simple"
    found = sources(PIP_EXTRA_INDEX_URL=f"{url} https://token@b")
    assert found.request_of("https://b/x").unredirected_hdrs["Authorization"] == "Basic dG9rZW46"
    # Not without encryption, and to no other host.
    assert not found.request_of("http://b/x").unredirected_hdrs
    assert not found.request_of("http://127.0.0.1:8/simple").unredirected_hdrs
    request = found.request_of("http://127.0.0.1:9/simple")
    assert request.full_url == "http://127.0.0.1:9/simple"
    assert request.unredirected_hdrs["Authorization"] == "Basic YWxpY2U6aHVudGVyIzI="
    pip_sources.report_other_pages("tiny", url, "http://alice:hunter2@[bad/simple")
    with mock.patch.object(pip_sources, "read_page", return_value="<title>Log in</title>"):
        pip_sources.report_other_pages("tiny", url)
    printed = capsys.readouterr().out
    assert printed.startswith("hvdenv: http://127.0.0.1:9/simple answers")
    assert "hunter" not in printed


def test_passwords_in_the_configuration_of_pip_are_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    urls = "extra-index-url =\n  https://x\n  https://alice:hunter2a@y/simple\n"
    for text, masked in ((f"[global]\n{urls}", "port: '***@y'"), ("odd", "port: 'hunter2a@y'")):
        write(tmp_path / "pip/pip.conf", text)
        with (
            forgotten(),
            prefix_lock.scratch_folder(tmp_path, "build"),
        ):  # as each command that runs steps
            assert mask("port: 'hunter2a@y'") == masked


def test_offline(hvdenv: Hvdenv, cases: Path) -> None:
    said = hvdenv("check", "local", "--offline", "--facts", str(cases / "facts.json")).out
    assert "not looked up: packages: --offline" in said
    assert "no known problem" not in said
    page = "frameworks.torch.extra_index=https://x.org/torch_stable.html"
    words = ("--offline", "--facts", str(cases / "facts.json"), "--set", page)
    assert "and not a package index" in hvdenv("check", "local", *words, code=3).out


def test_proxies_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may be no URL, and has the port of its scheme. It is named without its password."""
    for name in [each for each in os.environ if each.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    assert lookup._proxies() == Availability()
    monkeypatch.setenv("no_proxy", "localhost")
    for value, said in (
        ("http://ann:secret@127.0.0.1:9", "HTTP_PROXY (127.0.0.1: "),
        ("http://[bad", "HTTP_PROXY (not a URL: "),
    ):
        monkeypatch.setenv("HTTP_PROXY", value)
        (dead,) = lookup._proxies().wrong["proxies_dead"]
        assert dead.startswith(said) and "secret" not in dead
    connect = mock.Mock()
    monkeypatch.setattr(socket, "create_connection", connect)
    ports = {"http://p": 80, "p": 80, "https://p": 443, "socks5h://p": 1080, "p:3128": 3128}
    for value, port in ports.items():
        monkeypatch.setenv("HTTP_PROXY", value)
        assert lookup._proxies() == Availability()
        assert connect.call_args.args[0] == ("p", port)
