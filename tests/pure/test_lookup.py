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

from hvdenv.building import lookup
from hvdenv.building.lookup import Questions, look_up
from hvdenv.building.resolver import platform
from hvdenv.cli.main import main
from hvdenv.command import Command, Outcome
from hvdenv.environments import scratch
from hvdenv.masking import forgotten, mask
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.layers import load_recipe
from hvdenv.plans.plan import steps_of
from hvdenv.plans.resolution import Availability, Resolution
from hvdenv.runner import Runner
from hvdenv.session.progress import Silent
from tests.standalone import load

pip_sources, uv_pip, index_page = map(load, ("pip_sources", "uv_pip", "index_page"))

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
NO_INDEX = "hvdenv: pip is configured to use no index and no directory of packages\n"
SILENT = "hvdenv: no answer from https://cpu.org (timed out); continuing without it\n"
GOOD = "numpy==2.2.6\ntorch==2.13.0+cpu\n"


class Recorded(Runner):
    """Answers of uv one after the other, and the source archives that indexes have."""

    def __init__(self, answers: list[tuple[int, str]], versions: str, silent: str) -> None:
        super().__init__()
        self.answers, self.versions, self.asked = answers, versions, list[Command]()
        self.silent = silent

    def run(self, command: Command, **_: Any) -> Outcome:
        self.asked.append(command)
        code, output = 0, ""
        if "/uv_pip.py" in command.argv[1]:
            code, output = self.answers.pop(0)
            output = self.silent + output
        elif "/pip_sources.py" in command.argv[1]:
            output = self.versions
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
        (
            [(1, OLD_PYTHON)],
            "numpy-1.21.6.tar.gz >=3.7\nnumpy-1.24.0.zip >=3.12",
            "packages.numpy: no file for Python 3.11.7 on",
            "",
        ),
        (
            [(1, ARCHIVE), (0, GOOD)],
            "wheel-0.40.tar.gz ",
            "",
            "wheel: only its source archive fits",
        ),
        ([(1, NO_INDEX)], "", "", "Python packages: pip is configured to use no index"),
        ([(2, NO_NETWORK)], "", "", "Python packages: Failed to fetch: `https://pypi.org"),
        ([(-9, "")], "", "", "Python packages: no answer in time"),
    ],
)
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


def test_builds_do_without_an_index_of_cpu_builds_that_does_not_answer(ask: Ask) -> None:
    found, _ = ask((0, GOOD), silent=SILENT)
    assert found.not_looked_up == (SILENT.strip().removeprefix("hvdenv: "),)
    assert ask((1, NO_TORCH), silent=SILENT)[0].wrong
    (told,) = ask((2, f"warning: none\n{NO_NETWORK}"), silent=SILENT)[0].not_looked_up
    assert told.startswith("Python packages: Failed to fetch: `https://pypi.org")


@pytest.mark.parametrize(
    ("machine", "glibc", "tag"),
    [
        ("x86_64", "2.17", "x86_64-manylinux_2_17"),
        ("aarch64", "2.30", "aarch64-manylinux_2_28"),
        ("x86_64", "2.41", "x86_64-manylinux_2_40"),
        ("x86_64", "2.12", ""),
        ("ppc64le", "2.28", ""),
    ],
)
def test_platforms(machine: str, glibc: str, tag: str) -> None:
    assert platform(machine, glibc) == tag


def sources(tmp_path: Path, *words: str, **variables: str) -> Any:
    """What pip_sources.py finds with a pip.conf of the user and with these variables."""
    environ = {
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_CONFIG_DIRS": str(tmp_path / "none"),
        "HOME": "/none",
    }
    with mock.patch.dict(os.environ, {**environ, **variables}, clear=True):
        return pip_sources.Sources(pip_sources.parser_of_sources().parse_args([*words]))


@pytest.fixture
def pip_conf(tmp_path: Path) -> Path:
    (tmp_path / "pip").mkdir()
    return tmp_path / "pip/pip.conf"


