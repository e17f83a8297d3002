from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import stat
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.base.masking import (
    clean,
    clean_output,
    cut_before,
    forgotten,
    is_secret,
    learn,
    mask,
    plain,
)
from hvdenv.base.places import find_places
from hvdenv.base.schema import encode
from hvdenv.building.effects import _recorded
from hvdenv.cli.main import COMMANDS, main
from hvdenv.knowledge.diagnosis import explain
from hvdenv.sites.modules import Loaded
from tests.support.commands import Hvdenv, ended
from tests.support.files import write

# Texts that are likelier to hold something than arbitrary ones.
PIECES = st.sampled_from(
    ["https://", "://", "@", "/", "user:pw", "?", "&sig=", "api_key", "=", ": ", "'", '"', "hunter2",
     "\x1b[", "31m", "\x1b]0;", "\x07", "\x1b\\", "\x9b", "***", " ", "\n", "\t", "x"]
)  # fmt: skip
TEXTS = st.text() | st.lists(PIECES).map("".join)


# Values of variables as people have them; none of their texts says what they are.
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
    "OPENAI_API_KEY": "sk-proj-Zk3vQ9xT1bWf7yR2",
    "SLACK_TOKEN": "xoxb-2345-6789-AbCdEf",
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJl",
    "PGPASS": "hunter2",
    "DB_PASSWD": "correct horse battery",
    "MYSQL_PWD": "p@ss:w/rd",
    "GITHUB_TOKEN": "ghp_0123456789abcdefghij",
    "SITE_CRED": "a'b\"c$d`e\\f",
    "UNICODE_SECRET": "gr\u00fcn-\u2713-wort",
    "BYTES_SECRET": "ab\udcffcd-ef",
    "apiKey": "sw0rdfish",
    "DEPLOY_KEY": "-----BEGIN KEY-----\nMIIEpAIBAAKCAQEA1x\nq9Zt0aBcDeFgHiJkLm\n-----END KEY-----\n",
}
# They say nothing that must be hidden, and ordinary text contains them.
ORDINARY = {
    "KEY": "1",
    "TOKEN": "",
    "MAX_TOKENS": "1048576",
    "USE_SECRET": "true",
    "PASS": "disabled",
    "KEY_FOLDER": "/home/ann",
    "PASSWORD_STORE_KEY": "~/.store",
    "TOKENIZERS_PARALLELISM": "parallel1",
    "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring",
    "SSH_ASKPASS": "git-ask-pass",
    "UCX_IB_PKEY": "0x7fff",
    "PUBLIC_KEY": "ssh-ed25519",
    "COMPASS": "north-1",
    "FILL_KEY": "xxxxxxxx",
    "API_KEY": "$OTHER_VARIABLE",
    "SSH_KEY_TYPE": "ed25519",
    "CREDITS": "credits-42",
    "PWD": "/proj/x-1",
    "STAGE_KEY": "openmpi",
}


@pytest.fixture(autouse=True)
def _secrets() -> Iterator[None]:
    with forgotten():
        learn([*SECRETS.items(), *ORDINARY.items()])
        yield


def _printed(value: str) -> Iterator[str]:
    """A value as programs print it."""
    yield value
    yield from (repr(value)[1:-1], shlex.quote(value), json.dumps(value))
    yield json.dumps(value, ensure_ascii=False)
    content = value.encode("utf-8", "surrogateescape")
    yield content.decode("utf-8", "replace")
    yield from (quote(content), quote(content, safe=""), quote_plus(content))
    yield base64.b64encode(content).decode()
    yield f"Authorization: Basic {base64.b64encode(b'ann:' + content).decode()}"
    if "\udcff" not in value:
        for script in ('printf %q "$1"', 'set -x; : "$1"', "A=$1; declare -p A"):
            shell = ended("bash", "-c", script, "-", value, check=True)
            yield shell.stdout + shell.stderr


