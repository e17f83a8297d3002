from __future__ import annotations

import io
import json
import re
import sys
import time
import unicodedata
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.cli.main import main
from hvdenv.knowledge.diagnosis import explain
from hvdenv.masking import mask, plain, plain_output

# Texts that are likelier to hold something than arbitrary ones.
PIECES = st.sampled_from(
    ["https://", "://", "@", "/", "user:pw", "token=", "PASSWORD: ", "api_key", "=", ": ", "'", '"',
     "\x1b[", "31m", "\x1b]0;", "\x07", "\x1b\\", "\x9b", "***", " ", "\n", "\t", "x"]
)  # fmt: skip
TEXTS = st.text() | st.lists(PIECES).map("".join)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:pw@host/simple", "https://***@host/simple"),
        ("git+https://token@host/x and http://a:b@c", "git+https://***@host/x and http://***@c"),
        ("1https://user:pw@host", "1https://***@host"),
        ("https://user:p@ss@host/x", "https://***@host/x"),
        ("PIP_INDEX_URL='https://u:p@h/'", "PIP_INDEX_URL='https://***@h/'"),
        ("WANDB_API_KEY=abc123", "WANDB_API_KEY=***"),
        ("HF_TOKEN=hf_x HOME=/root", "HF_TOKEN=*** HOME=/root"),
        ("env MY_SECRET_2='a b' x", "env MY_SECRET_2='***' x"),
        ("password = hunter2", "password = ***"),
        ('{"token":"abc"}', '{"token":"***"}'),
        ("curl --token abc --password 'a' x", "curl --token *** --password '***' x"),
        ("--proxy-password abc", "--proxy-password ***"),
        ("--password --verbose", "--password --verbose"),
        ("if (token == other)", "if (token == other)"),
        (f"with ghp_{'a1' * 18} in it", "with ghp_*** in it"),
        (f"glpat-{'a1' * 10}, hf_{'aB' * 17}", "glpat-***, hf_***"),
        ("hf_hub_download_with_a_very_long_name", "hf_hub_download_with_a_very_long_name"),
        ("password: hunter2", "password: ***"),
        ("Passwd=x", "Passwd=***"),
        ('{"token": "abc"}', '{"token": "***"}'),
        ("?token=abc&x=1", "?token=***&x=1"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer ***"),
        ("curl -H 'authorization: basic dTpw' x", "curl -H 'authorization: basic ***' x"),
        ('{"Authorization": "Bearer abc"}', '{"Authorization": "Bearer ***"}'),
        ("Proxy-Authorization=Negotiate  YII=", "Proxy-Authorization=Negotiate  ***"),
        ("Authorization: abc", "Authorization: ***"),
        ("with Bearer eyJhbGciOiJIUzI1NiJ9.e30", "with Bearer ***"),
        ("the bearer of news", "the bearer of news"),
        ("GET /TOKEN=x HTTP", "GET /TOKEN=*** HTTP"),
        ("https://h/api_key=abc/x", "https://h/api_key=***"),
        ("/etc/passwd=x", "/etc/passwd=***"),
        ("/a/token: it is there", "/a/token: it is there"),
        ("mail to a@b.c", "mail to a@b.c"),
        ("https://host/a@b", "https://host/a@b"),
        ("the token is there", "the token is there"),
        ("tokenize: Is a directory", "tokenize: Is a directory"),
        ("TOKENIZERS_PARALLELISM=false tokenizer: x", "TOKENIZERS_PARALLELISM=false tokenizer: x"),
        ("tokenIsHere=abc TokenizerToken=abc", "tokenIsHere=*** TokenizerToken=***"),
        ("/etc/passwd: not JSON", "/etc/passwd: not JSON"),
        ("", ""),
    ],
)
def test_secrets_are_masked(text: str, masked: str) -> None:
    assert mask(text) == masked


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


@given(TEXTS)
def test_masking_twice_is_masking_once(text: str) -> None:
    assert mask(mask(text)) == mask(text)


@given(TEXTS)
def test_what_is_plain_stays_and_has_no_control_characters(text: str) -> None:
    once = plain(text)
    assert plain(once) == once
    assert not any(ord(each) < 32 and each not in "\t\n" for each in once)
    assert "\x1b" not in once


@given(st.from_regex(r"[a-z]{1,8}:[A-Za-z0-9%]{6,12}", fullmatch=True), TEXTS)
def test_credentials_in_a_url_never_stay(credentials: str, around: str) -> None:
    assert f"{credentials}@host" not in mask(f"{around} https://{credentials}@host/simple")


