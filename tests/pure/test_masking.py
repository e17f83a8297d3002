from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.knowledge.diagnosis import explain
from hvdenv.masking import mask, plain

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
        ("env MY_SECRET_2='a b' x", "env MY_SECRET_2='*** b' x"),
        ("password: hunter2", "password: ***"),
        ("Passwd=x", "Passwd=***"),
        ('{"token": "abc"}', '{"token": "***"}'),
        ("?token=abc&x=1", "?token=***&x=1"),
        ("mail to a@b.c", "mail to a@b.c"),
        ("https://host/a@b", "https://host/a@b"),
        ("the token is there", "the token is there"),
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


@pytest.mark.parametrize(
    "word", ["a", "a-", "token", "a://", "://a", "x:1:1:", "\x1b]", "C+", "error: "]
)
def test_long_lines_take_no_time(word: str) -> None:
    """A line of a megabyte without a space: base64, a progress bar, a minified file."""
    line = word * (1_000_000 // len(word))
    started = time.process_time()
    mask(line)
    plain(line)
    explain(line, "build")
    assert time.process_time() - started < 5