@pytest.mark.parametrize("name", SECRETS)
def test_values_of_secret_variables_are_masked_wherever_they_occur(name: str) -> None:
    assert is_secret(name)
    value = SECRETS[name]
    if "\n" in value:
        for text in (value, *value.splitlines()[1:3]):
            assert not any(each in mask(text) for each in value.splitlines()[1:3])
        return
    for text in _printed(value):
        for around in (text, f"x{text}y", f"curl -u ann:{text} https://h/", f"{name}={text}, ok"):
            if around != f"x{text}y" or value in text:
                shown = mask(around)
                assert value not in shown and text not in shown, around
                assert "***" in shown
    assert mask(f"before {value} after") == "before *** after"


@pytest.mark.parametrize(("name", "value"), ORDINARY.items())
def test_a_name_or_a_value_that_says_nothing_masks_nothing(name: str, value: str) -> None:
    for line in (f"{name}={value}", f"x {value} y", f"/{value}/"):
        assert mask(line) == line


HARMLESS = """\
num_tokens: 5
password: hunter3
tokens = tokenizer("the secret of a good key")
if (token == other): pass
Passwd=x
the bearer of news, Authorization: required
--token-file /etc/token --password --verbose
/etc/passwd: Is a directory
hf_hub_download(repo_id="AKIAB/sk-learn-contrib-xoxb"), ghp_token, eyJ.eyJ.x
from hf_hub_download import api_key=None
git+ssh://git@github.com/horovod/horovod.git
git@github.com:horovod/horovod.git, mail to a@b.c
https://ann@bitbucket.org/x.git
https://host/a@b and http://host:8080/x?a=b@c&page=2
https://discuss.pytorch.org/t/is-there-a-way-to-share-tensors/1234
tcp://10.0.0.1:4242 (rank 3)
SELECT key, token FROM credentials;
what?key=v&x=1
Basic usage: Basic training
"""


@pytest.mark.parametrize("line", HARMLESS.splitlines())
def test_ordinary_lines_are_not_changed(line: str) -> None:
    assert mask(line) == line


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:pw@host/simple", "https://***@host/simple"),
        ("git+https://a:b@h/x and http://:b@c", "git+https://***@h/x and http://***@c"),
        ("1https://user:pw@host", "1https://***@host"),
        ("https://user:p@ss@host/x", "https://***@host/x"),
        ("PIP_INDEX_URL='https://u:p@h/'", "PIP_INDEX_URL='https://***@h/'"),
        (f"https://{'a1' * 20}@github.com/x", "https://***@github.com/x"),
        ("https://x/b?sv=1&sig=a%2Fb0c1d2&e=1", "https://x/b?sv=1&sig=***&e=1"),
        ("https://x/b?X-Amz-Signature=0a1b2c3d", "https://x/b?X-Amz-Signature=***"),
        (
            '"GET /simple/?access_token=0a1b2c3d HTTP/1.1"',
            '"GET /simple/?access_token=*** HTTP/1.1"',
        ),
        (
            "https://conda.host/t/an-01234567-89ab-cdef-0123-456789abcdef/ch",
            "https://conda.host/t/***/ch",
        ),
    ],
)
def test_credentials_of_urls_are_masked(text: str, masked: str) -> None:
    assert mask(text) == masked


@pytest.mark.parametrize(
    "token",
    [
        "AKIAIOSFODNN7EXAMPLF",
        f"ghp_{'aB3' * 12}",
        f"hf_{'aB3' * 12}",
        "xoxb-2345-6789-AbCdEfgh",
        f"sk-{'aB3' * 16}",
        f"eyJ{'aB3' * 9}.eyJ{'aB3' * 9}.{'a-_' * 9}",
    ],
)
def test_tokens_are_known_by_their_form(token: str) -> None:
    assert mask(f'x="{token}" y') == 'x="***" y'