SECRETS = st.from_regex(r"[A-Za-z0-9]{16,24}", fullmatch=True)


@given(
    TEXTS,
    st.sampled_from(
        ["Authorization: Bearer {}", "authorization=basic {}", "'Authorization': 'Token {}'",
         "Bearer {}", "/TOKEN={}", "MY_TOKEN={}", "?api-key={}&x", "'password': '{}'",
         "password = {}", "'passphrase':'a {}'", "--token {}"]
    ),
    SECRETS,
    st.sampled_from(["", " ", "\n", "'", '"', " x"]),
)  # fmt: skip
def test_secrets_never_stay_whatever_is_around_them(
    before: str, form: str, secret: str, after: str
) -> None:
    assert secret not in mask(f"{before}\n{form.format(secret)}{after}")


HOSTILE = "a\x1b[31mb\x1b]0;t\x07c\x9b1md\x85e\u202ef\u2066g\x08h"


@given(TEXTS | st.just(HOSTILE))
def test_nothing_that_is_printed_controls_a_terminal(text: str) -> None:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        with plain_output():
            print(text)
            print(text, file=sys.stderr)
            sys.stdout.writelines([text])
        assert out.getvalue() == f"{plain(text)}\n{plain(text)}"
        assert err.getvalue() == f"{plain(text)}\n"
        print("\x1b[0m", end="")
        assert out.getvalue().endswith("\x1b[0m")


def _strings(value: object) -> object:
    """A document with something hostile in each of its strings."""
    if isinstance(value, dict):
        return {key: _strings(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_strings(each) for each in value]
    words = ("hvdenv.", "pass", "fail", "error", "skip", "unproven", "ok", "20")
    keep = not isinstance(value, str) or value.startswith(words)
    return value if keep else f"{value}{HOSTILE}"


RECIPE = """\
format = 1
name = "hostile"
extends = "local"
summary = "a\\u001b[31mb\\u202Ec\\u009B1m\\nfake  a recipe (verified)"
"""


@pytest.mark.parametrize("colour", ["always", "never"])
def test_a_hostile_report_is_plain(
    colour: str, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads((cases / "reports" / "everything.json").read_text(encoding="utf-8"))
    (tmp_path / "report.json").write_text(json.dumps(_strings(report)))
    assert main(["verify", "--from", str(tmp_path / "report.json"), "--color", colour]) in (1, 7)
    shown = capsys.readouterr().out
    assert "Available" in shown and "bcd" not in shown
    _see_plain(re.sub("\x1b\\[(?:31|32|33|0)m", "", shown) if colour == "always" else shown)
    for option in ("--html", "--junit"):
        file = tmp_path / "page"
        main(["verify", "--from", str(tmp_path / "report.json"), option, str(file)])
        capsys.readouterr()
        _see_plain(file.read_text(encoding="utf-8"))


def _see_plain(text: str) -> None:
    kinds = {unicodedata.category(each) for each in text if each not in "\n\t"}
    assert not kinds & {"Cc"}
    assert not {unicodedata.bidirectional(each) for each in text} & {
        "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"
    }  # fmt: skip


def test_hostile_recipes_are_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "hostile.toml").write_text(RECIPE)
    (tmp_path / "site.toml").write_text(f'recipe_folders = ["{recipes}"]\n')
    for words in (
        ["recipes", "--site", str(tmp_path / "site.toml")],
        ["show", str(recipes / "hostile.toml")],
        ["check", str(recipes / "hostile.toml")],
        ["show", f"no{HOSTILE}"],
        ["doctor", f"no{HOSTILE}"],
        ["envs", "remove", f"no{HOSTILE}"],
        ["verify", f"--from=no{HOSTILE}"],
    ):
        assert main(words) in (0, 2, 3)
        said = capsys.readouterr()
        _see_plain(said.out + said.err)
        assert not any(line.startswith("fake") for line in said.out.split("\n"))
    with pytest.raises(SystemExit):
        main(["show", f"--no{HOSTILE}", "x"])
    said = capsys.readouterr()
    _see_plain(said.out + said.err)


@pytest.mark.parametrize(
    "word", ["a", "a-", "token", "a://", "://a", "x:1:1:", "\x1b]", "C+", "error: ", "authorization", "bearer ",
     "authorization: ", "/token", "/token-"]
)  # fmt: skip
def test_long_lines_take_no_time(word: str) -> None:
    """A line of a megabyte without a space: base64, a progress bar, a minified file."""
    line = word * (1_000_000 // len(word))
    started = time.process_time()
    mask(line)
    plain(line)
    explain(line, "build")
    assert time.process_time() - started < 5