def test_where_pip_is_configured_to_look(tmp_path: Path, pip_conf: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    pip_conf.write_text(
        "[global]\nindex-url = https://a:b@mirror/simple\nextra-index-url =\n  https://x\n  https://y\n"
        f"no-index = true\n[install]\nno-index = false\nfind-links = {links} /gone https://z/links.html\n"
    )
    found = sources(tmp_path, "--extra-index-url", "https://recipe")
    assert found.indexes == [
        "https://a:b@mirror/simple",
        "https://x",
        "https://y",
        "https://recipe",
    ]
    # pip passes over a directory that is not there, and uv would stop.
    assert found.links == [str(links), "https://z/links.html"]
    assert sources(tmp_path, PIP_NO_INDEX="1").indexes == []
    assert sources(tmp_path, "--no-index").indexes == []
    # Empty variables change nothing.
    assert sources(tmp_path, PIP_FIND_LINKS="", PIP_INDEX_URL="").links == found.links
    assert sources(tmp_path, PIP_INDEX_URL="").indexes == found.indexes[:-1]
    assert sources(tmp_path, PIP_FIND_LINKS=f"file://{links} file:///gone").links == [str(links)]
    default = sources(tmp_path, PIP_CONFIG_FILE=os.devnull)
    assert default.indexes == ["https://pypi.org/simple"]


def test_a_netrc_need_not_be_the_private_one_at_home(tmp_path: Path) -> None:
    for name, user in (("named", "al"), (".netrc", "bo")):
        (tmp_path / name).write_text(f"machine mirror login {user} password hunter2\n")
        (tmp_path / name).chmod(0o644)
    given = {"HOME": str(tmp_path)}
    for variables, sent in (
        (given | {"NETRC": f"{tmp_path}/named"}, "YWw6aHVudGVyMg=="),
        (given, "Ym86aHVudGVyMg=="),
    ):
        found = sources(tmp_path, **variables)
        with mock.patch.dict(os.environ, variables):
            request = found.request_of("https://mirror/x")
        assert request.unredirected_hdrs["Authorization"] == f"Basic {sent}"
        # Where a redirect may lead.
        assert not found.request_of("http://mirror/x").unredirected_hdrs


def test_an_index_that_shows_no_list_of_packages_answers(tmp_path: Path) -> None:
    given = {"PIP_INDEX_URL": "http://i/simple", "PIP_FIND_LINKS": "http://l/page.html"}
    found = sources(tmp_path, PIP_CONFIG_FILE=os.devnull, **given)
    with mock.patch.object(found, "open", side_effect=HTTPError("", 403, "", Message(), None)) as o:
        assert not found.leave_out_silent()
    assert [call.args[0] for call in o.mock_calls] == ["http://i/simple/", "http://l/page.html"]
    with mock.patch.object(found, "open", side_effect=HTTPError("", 503, "", Message(), None)):
        assert found.leave_out_silent()
    assert (found.indexes, found.links) == ([], [])


def test_each_server_is_verified_as_it_is_configured(tmp_path: Path) -> None:
    """A redirect of a trusted host does not make the other server trusted."""
    given = {"PIP_INDEX_URL": "https://me:geheim@mirror/simple", "PIP_TRUSTED_HOST": "old:81"}
    given |= {"PIP_CONFIG_FILE": os.devnull, "REQUESTS_CA_BUNDLE": "/gone.pem"}
    with pytest.raises(SystemExit, match="no certificates"):
        sources(tmp_path, **given)
    found = sources(tmp_path, **given | {"REQUESTS_CA_BUNDLE": ""})
    modes = [
        found.context_of(url).verify_mode for url in ("https://old:81/", "https://me:x@mirror/")
    ]
    assert modes == [ssl.CERT_NONE, ssl.CERT_REQUIRED]
    # Certificates matter for https only.
    plain = sources(tmp_path, **given | {"PIP_INDEX_URL": "http://mirror/simple"})
    assert plain.pip["cert"] == "/gone.pem"


def test_certificates_of_requests_are_those_of_pip(tmp_path: Path) -> None:
    (bundle := tmp_path / "ca.pem").write_text("")
    variables = {"REQUESTS_CA_BUNDLE": str(bundle), "PIP_CONFIG_FILE": os.devnull}
    assert sources(tmp_path, **variables).pip["cert"] == str(bundle)
    (other := tmp_path / "other.pem").touch()
    assert sources(tmp_path, **variables, PIP_CERT=str(other)).pip["cert"] == str(other)


def test_uv_goes_where_pip_would(tmp_path: Path, pip_conf: Path) -> None:
    pip_conf.write_text(
        "[global]\nindex-url = https://me:geheim-1@mirror/simple\nproxy = http://proxy:3128\n"
        f"trusted-host =\n  mirror\n  other:81\ncert = ~/ca.pem\nclient-cert = {tmp_path}/me.pem\n"
        "constraint = /c.txt\ntimeout = 6.5\n"
    )
    for name in ("ca.pem", "me.pem"):
        (tmp_path / name).touch()
    found = sources(tmp_path, HOME=str(tmp_path))
    with mock.patch.dict(os.environ, {}, clear=True):
        variables = uv_pip.variables(found)
    assert variables == {
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
    assert uv_pip.options(sources(tmp_path, PIP_NO_INDEX="1"), ["compile"])[0] == "--no-index"


def test_the_main_index_comes_first(tmp_path: Path) -> None:
    found = sources(
        tmp_path, PIP_INDEX_URL="https://main", PIP_EXTRA_INDEX_URL="https://a https://b"
    )
    with mock.patch.dict(os.environ, {}, clear=True):
        variables = uv_pip.variables(found)
    assert variables["UV_INDEX"] == "https://main https://a"
    assert variables["UV_DEFAULT_INDEX"] == "https://b"


def test_the_password_of_an_index_is_sent_but_not_part_of_the_address(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = "http://alice:hunter%232@127.0.0.1:9/simple"
    found = sources(tmp_path, PIP_EXTRA_INDEX_URL=f"{url} https://token@b")
    assert found.request_of("https://b/x").unredirected_hdrs["Authorization"] == "Basic dG9rZW46"
    # Not without encryption, and to no other host.
    assert not found.request_of("http://b/x").unredirected_hdrs
    assert not found.request_of("http://127.0.0.1:8/simple").unredirected_hdrs
    request = found.request_of("http://127.0.0.1:9/simple")
    assert request.full_url == "http://127.0.0.1:9/simple"
    assert request.unredirected_hdrs["Authorization"] == "Basic YWxpY2U6aHVudGVyIzI="
    index_page.main("tiny", url, "http://alice:hunter2@[bad/simple")
    with mock.patch.object(index_page, "read", return_value="<title>Log in</title>"):
        index_page.main("tiny", url)
    printed = capsys.readouterr().out
    assert (
        printed.startswith("hvdenv: http://127.0.0.1:9/simple answers") and "hunter" not in printed
    )


def test_passwords_in_the_configuration_of_pip_are_masked(
    tmp_path: Path, pip_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    pip_conf.write_text(
        "[global]\nextra-index-url =\n  https://x\n  https://alice:hunter2a@y/simple\n"
    )
    with forgotten(), scratch.folder(tmp_path, "build"):  # as each command that runs steps
        assert mask("nonnumeric port: 'hunter2a@y'") == "nonnumeric port: '***@y'"
    pip_conf.write_text("no section")
    with forgotten(), scratch.folder(tmp_path, "build"):
        assert mask("hunter2a") == "hunter2a"


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


def test_a_proxy_may_be_no_url_and_has_the_port_of_its_scheme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [each for each in os.environ if each.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HTTP_PROXY", "http://[bad")
    (dead,) = lookup._proxies().wrong["proxies_dead"]
    assert dead.startswith("HTTP_PROXY (not a URL: ")
    connect = mock.Mock()
    monkeypatch.setattr(socket, "create_connection", connect)
    ports = {"http://p": 80, "p": 80, "https://p": 443, "socks5h://p": 1080, "p:3128": 3128}
    for value, port in ports.items():
        monkeypatch.setenv("HTTP_PROXY", value)
        assert lookup._proxies() == Availability()
        assert connect.call_args.args[0] == ("p", port)