def test_credentials_in_the_url_of_a_variable_are_masked_elsewhere() -> None:
    learn([("PIP_INDEX_URL", "https://ann:s%40fe-word@h/simple?token=q0w9e8r7")])
    basic = base64.b64encode(b"ann:s@fe-word").decode()
    for text in ("s%40fe-word", "s@fe-word", "q0w9e8r7", basic):
        assert mask(f"with {text}") == "with ***"
    # The name of the user is no secret.
    learn([("USER", "annabell1"), ("DB_PASSWORD", "annabell1")])
    assert mask("/home/annabell1") == "/home/annabell1"


def test_overlapping_secrets_leave_nothing() -> None:
    learn([("A_TOKEN", "abcdefgh1"), ("B_TOKEN", "fgh1ijkl"), ("C_TOKEN", "abcdefgh1ijklmn")])
    assert mask("1abcdefgh1ijkl2") == "1***2"
    assert mask("abcdefgh1ijklmn") == "***"


def test_records_of_ranks_stay_whole() -> None:
    """They are JSON in base64, which can contain the base64 of a secret."""
    for space in ("", " ", "  "):
        record = json.dumps({"text": f"{space}ghp_0123456789abcdefghij"}).encode()
        line = f"@hvdenv-rank {base64.b64encode(record).decode().rstrip('=')}"
        assert mask(line) == line


@given(st.sampled_from(sorted(SECRETS)), st.integers(0, 200), st.integers(0, 200))
def test_a_long_line_is_never_cut_inside_of_a_secret(name: str, before: int, after: int) -> None:
    value = SECRETS[name].splitlines()[-2:][0].encode("utf-8", "surrogateescape")
    data = b"." * before + value + b"." * after
    at = cut_before(data)
    assert 0 < at <= len(data)
    assert data[:at].endswith(value) or value in data[:at] or value in data[at:]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[1;31;4mred\x1b[K", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;https://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("a\x08b\x00c\x7f", "abc"),
        ("\x9b31mred", "31mred"),
        ("one\r\n\ttwo", "one\n\ttwo"),
        ("C1 \x85\x9d0;title\x9c", "C1 0;title"),
        ("user\u202e\u2066// admin\u2069\u200f\u061c", "user// admin"),
        ("one\u2028two\u2029", "onetwo"),
        ("grün ✓", "grün ✓"),
    ],
)
def test_control_sequences_are_dropped(text: str, left: str) -> None:
    assert plain(text) == left


@given(TEXTS, st.sampled_from(sorted(SECRETS)), TEXTS)
def test_whatever_is_around_a_secret_it_is_masked_and_nothing_controls_a_terminal(
    before: str, name: str, after: str
) -> None:
    value = SECRETS[name].splitlines()[-2:][0]
    credentials = "ann:Sw0rd%41"
    text = f"{before}{value}{after} https://{credentials}@host/simple"
    for shown in (mask(text), once := clean(text)):
        assert value not in shown and f"{credentials}@host" not in shown
    assert clean(once) == once
    _see_plain(once)


HOSTILE = "a\x1b[31mb\x1b]0;t\x07c\x9b1md\x85e\u202ef\u2066g\x08h"


def test_nothing_that_is_printed_controls_a_terminal() -> None:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        with clean_output(SECRETS.items()):
            print(HOSTILE)
            print(HOSTILE, file=sys.stderr)
            sys.stdout.writelines([HOSTILE])
        assert out.getvalue() == f"{clean(HOSTILE)}\n{clean(HOSTILE)}"
        assert err.getvalue() == f"{clean(HOSTILE)}\n"
        print("\x1b[0m", end="")
        assert out.getvalue().endswith("\x1b[0m")


def _hostile(value: object) -> object:
    """A document with something hostile in each of its strings."""
    if isinstance(value, dict):
        return {key: _hostile(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_hostile(each) for each in value]
    words = ("hvdenv.", "pass", "fail", "error", "skip", "unproven", "ok", "20")
    keep = not isinstance(value, str) or value.startswith(words)
    return value if keep else f"{value}{HOSTILE}"


def _see_plain(text: str) -> None:
    assert "Cc" not in {unicodedata.category(each) for each in text if each not in "\n\t"}
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not {unicodedata.bidirectional(each) for each in text} & bidi


RECIPE = """\
format = 1
name = "hostile"
extends = "local"
summary = "a\\u001b[31mb\\u202Ec\\u009B1m\\nfake  a recipe (verified)"
"""


def test_hostile_recipes_are_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write(tmp_path / "recipes/hostile.toml", RECIPE))
    site = write(tmp_path / "site.toml", f'recipe_folders = ["{tmp_path}/recipes"]\n')
    for words in (["recipes", "--site", str(site)], ["show", recipe], ["check", recipe]):
        assert main(words) in (0, 2, 3)
        said = capsys.readouterr()
        _see_plain(said.out + said.err)
        assert not any(line.startswith("fake") for line in said.out.split("\n"))


@pytest.mark.parametrize(
    "word", ["a", "a-", "token", "a://", "://a", "x:1:1:", "\x1b]", "C+", "error: ", "authorization", "bearer ",
     "://a:", "://a:b@", "/x?sig=abcdefg", "a?b=c&", "basic ", "basic YWJj", "hunter", "hunter2"]
)  # fmt: skip
def test_long_lines_take_no_time(word: str) -> None:
    """A long line without a space: base64, a progress bar, a minified file."""
    line = word * (100_000 // len(word))
    started = time.process_time()
    mask(line)
    plain(line)
    explain(line)
    assert time.process_time() - started < 2  # quadratic algorithms take minutes


# ---------------------------------------------------------------- a secret of the user's shell

CANARY = "c4n4ry-of-ann's"
PASSWORD = "p4ssw0rd-of-ann"


@pytest.fixture
def _exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", CANARY)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"https://ann:{PASSWORD}@index.example/simple")


@pytest.fixture
def unseen(
    _exported: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
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
    said = unseen(command, *before, f"./no-{CANARY}-{PASSWORD}{HOSTILE}.toml", *after)
    assert "***" in said
    _see_plain(said)


@pytest.mark.parametrize(
    "words",
    [("doctor", "LOG"), ("doctor", "LOG", "--json"), ("init", "x", "--from", "LOG", "-o", "-")],
    ids=lambda words: "".join(words),
)
def test_lines_are_shown_without_secrets(
    words: tuple[str, ...], tmp_path: Path, unseen: Callable[..., str]
) -> None:
    line = f"{'x' * 150} {CANARY}: error: No space left on device {PASSWORD}"
    page = f'```\nmodule load gcc/1\ncurl -u ann:{PASSWORD} "{CANARY}"\n```\n'
    log = write(tmp_path / "log", f"{line}\nfatal: {CANARY} was refused\n{page}")
    assert "***" in unseen(*(str(log) if each == "LOG" else each for each in words))


def test_reports_are_shown_and_written_plain_and_without_secrets(
    cases: Path, tmp_path: Path, unseen: Callable[..., str]
) -> None:
    report: dict[str, Any] = json.loads((cases / "reports" / "everything.json").read_text())
    for finding in report["findings"]:
        finding["evidence"] += f"\n{CANARY} {PASSWORD}"
    words = ("verify", "--report", str(write(tmp_path / "r", json.dumps(_hostile(report)))))
    shown = unseen(*words, "--color", "never")
    assert "***" in shown and "Available" in shown and "bcd" not in shown
    _see_plain(shown)
    _see_plain(re.sub("\x1b\\[(?:31|32|33|0)m", "", unseen(*words, "--color", "always")))
    assert "***" in unseen(*words, "--json")
    for option in ("--html", "--junit", "--metrics"):
        file = tmp_path / f"of{option}"
        unseen(*words, option, str(file))
        text = file.read_text() if file.exists() else ""
        assert not any(each in text for each in ("c4n4ry", "p4ssw0rd"))
        assert option == "--metrics" or "***" in text
        _see_plain(text)


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
